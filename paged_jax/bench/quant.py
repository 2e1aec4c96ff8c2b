"""`paged-jax bench quant`: what fewer bits save, what they cost in speed, and how far off they are.

Every variant scores the same tokens, which the model itself sampled in full precision, and decodes
the same batch. Nothing is calibrated: weights are rounded to nearest.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from paged_jax.bench.model_bed import ModelBed, load_bed
from paged_jax.bench.report import environment, require_writable, write_json
from paged_jax.bench.table import Table, number, show
from paged_jax.config import EngineConfig
from paged_jax.engine import Engine
from paged_jax.progress import ConsoleProgress
from scheduler import SamplingParams

__all__ = ["VARIANTS", "run_quant"]

NUM_SEQUENCES = 4
FIRST_TOKEN = 1  # sequences begin with single tokens from here on
MIB = 1024**2

# Name in the table, and what it changes of the configuration.
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "weights int8": {"quantization": "int8"},
    "weights fp8": {"quantization": "fp8"},
    "weights int4": {"quantization": "int4"},
    "KV int8": {"kv_cache_dtype": "int8"},
    "KV fp8": {"kv_cache_dtype": "fp8"},
    "weights and KV int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}


def run_quant(config: EngineConfig, *, num_tokens: int, json_path: str | None) -> int:
    """Measure every variant, print and write; returns the exit code."""
    require_writable(json_path)
    bed = load_bed(config, ConsoleProgress())
    texts: list[list[int]] = []
    exact: list[np.ndarray] = []
    rows = []
    for name, changes in VARIANTS.items():
        with bed.cold_engine(dataclasses.replace(config, **changes)) as engine:
            texts = texts or _sampled(engine, num_tokens)
            scores = engine.score(texts)
            exact = exact or scores
            rows.append({"variant": name, **_figures(engine, scores, exact, num_tokens)})
    show(_table(rows, bed, num_tokens))
    report = {"environment": environment(), "model": bed.name, "num_tokens": num_tokens}
    write_json(json_path, report | {"variants": rows})
    return 0


def _sampled(engine: Engine, num_tokens: int) -> list[list[int]]:
    """Token ids of texts that the model draws by itself, the same every time."""
    params = SamplingParams(max_tokens=num_tokens, seed=0, ignore_eos=True)
    outputs = _run(engine, params)
    return [[FIRST_TOKEN + i, *tokens] for i, tokens in enumerate(outputs)]


def _run(engine: Engine, params: SamplingParams) -> list[list[int]]:
    """The output of NUM_SEQUENCES requests at once."""
    outputs: list[list[int]] = [[] for _ in range(NUM_SEQUENCES)]
    for i in range(NUM_SEQUENCES):
        engine.add_request(str(i), [FIRST_TOKEN + i], params)
    while engine.has_unfinished:
        for update in engine.step():
            if update.token_id is not None:
                outputs[int(update.sequence.request.request_id)].append(update.token_id)
    return outputs


def _figures(
    engine: Engine, scores: Sequence[np.ndarray], exact: Sequence[np.ndarray], num_tokens: int
) -> dict[str, Any]:
    greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    _run(engine, greedy)  # compiles
    began = time.perf_counter()
    _run(engine, greedy)
    seconds = time.perf_counter() - began
    ours, theirs = np.concatenate(scores), np.concatenate(exact)
    return {
        "weight_bytes": engine.runner.num_weight_bytes,
        "kv_bytes_per_token": engine.runner.num_block_bytes // engine.config.block_size,
        "output_tok_s": NUM_SEQUENCES * num_tokens / seconds,
        "perplexity": float(np.exp(-ours.mean())),
        "mean_difference": float(np.abs(ours - theirs).mean()),
        "largest_difference": float(np.abs(ours - theirs).max()),
    }


def _table(rows: Sequence[dict[str, Any]], bed: ModelBed, num_tokens: int) -> Table:
    return Table(
        f"{bed.name}: {NUM_SEQUENCES} texts of {num_tokens} tokens that the model sampled",
        (
            "",
            "weights, MiB",
            "KV, bytes a token",
            "tokens/s",
            "perplexity",
            "log-probability off by, mean",
            "at most",
        ),
        tuple(
            (
                row["variant"],
                number(row["weight_bytes"] / MIB),
                number(row["kv_bytes_per_token"]),
                number(row["output_tok_s"]),
                number(row["perplexity"], 4),
                number(row["mean_difference"], 2),
                number(row["largest_difference"], 2),
            )
            for row in rows
        ),
    )
