"""The pool of KV blocks: who holds which block, and which freed block still has its content."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

NULL_BLOCK = 0


class BlockPool:
    """Reference-counted blocks with an index from content digest to block.

    Every block but the null block 0 is in exactly one of three states:
      free        never written, or its content is forgotten;
      evictable   referenced by nobody, but findable by its digest until it is reused (LRU);
      referenced  held by block tables or copies in flight, once for each in `ref_counts`.
    Owned by the scheduler; block ids are all that leaves it.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, bytes], None] | None = None):
        """`num_blocks` includes the null block, which is never handed out.

        `on_evict(block_id, digest)` hears of cached content that is about to be lost.
        """
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2, got {num_blocks}")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self.ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._block_of_digest: dict[bytes, int] = {}
        self._digest_of_block: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Evictable blocks: unused now, findable by digest."""
        return len(self._evictable)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - 1 - self.num_available

    def allocate(self) -> int:
        """Hand out a block with reference count 1, evicting the oldest cached one if need be."""
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._evictable.popitem(last=False)
            digest = self._digest_of_block.pop(block_id)
            del self._block_of_digest[digest]
            if self._on_evict is not None:
                self._on_evict(block_id, digest)
        self.ref_counts[block_id] = 1
        return block_id

    def retain(self, block_id: int) -> None:
        """Add a holder, taking the block back from the evictable ones if nobody held it."""
        if self.ref_counts[block_id] == 0:
            del self._evictable[block_id]
        self.ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one holder of each block; null blocks are passed over.

        Pass a sequence's blocks last first: the leaves of a prefix are then evicted first.
        """
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            count = self.ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} released more often than held"
            self.ref_counts[block_id] = count
            if count == 0:
                if block_id in self._digest_of_block:
                    self._evictable[block_id] = None
                else:
                    self._free.append(block_id)

    def lookup(self, digest: bytes) -> int | None:
        """The block whose content has this digest, referenced or not."""
        return self._block_of_digest.get(digest)

    def is_evictable(self, block_id: int) -> bool:
        return block_id in self._evictable

    def register(self, block_id: int, digest: bytes) -> None:
        """Make a held, fully computed block findable. The first block of a digest keeps it."""
        if digest not in self._block_of_digest and block_id not in self._digest_of_block:
            self._block_of_digest[digest] = block_id
            self._digest_of_block[block_id] = digest

    def forget_all(self) -> None:
        """Empty the index: evictable blocks become free, held ones are no longer findable."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._block_of_digest.clear()
        self._digest_of_block.clear()

    def check_invariants(self, holders: Iterable[int]) -> None:
        """Assert that the books balance; `holders` names each held block once for each holder."""
        counts = np.bincount(
            np.fromiter((b for b in holders if b != NULL_BLOCK), np.int64),
            minlength=self.num_blocks,
        )
        assert counts.tolist() == self.ref_counts, "reference counts differ from the holders"
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & evictable, "a block is free and evictable"
        assert NULL_BLOCK not in free | evictable, "the null block got into the pool"
        unheld = {b for b in range(1, self.num_blocks) if self.ref_counts[b] == 0}
        assert free | evictable == unheld, "a block was lost or handed out while held"
        assert evictable <= self._digest_of_block.keys(), "an evictable block has no digest"
        assert not free & self._digest_of_block.keys(), "a free block is still findable"
        inverse = {block: digest for digest, block in self._block_of_digest.items()}
        assert inverse == self._digest_of_block, "the prefix index contradicts itself"
