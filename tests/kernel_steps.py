"""Steps for the attention back ends: rows of given lengths, laid out over permuted blocks."""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import KVPool, KVSpec, get_backend, paged_attention, write_kv
from pallas_kernels.quantized_kv import decode, encode, is_quantized

# The back ends that run as they are on any machine; those of kernels have tests of their own.
PORTABLE = ("reference", "xla")


class Attn(NamedTuple):
    """AttentionMetadata, as the scheduler fills it."""

    slot_mapping: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    num_decodes: np.ndarray
    num_seqs: np.ndarray


class Shape(NamedTuple):
    """The static sizes of a step: one compiled program for each."""

    decode_rows: int = 5  # D
    chunk_rows: int = 3
    chunk_tokens: int = 150  # C
    table_width: int = 24  # B
    num_blocks: int = 128  # N
    block_size: int = 16  # b
    num_heads: int = 4  # H
    num_kv_heads: int = 2  # K
    head_size: int = 64  # D
    num_layers: int = 2
    dtype: str = "float32"
    pool_dtype: str = "float32"

    @property
    def num_rows(self) -> int:
        return self.decode_rows + self.chunk_rows

    @property
    def num_tokens(self) -> int:
        return self.decode_rows + self.chunk_tokens

    @property
    def spec(self) -> KVSpec:
        return KVSpec(
            self.num_layers,
            self.num_blocks,
            self.block_size,
            self.num_kv_heads,
            self.head_size,
            jnp.dtype(self.pool_dtype),
        )


class Rows(NamedTuple):
    """What a step runs: sequence lengths of one-token rows, where 0 is a row without a sequence,
    then (query_len, seq_len) of chunks."""

    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()

    def placed(self, shape: Shape) -> list[tuple[int, int, int]]:
        """(row, query_len, seq_len) of the real rows."""
        decodes = [(i, 1, seq_len) for i, seq_len in enumerate(self.decodes) if seq_len]
        return decodes + [(shape.decode_rows + i, *chunk) for i, chunk in enumerate(self.chunks)]


class Sequence(NamedTuple):
    """A real row, unpaged: its queries of this step, and all keys and values it has."""

    q: np.ndarray  # [Q, H, D]
    keys: np.ndarray  # [seq_len, K, D]
    values: np.ndarray


class Step(NamedTuple):
    """A step's inputs, and the whole sequences that they belong to."""

    attn: Attn
    q: np.ndarray  # [T, H, D], NaN for padding tokens
    k: np.ndarray  # [T, K, D], this step's
    v: np.ndarray
    past_slots: np.ndarray  # of the tokens before this step, padded with 0
    past_k: np.ndarray
    past_v: np.ndarray
    sequences: list[tuple[np.ndarray, Sequence]]  # where the row's tokens stand in T, and itself


