"""Runs requests on a real engine, and looks at what they leave behind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np

from paged_jax import Engine, SamplingParams
from paged_jax.outputs import TokenLogprob
from pallas_kernels import write_kv
from scheduler import AttentionMetadata, SequenceUpdate

Job = tuple[Sequence[int], SamplingParams]
MAX_STEPS = 5000


@dataclass
class Sample:
    """What one sample of a request produced, as the engine's updates told it."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Run:
    """Collects the updates of an engine's steps; checks that nothing follows an end."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.samples: dict[tuple[str, int], Sample] = {}
        self.num_steps = 0

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams):
        return self.engine.add_request(request_id, prompt, params)

    def step(self) -> list[SequenceUpdate]:
        updates = self.engine.step()
        self.num_steps += 1
        for update in updates:
            key = (update.sequence.request.request_id, update.sequence.index)
            sample = self.samples.setdefault(key, Sample())
            assert sample.finish_reason is None, f"{key} goes on after its end"
            if update.token_id is not None:
                sample.token_ids.append(update.token_id)
            if update.logprobs is not None:
                sample.logprobs.append(update.logprobs)
            if update.finish_reason is not None:
                sample.finish_reason = str(update.finish_reason)
                sample.stop_reason = update.stop_reason
        return updates

    def drain(self, max_steps: int = MAX_STEPS) -> None:
        for _ in range(max_steps):
            if not self.engine.has_unfinished:
                return
            self.step()
        raise AssertionError(f"work is left after {max_steps} steps")

    def tokens(self, request_id: str, index: int = 0) -> tuple[int, ...]:
        return tuple(self.samples[request_id, index].token_ids)


def run_all(engine: Engine, jobs: Mapping[str, Job]) -> dict[tuple[str, int], Sample]:
    """All jobs at once, to the end; the books must balance afterwards."""
    run = Run(engine)
    for request_id, (prompt, params) in jobs.items():
        run.add(request_id, prompt, params)
    run.drain()
    assert_idle(engine)
    return run.samples


def assert_idle(engine: Engine) -> None:
    """Nothing runs, waits or is held: not a block, a row or a record of a request."""
    scheduler = engine.scheduler
    assert not engine.has_unfinished
    scheduler.check_invariants()
    assert not scheduler.requests and not scheduler.running and not scheduler.num_waiting
    assert scheduler.rows.num_free == engine.config.max_num_seqs
    for pool in scheduler.pools:
        assert pool.num_referenced == 0
        assert pool.num_available == pool.num_blocks - 1
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_in_use) == (0, 0, 0)


def spoil_unused_slots(engine: Engine, value: float) -> int:
    """Fill every slot of the device's pools that holds no token in use; how many there were.

    In use are the computed tokens of running sequences, and blocks that the prefix index could
    hand out again. For an engine without overlap: no step may be in flight.
    """
    assert not engine.config.overlap
    pools, last_tokens = engine.runner._state
    size = engine.config.block_size
    num_unused = 0
    spoiled = []
    for group, pool in enumerate(pools):
        block_pool = engine.scheduler.pools[group]
        unused = np.ones((pool.spec.num_blocks, size), np.bool_)
        for block_id in range(1, pool.spec.num_blocks):
            unused[block_id] = not block_pool.is_evictable(block_id)
        for sequence in engine.scheduler.running:
            for position in range(sequence.num_computed_tokens):
                block_id = sequence.blocks[group][position // size]
                unused[block_id, position % size] &= block_id == 0
        slots = np.flatnonzero(unused).astype(np.int32)
        num_unused += len(slots)
        slot_mapping = np.zeros((1, unused.size), np.int32)  # slot 0 is never in use
        slot_mapping[0, : len(slots)] = slots
        shape = (unused.size, pool.spec.num_kv_heads, pool.spec.head_size)
        filling = np.full(shape, value, np.float32)
        for layer in range(pool.spec.num_layers):
            pool = _fill(pool, filling, slot_mapping, np.int32(layer), engine.runner.backend)
        spoiled.append(pool)
    engine.runner._state = type(engine.runner._state)(tuple(spoiled), last_tokens)
    return num_unused


@partial(jax.jit, static_argnums=4, donate_argnums=0)
def _fill(pool, values, slot_mapping, layer, backend):
    zero = np.zeros((), np.int32)
    attn = AttentionMetadata(
        slot_mapping=slot_mapping,
        block_tables=np.zeros((1, 1, 1), np.int32),
        seq_lens=np.zeros(1, np.int32),
        query_start_loc=np.zeros(2, np.int32),
        num_decodes=zero,
        num_seqs=zero,
    )
    return write_kv(pool, values, values, attn, layer=layer, backend=backend)
