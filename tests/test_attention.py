"""The attend hook: dense against NumPy, paged against dense, and what discovery finds."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from paged_jax.attention import LayerSpec, PagedAttend, dense, discover_layers
from paged_jax.errors import ModelLoadError
from pallas_kernels import KVPool, KVSpec, get_backend
from tests.paged_steps import DECODE_ROWS, PagedStep, Row, Rows, paged_step, random_rows

H, K, D = 4, 2, 8
BLOCK_SIZE, NUM_BLOCKS = 4, 32


def draw(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(shape)
    return (scale * noise).astype(np.float32)


def draw_qkv(seed: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        draw(seed, num_tokens, H, D, scale=2.0),
        draw(seed + 1, num_tokens, K, D),
        draw(seed + 2, num_tokens, K, D),
    )


def oracle(q, k, v, segment_ids, *, scale=None, window=None, softcap=None, sinks=None):
    """Attention in float64, one query and one head at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for t, h in np.ndindex(q.shape[:2]):
        kv_head = h // (q.shape[1] // k.shape[1])
        first = 0 if window is None else max(0, t - window + 1)
        seen = [s for s in range(first, t + 1) if segment_ids[s] == segment_ids[t]]
        scores = k[seen, kv_head] @ q[t, h] * (q.shape[2] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        sink = [] if sinks is None else [sinks[h]]
        weights = np.exp(np.concatenate([scores, sink]))
        out[t, h] = (weights / weights.sum())[: len(seen)] @ v[seen, kv_head]
    return out


VARIANTS = {
    "plain": {},
    "scale": {"scale": 0.7},
    "window": {"window": 3},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": draw(9, H)},
    "all": {"scale": 0.5, "window": 4, "softcap": 2.0, "sinks": draw(10, H)},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_dense_equals_numpy(options):
    segment_ids = np.array([0] * 5 + [1] * 7 + [2])
    q, k, v = draw_qkv(0, 13)
    got = dense(jnp.asarray(segment_ids))(*map(jnp.asarray, (q, k, v)), layer=0, **options)
    np.testing.assert_allclose(got, oracle(q, k, v, segment_ids, **options), atol=2e-6)


def test_dense_softmax_is_float32_for_narrow_inputs():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in draw_qkv(3, 64))
    segment_ids = jnp.zeros(64, jnp.int32)
    got = dense(segment_ids)(q, k, v, layer=0)
    assert got.dtype == jnp.bfloat16
    wide = oracle(*(x.astype(jnp.float32) for x in (q, k, v)), np.zeros(64))
    # One rounding at the end: half a unit in the last of bfloat16's eight bits.
    np.testing.assert_allclose(got.astype(jnp.float32), wide, rtol=2**-8, atol=1e-5)


def test_dense_stays_finite_for_scores_past_the_range_of_exp():
    q, k, v = draw_qkv(4, 6)
    attend = dense(jnp.zeros(6, jnp.int32))
    for options in ({}, {"softcap": 50.0}, {"sinks": jnp.full(H, 1e4)}):
        out = attend(1e4 * q, k, v, layer=0, **options)
        assert np.isfinite(out).all()


@pytest.mark.parametrize(("distance", "changed"), [(2, True), (3, False)])
def test_window_counts_the_query_itself(distance, changed):
    q, k, v = draw_qkv(5, 8)
    attend = dense(jnp.zeros(8, jnp.int32))
    before = attend(q, k, v, layer=0, window=3)[7]
    v[7 - distance] += 1.0
    after = attend(q, k, v, layer=0, window=3)[7]
    assert (np.abs(after - before).max() > 1e-3) == changed


def test_dense_has_a_gradient_even_where_a_query_sees_one_key():
    q, k, v = map(jnp.asarray, draw_qkv(6, 5))
    attend = dense(jnp.arange(5))
    grads = jax.grad(lambda *qkv: attend(*qkv, layer=0, sinks=jnp.zeros(H)).sum(), (0, 1, 2))
    for grad in grads(q, k, v):
        assert np.isfinite(grad).all()
    assert np.abs(grads(q, k, v)[2]).max() > 0


# --- paged ----------------------------------------------------------------------------------


class Stack(NamedTuple):
    """Inputs of a stack of attention layers over whole sequences."""

    q: np.ndarray  # [L, T, H, D], the tokens of all sequences one after the other
    k: np.ndarray  # [L, T, K, D]
    v: np.ndarray
    segment_ids: np.ndarray  # [T]

    @classmethod
    def draw(cls, lengths: Sequence[int], num_layers: int) -> "Stack":
        total = sum(lengths)
        q, k, v = (draw(20 + i, num_layers, total, heads, D) for i, heads in enumerate((H, K, K)))
        return cls(q, k, v, np.repeat(np.arange(len(lengths)), lengths))

    def padded(self, step: PagedStep, tokens: Sequence[int]) -> list[np.ndarray]:
        """q, k, v of these tokens, at their places in the step: [L, T, ...] each."""
        return [np.stack([step.spread(x[tokens]) for x in part]) for part in self[:3]]

    def dense(self, layer: int, **options) -> np.ndarray:
        attend = dense(jnp.asarray(self.segment_ids))
        return np.asarray(
            attend(self.q[layer], self.k[layer], self.v[layer], layer=layer, **options)
        )


def new_pool(backend, num_layers: int) -> KVPool:
    spec = KVSpec(num_layers, NUM_BLOCKS, BLOCK_SIZE, K, D, jnp.dtype("float32"))
    return backend.init_pool(spec)


@pytest.mark.parametrize("name", ["reference", "xla"])
def test_paged_equals_dense_over_chunks_and_two_groups(name):
    """Three layers: two that see everything, one with a window and a block group of its own."""
    backend = get_backend(name)
    lengths, windows = (11, 5, 9), (None, 6, None)
    slots = ((0, 0), (1, 0), (0, 1))
    stack = Stack.draw(lengths, 3)
    want = np.stack([stack.dense(i, window=windows[i]) for i in range(3)])
    got = np.full_like(want, np.nan)

    @partial(jax.jit, donate_argnums=0)
    def run(pools, attn, q, k, v):
        attend = PagedAttend(
            pools, attn, layer_slots=slots, decode_rows=DECODE_ROWS, backend=backend
        )
        out = [attend(q[i], k[i], v[i], layer=i, window=windows[i]) for i in range(3)]
        return jnp.stack(out), attend.pools()

    pools = (new_pool(backend, 2), new_pool(backend, 1))
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    for rows in random_rows(lengths, seed=1):
        step = paged_step(rows, num_groups=2, block_size=BLOCK_SIZE)
        flat = [starts[row.sequence] + p for row in rows.all() for p in row.positions()]
        out, pools = run(pools, step.attn, *stack.padded(step, flat))
        got[:, flat] = out[:, step.token_places]
    np.testing.assert_allclose(got, want, atol=3e-6)


def scanned(qkv, attend, wrap=lambda f: f):
    """All layers under `lax.scan`: the layer's number is a tracer."""

    @wrap
    def body(total, inputs):
        layer, q, k, v = inputs
        return total + 1, attend(q, k, v, layer=layer, softcap=3.0)

    return lax.scan(body, 0, (jnp.arange(len(qkv[0])), *qkv))[1]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["scan", "checkpoint"])
