"""The scheduler's configuration: a frozen value, validated at birth."""

from dataclasses import dataclass

CHOICES = {
    "preemption": ("recompute", "swap"),
    "prefill": ("mixed", "dedicated"),
    "batching": ("continuous", "static"),
    "allocation": ("paged", "reserved"),
}


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Sizes and choices that the scheduler works with.

    `num_blocks` counts blocks of each group, the null block included; `windows` names the
    sliding window of each block group in tokens (None: full attention). `num_host_blocks` are
    those of the host pool that `preemption="swap"` and `kv_offload` use (empty: no host pool).
    `batching="static"` and `allocation="reserved"` are the baselines that the others are
    measured against.
    """

    block_size: int
    num_blocks: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_num_chunks: int = 8
    windows: tuple[int | None, ...] = (None,)
    watermark: float = 0.01
    enable_prefix_caching: bool = True
    preemption: str = "recompute"
    num_host_blocks: tuple[int, ...] = ()
    kv_offload: bool = False
    prefill: str = "mixed"
    batching: str = "continuous"
    batch_timeout_s: float = 0.05
    allocation: str = "paged"

    def __post_init__(self):
        for name in ("block_size", "max_model_len", "max_num_seqs", "max_num_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}: every running sequence takes one token a step"
            )
        if len(self.num_blocks) != len(self.windows) or not self.windows:
            raise ValueError(
                f"num_blocks={self.num_blocks} and windows={self.windows} must have one entry "
                "for each block group"
            )
        if min(self.num_blocks) < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is the null block), got {self.num_blocks}"
            )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}"
                )
        if self.num_host_blocks and len(self.num_host_blocks) != len(self.windows):
            raise ValueError(
                f"num_host_blocks={self.num_host_blocks} must have one entry for each block group"
            )
        if self.kv_offload and not (self.num_host_blocks and self.enable_prefix_caching):
            raise ValueError("kv_offload needs a host pool (num_host_blocks) and prefix caching")
        if self.preemption == "swap" and not self.num_host_blocks:
            raise ValueError("preemption='swap' needs a host pool (num_host_blocks)")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")

    @property
    def table_width(self) -> int:
        """Block ids in a row of the block table: enough for the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose keys and values one sequence alone could hold in the pools."""
        return min(
            (n - 1) * self.block_size if self._holds_all(n, w) else self.max_model_len
            for n, w in zip(self.num_blocks, self.windows, strict=True)
        )

    @property
    def largest_chunk(self) -> int:
        """Tokens of a prompt that can be computed at once: a group of a sliding window must hold
        them beside the blocks that their first query sees."""
        spare = [
            n - 1 - self._num_seen(w)
            for n, w in zip(self.num_blocks, self.windows, strict=True)
            if w is not None and not self._holds_all(n, w)
        ]
        return min([self.max_num_batched_tokens, *(n * self.block_size for n in spare)])

    def most_blocks(self, window: int | None, num_blocks: int) -> int:
        """Of a sequence's `num_blocks` blocks, those that a group must hold at the same time."""
        if window is None or self.allocation == "reserved":
            return num_blocks
        chunk = -(-self.largest_chunk // self.block_size)
        return min(num_blocks, self._num_seen(window) + chunk)

    def _num_seen(self, window: int) -> int:
        """Blocks that the keys of one query lie in, at most."""
        return -(-window // self.block_size) + 1

    def _holds_all(self, num_blocks: int, window: int | None) -> bool:
        """Whether a group keeps every block of a sequence: it has no window, or no room to let
        one slide."""
        if window is None or self.allocation == "reserved":
            return True
        return num_blocks - 1 < self._num_seen(window) + 1
