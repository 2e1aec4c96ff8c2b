"""Does a model mean the same through a paged cache? A test to run on your own.

from paged_jax.testing import check_model

def test_my_model_can_be_served():
    check_model(MyModel(rngs=nnx.Rngs(0)))
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from paged_jax.attention import LayerSpec, PagedAttend, dense, discover_layers
from paged_jax.compile_options import compile_options
from paged_jax.kv_cache import BlockGroup, group_layers, kv_spec
from paged_jax.models import ServedModel, from_linen, from_nnx
from pallas_kernels import get_backend
from scheduler import AttentionMetadata

__all__ = ["ModelCheck", "check_model"]

NUM_SEQUENCES = 3
BLOCK_SIZE = 4
CHUNK_LEN = 5  # divides neither a block nor a prompt


@dataclass(frozen=True)
class ModelCheck:
    """What `check_model` found out. `errors` are the largest differences between two ways to the
    same scores, as shares of the largest score."""

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    hidden_size: int
    tolerance: float
    errors: dict[str, float]


def check_model(
    model: ServedModel | nnx.Module | linen.Module,
    params: Any = None,
    *,
    num_layers: int | None = None,
    uses_positions: bool = True,
    length: int = 24,
    tolerance: float | None = None,
    attention_backend: str = "xla",
    seed: int = 0,
) -> ModelCheck:
    """Assert that a model gives the same scores however the engine runs it.

    Random prompts of `length` tokens go through the model densely (`attention.dense`), and then
    through a paged KV cache: whole (`paged`), in chunks and single tokens (`chunked`), and beside
    other sequences at other positions (`batched`). `model` is a Flax NNX module, a Linen module
    with `params`, or a `ServedModel`; `num_layers` and `uses_positions` are those of
    `Engine.from_nnx`. `tolerance` is a share of the largest score: by default 1e-4, or 3e-2 where
    keys and values have 16 bits.

    Raises ModelLoadError where the model is of another form, and AssertionError with the first
    token that differs where it is right in form only.
    """
    served = _served(model, params, num_layers, uses_positions)
    layers = discover_layers(served.apply, served.params, served.num_layers)
    if tolerance is None:
        tolerance = 1e-4 if all(layer.dtype.itemsize == 4 for layer in layers) else 3e-2
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, served.vocab_size, (NUM_SEQUENCES, length)).astype(np.int32)
    pager = _Pager(served, layers, length, attention_backend)
    want = [_dense_scores(served, prompt) for prompt in prompts]
    largest = float(max(np.abs(scores).max() for scores in want))

    errors = {}
    for name, plan in _plans(length).items():
        got = pager.scores(prompts, plan)
        errors[name] = _compare(name, got, want, largest, tolerance)
    return ModelCheck(layers, served.vocab_size, served.hidden_size, tolerance, errors)


def _served(model: Any, params: Any, num_layers: int | None, uses_positions: bool) -> ServedModel:
    if isinstance(model, ServedModel):
        return model
    options: dict[str, Any] = {"num_layers": num_layers, "uses_positions": uses_positions}
    if isinstance(model, linen.Module):
        return from_linen(model, params, **options)
    return from_nnx(model, **options)


class _Span(NamedTuple):
    """`num_tokens` tokens of a sequence from position `start` on."""

    sequence: int
    start: int
    num_tokens: int


Plan = list[tuple[_Span, ...]]  # the spans that run together, step by step


def _plans(length: int) -> dict[str, Plan]:
    """Ways to compute all scores of all sequences."""
    every = range(NUM_SEQUENCES)
    cuts = [*range(0, length - 2, CHUNK_LEN), length - 2, length - 1, length]
    chunks = [(a, b - a) for a, b in itertools.pairwise(cuts)]
    staggered: Plan = []
    for step in range(len(chunks) + NUM_SEQUENCES - 1):
        live = ((s, step - s) for s in every if 0 <= step - s < len(chunks))
        staggered.append(tuple(_Span(s, *chunks[i]) for s, i in live))
    return {
        "paged": [(_Span(s, 0, length),) for s in every],
        "chunked": [(_Span(s, *chunk),) for s in every for chunk in chunks],
        "batched": staggered,
    }


_REASONS = {
    "paged": "The attention must go through `attend` alone, with positions taken from `positions`.",
    "chunked": "Nothing but `attend` may look at other tokens of the step, or count them.",
    "batched": "A token's result may not depend on its neighbours in the step: they belong to "
    "other sequences.",
}


def _compare(
    name: str,
    got: Sequence[np.ndarray],
    want: Sequence[np.ndarray],
    largest: float,
    tolerance: float,
) -> float:
    worst = 0.0
    for sequence, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        error = np.abs(ours - theirs).max(axis=1) / largest
        wrong = np.flatnonzero(~(error <= tolerance))
        if len(wrong):
            raise AssertionError(
                f"{name}: the scores of token {wrong[0]} of sequence {sequence} are "
                f"{error[wrong[0]]:.2g} of the largest score away from those of the model run "
                f"densely and alone, where {tolerance:.2g} is allowed ({len(wrong)} of "
                f"{len(error)} tokens differ). {_REASONS[name]}"
            )
        worst = max(worst, float(error.max()))
    return worst


def _dense_scores(model: ServedModel, token_ids: np.ndarray) -> np.ndarray:
    """float32[T, V]: a sequence alone, without a cache."""
    return np.asarray(_run_dense(model.apply, model.logits, model.params, token_ids))


def _run_dense(apply, logits, params, token_ids):
    def run(params, token_ids):
        positions = jnp.arange(len(token_ids), dtype=jnp.int32)
        return logits(params, apply(params, token_ids, positions, dense(jnp.zeros_like(token_ids))))

    return jax.jit(run, compiler_options=compile_options(jax.devices()[0]))(params, token_ids)


class _Pager:
    """Runs spans of sequences through a paged cache; sequence s owns every third block."""

    def __init__(
        self, model: ServedModel, layers: tuple[LayerSpec, ...], length: int, backend: str
    ):
        self._groups, slots = group_layers(layers, length)
        self._table_width = -(-length // BLOCK_SIZE)
        self._num_tokens = NUM_SEQUENCES + length  # one-token rows first, then chunks
        self._model = model
        self._backend = get_backend(backend)
        self._run: Callable = jax.jit(
            _step_of(model, slots, self._backend),
            donate_argnums=1,
            compiler_options=compile_options(jax.devices()[0]),
        )

    def scores(self, prompts: np.ndarray, plan: Plan) -> list[np.ndarray]:
        pools = tuple(map(self._empty_pool, self._groups))
        out = [np.full((len(p), self._model.vocab_size), np.nan, np.float32) for p in prompts]
        for spans in plan:
            attn, positions, places = self._lay_out(spans)
            token_ids = np.zeros(self._num_tokens, np.int32)
            for span, at in zip(spans, places, strict=True):
                token_ids[at] = prompts[span.sequence, span.start : span.start + span.num_tokens]
            pools, scores = self._run(self._model.params, pools, attn, token_ids, positions)
            for span, at in zip(spans, places, strict=True):
                out[span.sequence][span.start : span.start + span.num_tokens] = scores[at]
        return out

    def _empty_pool(self, group: BlockGroup):
        num_blocks = 1 + NUM_SEQUENCES * self._table_width
        return self._backend.init_pool(
            kv_spec(group, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=group.dtype)
        )

    def _lay_out(self, spans: tuple[_Span, ...]):
        """Metadata of a step, the positions of its tokens, and where each span's tokens are."""
        num_rows, num_groups = 2 * NUM_SEQUENCES, len(self._groups)
        ones = [span for span in spans if span.num_tokens == 1]
        block_tables = np.zeros((num_groups, num_rows, self._table_width), np.int32)
        slot_mapping = np.zeros((num_groups, self._num_tokens), np.int32)
        seq_lens = np.zeros(num_rows, np.int32)
        query_start_loc = np.arange(num_rows + 1, dtype=np.int32)
        query_start_loc[NUM_SEQUENCES:] = NUM_SEQUENCES
        positions = np.zeros(self._num_tokens, np.int32)
        places: list[np.ndarray] = []
        row_of = {span: i for i, span in enumerate(ones)}
        row_of |= {
            span: NUM_SEQUENCES + i for i, span in enumerate(s for s in spans if s.num_tokens > 1)
        }
        end = NUM_SEQUENCES
        for span in spans:
            row = row_of[span]
            first = row if span.num_tokens == 1 else end
            at = np.arange(first, first + span.num_tokens)
            if span.num_tokens > 1:
                end += span.num_tokens
                query_start_loc[row + 1 :] = end
            positions[at] = np.arange(span.start, span.start + span.num_tokens)
            table = 1 + span.sequence + NUM_SEQUENCES * np.arange(self._table_width)
            block_tables[:, row] = table
            seq_lens[row] = span.start + span.num_tokens
            slot_mapping[:, at] = (
                table[positions[at] // BLOCK_SIZE] * BLOCK_SIZE + positions[at] % BLOCK_SIZE
            )
            places.append(at)
        attn = AttentionMetadata(
            slot_mapping,
            block_tables,
            seq_lens,
            query_start_loc,
            np.asarray(len(ones), np.int32),
            np.asarray(len(spans), np.int32),
        )
        return attn, positions, places


def _step_of(model: ServedModel, layer_slots, backend) -> Callable:
    def step(params, pools, attn, token_ids, positions):
        attend = PagedAttend(
            pools, attn, layer_slots=layer_slots, decode_rows=NUM_SEQUENCES, backend=backend
        )
        hidden = model.apply(params, token_ids, positions, attend)
        return attend.pools(), model.logits(params, hidden)

    return step
