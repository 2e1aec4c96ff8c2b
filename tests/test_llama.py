"""The Llama family against NumPy in float64, through pages, in training and in narrow types."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from paged_jax.attention import LayerSpec, PagedAttend, dense, discover_layers
from paged_jax.errors import ModelLoadError
from paged_jax.models import ServedModel, from_nnx, load_model
from paged_jax.models.decoder import Decoder
from paged_jax.models.llama import parse
from pallas_kernels import KVSpec, get_backend
from tests.oracle_llama import llama_logits
from tests.paged_steps import DECODE_ROWS, paged_step, random_rows
from tests.tiny_models import TINY_LLAMA, write_tiny_llama

LINEAR = {"type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "linear-rope": {"rope_scaling": LINEAR},
    "llama3-rope": {"rope_parameters": LLAMA3, "rope_theta": None},
    "no-groups": {"num_key_value_heads": 4},
    "one-kv-head": {"num_key_value_heads": 1},
    "wide-heads": {"head_dim": 32},
    "everything": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LLAMA3,
        "num_hidden_layers": 3,
    },
}


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, TINY_LLAMA["vocab_size"], count).tolist()


def dense_logits(model: ServedModel, token_ids: list[int]) -> np.ndarray:
    """float32[T, V] of one sequence, without a cache."""

    @jax.jit
    def run(params, ids):
        attend = dense(jnp.zeros_like(ids))
        hidden = model.apply(params, ids, jnp.arange(len(ids), dtype=jnp.int32), attend)
        return model.logits(params, hidden)

    return np.asarray(run(model.params, jnp.asarray(token_ids, jnp.int32)))


def greedy(model: ServedModel, prompt: list[int], count: int) -> list[int]:
    """`count` tokens, the whole sequence computed anew for each."""

    @jax.jit
    def best(params, ids, last):
        attend = dense(jnp.zeros_like(ids))
        hidden = model.apply(params, ids, jnp.arange(len(ids), dtype=jnp.int32), attend)
        return model.logits(params, hidden[last][None]).argmax()

    ids = np.zeros(len(prompt) + count, np.int32)
    ids[: len(prompt)] = prompt
    for last in range(len(prompt) - 1, len(ids) - 1):
        ids[last + 1] = best(model.params, ids, last)
    return ids[len(prompt) :].tolist()


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_numpy(tmp_path, overrides):
    config = write_tiny_llama(tmp_path, **overrides)
    model = load_model(tmp_path, dtype="float32")
    token_ids = tokens(0, 40)
    want = llama_logits(config, load_file(tmp_path / "model.safetensors"), token_ids)
    np.testing.assert_allclose(dense_logits(model, token_ids), want, atol=1e-4)
    assert want.std() > 1  # else the tolerance would say little


def test_head_size_is_derived_where_config_is_silent(tmp_path):
    config = write_tiny_llama(tmp_path)
    raw = {key: value for key, value in config.items() if key != "head_dim"}
    assert parse(raw) == parse({**raw, "head_dim": None})
    assert parse(raw).attention.head_size == 16


def test_paged_equals_dense_over_chunks(tmp_path):
    write_tiny_llama(tmp_path, num_hidden_layers=3)
    model = load_model(tmp_path, dtype="float32")
    backend = get_backend("xla")
    specs = discover_layers(model.apply, model.params)
    assert specs == (LayerSpec(4, 2, 16, None, jnp.dtype("float32")),) * 3

    @partial(jax.jit, donate_argnums=1)
    def run(params, pool, attn, ids, positions):
        attend = PagedAttend(
            (pool,),
            attn,
            layer_slots=[(0, i) for i in range(3)],
            decode_rows=DECODE_ROWS,
            backend=backend,
        )
        hidden = model.apply(params, ids, positions, attend)
        return model.logits(params, hidden), attend.pools()[0]

    sequences = [tokens(i, n) for i, n in enumerate((29, 13, 21))]
    want = [dense_logits(model, ids) for ids in sequences]
    pool = backend.init_pool(KVSpec(3, 32, 4, 2, 16, jnp.dtype("float32")))
    for rows in random_rows([len(ids) for ids in sequences], seed=2):
        step = paged_step(rows, num_groups=1, block_size=4)
        at = [(row.sequence, position) for row in rows.all() for position in row.positions()]
        ids = step.spread(np.array([sequences[s][p] for s, p in at], np.int32))
        logits, pool = run(model.params, pool, step.attn, ids, step.positions)
        for (sequence, position), place in zip(at, step.token_places, strict=True):
            np.testing.assert_allclose(logits[place], want[sequence][position], atol=1e-4)


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 0.5), ("float16", 0.06)])
def test_narrow_parameters_stay_close(tmp_path, dtype, atol):
    config = write_tiny_llama(tmp_path, attention_bias=True, mlp_bias=True)
    model = load_model(tmp_path, dtype=dtype)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {dtype}
    token_ids = tokens(0, 40)
    got = dense_logits(model, token_ids)
    assert got.dtype == np.float32
    want = llama_logits(config, load_file(tmp_path / "model.safetensors"), token_ids)
    # Logits have a standard deviation of 3; 8 (11) bits of precision, two layers deep.
    np.testing.assert_allclose(got, want, atol=atol)
    assert np.abs(got - want).max() > 1e-4  # it did run in the narrow type


def test_the_same_module_trains_and_is_served(tmp_path):
    """Built with random weights, it learns with `dense`; its parameters fit the loaded model."""
    config = parse(write_tiny_llama(tmp_path, tie_word_embeddings=True))
    module = Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    token_ids = jnp.asarray(tokens(0, 24))
    segment_ids = jnp.asarray([0] * 10 + [1] * 14)
    positions = jnp.concatenate([jnp.arange(10), jnp.arange(14)])

    def loss(module):
        logits = module.logits(module(token_ids, positions, dense(segment_ids)))
        scores = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(scores[:-1], token_ids[1:, None], axis=1).mean()

    value_and_grad = nnx.jit(nnx.value_and_grad(loss))
    before, grads = value_and_grad(module)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))
    params = nnx.state(module, nnx.Param)
    nnx.update(module, jax.tree.map(lambda p, g: p - 0.5 * g, params, grads))
    after, _ = value_and_grad(module)
    assert after < before - 0.1

    trained = from_nnx(module)
    loaded = load_model(tmp_path, dtype="float32")
    assert jax.tree.structure(trained.params) == jax.tree.structure(loaded.params)
    swapped = loaded._replace(params=trained.params)
    np.testing.assert_array_equal(
        dense_logits(swapped, tokens(1, 9)), dense_logits(trained, tokens(1, 9))
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"hidden_act": "tanh"},
            "hidden_act='tanh' is not supported, only 'silu', 'swish', 'gelu'",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.*not supported"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"vocab_size": "160"}, "vocab_size='160' must be a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a positive number"),
        ({"attention_bias": "yes"}, "attention_bias='yes' must be true or false"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads=4 must be a multiple of num_key_value_heads=3",
        ),
        ({"hidden_size": 66, "head_dim": None}, "hidden_size=66 must be a multiple of"),
        ({"rope_scaling": {"type": "ntk"}}, "'ntk' is not supported"),
    ],
)
def test_configs_that_are_not_supported_are_refused_by_key(overrides, message):
    with pytest.raises(ModelLoadError, match=message):
        parse({**TINY_LLAMA, **overrides})


@pytest.mark.smollm2
def test_smollm2_continues_a_prompt_as_it_should(smollm2):
    """Greedy tokens of the published implementation, from the same weights in float32."""
    model = load_model(smollm2, dtype="float32")
    prompt = [504, 3575, 282, 4649, 314]  # "The capital of France is"
    assert greedy(model, prompt, 8) == [7042, 30, 198, 198, 504, 2988, 314, 42]
