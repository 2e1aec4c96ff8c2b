"""`paged-jax bench quant`: what fewer bits save, what they cost in speed, and how far off they are.

Every variant scores the same tokens: of a file, or of texts that the model itself sampled in full
precision. And every one decodes the same batch. Nothing is calibrated: weights are rounded to
nearest.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np

from paged_jax.bench.model_bed import load_bed
from paged_jax.bench.report import environment, require_writable, write_json
from paged_jax.bench.table import Table, number, show
from paged_jax.config import EngineConfig
from paged_jax.engine import Engine
from paged_jax.errors import ConfigError
from paged_jax.outputs import TokenLogprob
from paged_jax.progress import ConsoleProgress
from scheduler import SamplingParams

__all__ = ["VARIANTS", "run_quant"]

NUM_SEQUENCES = 4
MAX_NUM_TEXTS = 16  # of a file
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


class Scores(NamedTuple):
    """What one variant thinks of every token but the first of each text."""

    logprobs: np.ndarray  # float32[n], of the tokens that are there
    best: np.ndarray  # i32[n], the tokens that it would have chosen

    @classmethod
    def of(cls, entries: Sequence[TokenLogprob]) -> Self:
        return cls(
            np.array([entry.logprob for entry in entries], np.float32),
            np.array([next(iter(entry.top)) for entry in entries], np.int32),
        )


def run_quant(
    config: EngineConfig, *, num_tokens: int, text_path: str | None, json_path: str | None
) -> int:
    """Measure every variant, print and write; returns the exit code.

    `num_tokens` are those of a text; a file is cut into so many as it has, MAX_NUM_TEXTS at most.
    """
    require_writable(json_path)
    content = None if text_path is None else _read(text_path)
    bed = load_bed(config, ConsoleProgress())
    texts = [] if content is None else _cut(bed.encode(content), num_tokens, text_path)
    exact: Scores | None = None
    rows = []
    for name, changes in VARIANTS.items():
        with bed.cold_engine(dataclasses.replace(config, **changes)) as engine:
            texts = texts or _sampled(engine, num_tokens)
            scores = _score(engine, texts)
            exact = exact or scores
            rows.append({"variant": name, **_figures(engine, scores, exact, num_tokens)})
    source = "that the model sampled" if text_path is None else f"of {Path(text_path).name}"
    show(_table(rows, f"{bed.name}: {len(texts)} texts of {num_tokens} tokens {source}"))
    report = {"environment": environment(), "model": bed.name, "num_tokens": num_tokens}
    write_json(json_path, report | {"text": text_path, "variants": rows})
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text={path!r} cannot be read: {error}") from error


def _cut(token_ids: Sequence[int], num_tokens: int, path: str | None) -> list[list[int]]:
    starts = range(0, len(token_ids) - num_tokens + 1, num_tokens)
    if not starts:
        raise ConfigError(
            f"text={path!r} has {len(token_ids)} tokens, and one text takes {num_tokens}"
        )
    return [list(token_ids[i : i + num_tokens]) for i in starts[:MAX_NUM_TEXTS]]


def _score(engine: Engine, texts: Sequence[Sequence[int]]) -> Scores:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    for i, text in enumerate(texts):
        engine.add_request(str(i), text, params)
    found: dict[int, Scores] = {}
    while engine.has_unfinished:
        for update in engine.step():
            assert update.prompt_logprobs is not None, "the logits are not finite"
            entries = cast(Sequence[TokenLogprob], update.prompt_logprobs)[1:]
            found[int(update.sequence.request.request_id)] = Scores.of(entries)
    return Scores(*map(np.concatenate, zip(*(found[i] for i in range(len(texts))), strict=True)))


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


def _figures(engine: Engine, scores: Scores, exact: Scores, num_tokens: int) -> dict[str, Any]:
    greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    _run(engine, greedy)  # compiles
    began = time.perf_counter()
    _run(engine, greedy)
    seconds = time.perf_counter() - began
    difference = np.abs(scores.logprobs - exact.logprobs)
    return {
        "weight_bytes": engine.runner.num_weight_bytes,
        "kv_bytes_per_token": engine.runner.num_block_bytes // engine.config.block_size,
        "output_tok_s": NUM_SEQUENCES * num_tokens / seconds,
        "perplexity": float(np.exp(-scores.logprobs.mean())),
        "mean_difference": float(difference.mean()),
        "largest_difference": float(difference.max()),
        "same_best": float(np.mean(scores.best == exact.best)),
    }


def _table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    return Table(
        title,
        (
            "",
            "weights, MiB",
            "KV, bytes a token",
            "tokens/s",
            "perplexity",
            "log-probability off by, mean",
            "at most",
            "same best token",
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
                f"{row['same_best']:.1%}",
            )
            for row in rows
        ),
    )
