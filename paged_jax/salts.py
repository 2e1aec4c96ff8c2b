"""What keeps cached blocks apart that hold the same tokens.

A salt is `NUMBER|rest`: the number of the weights that write the blocks, then everything else
that they depend on. Two are equal only where every part is.
"""

__all__ = ["resalted", "salt_of"]


def salt_of(params_number: int, *parts: object) -> bytes:
    """`parts` are strings, numbers and None: whose `repr` says all about them."""
    return b"%d|%s" % (params_number, repr(parts).encode())


def resalted(salt: bytes, params_number: int) -> bytes:
    """The same under other weights."""
    return b"%d|%s" % (params_number, salt.partition(b"|")[2])
