"""Content digests of full blocks: chained SHA-256, so that a digest names a whole prefix."""

import hashlib
from array import array

from scheduler.request import Sequence


def root_digest(salt: bytes) -> bytes:
    """Parent of a sequence's first block; `salt` separates models, adapters and tenants."""
    return hashlib.sha256(b"paged-jax" + salt).digest()


def block_digest(parent: bytes, token_ids: list[int]) -> bytes:
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


def extend_digests(sequence: Sequence, num_blocks: int, block_size: int) -> list[bytes]:
    """Digests of the sequence's first `num_blocks` full blocks, kept on the sequence."""
    digests = sequence.digests
    parent = digests[-1] if digests else root_digest(sequence.request.salt)
    for i in range(len(digests), num_blocks):
        parent = block_digest(parent, sequence.token_ids[i * block_size : (i + 1) * block_size])
        digests.append(parent)
    return digests
