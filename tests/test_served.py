"""Modules of one's own behind the contract: NNX and Linen, unrolled and scanned."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.attention import PagedAttend, dense, discover_layers
from paged_jax.errors import ModelLoadError
from paged_jax.layers import Embedding, Linear, linear
from paged_jax.models import ServedModel, from_linen, from_nnx
from paged_jax.sharding import Split
from pallas_kernels import KVPool, KVSpec, get_backend
from tests.linen_models import Decoder, unrolled_params
from tests.paged_steps import DECODE_ROWS, paged_step, random_rows

BLOCK_SIZE, NUM_BLOCKS = 4, 32
LENGTHS = (17, 6, 11)
SEQUENCES = [list(np.random.default_rng(i).integers(0, 50, n)) for i, n in enumerate(LENGTHS)]


def dense_logits(model: ServedModel, token_ids: list[int]) -> np.ndarray:
    """float32[T, V] of one sequence, without a cache."""

    @jax.jit
    def run(params, ids):
        attend = dense(jnp.zeros_like(ids))
        hidden = model.apply(params, ids, jnp.arange(len(ids), dtype=jnp.int32), attend)
        return model.logits(params, hidden)

    return np.asarray(run(model.params, jnp.asarray(token_ids, jnp.int32)))


def paged_logits(model: ServedModel, sequences: list[list[int]]) -> list[np.ndarray]:
    """The same of several sequences, run together in random chunks over one pool."""
    backend = get_backend("xla")
    specs = discover_layers(model.apply, model.params, model.num_layers)
    pool = backend.init_pool(
        KVSpec(
            len(specs),
            NUM_BLOCKS,
            BLOCK_SIZE,
            specs[0].num_kv_heads,
            specs[0].head_size,
            specs[0].dtype,
        )
    )

    @partial(jax.jit, donate_argnums=1)
    def run(params, pool: KVPool, attn, ids, positions):
        attend = PagedAttend(
            (pool,),
            attn,
            layer_slots=[(0, i) for i in range(len(specs))],
            decode_rows=DECODE_ROWS,
            backend=backend,
        )
        hidden = model.apply(params, ids, positions, attend)
        return model.logits(params, hidden), attend.pools()[0]

    lengths = [len(tokens) for tokens in sequences]
    out = [np.full((n, model.vocab_size), np.nan, np.float32) for n in lengths]
    for rows in random_rows(lengths, seed=3):
        step = paged_step(rows, num_groups=1, block_size=BLOCK_SIZE)
        at = [(row.sequence, position) for row in rows.all() for position in row.positions()]
        ids = step.spread(np.array([sequences[s][p] for s, p in at], np.int32))
        logits, pool = run(model.params, pool, step.attn, ids, step.positions)
        for (sequence, position), place in zip(at, step.token_places, strict=True):
            out[sequence][position] = logits[place]
    return out


def linen_model(**options) -> tuple[Decoder, dict]:
    module = Decoder(**options)
    ids = jnp.arange(4)
    params = module.init(jax.random.key(0), ids, ids, dense(jnp.zeros_like(ids)))["params"]
    return module, params


@pytest.fixture(scope="module")
def scanned() -> ServedModel:
    module, params = linen_model()
    return from_linen(module, params, num_layers=module.num_layers)


def test_scanned_linen_model_paged_equals_dense(scanned):
    for got, tokens in zip(paged_logits(scanned, SEQUENCES), SEQUENCES, strict=True):
        want = dense_logits(scanned, tokens)
        np.testing.assert_allclose(got, want, atol=1e-4)
        assert want.std() > 0.1


def test_unrolled_linen_model_equals_the_scanned_one(scanned):
    module = Decoder(scan=False)
    unrolled = from_linen(module, unrolled_params(scanned.params))
    assert discover_layers(unrolled.apply, unrolled.params) == discover_layers(
        scanned.apply, scanned.params, scanned.num_layers
    )
    for got, tokens in zip(paged_logits(unrolled, SEQUENCES), SEQUENCES, strict=True):
        np.testing.assert_allclose(got, dense_logits(scanned, tokens), atol=1e-4)


def test_sizes_are_found_by_running_on_shapes(scanned):
    assert (scanned.vocab_size, scanned.hidden_size) == (50, 32)
    assert (scanned.max_position, scanned.num_layers) == (None, 3)


class OneLayer(nnx.Module):
    """An NNX decoder with state that is no parameter."""

    def __init__(self, *, dtype=jnp.float32):
        rngs, self.dtype = nnx.Rngs(0), dtype
        self.embed = Embedding(50, 16, dtype=dtype, rngs=rngs)
        self.qkv = Linear(16, 32, bias=True, dtype=dtype, rngs=rngs)
        self.scale = nnx.Variable(jnp.full((1, 1), 2.0, dtype))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, token_ids, positions, attend):
        x = self.embed(token_ids) * self.scale[...] + 0.01 * positions[:, None].astype(self.dtype)
        parts = self.qkv(self.dropout(x)).reshape(len(token_ids), 4, 8)
        return x + attend(parts[:, :2], parts[:, 2:3], parts[:, 3:], layer=0).reshape(x.shape)

    def logits(self, hidden):
        return linear(hidden, self.embed.weight[...])


def test_nnx_module_serves_what_it_computes():
    module = OneLayer()
    model = from_nnx(module, max_position=99)
    assert not module.dropout.deterministic  # training goes on
    assert (model.vocab_size, model.hidden_size, model.max_position) == (50, 16, 99)
    assert model.num_layers is None
    assert model.linears == (("qkv", "weight"),)
    assert model.experts == ()
    assert model.splits == {("embed", "weight"): Split(0)}  # of the layers that say it
    assert set(model.params) == {"embed", "qkv"}  # only what is trained
    tokens = jnp.asarray(SEQUENCES[0])
    module.eval()
    want = module.logits(module(tokens, jnp.arange(len(tokens)), dense(jnp.zeros_like(tokens))))
    np.testing.assert_allclose(dense_logits(model, SEQUENCES[0]), want, atol=1e-5)
    for got, ids in zip(paged_logits(model, SEQUENCES), SEQUENCES, strict=True):
        np.testing.assert_allclose(got, dense_logits(model, ids), atol=1e-5)


def test_new_parameters_need_no_new_program():
    model = from_nnx(OneLayer())
    traces = []

    @jax.jit
    def run(params, ids):
        traces.append(1)
        return model.apply(params, ids, ids, dense(jnp.zeros_like(ids)))

    ids = jnp.arange(5)
    before = run(model.params, ids)
    after = run(jax.tree.map(lambda leaf: 2 * leaf, model.params), ids)
    assert len(traces) == 1
    assert np.abs(before - after).max() > 1e-3


def test_logits_are_float32_whatever_the_model_computes_in():
    model = from_nnx(OneLayer(dtype=jnp.bfloat16))
    assert dense_logits(model, [1, 2, 3]).dtype == np.float32
    assert discover_layers(model.apply, model.params)[0].dtype == jnp.bfloat16


def test_models_of_another_form_are_refused():
    class Batched(OneLayer):
        def __call__(self, token_ids, positions, attend):
            return super().__call__(token_ids, positions, attend)[None]

    class OneRow(OneLayer):
        def logits(self, hidden):
            return super().logits(hidden)[-1]

    with pytest.raises(ModelLoadError, match=r"hidden \[8, E\]: \(1, 8, 16\)"):
        from_nnx(Batched())
    with pytest.raises(ModelLoadError, match=r"to \[8, V\]: \(50,\)"):
        from_nnx(OneRow())
