"""Random life at the scheduler's door: whatever comes in what order, the books balance."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler import FinishReason, RequestError, SamplingParams, SchedulerConfig
from tests.fakes import FakeEngine, expected_tokens

RARELY = st.integers(0, 3).map(lambda i: i == 0)
CONFIGS = st.builds(
    lambda size, blocks, rows, spare, chunks, windows, caching, host, modes: SchedulerConfig(
        block_size=size,
        num_blocks=(blocks,) * len(windows),
        max_model_len=64,
        max_num_seqs=rows,
        max_num_batched_tokens=rows + spare,
        max_num_chunks=chunks,
        windows=windows,
        watermark=0.05,
        enable_prefix_caching=caching,
        num_host_blocks=(host,) * len(windows) if host else (),
        preemption="swap" if host and modes[0] else "recompute",
        kv_offload=bool(host and caching and modes[1]),
        prefill="dedicated" if modes[2] else "mixed",
        allocation="reserved" if modes[3] else "paged",
        batching="static" if modes[4] else "continuous",
        batch_timeout_s=0.0,
    ),
    st.sampled_from([1, 2, 4]),
    st.integers(5, 30),
    st.integers(1, 6),
    st.integers(0, 16),
    st.integers(1, 3),
    st.sampled_from([(None,), (None, 6), (None, 1)]),
    st.booleans(),
    st.sampled_from([0, 2, 12, 40]),
    st.tuples(*[st.booleans()] * 3, RARELY, RARELY),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps and aborts at random; every token is checked against the fake model."""

    lag = 0

    @initialize(config=CONFIGS)
    def start(self, config):
        self.engine = FakeEngine(config, lag=self.lag)
        self.expected = {}
        self.steps_without_progress = 0

    @rule(
        stem=st.sampled_from([(), (1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 9, 9, 9, 9)]),
        tail=st.lists(st.integers(1, 3), min_size=1, max_size=14),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        max_tokens=st.integers(1, 20),
        temperature=st.sampled_from([0.0, 1.0]),
        ignore_eos=st.booleans(),
        seed=st.integers(0, 3),
    )
    def add(self, stem, tail, n, max_tokens, temperature, ignore_eos, seed):
        engine = self.engine
        prompt = [*stem, *tail]
        params = SamplingParams(
            n=n, max_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos
        )
        request_id = f"r{len(self.expected)}"
        if len(prompt) > engine.config.capacity_tokens:
            with pytest.raises(RequestError, match=f"prompt has {len(prompt)} tokens"):
                engine.add(request_id, prompt, params)
            return
        engine.add(request_id, prompt, params, seed=seed)
        for index in range(n):
            self.expected[request_id, index] = expected_tokens(
                prompt,
                params,
                seed=seed,
                index=index,
                windows=engine.config.windows,
                max_total_tokens=engine.max_total_tokens(prompt, params),
            )

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self._one_step()

    def _one_step(self):
        engine = self.engine
        had_work = engine.scheduler.has_unfinished
        output = engine.step()
        assert output.num_tokens <= engine.config.max_num_batched_tokens
        assert len(output.chunks) <= engine.config.max_num_chunks
        assert all(s.num_tokens > 1 for s in output.chunks)
        members = [s.sequence for s in (*output.decodes, *output.chunks)]
        assert len(set(members)) == len(members), "a sequence runs twice in a step"
        assert not set(members) & set(output.preempted), "scheduled and preempted in one step"
        written = self._written_blocks(output)
        assert len(written) == len(set(written)), "two live writers of a block"
        stuck = had_work and output.is_empty
        self.steps_without_progress = self.steps_without_progress + 1 if stuck else 0
        assert self.steps_without_progress <= 3, "work waits and nothing runs"

    def _written_blocks(self, output):
        size = self.engine.config.block_size
        written = []
        for x in (*output.decodes, *output.chunks):
            if not x.sequence.blocks:
                continue  # its step was updated at once and it ended
            for group, blocks in enumerate(x.sequence.blocks):
                first, last = x.start // size, (x.start + x.num_tokens - 1) // size
                written += [(group, b) for b in blocks[first : last + 1] if b]
        return written

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data):
        request_id, index = data.draw(st.sampled_from(sorted(self.expected)))
        whole = data.draw(st.booleans())
        self.engine.abort(request_id, None if whole else index)
        self.engine.abort(request_id, None if whole else index)  # twice is once

    @rule()
    def forget_prefixes(self):
        self.engine.scheduler.forget_prefixes()

    @invariant()
    def books_balance(self):
        self.engine.scheduler.check_invariants()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        while engine.scheduler.has_unfinished or engine.pending:
            self._one_step()
            engine.scheduler.check_invariants()
        assert engine.finished.keys() == self.expected.keys()
        for key, expected in self.expected.items():
            got = engine.tokens.get(key, [])
            if engine.finished[key] is FinishReason.ABORT:
                assert got == expected[: len(got)]
            else:
                assert got == expected
        assert all(pool.num_referenced == 0 for pool in engine.scheduler.pools)


class LaggingMachine(SchedulerMachine):
    lag = 1


PROFILE = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestLag0 = SchedulerMachine.TestCase
TestLag0.settings = PROFILE
TestLag1 = LaggingMachine.TestCase
TestLag1.settings = PROFILE
