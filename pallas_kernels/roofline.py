"""How fast each chip could be at best: what memory delivers, and what the matrix unit does.

Per chip as JAX sees it (a whole TPU v4 or v5p is one device). Figures are the vendors' own, dense,
from the pages named beside them; nobody reaches them quite.
"""

from typing import NamedTuple


class Chip(NamedTuple):
    """One device: memory bandwidth, bfloat16 matrix rate, and memory."""

    bytes_per_s: float
    flops_per_s: float
    memory_gib: int
    source: str

    @property
    def ridge(self) -> float:
        """Operations a byte above which the matrix unit is the limit, not the memory."""
        return self.flops_per_s / self.bytes_per_s


_TPU = "cloud.google.com/tpu/docs"
_NVIDIA = "NVIDIA data sheet"
CHIPS = {
    "v4": Chip(1228e9, 275e12, 32, f"{_TPU}/v4"),
    "v5e": Chip(819e9, 197e12, 16, f"{_TPU}/v5e"),
    "v5p": Chip(2765e9, 459e12, 95, f"{_TPU}/v5p"),
    "v6e": Chip(1640e9, 918e12, 32, f"{_TPU}/v6e"),
    "v7x": Chip(7380e9, 2307e12, 192, f"{_TPU}/tpu7x"),
    "a100": Chip(2039e9, 312e12, 80, f"{_NVIDIA}, A100 80GB SXM"),
    "l4": Chip(300e9, 121e12, 24, f"{_NVIDIA}, L4 (242 with sparsity)"),
    "h100": Chip(3350e9, 989e12, 80, f"{_NVIDIA}, H100 SXM (1979 with sparsity)"),
    "h200": Chip(4800e9, 989e12, 141, f"{_NVIDIA}, H200 SXM (1979 with sparsity)"),
    "b200": Chip(8000e9, 2250e12, 180, f"{_NVIDIA}, B200 (4500 with sparsity)"),
}


class Work(NamedTuple):
    """Bytes that must pass the memory, and operations that the matrix unit must do."""

    num_bytes: float
    flops: float

    def seconds_on(self, chip: Chip) -> float:
        """The shortest time: whichever of memory and matrix unit takes longer."""
        return max(self.num_bytes / chip.bytes_per_s, self.flops / chip.flops_per_s)

    def limit_on(self, chip: Chip) -> str:
        by_memory = self.num_bytes / chip.bytes_per_s >= self.flops / chip.flops_per_s
        return "memory" if by_memory else "matrix unit"


def attention_work(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    kv_itemsize: int,
    q_itemsize: int = 2,
) -> Work:
    """What causal attention of one layer takes at least: keys and values read once, queries read
    and results written once, two products for every query and key that it sees."""
    keys = sum(seq_lens)
    queries = sum(query_lens)
    pairs = sum(
        query_len * seq_len - query_len * (query_len - 1) / 2
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True)
    )
    kv_bytes = 2 * keys * num_kv_heads * head_size * kv_itemsize
    q_bytes = 2 * queries * num_heads * head_size * q_itemsize
    return Work(kv_bytes + q_bytes, 4 * pairs * num_heads * head_size)
