"""Which sequence holds which blocks, on the device and on the host.

The scheduler decides who runs; this keeps the books for it: it extends block tables, shares and
copies blocks, finds cached prefixes, swaps sequences out and in, and gives blocks back when no
step in flight can touch them any more.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from scheduler.block_hash import extend_digests
from scheduler.block_pool import NULL_BLOCK, BlockPool
from scheduler.config import SchedulerConfig
from scheduler.output import BlockCopy, BlockMoves, InFlight
from scheduler.request import Sequence
from scheduler.rows import Rows


class Found(NamedTuple):
    """Blocks that already hold the first `num_tokens` of a sequence, a list for each group.

    An entry is (on_host, block_id); the null block stands for one that slid out of a window.
    """

    num_tokens: int
    blocks: list[list[tuple[bool, int]]]


class BlockManager:
    """Block pools of every group, and what the sequences hold of them."""

    def __init__(self, config: SchedulerConfig, rows: Rows):
        self.config = config
        self._rows = rows
        self.pools = tuple(
            BlockPool(n, self._offloader(group) if config.kv_offload else None)
            for group, n in enumerate(config.num_blocks)
        )
        self.host_pools = tuple(BlockPool(n) for n in config.num_host_blocks)
        self._in_flight: deque[InFlight] = deque()
        self._step = InFlight(-1)
        self._swap_outs: list[BlockCopy] = []
        self._swap_ins: list[BlockCopy] = []
        self._copies: list[BlockCopy] = []

    # -- steps ------------------------------------------------------------------------------

    def begin_step(self, step_id: int) -> None:
        self._step = InFlight(step_id)

    def take_moves(self) -> BlockMoves:
        """The block copies that the step needs; called once, when it is put together."""
        moves = BlockMoves(tuple(self._swap_outs), tuple(self._swap_ins), tuple(self._copies))
        self._swap_outs, self._swap_ins, self._copies = [], [], []
        return moves

    def dispatch_step(self) -> None:
        """The step that was begun goes to the device: what it touches stays held until `land`."""
        self._in_flight.append(self._step)

    def land_step(self) -> InFlight:
        """The oldest step in flight is done. The caller releases it after its last look."""
        return self._in_flight.popleft()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    # -- room -------------------------------------------------------------------------------

    def has_room(self, sequence: Sequence, num_tokens: int, *, with_releases: bool = False) -> bool:
        """Whether every group can give the blocks for the next `num_tokens` positions.

        `with_releases` counts those that steps in flight, or the one being made, will release.
        """
        missing = self._num_missing(sequence, num_tokens)
        for group, pool in enumerate(self.pools):
            needed = missing + (self._tail_to_copy(sequence, group) is not None)
            available = pool.num_available
            if with_releases:
                available += sum(
                    len(blocks)
                    for flight in (*self._in_flight, self._step)
                    for released_from, blocks in flight.released
                    if released_from is pool
                )
            if needed > available:
                return False
        return True

    def room(self, sequence: Sequence) -> int:
        """Tokens that the sequence could add with the blocks that are free now."""
        free = min(
            pool.num_available - (self._tail_to_copy(sequence, group) is not None)
            for group, pool in enumerate(self.pools)
        )
        spare = sequence.capacity - sequence.num_computed_tokens
        return max(0, free) * self.config.block_size + spare

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the sequence its own writable blocks for the next positions."""
        missing = self._num_missing(sequence, num_tokens)
        for group, pool in enumerate(self.pools):
            blocks = sequence.blocks[group]
            table = self._rows.tables[group, sequence.row]
            tail = self._tail_to_copy(sequence, group)
            if tail is not None:
                own = pool.allocate()
                self._copies.append(BlockCopy(group, blocks[tail], own))
                pool.release([blocks[tail]])
                blocks[tail] = table[tail] = own
            for _ in range(missing):
                block_id = pool.allocate()
                table[len(blocks)] = block_id
                blocks.append(block_id)
        sequence.shares_tail = False
        sequence.capacity += missing * self.config.block_size

    def _num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that each group must add for the next `num_tokens` positions."""
        target = self._target_tokens(sequence.num_computed_tokens + num_tokens)
        return max(0, -(-(target - sequence.capacity) // self.config.block_size))

    def _target_tokens(self, num_tokens: int) -> int:
        if self.config.allocation == "paged":
            return num_tokens
        return min(self.config.max_model_len, self.config.capacity_tokens)

    def _tail_to_copy(self, sequence: Sequence, group: int) -> int | None:
        """Index of the block that would be written while others hold it too."""
        tail, offset = divmod(sequence.num_computed_tokens, self.config.block_size)
        if not sequence.shares_tail or not offset:
            return None
        shared = self.pools[group].ref_counts[sequence.blocks[group][tail]] > 1
        return tail if shared else None

    def drop_slid_out(self, sequence: Sequence) -> None:
        """Give back the blocks that no later query of a sliding window sees."""
        for group, window in enumerate(self.config.windows):
            if window is not None:
                self._drop_slid_out(sequence, group)

    def _drop_slid_out(self, sequence: Sequence, group: int) -> None:
        blocks = sequence.blocks[group]
        dead = min(self._first_visible(group, sequence.num_computed_tokens), len(blocks))
        slid_out = []
        for i in range(dead - 1, -1, -1):
            if blocks[i] == NULL_BLOCK:
                break
            slid_out.append(blocks[i])
            blocks[i] = self._rows.tables[group, sequence.row, i] = NULL_BLOCK
        self._release(sequence, group, slid_out)

    def _first_visible(self, group: int, position: int) -> int:
        """Index of the first block that the query at `position` sees in this group."""
        window = self.config.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.config.block_size

    # -- giving back ------------------------------------------------------------------------

    def _release(self, sequence: Sequence, group: int, blocks: list[int]) -> None:
        """Give blocks back: at once, or when the last step in flight that writes them is done."""
        if self._in_flight and sequence.last_step_id >= self._in_flight[0].step_id:
            self._in_flight[-1].released.append((self.pools[group], blocks))
        else:
            self.pools[group].release(blocks)

    def free(self, sequence: Sequence) -> None:
        """Take back everything that a sequence holds, on the device and on the host."""
        for group, blocks in enumerate(sequence.blocks):
            self._release(sequence, group, [b for b in reversed(blocks) if b != NULL_BLOCK])
        self._forget_table(sequence)
        self.free_host(sequence)

    def free_host(self, sequence: Sequence) -> None:
        """Take back a sequence's host blocks once no copy in flight can touch them."""
        flight = self._in_flight[-1] if self._in_flight else None
        for pool, blocks in zip(self.host_pools, sequence.host_blocks, strict=False):
            if flight is None:
                pool.release(blocks)
            else:
                flight.released.append((pool, blocks))
        sequence.host_blocks = []

    def _forget_table(self, sequence: Sequence) -> None:
        sequence.blocks = []
        sequence.capacity = 0
        sequence.shares_tail = False
        sequence.num_registered = 0

    # -- sharing ----------------------------------------------------------------------------

    def fork(self, elder: Sequence, younger: Sequence) -> None:
        """Let `younger` share the blocks of the tokens that `elder` has computed."""
        num_blocks = -(-elder.num_computed_tokens // self.config.block_size)
        younger.blocks = [blocks[:num_blocks] for blocks in elder.blocks]
        for pool, blocks in zip(self.pools, younger.blocks, strict=True):
            for block_id in blocks:
                if block_id != NULL_BLOCK:
                    pool.retain(block_id)
        younger.num_computed_tokens = elder.num_computed_tokens
        younger.capacity = num_blocks * self.config.block_size
        younger.digests = list(elder.digests)
        younger.num_registered = elder.num_registered
        younger.shares_tail = elder.shares_tail = True

    # -- cached prefixes and swapped sequences ----------------------------------------------

    def find(self, sequence: Sequence) -> Found:
        """What of a waiting sequence is computed already; at least one token is left over."""
        if sequence.host_blocks:
            return self._find_swapped(sequence)
        if not self.may_reuse(sequence):
            return Found(0, [[] for _ in self.pools])
        digests = self.prefix_digests(sequence)
        num_hits = len(digests)
        for group, window in enumerate(self.config.windows):
            if window is None:
                num_hits = self._count_leading(group, digests[:num_hits])
        while num_hits and not self._windows_hit(digests[:num_hits]):
            num_hits -= 1
        blocks = [self._hit_blocks(group, digests[:num_hits]) for group in range(len(self.pools))]
        return Found(num_hits * self.config.block_size, blocks)

    def may_reuse(self, sequence: Sequence) -> bool:
        """Whether cached blocks may stand in for computing: not where the prompt is scored, which
        takes the hidden states of all of it."""
        if not self.config.enable_prefix_caching:
            return False
        return sequence.request.params.prompt_logprobs is None or sequence.index > 0

    def prefix_digests(self, sequence: Sequence) -> list[bytes]:
        """Digests of the full blocks before the sequence's last token."""
        most = (sequence.num_tokens - 1) // self.config.block_size
        return extend_digests(sequence, most, self.config.block_size)[:most]

    def full_digests(self, sequence: Sequence) -> list[bytes]:
        """Digests of all blocks that the sequence's tokens fill."""
        num_full = len(sequence.token_ids) // self.config.block_size
        return extend_digests(sequence, num_full, self.config.block_size)[:num_full]

    def _locate(self, group: int, digest: bytes) -> tuple[bool, int] | None:
        block_id = self.pools[group].lookup(digest)
        if block_id is not None:
            return (False, block_id)
        if self.config.kv_offload:
            block_id = self.host_pools[group].lookup(digest)
            if block_id is not None:
                return (True, block_id)
        return None

    def _count_leading(self, group: int, digests: list[bytes]) -> int:
        for i, digest in enumerate(digests):
            if self._locate(group, digest) is None:
                return i
        return len(digests)

    def _visible(self, group: int, digests: list[bytes]) -> list[bytes]:
        """Those of a prefix's blocks that the query after them sees."""
        return digests[self._first_visible(group, len(digests) * self.config.block_size) :]

    def _windows_hit(self, digests: list[bytes]) -> bool:
        return all(
            self._locate(group, digest) is not None
            for group in range(len(self.pools))
            for digest in self._visible(group, digests)
        )

    def _hit_blocks(self, group: int, digests: list[bytes]) -> list[tuple[bool, int]]:
        visible = self._visible(group, digests)
        found = (self._locate(group, digest) for digest in visible)
        slid_out = [(False, NULL_BLOCK)] * (len(digests) - len(visible))
        return slid_out + [place for place in found if place is not None]

    def _find_swapped(self, sequence: Sequence) -> Found:
        """A swapped sequence resumes where it was, on blocks still cached where there are any."""
        size = self.config.block_size
        digests = []
        if self.config.enable_prefix_caching:
            num_full = sequence.num_computed_tokens // size
            digests = extend_digests(sequence, num_full, size)[:num_full]
        blocks = []
        for pool, on_host in zip(self.pools, sequence.host_blocks, strict=True):
            places = []
            for i, host_id in enumerate(on_host):
                cached = pool.lookup(digests[i]) if i < len(digests) and host_id else None
                places.append((True, host_id) if cached is None else (False, cached))
            blocks.append(
                [(False, NULL_BLOCK) if place == (True, NULL_BLOCK) else place for place in places]
            )
        return Found(sequence.num_computed_tokens, blocks)

    def can_start(self, found: Found, num_tokens: int, margins: Iterable[int]) -> bool:
        """Whether every group could hold `num_tokens` tokens, beyond what was found, and have
        its margin left."""
        needed = -(-self._target_tokens(num_tokens) // self.config.block_size)
        groups = zip(self.pools, self.config.windows, found.blocks, margins, strict=True)
        for pool, window, places, margin in groups:
            held = [block for on_host, block in places if not on_host and block != NULL_BLOCK]
            slid_out = sum(place == (False, NULL_BLOCK) for place in places)
            revived = sum(pool.is_evictable(block) for block in held)
            at_once = self.config.most_blocks(window, needed - slid_out)
            if at_once - len(held) + revived + margin > pool.num_available:
                return False
        return True

    def start(self, sequence: Sequence, found: Found) -> None:
        """Give a waiting sequence the blocks that were found, copying those on the host.

        Hits are held before anything is allocated, so that no allocation can evict them.
        """
        for group, places in enumerate(found.blocks):
            for on_host, block_id in places:
                if on_host and not sequence.host_blocks:
                    self.host_pools[group].retain(block_id)
                    self._step.released.append((self.host_pools[group], [block_id]))
                elif not on_host and block_id != NULL_BLOCK:
                    self.pools[group].retain(block_id)
        sequence.blocks = [
            [self._bring_in(group, *place) for place in places]
            for group, places in enumerate(found.blocks)
        ]
        for pool, blocks in zip(self.host_pools, sequence.host_blocks, strict=False):
            self._step.released.append((pool, blocks))
        sequence.host_blocks = []
        sequence.num_computed_tokens = found.num_tokens
        sequence.capacity = len(found.blocks[0]) * self.config.block_size
        on_device = (
            not any(on_host for on_host, _ in column) for column in zip(*found.blocks, strict=True)
        )
        num_full = found.num_tokens // self.config.block_size
        sequence.num_registered = min(num_full, _count_leading_true(on_device))

    def _bring_in(self, group: int, on_host: bool, block_id: int) -> int:
        if not on_host:
            return block_id
        own = self.pools[group].allocate()
        self._swap_ins.append(BlockCopy(group, block_id, own))
        return own

    def swap_out(self, sequence: Sequence) -> bool:
        """Copy a sequence's blocks to the host and give the device's back when that is done.

        False, and nothing happens, if the host pool has no room.
        """
        num_blocks = -(-sequence.num_computed_tokens // self.config.block_size)
        wanted = [blocks[:num_blocks] for blocks in sequence.blocks]
        for pool, blocks in zip(self.host_pools, wanted, strict=True):
            if sum(b != NULL_BLOCK for b in blocks) > pool.num_available:
                return False
        sequence.host_blocks = [
            [self._copy_out(group, block_id) for block_id in blocks]
            for group, blocks in enumerate(wanted)
        ]
        for pool, blocks in zip(self.pools, sequence.blocks, strict=True):
            held = [b for b in reversed(blocks) if b != NULL_BLOCK]
            self._step.released.append((pool, held))
        self._forget_table(sequence)
        return True

    def _copy_out(self, group: int, block_id: int) -> int:
        if block_id == NULL_BLOCK:
            return NULL_BLOCK
        host_id = self.host_pools[group].allocate()
        self._swap_outs.append(BlockCopy(group, block_id, host_id))
        return host_id

    def _offloader(self, group: int):
        """What an evicting pool calls: the content goes to the host pool, where it is cached.

        The step's copies run before its writes, so the block may be written in this very step.
        """

        def offload(block_id: int, digest: bytes) -> None:
            host_pool = self.host_pools[group]
            if host_pool.lookup(digest) is None and host_pool.num_available:
                host_id = self._copy_out(group, block_id)
                host_pool.register(host_id, digest)
                self._step.released.append((host_pool, [host_id]))

        return offload

    def register(self, sequence: Sequence, num_tokens: int) -> Iterator[bytes]:
        """Put the full blocks of the first `num_tokens` into the prefix index; their digests."""
        size = self.config.block_size
        num_full = num_tokens // size
        first = sequence.num_registered
        if num_full <= first or not sequence.blocks:
            return
        digests = extend_digests(sequence, num_full, size)
        for i in range(first, num_full):
            for pool, blocks in zip(self.pools, sequence.blocks, strict=True):
                if blocks[i] != NULL_BLOCK:
                    pool.register(blocks[i], digests[i])
            yield digests[i]
        sequence.num_registered = num_full

    def forget_prefixes(self) -> None:
        for pool in (*self.pools, *self.host_pools):
            pool.forget_all()

    # -- the books --------------------------------------------------------------------------

    def check_invariants(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Assert that every block is held exactly as often as somebody holds it."""
        for group, pool in enumerate(self.pools):
            pool.check_invariants(
                [*self._in_release(pool), *(b for s in running for b in s.blocks[group])]
            )
        for group, pool in enumerate(self.host_pools):
            swapped = (b for s in waiting if s.host_blocks for b in s.host_blocks[group])
            pool.check_invariants([*self._in_release(pool), *swapped])

    def _in_release(self, pool: BlockPool) -> Iterator[int]:
        for flight in self._in_flight:
            for released_from, blocks in flight.released:
                if released_from is pool:
                    yield from blocks


def _count_leading_true(values: Iterable[bool]) -> int:
    count = 0
    for value in values:
        if not value:
            break
        count += 1
    return count
