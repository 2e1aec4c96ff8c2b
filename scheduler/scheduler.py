"""The scheduler: decides at every step which sequences run, and for how many tokens.

    schedule() -> SchedulerOutput        who runs; counters advance as if the step had happened
    update(output, tokens) -> updates    what the device sampled; stops, frees, registers

`schedule` may run once more before `update` of the step before it (a lag of one), so that the
host prepares a step while the device runs another.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from scheduler.block_manager import BlockManager, Found
from scheduler.config import SchedulerConfig
from scheduler.errors import RequestError
from scheduler.output import Sampled, Scheduled, SchedulerOutput, SequenceUpdate
from scheduler.policy import FirstComeFirstServed, OrderPolicy
from scheduler.prefix_waiters import PrefixWaiters
from scheduler.request import FinishReason, Request, Sequence, Status
from scheduler.rows import Rows
from scheduler.waiting import WaitingQueue

MAX_LAG = 1
MANY_STEPS = 8


class _Step:
    """A step while it is being put together."""

    def __init__(self, step_id: int, num_tokens: int, num_chunks: int):
        self.step_id = step_id
        self.num_tokens_left = num_tokens
        self.num_chunks_left = num_chunks
        self.decodes: list[Scheduled] = []
        self.chunks: list[Scheduled] = []
        self.preempted: list[Sequence] = []
        self.started: list[Sequence] = []


class Scheduler:
    """Continuous batching over a paged KV cache. Pure Python and NumPy; one thread owns it."""

    def __init__(
        self,
        config: SchedulerConfig,
        order: OrderPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`clock` gives seconds; only static batching looks at it."""
        self.config = config
        self.order = order or FirstComeFirstServed()
        self.rows = Rows(config.max_num_seqs, len(config.windows), config.table_width)
        self.blocks = BlockManager(config, self.rows)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in the order policy's order
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.num_swaps = 0
        self.num_lookup_tokens = 0
        self.num_hit_tokens = 0
        self._clock = clock
        self._awaiting_token: set[Sequence] = set()  # preempted with a token in flight
        self._waiters = PrefixWaiters()
        self._outputs: deque[SchedulerOutput] = deque()  # in flight
        self._next_step_id = 0
        self._next_arrival = 0
        self._largest_chunk = config.largest_chunk
        self._margins = tuple(int(config.watermark * (n - 1)) for n in config.num_blocks)
        self._num_slots_held = 0  # of a static batch
        self._num_due = 0  # members that a static batch still waits for
        self._batch_due: float | None = None  # when a static batch starts though not full
        self._prefilled_last = False

    # -- requests ---------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. `RequestError` if it could never run; nothing is kept then."""
        if request.request_id in self.requests:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by a live request",
                param="request_id",
            )
        self.check_fits(len(request.prompt_token_ids))
        # What neither the model nor the pool can hold is foreseen; the last token is not stored.
        longest = min(self.config.max_model_len, self.config.capacity_tokens + 1)
        # Whoever wants a prompt scored that fills the model gets a token drawn and dropped.
        longest = max(longest, len(request.prompt_token_ids) + 1)
        request.max_total_tokens = min(request.max_total_tokens, longest)
        request.came_at = self._clock()
        request.order_key = (self.order.key(request), self._next_arrival)
        self._next_arrival += 1
        self.requests[request.request_id] = request
        self.waiting.push(request.sequences[0])
        if self._batch_due is None and self.config.batching == "static":
            self._batch_due = self._clock() + self.config.batch_timeout_s

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Refuse a prompt that the pool could not hold even if it were empty."""
        capacity, size = self.config.capacity_tokens, self.config.block_size
        if num_prompt_tokens > capacity:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens, but the KV cache holds only "
                f"{capacity} ({size} in each of {capacity // size} blocks)",
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
    def num_in_flight(self) -> int:
        """Steps dispatched and not updated."""
        return len(self._outputs)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._awaiting_token) + len(self._waiters)

    @property
    def pools(self):
        """The device's block pools, one of each group."""
        return self.blocks.pools

    # -- one step ---------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Put the next step together and advance the counters as if it had happened."""
        assert len(self._outputs) <= MAX_LAG, "schedule ran twice without an update"
        config = self.config
        step = _Step(self._next_step_id, config.max_num_batched_tokens, config.max_num_chunks)
        self._next_step_id += 1
        self.blocks.begin_step(step.step_id)
        if config.batching == "static":
            self._schedule_static(step)
        elif config.prefill == "dedicated":
            self._schedule_dedicated(step)
        else:
            self._schedule_decodes(step)
            self._schedule_prefill(step)
        output = SchedulerOutput(
            step_id=step.step_id,
            samples=tuple(self._samples(step)),
            decodes=tuple(step.decodes),
            chunks=tuple(step.chunks),
            moves=self.blocks.take_moves(),
            preempted=tuple(step.preempted),
            started=tuple(step.started),
            num_slots_held=self._num_slots_held,
        )
        if not output.is_empty:
            self._outputs.append(output)
            self.blocks.dispatch_step()
        return output

    def update(self, output: SchedulerOutput, tokens: list[int]) -> list[SequenceUpdate]:
        """Take in what a step sampled: `tokens[i]` is the token of `output.samples[i]`.

        A negative token means that the row's logits were not finite: the sequence ends with
        `error` and the blocks of this step never enter the prefix index. Steps are updated in
        the order of their dispatch.
        """
        assert self._outputs.popleft() is output, "steps must be updated in their order"
        flight = self.blocks.land_step()
        updates = []
        poisoned = set()
        for sampled, token in zip(output.samples, tokens, strict=True):
            sequence = sampled.sequence
            sequence.num_in_flight -= 1
            if sequence.status is Status.FINISHED:
                continue
            if token < 0:
                poisoned.add(sequence)
            updates.append(_take_token(sequence, token))
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
        flight.release()
        return updates

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
            step.num_tokens_left -= 1
            sequence.num_computed_tokens = start + 1
            sequence.last_step_id = step.step_id

    def _schedule_prefill(self, step: _Step) -> None:
        """Prompts, begun or waiting. The oldest begun one gets three quarters of the tokens.

        The others get the rest, those first that need fewest, so that a long prompt never keeps
        the short ones behind it waiting; what they leave is the oldest's too.
        """
        unfinished = [s for s in self.running if _num_uncomputed(s) > 1]
        if not unfinished:
            self._admit(step)
            return
        oldest, *others = sorted(unfinished, key=lambda s: s.request.order_key)
        left = step.num_tokens_left
        kept_back = left - left // 4 if left >= 4 else max(1, left - 1)
        kept_back = min(kept_back, _num_uncomputed(oldest))
        step.num_tokens_left -= kept_back
        step.num_chunks_left -= 1
        self._schedule_others(others, step)
        step.num_tokens_left += kept_back
        step.num_chunks_left += 1
        self._schedule_chunk(oldest, step)
        self._schedule_others([s for s in others if s.last_step_id != step.step_id], step)

    def _schedule_others(self, begun: list[Sequence], step: _Step) -> None:
        """Those that need fewest tokens first. If even they will take many steps, half of the
        tokens begin a new prompt, which may be a short one or have a short one behind it."""
        begun = sorted(begun, key=_num_uncomputed)
        left = step.num_tokens_left
        if begun and _num_uncomputed(begun[0]) > MANY_STEPS * left:
            step.num_tokens_left -= left // 2
            self._admit(step, most=1)
            step.num_tokens_left += left // 2
        for sequence in begun:
            self._schedule_chunk(sequence, step)
        self._admit(step)

    def _schedule_static(self, step: _Step) -> None:
        """All prompts of a batch, then their decodes."""
        self._schedule_prefill(step)
        if not step.decodes and not step.chunks:
            self._schedule_decodes(step)

    def _schedule_dedicated(self, step: _Step) -> None:
        """Steps of prefill only and of decodes only, in turn while there is work of both kinds."""
        if not self._prefilled_last:
            self._schedule_prefill(step)
        self._prefilled_last = bool(step.decodes or step.chunks)
        if self._prefilled_last:
            return
        self._schedule_decodes(step)
        if not step.decodes and not step.preempted:
            self._schedule_prefill(step)
            self._prefilled_last = True

    def _schedule_chunk(self, sequence: Sequence, step: _Step) -> None:
        """As much of a begun prompt as the step and the blocks have room for."""
        if sequence.status is not Status.RUNNING:
            return  # preempted a moment ago
        num_tokens = min(_num_uncomputed(sequence), step.num_tokens_left, self._largest_chunk)
        if num_tokens < 1 or step.num_chunks_left < 1:
            return
        self.blocks.drop_slid_out(sequence)  # they may be the room
        num_tokens = max(1, min(num_tokens, self.blocks.room(sequence)))
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
        step.num_tokens_left -= num_tokens
        sequence.num_computed_tokens = start + num_tokens
        sequence.last_step_id = step.step_id

    def _samples(self, step: _Step) -> Iterator[Sampled]:
        """Rows that sample: those computed up to their last token, and samples forked off them."""
        for i, scheduled in enumerate((*step.decodes, *step.chunks)):
            sequence = scheduled.sequence
            if sequence.num_computed_tokens != sequence.num_tokens:
                continue
            position = sequence.num_tokens
            sequence.num_in_flight += 1
            yield Sampled(sequence, sequence.row, i, position)
            if position == sequence.num_prompt_tokens:
                for sibling in self._fork_siblings(sequence, step):
                    sibling.num_in_flight += 1
                    yield Sampled(sibling, sibling.row, i, position)

    def _fork_siblings(self, elder: Sequence, step: _Step) -> Iterator[Sequence]:
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
            self.blocks.fork(elder, sibling)
            sibling.last_step_id = step.step_id
            self._run(sibling, step)
            yield sibling

    # -- preemption -------------------------------------------------------------------------

    def _make_room(self, sequence: Sequence, num_tokens: int, step: _Step) -> bool:
        """Blocks for the next `num_tokens` positions, preempting younger sequences if need be.

        False if the sequence has to sit this step out: only older ones and members of this step
        hold the blocks, or some come back at the update of a step in flight. The oldest sequence
        can always push the others out in the end, so that there is always progress.
        """
        self.blocks.drop_slid_out(sequence)
        while not self.blocks.has_room(sequence, num_tokens):
            if self.blocks.has_room(sequence, num_tokens, with_releases=True):
                return False
            victim = self._youngest_idle(step)
            if victim is sequence or victim is None:
                return False
            self._preempt(victim, step)
        self.blocks.extend(sequence, num_tokens)
        return True

    def _youngest_idle(self, step: _Step) -> Sequence | None:
        for sequence in reversed(self.running):
            if sequence.last_step_id != step.step_id:
                return sequence
        return None

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        """Take a running sequence's row and blocks: copied to the host, or computed again later.

        A token in flight still reaches it; until then it cannot be admitted again.
        """
        self._leave_batch(sequence)
        if self.config.preemption == "swap" and self.blocks.swap_out(sequence):
            self.num_swaps += 1
        else:
            self.blocks.free(sequence)
            sequence.num_computed_tokens = 0
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        step.preempted.append(sequence)
        if sequence.num_in_flight:
            self._awaiting_token.add(sequence)
        else:
            self.waiting.push(sequence)

    def recompute_all(self) -> None:
        """The device's KV cache is lost: forget every block; what ran starts over from its tokens.

        For a step that failed after the pool was donated. Steps in flight are dropped, and the
        tokens they would have brought are sampled again, the same ones.
        """
        self._outputs.clear()
        while self.blocks.num_in_flight:
            self.blocks.land_step().release()
        for sequence in [*self.running]:
            self._leave_batch(sequence)
            self.blocks.free(sequence)
            sequence.status = Status.WAITING
            sequence.num_computed_tokens = 0
            sequence.num_preemptions += 1
            sequence.num_in_flight = 0
            self.waiting.push(sequence)
        for sequence in self._awaiting_token:
            sequence.num_in_flight = 0
            self.waiting.push(sequence)
        self._awaiting_token.clear()
        for sequence in self.waiting:
            self.blocks.free_host(sequence)
            sequence.num_computed_tokens = 0
        self.blocks.forget_prefixes()

    def resalt(self, salts: Mapping[str, bytes]) -> None:
        """Other salts for live requests that have no computed blocks: after `recompute_all`."""
        for request_id, salt in salts.items():
            request = self.requests[request_id]
            request.salt = salt
            for sequence in request.sequences:
                assert not sequence.num_computed_tokens, "its blocks were found by the old salt"
                sequence.digests = []

    # -- admission --------------------------------------------------------------------------

    def _admit(self, step: _Step, most: int | None = None) -> None:
        """Start waiting sequences, at most so many, while they find tokens, rows and blocks."""
        if step.preempted or not self._may_admit():
            return
        num_left = self.rows.num_free if most is None else min(most, self.rows.num_free)
        while step.num_tokens_left > 0 and step.num_chunks_left > 0 and num_left > 0:
            sequence = self.waiting.peek()
            if sequence is None:
                break
            found = self.blocks.find(sequence)
            if self._waits_for_elder(sequence, found):
                continue
            uncomputed = sequence.num_tokens - found.num_tokens
            num_tokens = min(uncomputed, step.num_tokens_left, self._largest_chunk)
            if not self._can_admit(sequence, found, num_tokens):
                break
            self.waiting.pop()
            self._start(sequence, found, step)
            self.blocks.extend(sequence, num_tokens)
            self._place(sequence, num_tokens, step)
            num_left -= 1
            if self.config.batching == "static":
                self._join_batch()
                if not self._num_due:
                    break

    def _may_admit(self) -> bool:
        """A static batch starts when it is full or its time has come, with as many members as
        wait then, and runs to its longest one."""
        if self.config.batching == "continuous" or self._num_due:
            return True
        if self.running:
            return False
        if self._num_slots_held:
            self._num_slots_held = 0
            self._batch_due = self._clock() + self.config.batch_timeout_s
        full = len(self.waiting) >= self.config.max_num_seqs
        if full or (self._batch_due is not None and self._clock() >= self._batch_due):
            self._num_due = min(len(self.waiting), self.config.max_num_seqs)
        return self._num_due > 0

    def _join_batch(self) -> None:
        self._num_due -= 1
        self._num_slots_held = max(self._num_slots_held, len(self.running))
        self._batch_due = None

    def _waits_for_elder(self, sequence: Sequence, found: Found) -> bool:
        """Park a sequence whose next block is about to be computed by another one."""
        if not self.blocks.may_reuse(sequence) or sequence.host_blocks:
            return False
        digests = self.blocks.prefix_digests(sequence)
        num_hits = len(found.blocks[0])
        if num_hits == len(digests) or not self._waiters.park(sequence, digests[num_hits]):
            return False
        self.waiting.remove(sequence)
        return True

    def _can_admit(self, sequence: Sequence, found: Found, num_tokens: int) -> bool:
        """Room for the next chunk and a margin for the running.

        A preempted sequence comes back only when there is room for all of it and for one more
        block of every running one: victims must not thrash.
        """
        total = found.num_tokens + num_tokens
        margins = self._margins if self.running else (0,) * len(self._margins)
        if sequence.num_preemptions:
            total = min(sequence.num_tokens + 1, sequence.request.max_total_tokens - 1)
            margins = tuple(max(m, len(self.running)) for m in margins)
        return self.blocks.can_start(found, total, margins)

    def _start(self, sequence: Sequence, found: Found, step: _Step) -> None:
        self.blocks.start(sequence, found)
        self.order.started(sequence.request)
        if self.config.enable_prefix_caching:
            if sequence.num_preemptions == 0:
                self.num_lookup_tokens += sequence.num_tokens
                self.num_hit_tokens += found.num_tokens
                if sequence.index == 0:
                    sequence.request.num_cached_tokens = found.num_tokens
            digests = self.blocks.full_digests(sequence)
            self._waiters.announce(sequence, digests[sequence.num_registered :])
        self._run(sequence, step)

    def _run(self, sequence: Sequence, step: _Step) -> None:
        """Give a sequence a row, and its place among the running."""
        if sequence.request.began_at is None:
            sequence.request.began_at = self._clock()
        self.rows.lend(sequence)
        step.started.append(sequence)
        sequence.status = Status.RUNNING
        position = len(self.running)
        while position and _order(sequence) < _order(self.running[position - 1]):
            position -= 1
        self.running.insert(position, sequence)

    def _register(self, scheduled: Scheduled) -> None:
        """Put the blocks that a step filled into the prefix index, and wake who waits for them."""
        sequence = scheduled.sequence
        digests = self.blocks.register(sequence, scheduled.start + scheduled.num_tokens)
        self._wake(sequence, list(digests))

    def _wake(self, sequence: Sequence, digests: list[bytes]) -> None:
        for waiter in self._waiters.settle(sequence, digests):
            self.waiting.push(waiter)

    # -- ending -----------------------------------------------------------------------------

    def _finish(self, sequence: Sequence) -> None:
        """End a sequence in any state. Ending the eldest lets no younger one wait for its fork."""
        if sequence.status is Status.RUNNING:
            self._leave_batch(sequence)
        elif sequence in self._awaiting_token:
            self._awaiting_token.remove(sequence)
        elif not self._waiters.unpark(sequence):
            self.waiting.remove(sequence)
        self.blocks.free(sequence)
        sequence.status = Status.FINISHED
        request = sequence.request
        forking = [s for s in request.sequences if s.status is Status.FORKING]
        if forking and all(
            s.status in (Status.FORKING, Status.FINISHED) for s in request.sequences
        ):
            forking[0].status = Status.WAITING
            self.waiting.push(forking[0])
        if all(s.status is Status.FINISHED for s in request.sequences):
            del self.requests[request.request_id]
            self.order.ended(request)

    def _leave_batch(self, sequence: Sequence) -> None:
        """A sequence stops running: whoever waits for blocks it announced tries again."""
        self.running.remove(sequence)
        self.rows.take_back(sequence)
        self._wake(sequence, sequence.digests[sequence.num_registered :])

    def forget_prefixes(self) -> None:
        """Empty the prefix index; running sequences keep their blocks."""
        self.blocks.forget_prefixes()

    # -- the books --------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert that every block, row and sequence is accounted for."""
        waiting = [*self.waiting, *self._awaiting_token, *self._waiters]
        self.blocks.check_invariants(self.running, waiting)
        self.rows.check_invariants(self.running)
        self._waiters.check_invariants(self.running)
        assert self.blocks.num_in_flight == len(self._outputs)
        keys = [_order(s) for s in self.running]
        assert keys == sorted(keys), "running sequences are out of order"
        for sequence in self.running:
            assert sequence.status is Status.RUNNING
            assert sequence.num_computed_tokens <= min(sequence.num_tokens, sequence.capacity)
        placed = [*self.running, *waiting]
        live = [
            s
            for r in self.requests.values()
            for s in r.sequences
            if s.status in (Status.RUNNING, Status.WAITING)
        ]
        assert len(placed) == len(set(placed)), "a sequence is in two places"
        assert set(placed) == set(live), "a sequence is lost"
        if not self.requests and not self._outputs:
            pools = (*self.blocks.pools, *self.blocks.host_pools)
            assert all(pool.num_referenced == 0 for pool in pools), "blocks leaked"


def _num_uncomputed(sequence: Sequence) -> int:
    return sequence.num_tokens - sequence.num_computed_tokens


def _order(sequence: Sequence) -> tuple[tuple[float, int], int]:
    return sequence.request.order_key, sequence.index


def _take_token(sequence: Sequence, token: int) -> SequenceUpdate:
    """Append a sampled token and say whether it ends the sequence."""
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