def test_traced_layer_writes_into_the_donated_pool(wrap):
    backend = get_backend("xla")
    stack = Stack.draw((13,), 3)
    pool = new_pool(backend, 3)

    def run(pools, attn, *qkv):
        attend = PagedAttend(
            pools,
            attn,
            layer_slots=((0, 2), (0, 0), (0, 1)),
            decode_rows=DECODE_ROWS,
            backend=backend,
        )
        return scanned(qkv, attend, wrap), attend.pools()

    first = paged_step(Rows.prefill(12), num_groups=1, block_size=BLOCK_SIZE)
    last = paged_step(Rows((Row(0, 12, 1),), ()), num_groups=1, block_size=BLOCK_SIZE)
    inputs = first.attn, *stack.padded(first, range(12))
    compiled = jax.jit(run, donate_argnums=0).lower((pool,), *inputs).compile()
    pool_bytes = sum(array.nbytes for array in pool.arrays)
    assert compiled.memory_analysis().alias_size_in_bytes == pool_bytes

    out, pools = compiled((pool,), *inputs)
    want = np.stack([stack.dense(i, softcap=3.0) for i in range(3)])
    np.testing.assert_allclose(out[:, first.token_places], want[:, :12], atol=3e-6)
    out, _ = compiled(pools, last.attn, *stack.padded(last, [12]))
    np.testing.assert_allclose(out[:, last.token_places], want[:, 12:], atol=3e-6)


