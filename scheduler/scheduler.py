"""The scheduler: decides at every step which sequences run, for how many tokens, on which blocks.

    schedule() -> SchedulerOutput        who runs; counters advance as if the step had happened
    update(output, tokens) -> updates    what the device sampled; stops, frees, registers

`schedule` may run once more before `update` of the step before it (a lag of one), so that the
host prepares a step while the device runs another. Blocks that a step in flight may still write
are released at that step's update, never earlier.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from scheduler.block_hash import extend_digests
from scheduler.block_pool import NULL_BLOCK, BlockPool
from scheduler.config import SchedulerConfig
from scheduler.errors import RequestError
from scheduler.output import (
    BlockCopy,
    InFlight,
    Sampled,
    Scheduled,
    SchedulerOutput,
    SequenceUpdate,
)
from scheduler.policy import FirstComeFirstServed, OrderPolicy
from scheduler.request import FinishReason, Request, Sequence, Status
from scheduler.rows import Rows
from scheduler.waiting import WaitingQueue

MAX_LAG = 1


class _Step:
    """A step while it is being put together."""

    def __init__(self, step_id: int, token_budget: int, chunk_budget: int):
        self.step_id = step_id
        self.token_budget = token_budget
        self.num_chunks_left = chunk_budget
        self.decodes: list[Scheduled] = []
        self.chunks: list[Scheduled] = []
        self.copies: list[BlockCopy] = []
        self.preempted: list[Sequence] = []

    def finish(self, samples: list[Sampled]) -> SchedulerOutput:
        return SchedulerOutput(
            step_id=self.step_id,
            decodes=tuple(self.decodes),
            chunks=tuple(self.chunks),
            samples=tuple(samples),
            copies=tuple(self.copies),
            preempted=tuple(self.preempted),
        )


class Scheduler:
    """Continuous batching over a paged KV cache. Pure Python and NumPy; one thread owns it."""

    def __init__(self, config: SchedulerConfig, order: OrderPolicy | None = None):
        self.config = config
        self.order = order or FirstComeFirstServed()
        self.pools = tuple(BlockPool(n) for n in config.num_blocks)
        self.rows = Rows(config.max_num_seqs, len(config.windows), config.table_width)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in the order policy's order
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.num_lookup_tokens = 0
        self.num_hit_tokens = 0
        self._awaiting_token: set[Sequence] = set()  # preempted with a token in flight
        self._parked: dict[bytes, list[Sequence]] = {}  # until a digest is computed
        self._computing: dict[bytes, Sequence] = {}  # digest -> who will compute it
        self._in_flight: deque[InFlight] = deque()
        self._next_step_id = 0
        self._next_arrival = 0
        self._watermark = tuple(int(config.watermark * (n - 1)) for n in config.num_blocks)

    # -- requests ---------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. `RequestError` if it could never run; nothing is kept then."""
        if request.request_id in self.requests:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by a live request",
                param="request_id",
            )
        self.check_fits(len(request.prompt_token_ids))
        request.order_key = (self.order.key(request), self._next_arrival)
        self._next_arrival += 1
        self.requests[request.request_id] = request
        self.waiting.push(request.sequences[0])

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Refuse a prompt that the pool could not hold even if it were empty."""
        if num_prompt_tokens > self.config.capacity_tokens:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens, but the KV cache holds only "
                f"{self.config.capacity_tokens} ({self.config.block_size} in each of "
                f"{self.config.capacity_tokens // self.config.block_size} blocks)",
                param="prompt",
                code="context_length_exceeded",
            )

    def abort(self, request_id: str, index: int | None = None) -> list[Sequence]:
        """End a request, or one of its samples, in whatever state it is.

        Returns the sequences that this call ended; unknown and finished ones are passed over.
        """
        request = self.requests.get(request_id)
        if request is None:
            return []
        ended = [
            s
            for s in request.sequences
            if s.status is not Status.FINISHED and index in (None, s.index)
        ]
        for sequence in ended:
            self._finish(sequence)
        return ended

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def has_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def num_waiting(self) -> int:
        parked = sum(len(group) for group in self._parked.values())
        return len(self.waiting) + len(self._awaiting_token) + parked

    # -- one step ---------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Put the next step together and advance the counters as if it had happened."""
        assert len(self._in_flight) <= MAX_LAG, "schedule ran twice without an update"
        step = _Step(
            self._next_step_id, self.config.max_num_batched_tokens, self.config.max_num_chunks
        )
        self._next_step_id += 1
        self._schedule_decodes(step)
        self._schedule_chunks(step)
        if not step.preempted:
            self._admit(step)
        output = step.finish(self._schedule_samples(step))
        if not output.is_empty:
            self._in_flight.append(InFlight(output))
        return output

    def update(self, output: SchedulerOutput, tokens: list[int]) -> list[SequenceUpdate]:
        """Take in what a step sampled: `tokens[i]` is the token of `output.samples[i]`.

        A negative token means that the row's logits were not finite: the sequence ends with
        `error` and its blocks never enter the prefix index. Steps are updated in order.
        """
        flight = self._in_flight.popleft()
        assert flight.output is output, "steps must be updated in the order of their dispatch"
        updates = []
        poisoned = set()
        for sampled, token in zip(output.samples, tokens, strict=True):
            sequence = sampled.sequence
            sequence.num_in_flight -= 1
            if sequence.status is Status.FINISHED:
                continue
            if token < 0:
                poisoned.add(sequence)
            updates.append(self._take_token(sequence, token))
        if self.config.enable_prefix_caching:
            for scheduled in (*output.decodes, *output.chunks):
                if scheduled.sequence not in poisoned:
                    self._register(scheduled)
        for update in updates:
            if update.finish_reason is not None:
                self._finish(update.sequence)
            elif update.sequence in self._awaiting_token:
                self._awaiting_token.remove(update.sequence)
                self.waiting.push(update.sequence)
        for group, blocks in flight.released:
            self.pools[group].release(blocks)
        return updates

    def _take_token(self, sequence: Sequence, token: int) -> SequenceUpdate:
        if token < 0:
            return SequenceUpdate(sequence, None, FinishReason.ERROR)
        sequence.token_ids.append(token)
        request = sequence.request
        if token in request.stop_token_ids:
            own = token if token in request.params.stop_token_ids else None
            return SequenceUpdate(sequence, token, FinishReason.STOP, own)
        if len(sequence.token_ids) >= request.max_total_tokens:
            return SequenceUpdate(sequence, token, FinishReason.LENGTH)
        return SequenceUpdate(sequence, token, None)

    # -- running sequences ------------------------------------------------------------------

    def _schedule_decodes(self, step: _Step) -> None:
        """One token for every running sequence that lacks just one."""
        for sequence in list(self.running):
            if sequence.status is not Status.RUNNING:
                continue  # preempted a moment ago
            num_tokens = len(sequence.token_ids) + sequence.num_in_flight
            start = sequence.num_computed_tokens
            if num_tokens - start != 1 or num_tokens >= sequence.request.max_total_tokens:
                continue
            if (start >= sequence.capacity or sequence.shares_tail) and not self._make_room(
                sequence, 1, step
            ):
                continue
            step.decodes.append(Scheduled(sequence, sequence.row, start, 1))
            step.token_budget -= 1
            sequence.num_computed_tokens = start + 1
            sequence.last_step_id = step.step_id

    def _schedule_chunks(self, step: _Step) -> None:
        """Prefill of running sequences, oldest first.

        The oldest leaves up to a quarter of the tokens to the others, so that a long prompt
        never keeps the short ones behind it waiting.
        """
        unfinished = [s for s in self.running if s.num_tokens - s.num_computed_tokens > 1]
        if not unfinished:
            return
        wanted_by_others = sum(s.num_tokens - s.num_computed_tokens for s in unfinished[1:])
        if self.rows.num_free and (head := self.waiting.peek()):
            wanted_by_others += head.num_tokens
        reserve = min(step.token_budget // 4, wanted_by_others)
        for sequence in unfinished:
            if sequence.status is Status.RUNNING:
                self._schedule_chunk(sequence, step.token_budget - reserve, step)
            reserve = 0

    def _schedule_chunk(self, sequence: Sequence, budget: int, step: _Step) -> None:
        num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
        if num_tokens < 1 or (num_tokens > 1 and step.num_chunks_left < 1):
            return
        if self._make_room(sequence, num_tokens, step):
            self._place(sequence, num_tokens, step)

    def _place(self, sequence: Sequence, num_tokens: int, step: _Step) -> None:
        start = sequence.num_computed_tokens
        scheduled = Scheduled(sequence, sequence.row, start, num_tokens)
        if num_tokens == 1:
            step.decodes.append(scheduled)
        else:
            step.chunks.append(scheduled)
            step.num_chunks_left -= 1
        step.token_budget -= num_tokens
        sequence.num_computed_tokens = start + num_tokens
        sequence.last_step_id = step.step_id
        self.order.served(sequence, num_tokens)

    def _make_room(self, sequence: Sequence, num_tokens: int, step: _Step) -> bool:
        """Blocks for the next `num_tokens` positions, preempting younger sequences if need be.

        False if the sequence has to sit this step out: only older ones and members of this step
        hold the blocks, or some come back at the update of a step in flight. The oldest sequence
        never sits out twice in a row, so that there is always progress.
        """
        while not self._has_blocks_for(sequence, num_tokens):
            if self._has_blocks_for(sequence, num_tokens, with_releases=True):
                return False
            victim = self._youngest_idle(step)
            if victim is sequence or victim is None:
                return False
            self._preempt(victim, step)
        self._extend(sequence, num_tokens, step)
        return True

    def _youngest_idle(self, step: _Step) -> Sequence | None:
        for sequence in reversed(self.running):
            if sequence.last_step_id != step.step_id:
                return sequence
        return None

    def _num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that each group must add for the next `num_tokens` positions."""
        size = self.config.block_size
        return max(0, -(-(sequence.num_computed_tokens + num_tokens - sequence.capacity) // size))

    def _tail_to_copy(self, sequence: Sequence, group: int) -> int | None:
        """Index of the block that would be written while others hold it too."""
        tail, offset = divmod(sequence.num_computed_tokens, self.config.block_size)
        if not sequence.shares_tail or not offset:
            return None
        shared = self.pools[group].ref_counts[sequence.blocks[group][tail]] > 1
        return tail if shared else None

    def _has_blocks_for(
        self, sequence: Sequence, num_tokens: int, *, with_releases: bool = False
    ) -> bool:
        """Whether every group can give the blocks, perhaps with those that steps will release."""
        missing = self._num_missing(sequence, num_tokens)
        for group, pool in enumerate(self.pools):
            needed = missing + (self._tail_to_copy(sequence, group) is not None)
            available = pool.num_available
            if with_releases:
                available += sum(
                    len(blocks)
                    for flight in self._in_flight
                    for released_group, blocks in flight.released
                    if released_group == group
                )
            if needed > available:
                return False
        return True

    def _extend(self, sequence: Sequence, num_tokens: int, step: _Step) -> None:
        """Give the sequence its own writable blocks for the next positions; drop slid-out ones."""
        missing = self._num_missing(sequence, num_tokens)
        for group, pool in enumerate(self.pools):
            blocks = sequence.blocks[group]
            table = self.rows.tables[group, sequence.row]
            tail = self._tail_to_copy(sequence, group)
            if tail is not None:
                own = pool.allocate()
                step.copies.append(BlockCopy(group, blocks[tail], own))
                pool.release([blocks[tail]])
                blocks[tail] = table[tail] = own
            self._drop_slid_out(sequence, group)
            for _ in range(missing):
                block_id = pool.allocate()
                table[len(blocks)] = block_id
                blocks.append(block_id)
        sequence.shares_tail = False
        sequence.capacity += missing * self.config.block_size

    def _drop_slid_out(self, sequence: Sequence, group: int) -> None:
        """Give back the blocks that no later query of a sliding window sees."""
        if self.config.windows[group] is None:
            return
        blocks = sequence.blocks[group]
        dead = min(self._first_visible(group, sequence.num_computed_tokens), len(blocks))
        slid_out = []
        for i in range(dead - 1, -1, -1):
            if blocks[i] == NULL_BLOCK:
                break
            slid_out.append(blocks[i])
            blocks[i] = self.rows.tables[group, sequence.row, i] = NULL_BLOCK
        self._release(sequence, group, slid_out)

    def _release(self, sequence: Sequence, group: int, blocks: list[int]) -> None:
        """Give blocks back: at once, or when the last step in flight that writes them is done."""
        if self._in_flight and sequence.last_step_id >= self._in_flight[0].output.step_id:
            self._in_flight[-1].released.append((group, blocks))
        else:
            self.pools[group].release(blocks)

    def _schedule_samples(self, step: _Step) -> list[Sampled]:
        """Rows that sample: those computed up to their last token, and samples forked off them."""
        samples = []
        for i, scheduled in enumerate((*step.decodes, *step.chunks)):
            sequence = scheduled.sequence
            if sequence.num_computed_tokens != sequence.num_tokens:
                continue
            position = sequence.num_tokens
            sequence.num_in_flight += 1
            samples.append(Sampled(sequence, sequence.row, i, position))
            if position == sequence.num_prompt_tokens:
                for sibling in self._fork_siblings(sequence):
                    sibling.num_in_flight += 1
                    samples.append(Sampled(sibling, sibling.row, i, position))
        return samples

    # -- admission and preemption -----------------------------------------------------------

    def _admit(self, step: _Step) -> None:
        """Start waiting sequences while there are tokens, rows and blocks for them."""
        while step.token_budget > 0 and step.num_chunks_left > 0 and self.rows.num_free:
            sequence = self.waiting.peek()
            if sequence is None:
                return
            hits = self._find_prefix(sequence)
            if hits is None:
                continue  # parked until an elder computes the blocks it shares
            num_cached = len(hits[0]) * self.config.block_size
            num_tokens = min(sequence.num_tokens - num_cached, step.token_budget)
            if not self._can_admit(sequence, hits, num_cached + num_tokens):
                return
            self.waiting.pop()
            self._start(sequence, hits)
            self._extend(sequence, num_tokens, step)
            self._place(sequence, num_tokens, step)

    def _can_admit(self, sequence: Sequence, hits: list[list[int]], num_tokens: int) -> bool:
        """Room for the next chunk (all of a preempted sequence) and a margin for the running."""
        if sequence.num_preemptions:
            num_tokens = min(sequence.num_tokens + 1, sequence.request.max_total_tokens - 1)
        needed = -(-num_tokens // self.config.block_size)
        for group, pool in enumerate(self.pools):
            margin = self._watermark[group] if self.running else 0
            revived = sum(block != NULL_BLOCK and pool.is_evictable(block) for block in hits[group])
            if needed - len(hits[group]) + revived + margin > pool.num_available:
                return False
        return True

    def _start(self, sequence: Sequence, hits: list[list[int]]) -> None:
        """Make a waiting sequence running, on the cached blocks of its prefix.

        The hits are held before anything is allocated, so that no allocation can evict them.
        """
        for pool, blocks in zip(self.pools, hits, strict=True):
            for block_id in blocks:
                if block_id != NULL_BLOCK:
                    pool.retain(block_id)
        sequence.blocks = [list(blocks) for blocks in hits]
        sequence.num_computed_tokens = len(hits[0]) * self.config.block_size
        sequence.capacity = sequence.num_computed_tokens
        sequence.num_registered = len(hits[0])
        if self.config.enable_prefix_caching:
            self._count_lookup(sequence)
            self._announce(sequence)
        self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        self.rows.lend(sequence)
        sequence.status = Status.RUNNING
        position = len(self.running)
        key = (sequence.request.order_key, sequence.index)
        while position and key < (
            self.running[position - 1].request.order_key,
            self.running[position - 1].index,
        ):
            position -= 1
        self.running.insert(position, sequence)

    def _count_lookup(self, sequence: Sequence) -> None:
        if sequence.num_preemptions == 0:
            self.num_lookup_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed_tokens
            if sequence.index == 0:
                sequence.request.num_cached_tokens = sequence.num_computed_tokens

    def _fork_siblings(self, elder: Sequence) -> Iterator[Sequence]:
        """Start the other samples of a request on its prompt's blocks.

        Where no row is left a sample waits as a sequence of its own, for a prefix hit.
        """
        for sibling in elder.request.sequences:
            if sibling.status is not Status.FORKING:
                continue
            sibling.status = Status.WAITING
            if not self.rows.num_free:
                self.waiting.push(sibling)
                continue
            sibling.blocks = [list(blocks) for blocks in elder.blocks]
            for pool, blocks in zip(self.pools, sibling.blocks, strict=True):
                for block_id in blocks:
                    if block_id != NULL_BLOCK:
                        pool.retain(block_id)
            sibling.num_computed_tokens = elder.num_computed_tokens
            sibling.capacity = elder.capacity
            sibling.digests = list(elder.digests)
            sibling.num_registered = elder.num_registered
            sibling.shares_tail = elder.shares_tail = True
            sibling.last_step_id = self._next_step_id - 1
            self._run(sibling)
            yield sibling

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        """Take a running sequence's row and blocks; it will be computed again from its tokens.

        A token in flight still reaches it; until then it cannot be admitted again.
        """
        self._leave(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        step.preempted.append(sequence)
        if sequence.num_in_flight:
            self._awaiting_token.add(sequence)
        else:
            self.waiting.push(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """End a sequence in any state. Ending the eldest lets no younger one wait for its fork."""
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence in self._awaiting_token:
            self._awaiting_token.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self._unpark(sequence)
        sequence.status = Status.FINISHED
        request = sequence.request
        forking = [s for s in request.sequences if s.status is Status.FORKING]
        if forking and not any(
            s.status in (Status.WAITING, Status.RUNNING) for s in request.sequences
        ):
            forking[0].status = Status.WAITING
            self.waiting.push(forking[0])
        if all(s.status is Status.FINISHED for s in request.sequences):
            del self.requests[request.request_id]

    def _leave(self, sequence: Sequence) -> None:
        """Take a running sequence's row and blocks. Steps in flight keep what they may write."""
        self.running.remove(sequence)
        self.rows.take_back(sequence)
        self._withdraw(sequence)
        for group, blocks in enumerate(sequence.blocks):
            self._release(sequence, group, [b for b in reversed(blocks) if b != NULL_BLOCK])
        sequence.blocks = []
        sequence.capacity = 0
        sequence.shares_tail = False
        sequence.num_registered = 0

    # -- prefix cache -----------------------------------------------------------------------

    def _find_prefix(self, sequence: Sequence) -> list[list[int]] | None:
        """Cached blocks of the sequence's prefix, a list a group; None if it was parked.

        At least one token is left to compute. A sequence whose next block is being computed by
        another one waits for it instead of computing it again.
        """
        if not self.config.enable_prefix_caching:
            return [[] for _ in self.pools]
        most = (sequence.num_tokens - 1) // self.config.block_size
        digests = extend_digests(sequence, most, self.config.block_size)[:most]
        num_hits = most
        for group, window in enumerate(self.config.windows):
            if window is None:
                num_hits = self._count_leading(group, digests[:num_hits])
        while num_hits and not self._windows_hit(digests, num_hits):
            num_hits -= 1
        if num_hits < most:
            elder = self._computing.get(digests[num_hits])
            if elder is not None:
                self.waiting.remove(sequence)
                self._parked.setdefault(digests[num_hits], []).append(sequence)
                return None
        return [self._hit_blocks(g, digests[:num_hits]) for g in range(len(self.pools))]

    def _count_leading(self, group: int, digests: list[bytes]) -> int:
        pool = self.pools[group]
        for i, digest in enumerate(digests):
            if pool.lookup(digest) is None:
                return i
        return len(digests)

    def _first_visible(self, group: int, position: int) -> int:
        """Index of the first block that the query at `position` sees in this group."""
        window = self.config.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.config.block_size

    def _windows_hit(self, digests: list[bytes], num_hits: int) -> bool:
        return all(
            pool.lookup(digest) is not None
            for group, pool in enumerate(self.pools)
            for digest in self._visible(group, digests[:num_hits])
        )

    def _visible(self, group: int, digests: list[bytes]) -> list[bytes]:
        """Those of a prefix's blocks that the query after them sees."""
        return digests[self._first_visible(group, len(digests) * self.config.block_size) :]

    def _hit_blocks(self, group: int, digests: list[bytes]) -> list[int]:
        visible = self._visible(group, digests)
        found = (self.pools[group].lookup(digest) for digest in visible)
        return [NULL_BLOCK] * (len(digests) - len(visible)) + [b for b in found if b is not None]

    def _announce(self, sequence: Sequence) -> None:
        """Say that this sequence will compute the blocks of its tokens that nobody has yet."""
        for digest in sequence.digests[sequence.num_registered :]:
            self._computing.setdefault(digest, sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        """A sequence stops running: whoever waits for blocks it announced tries again."""
        for digest in sequence.digests[sequence.num_registered :]:
            if self._computing.get(digest) is sequence:
                del self._computing[digest]
                self._wake(digest)

    def _wake(self, digest: bytes) -> None:
        for sequence in self._parked.pop(digest, ()):
            self.waiting.push(sequence)

    def _unpark(self, sequence: Sequence) -> None:
        for digest, group in list(self._parked.items()):
            if sequence in group:
                group.remove(sequence)
                if not group:
                    del self._parked[digest]

    def _register(self, scheduled: Scheduled) -> None:
        """Put the blocks that a step filled into the prefix index."""
        sequence = scheduled.sequence
        size = self.config.block_size
        num_full = (scheduled.start + scheduled.num_tokens) // size
        first = sequence.num_registered
        if num_full <= first or not sequence.blocks:
            return
        digests = extend_digests(sequence, num_full, size)
        for i in range(first, num_full):
            for pool, blocks in zip(self.pools, sequence.blocks, strict=True):
                if blocks[i] != NULL_BLOCK:
                    pool.register(blocks[i], digests[i])
            if self._computing.get(digests[i]) is sequence:
                del self._computing[digests[i]]
                self._wake(digests[i])
        sequence.num_registered = num_full

    def forget_prefixes(self) -> None:
        """Empty the prefix index; running sequences keep their blocks."""
        for pool in self.pools:
            pool.forget_all()

    # -- the books --------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert that every block, row and sequence is accounted for."""
        for group, pool in enumerate(self.pools):
            pool.check_invariants(self._holders(group))
        self.rows.check_invariants(self.running)
        keys = [(s.request.order_key, s.index) for s in self.running]
        assert keys == sorted(keys), "running sequences are out of order"
        for sequence in self.running:
            assert sequence.status is Status.RUNNING
            assert sequence.num_computed_tokens <= sequence.num_tokens
            assert sequence.num_computed_tokens <= sequence.capacity
        places = [
            self.running,
            list(self.waiting),
            list(self._awaiting_token),
            [s for group in self._parked.values() for s in group],
        ]
        placed = [s for place in places for s in place]
        live = [
            s
            for r in self.requests.values()
            for s in r.sequences
            if s.status in (Status.RUNNING, Status.WAITING)
        ]
        assert len(placed) == len(set(placed)), "a sequence is in two places"
        assert set(placed) == set(live), "a sequence is lost"
        assert all(self._computing[d] in self.running for d in self._computing)
        assert all(d in self._computing for d in self._parked), "a parked sequence is forgotten"
        if not self.requests and not self._in_flight:
            assert all(pool.num_referenced == 0 for pool in self.pools), "blocks leaked"

    def _holders(self, group: int) -> Iterable[int]:
        for sequence in self.running:
            yield from sequence.blocks[group]
        for flight in self._in_flight:
            for released_group, blocks in flight.released:
                if released_group == group:
                    yield from blocks
