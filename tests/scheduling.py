"""Requests, runs and checks that the scheduler's tests share."""

from collections.abc import Callable

from scheduler import (
    Batch,
    BlockPool,
    FinishReason,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulerOutput,
    Sequence,
)
from tests.fakes import EOS, FakeEngine, FakeRunner, expected_tokens


def make_config(*, num_usable: int, block_size: int = 4, **fields) -> SchedulerConfig:
    """A pool of `num_usable` blocks beside the null block, without a watermark."""
    chosen = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    chosen |= {"watermark": 0.0, "num_blocks": (num_usable + 1,)}
    return SchedulerConfig(block_size=block_size, **(chosen | fields))


def greedy(max_tokens: int, **fields) -> SamplingParams:
    """Runs to its limit, whatever the fake model says."""
    return SamplingParams(
        **({"temperature": 0.0, "ignore_eos": True} | fields), max_tokens=max_tokens
    )


def prompt(num_tokens: int, first: int = 1) -> list[int]:
    """A prompt that shares no block with one of another `first`."""
    return [first, *range(100, 100 + num_tokens - 1)]


def prompt_ending_by_eos(num_tokens: int, num_output_tokens: int) -> list[int]:
    """A prompt that makes the fake model say end-of-sequence at just this output token."""
    params = SamplingParams(temperature=0.0)
    for first in range(10_000):
        candidate = prompt(num_tokens, first)
        limit = num_tokens + num_output_tokens
        output = expected_tokens(candidate, params, max_total_tokens=limit)
        if len(output) == num_output_tokens and output[-1] == EOS:
            return candidate
    raise AssertionError("the fake model never ends there")


def pool_of(engine: FakeEngine, group: int = 0) -> BlockPool:
    return engine.scheduler.pools[group]


def host_pool_of(engine: FakeEngine, group: int = 0) -> BlockPool:
    return engine.scheduler.blocks.host_pools[group]


def copies_of(output: SchedulerOutput) -> tuple:
    """The blocks that are copied before a step because they are shared."""
    return output.moves.copies


def members_of(output: SchedulerOutput) -> dict:
    """Tokens that each sequence computes in a step."""
    return {s.sequence: s.num_tokens for s in (*output.decodes, *output.chunks)}


def first_step_of(engine: FakeEngine, request: Request) -> int:
    """Index of the step that sampled a request's first token."""
    return next(
        i
        for i, output in enumerate(engine.outputs)
        if any(s.sequence.request is request for s in output.samples)
    )


def num_computed_for(engine: FakeEngine, *requests: Request) -> int:
    """Tokens that steps computed for these requests, those computed twice counted twice."""
    return sum(
        num_tokens
        for output in engine.outputs
        for sequence, num_tokens in members_of(output).items()
        if sequence.request in requests
    )