def random_sequences(shape: Shape, rows: Rows, seed: int = 0) -> list[Sequence]:
    rng = np.random.default_rng(seed)

    def random(*size: int) -> np.ndarray:
        return rng.normal(size=size).astype(np.float32).astype(jnp.dtype(shape.dtype))

    def stored(*size: int) -> np.ndarray:
        """Numbers that the pool can hold; any where it rounds by a scale."""
        pool_dtype = jnp.dtype(shape.pool_dtype)
        if is_quantized(pool_dtype):
            return random(*size)
        return random(*size).astype(pool_dtype).astype(jnp.dtype(shape.dtype))

    kv = (shape.num_kv_heads, shape.head_size)
    return [
        Sequence(
            random(query_len, shape.num_heads, shape.head_size),
            stored(seq_len, *kv),
            stored(seq_len, *kv),
        )
        for _, query_len, seq_len in rows.placed(shape)
    ]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Keys or values as a pool of this dtype gives them back."""
    kind = jnp.dtype(dtype)
    if not is_quantized(kind):
        return x
    return np.asarray(decode(*encode(jnp.asarray(x), kind), kind))


def make_step(
    shape: Shape,
    rows: Rows,
    sequences: Iterable[Sequence] | None = None,
    *,
    seed: int = 0,
    unused_id: int = 0,
) -> Step:
    """Lays the sequences, random ones by default, over a random permutation of the blocks.

    `unused_id` fills the block tables where no block belongs.
    """
    if sequences is None:
        sequences = random_sequences(shape, rows, seed)
    free = iter(np.random.default_rng(seed).permutation(np.arange(1, shape.num_blocks)))
    b, dtype = shape.block_size, jnp.dtype(shape.dtype)
    seq_lens = np.zeros(shape.num_rows, np.int32)
    query_lens = np.zeros(shape.num_rows, np.int32)
    query_lens[: shape.decode_rows] = 1
    tables = np.full((1, shape.num_rows, shape.table_width), unused_id, np.int32)
    for row, query_len, seq_len in rows.placed(shape):
        seq_lens[row], query_lens[row] = seq_len, query_len
        for column in range(-(-seq_len // b)):
            tables[0, row, column] = next(free)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    assert starts[-1] <= shape.num_tokens

    kv = (shape.num_kv_heads, shape.head_size)
    q = np.full((shape.num_tokens, shape.num_heads, shape.head_size), np.nan, dtype)
    k, v = np.full((2, shape.num_tokens, *kv), np.nan, dtype)
    slots = np.zeros((1, shape.num_tokens), np.int32)
    room = shape.num_blocks * b  # one size, so that one program writes every past
    past_slots = np.zeros(room, np.int32)
    past_k, past_v = np.full((2, room, *kv), np.nan, dtype)
    past_end = 0
    placed = []
    for (row, query_len, seq_len), sequence in zip(rows.placed(shape), sequences, strict=True):
        position = np.arange(seq_len)
        row_slots = tables[0, row, position // b] * b + position % b
        tokens = np.arange(starts[row], starts[row] + query_len)
        before, now = slice(seq_len - query_len), slice(seq_len - query_len, None)
        q[tokens] = sequence.q
        k[tokens], v[tokens] = sequence.keys[now], sequence.values[now]
        slots[0, tokens] = row_slots[now]
        past = slice(past_end, past_end := past_end + seq_len - query_len)
        past_slots[past] = row_slots[before]
        past_k[past], past_v[past] = sequence.keys[before], sequence.values[before]
        placed.append((tokens, sequence))
    attn = Attn(
        slots,
        tables,
        seq_lens,
        starts,
        np.int32(len(rows.decodes)),
        np.int32(len(rows.decodes) + len(rows.chunks)),
    )
    return Step(attn, q, k, v, past_slots, past_k, past_v, placed)


def filled_pool(backend_name: str, spec: KVSpec, fill: float | jax.Array) -> KVPool:
    """A pool that holds `fill` in every slot of every layer."""
    arrays = get_backend(backend_name).layout(spec).arrays
    return KVPool(tuple(jnp.full(a.shape, fill, a.dtype) for a in arrays), spec)


class StepResult(NamedTuple):
    out: np.ndarray  # [T, H, D]
    pool: KVPool


def run_step(
    backend_name: str,
    shape: Shape,
    step: Step,
    *,
    fill: float = float("nan"),
    layer: int = 1,
    past_backend: str | None = None,
    **scoring,
) -> StepResult:
    """Fills a pool with `fill`, writes the past, writes this step's tokens, attends.

    One compiled program for each back end, shape and set of options. `past_backend` writes the
    past, if it should be another than the one under test.
    """
    static = {k: v for k, v in scoring.items() if k in ("window", "softcap") or np.isscalar(v)}
    arrays = {k: jnp.asarray(v) for k, v in scoring.items() if k not in static}
    names = (backend_name, past_backend or backend_name)
    program = _program(*names, shape, tuple(sorted(static.items())))
    out, pool = program(step._replace(sequences=[]), jnp.float32(fill), jnp.int32(layer), arrays)
    return StepResult(np.asarray(out), pool)


@cache
def _program(
    backend_name: str, past_name: str, shape: Shape, static: tuple[tuple[str, object], ...]
):
    backend, past_backend = get_backend(backend_name), get_backend(past_name)

    @jax.jit
    def program(step: Step, fill, layer, arrays):
        pool = filled_pool(backend_name, shape.spec, fill)
        past = step.attn._replace(slot_mapping=step.past_slots[None])
        pool = write_kv(pool, step.past_k, step.past_v, past, layer=layer, backend=past_backend)
        pool = write_kv(pool, step.k, step.v, step.attn, layer=layer, backend=backend)
        out = paged_attention(
            step.q,
            pool,
            step.attn,
            layer=layer,
            decode_rows=shape.decode_rows,
            backend=backend,
            **dict(static),
            **arrays,
        )
        return out, pool

    return program


def shape_of(*size: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
    """Stands for an array where nothing is run."""
    return jax.ShapeDtypeStruct(size, jnp.dtype(dtype))


def attn_shapes(decode_rows: int, chunk_rows: int, chunk_tokens: int, table_width: int) -> Attn:
    """A step's metadata of one block group, as shapes."""
    rows = decode_rows + chunk_rows
    return Attn(
        shape_of(1, decode_rows + chunk_tokens),
        shape_of(1, rows, table_width),
        shape_of(rows),
        shape_of(rows + 1),
        shape_of(),
        shape_of(),
    )
