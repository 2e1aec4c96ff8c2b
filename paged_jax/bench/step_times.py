"""How long one decode step takes on the device, and what its attention costs.

    paged               the engine's own step program and sampler
    without attention   the same model with the identity in attention's place
    contiguous          one sequence through a dense contiguous cache: no blocks, no tables

All three sample with the same sampler. A step is repeated at one context length, so that every
repetition does the same work.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.attention import discover_layers
from paged_jax.bench.contiguous import decode_step, empty_cache
from paged_jax.bench.drive import greedy
from paged_jax.bench.timing import alternate, ratio_of_pairs, repeat_timed, spread
from paged_jax.engine import Engine
from paged_jax.errors import ConfigError
from paged_jax.model_runner import StepSizes
from paged_jax.models import ServedModel
from paged_jax.sampling import sample
from paged_jax.sharding import choose_device
from scheduler import Batch, Request, SamplingMetadata, Scheduler, make_batch

__all__ = ["decode_batch", "step_times"]

STEPS_A_ROUND = 8
ROUNDS = 5


def step_times(
    engine: Engine,
    model: ServedModel,
    *,
    batch_size: int,
    context_len: int,
    steps: int = STEPS_A_ROUND,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Seconds of a decode step of `batch_size` sequences, each `context_len` tokens long.

    The variants take turns, `steps` steps at a time; medians over `rounds`, with their spread.
    The engine must have nothing to do; its KV cache is written over.
    """
    batch, sizes = decode_batch(engine, batch_size, context_len)
    params = jax.device_put(model.params, choose_device(engine.config.device))
    variants: dict[str, Callable[[], Any]] = {
        "paged": lambda: engine.runner.execute(batch, sizes),
        "without_attention": _without_attention(model, params, batch, sizes),
    }
    if batch_size == 1 and model.num_layers is None:
        variants["contiguous"] = _contiguous(engine, model, params, batch)
    rounds_of = {name: partial(_seconds_of_step, run, steps) for name, run in variants.items()}
    seconds = alternate(rounds_of, rounds)
    times = {f"{name}_step_s": spread(taken)._asdict() for name, taken in seconds.items()}
    ratios = {
        f"paged_by_{name}": ratio_of_pairs(seconds["paged"], taken)._asdict()
        for name, taken in seconds.items()
        if name != "paged"
    }
    return {"batch_size": batch_size, "context_len": context_len, **times, **ratios}


def _seconds_of_step(run: Callable[[], Any], steps: int) -> float:
    """Of one step among several that are dispatched one after the other."""

    def several() -> None:
        for _ in range(steps - 1):
            run()
        jax.block_until_ready(run())

    return repeat_timed(several, 1)[0] / steps


def decode_batch(engine: Engine, num_seqs: int, context_len: int) -> tuple[Batch, StepSizes]:
    """A step in which `num_seqs` sequences compute their token number `context_len`.

    Laid out by a scheduler of its own over the engine's pool. ConfigError if they do not fit.
    """
    config = dataclasses.replace(
        engine.scheduler.config,
        max_num_batched_tokens=num_seqs * context_len,
        max_num_chunks=num_seqs,
        watermark=0.0,
        enable_prefix_caching=False,
        preemption="recompute",
        kv_offload=False,
        num_host_blocks=(),
        prefill="mixed",
        batching="continuous",
        allocation="paged",
    )
    scheduler = Scheduler(config)
    if num_seqs > config.max_num_seqs or context_len >= config.max_model_len:
        raise ConfigError(
            f"{num_seqs} sequences of {context_len} tokens, where max_num_seqs is "
            f"{config.max_num_seqs} and max_model_len {config.max_model_len}"
        )
    rng = np.random.default_rng(0)
    for i in range(num_seqs):
        prompt = rng.integers(0, engine.vocab_size, context_len - 1).tolist()
        limit = context_len + 1
        scheduler.add(Request(str(i), prompt, greedy(2), seed=0, max_total_tokens=limit))
    prefill = scheduler.schedule()
    if len(prefill.samples) < num_seqs:
        raise ConfigError(
            f"num_blocks={config.num_blocks[0]} cannot hold {num_seqs} sequences of "
            f"{context_len} tokens"
        )
    scheduler.update(prefill, [0] * num_seqs)
    output = scheduler.schedule()
    sizes = engine.runner.sizes(num_seqs, 0, num_seqs)
    batch = make_batch(
        output,
        scheduler.rows,
        block_size=config.block_size,
        num_decode_rows=sizes.decodes,
        num_chunk_rows=engine.runner.max_num_chunks,
        num_chunk_tokens=0,
        num_sample_rows=sizes.samples,
    )
    return batch, sizes


def _sampler(model: ServedModel) -> Callable[..., jax.Array]:
    return jax.jit(lambda params, hidden, sampling: sample(model.logits(params, hidden), sampling))


def _first_rows(sampling: SamplingMetadata, num_rows: int) -> SamplingMetadata:
    return SamplingMetadata(*(array[:num_rows] for array in sampling))


def _without_attention(
    model: ServedModel, params: Any, batch: Batch, sizes: StepSizes
) -> Callable[[], jax.Array]:
    @jax.jit
    def backbone(params, token_ids, positions):
        return model.apply(params, token_ids, positions, _identity)

    sampler, sampling = _sampler(model), _first_rows(batch.sampling, sizes.samples)

    def run() -> jax.Array:
        hidden = backbone(params, batch.token_ids, batch.positions)
        return sampler(params, hidden[: sizes.samples], sampling)

    return run


def _identity(q, k, v, **_):
    """Gives back the queries; keys and values are still computed, as the KV cache needs them."""
    return q + jnp.zeros((), q.dtype) * (k.sum() + v.sum()).astype(q.dtype)


def _contiguous(
    engine: Engine, model: ServedModel, params: Any, batch: Batch
) -> Callable[[], jax.Array]:
    context_len = int(batch.attn.seq_lens[0])
    layers = discover_layers(model.apply, model.params)
    cache = empty_cache(layers, context_len, engine.runner.specs[0].dtype)
    cache = jax.device_put(cache, choose_device(engine.config.device))
    step, sampler, sampling = decode_step(model), _sampler(model), _first_rows(batch.sampling, 1)

    def run() -> jax.Array:
        nonlocal cache
        cache, hidden = step(params, cache, batch.token_ids[:1], batch.positions[:1])
        return sampler(params, hidden, sampling)

    return run
