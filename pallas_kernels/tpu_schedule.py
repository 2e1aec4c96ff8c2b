"""What the TPU's compiler made of the attention kernel: its memory, and its loops by the bundle.

A bundle is what a core starts in one cycle. The compiler (libtpu) writes them down when it is
loaded with `dump_arguments`; the reading knows the kernel's loops, see `tpu_kernel`. Waiting is not
in it: it says what a kernel cannot be faster than, not how fast it is.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Of a core, from the vendor's matrix rate and the size of its matrix units; none for v7x.
CLOCK_HZ = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}

_BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +(LB)?[A-Z ]*: +(>*)")
_VMEM = re.compile(r"space=vmem, size = (0x[0-9a-f]+), scoped")


class Loop(NamedTuple):
    """A loop of the schedule; `bundles` are its own, without those of the loops within."""

    bundles: int
    inner: tuple["Loop", ...]


class Schedule(NamedTuple):
    """Of an attention kernel."""

    vmem_bytes: int
    fetch: int
    """Bundles for each fetch, beside the loops below."""
    start: int
    """For each group of blocks whose copies are started together."""
    wait: int
    """For each block."""
    tile: int
    """For each tile of keys."""

    def cycles(self, *, groups: int, blocks: int, tiles: int) -> int:
        """Of a whole fetch."""
        return self.fetch + groups * self.start + blocks * self.wait + tiles * self.tile


def dump_arguments(folder: Path) -> str:
    """For the environment variable `LIBTPU_INIT_ARGS`, before the compiler is loaded."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def read_schedule(folder: Path) -> Schedule:
    """Of the one attention kernel that was compiled into this folder; empties the folder."""
    (original,) = folder.glob("*-paged_attention*-02-original.txt")
    (bundles,) = folder.glob("*-paged_attention*-??-final_bundles.txt")
    sizes = [int(size, 16) for size in _VMEM.findall(original.read_text())]
    loops = parse_loops(bundles.read_text())
    for path in folder.iterdir():
        path.unlink()
    fetches = max(_every(loops), key=lambda loop: max((i.bundles for i in loop.inner), default=0))
    start, wait, *_, tile = fetches.inner
    return Schedule(sum(sizes), fetches.bundles, start.bundles, wait.bundles, tile.bundles)


def parse_loops(text: str) -> tuple[Loop, ...]:
    """The outermost loops of a listing of bundles."""
    lines = filter(None, map(_BUNDLE.match, text.splitlines()))
    _, loops = _loops([(line[1] == "LB", len(line[2])) for line in lines], 1)
    return loops


def _loops(bundles: list[tuple[bool, int]], depth: int) -> tuple[int, tuple[Loop, ...]]:
    """Bundles that are in no loop of this depth, and those loops."""
    outside, pieces = 0, []
    for bundle in bundles:
        starts, its_depth = bundle
        if its_depth < depth:
            outside += 1
        elif starts and its_depth == depth:
            pieces.append([bundle])
        else:
            pieces[-1].append(bundle)
    inner = (_loops(piece, depth + 1) for piece in pieces)
    return outside, tuple(Loop(*both) for both in inner)


def _every(loops: tuple[Loop, ...]) -> Iterator[Loop]:
    for loop in loops:
        yield loop
        yield from _every(loop.inner)