class WatchedRunner:
    """A fake runner that refuses a step which writes where a step in flight writes or copies from.

    Samples of one request may: the last holder of a shared block goes on in it.
    `before_update` is called in every step, after `schedule` and before any `update`.
    """

    def __init__(self, runner: FakeRunner, pending: list[tuple[SchedulerOutput, list[int]]]):
        self.pools = runner.pools
        self.host = runner.host
        self.before_update: Callable[[], None] = lambda: None
        self._runner = runner
        self._pending = pending
        self._writers: dict[int, dict[tuple[int, int], Sequence]] = {}
        self._copied: dict[int, set[tuple[int, int]]] = {}

    def execute(self, output: SchedulerOutput, batch: Batch) -> list[int]:
        writers = self._writers_in(output)
        for earlier, _ in self._pending:
            for block, sequence in self._writers[earlier.step_id].items():
                later = writers.get(block, sequence)
                assert later.request is sequence.request, f"{block} has two writers in flight"
            copied = self._copied[earlier.step_id]
            assert not copied & writers.keys(), "a block is written whose copy is in flight"
        self._writers[output.step_id] = writers
        copied = {(copy.group, copy.source) for copy in output.moves.swap_outs}
        self._copied[output.step_id] = copied - self._held_by_members(output)
        tokens = self._runner.execute(output, batch)
        self.before_update()
        return tokens

    def _held_by_members(self, output: SchedulerOutput) -> set[tuple[int, int]]:
        """Blocks of this step's sequences: new ones too, whose old content is copied first."""
        return {
            (group, block)
            for sequence in members_of(output)
            for group, blocks in enumerate(sequence.blocks)
            for block in blocks
        }

    def _writers_in(self, output: SchedulerOutput) -> dict[tuple[int, int], Sequence]:
        size = self._runner.config.block_size
        writers: dict[tuple[int, int], Sequence] = {}
        for sequence, _, start, num_tokens in (*output.decodes, *output.chunks):
            for group, blocks in enumerate(sequence.blocks):
                for block in blocks[start // size : -(-(start + num_tokens) // size)]:
                    assert block, "a token has no block"
                    assert (group, block) not in writers, f"{block} has two writers in a step"
                    writers[group, block] = sequence
        return writers


def make_engine(config: SchedulerConfig, *, lag: int = 0, order=None) -> FakeEngine:
    """A fake engine whose runner is watched."""
    engine = FakeEngine(config, lag=lag, order=order)
    engine.runner = WatchedRunner(engine.runner, engine.pending)
    return engine


def checked_step(engine: FakeEngine) -> SchedulerOutput:
    """One step; the books balance after it, and it keeps the limits."""
    had_running = bool(engine.scheduler.running)
    output = engine.step()
    engine.scheduler.check_invariants()
    assert output.num_tokens <= engine.config.max_num_batched_tokens
    assert not set(members_of(output)) & set(output.preempted), "scheduled and preempted at once"
    assert had_running or not output.preempted
    return output


def step_until(engine: FakeEngine, happened: Callable[[], bool], max_steps: int = 1000) -> None:
    for _ in range(max_steps):
        if happened():
            return
        checked_step(engine)
    raise AssertionError(f"it did not happen within {max_steps} steps")


def finish_all(engine: FakeEngine, max_steps: int = 2000) -> int:
    """Step until nothing is left, with the books checked at each step and at the end."""
    for count in range(max_steps):
        if not engine.scheduler.has_unfinished and not engine.pending:
            assert_idle_books(engine)
            return count
        checked_step(engine)
    raise AssertionError(f"not done after {max_steps} steps")


def assert_idle_books(engine: FakeEngine) -> None:
    scheduler = engine.scheduler
    scheduler.check_invariants()
    assert not scheduler.requests and not scheduler.running and scheduler.num_waiting == 0
    pools = [pool_of(engine, group) for group in range(len(engine.config.num_blocks))]
    pools += [host_pool_of(engine, group) for group in range(len(engine.config.num_host_blocks))]
    for pool in pools:
        assert pool.num_referenced == 0
        assert pool.num_available == pool.num_blocks - 1
    assert scheduler.rows.num_free == engine.config.max_num_seqs


def oracle(engine: FakeEngine, request: Request, index: int = 0) -> list[int]:
    """What a sample of the request must produce, from its own tokens alone."""
    return expected_tokens(
        list(request.prompt_token_ids),
        request.params,
        seed=request.sequences[0].seed,
        index=index,
        windows=engine.config.windows,
        max_total_tokens=request.max_total_tokens,
    )


def assert_right(engine: FakeEngine, *requests: Request) -> None:
    """Every sample ended with the oracle's tokens; an aborted one with the first of them."""
    for request in requests:
        for index in range(request.params.n):
            key = (request.request_id, index)
            got, expected = engine.tokens.get(key, []), oracle(engine, request, index)
            if engine.finished[key] is FinishReason.ABORT:
                assert got == expected[: len(got)]
            else:
                assert got == expected