def test_traced_layer_refuses_several_groups():
    backend = get_backend("xla")
    stack = Stack.draw((3,), 2)
    step = paged_step(Rows.prefill(3), num_groups=2, block_size=BLOCK_SIZE)
    attend = PagedAttend(
        (new_pool(backend, 1), new_pool(backend, 1)),
        step.attn,
        layer_slots=((0, 0), (1, 0)),
        decode_rows=DECODE_ROWS,
        backend=backend,
    )
    with pytest.raises(ValueError, match=r"traced.*block groups \[0, 1\]"):
        scanned(stack.padded(step, range(3)), attend)


# --- discovery ------------------------------------------------------------------------------


def attention_of(layers, *, heads=(H, K), window=None, dtype=jnp.float32):
    """A model that calls attend once for each number in `layers`."""

    def apply(params, token_ids, positions, attend):
        num_heads, num_kv_heads = heads
        q = jnp.zeros((len(token_ids), num_heads, D), dtype) + params
        k = jnp.zeros((len(token_ids), num_kv_heads, D), dtype) + params
        for layer in layers:
            q = attend(q, k, k, layer=layer, window=window)
        return q.reshape(len(token_ids), -1)

    return apply


def scanning(params, token_ids, positions, attend):
    q = jnp.zeros((len(token_ids), H, D)) + params

    def step(q, layer):
        return attend(q, q[:, :K], q[:, :K], layer=layer, window=7), None

    return lax.scan(step, q, jnp.arange(5))[0].reshape(len(token_ids), -1)


ONE = jnp.ones(())


def test_discovery_reads_every_layer_without_running_it():
    shape = jax.ShapeDtypeStruct((), jnp.bfloat16)
    apply = attention_of((1, 0, np.int64(2)), window=np.int32(5), dtype=jnp.bfloat16)
    spec = LayerSpec(H, K, D, 5, jnp.dtype("bfloat16"))
    assert discover_layers(apply, shape) == (spec,) * 3


def test_discovery_of_a_scanned_model():
    spec = LayerSpec(H, K, D, 7, jnp.dtype("float32"))
    assert discover_layers(scanning, ONE, num_layers=5) == (spec,) * 5
    with pytest.raises(ModelLoadError, match="say num_layers="):
        discover_layers(scanning, ONE)


def test_discovery_of_scanned_layers_that_differ():
    def apply(params, token_ids, positions, attend):
        def step(q, layer):
            q = attend(q, q, q, layer=2 * layer, window=4)
            return attend(q, q, q, layer=2 * layer + 1), None

        return lax.scan(step, jnp.zeros((len(token_ids), H, D)), jnp.arange(2))[0]

    with pytest.raises(ModelLoadError, match=r"differ from each other.*window=4"):
        discover_layers(apply, ONE, num_layers=4)


@pytest.mark.parametrize(
    ("apply", "num_layers", "message"),
    [
        (attention_of(()), None, "never called attend"),
        (attention_of((0, 1, 1)), None, "twice with layer=1"),
        (attention_of((0, 2)), None, r"missing \[1\], unexpected \[2\]"),
        (attention_of((0, 1)), 3, r"missing \[2\]"),
        (attention_of((0, 1)), 1, r"unexpected \[1\]"),
        (attention_of((-1,)), None, r"unexpected \[-1\]"),
        (
            attention_of((0,), heads=(4, 3)),
            None,
            "num_heads=4 must be a multiple of num_kv_heads=3",
        ),
        (attention_of((0,), window=2.5), None, "window=2.5 must be a Python integer"),
    ],
)
def test_discovery_errors_say_what_is_wrong(apply, num_layers, message):
    with pytest.raises(ModelLoadError, match=message):
        discover_layers(apply, ONE, num_layers)


def test_discovery_refuses_a_batch_axis_and_unlike_shapes():
    def batched(params, token_ids, positions, attend):
        q = jnp.zeros((1, len(token_ids), H, D))
        return attend(q, q, q, layer=0)

    def unlike(params, token_ids, positions, attend):
        q = jnp.zeros((len(token_ids), H, D))
        return attend(q, q, q[..., :4], layer=0)

    with pytest.raises(ModelLoadError, match="without a batch"):
        discover_layers(batched, ONE)
    with pytest.raises(ModelLoadError, match=r"D equal: q \(8, 4, 8\)"):
        discover_layers(unlike, ONE)
