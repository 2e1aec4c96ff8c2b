"""Models of one's own: the ways in, the errors that teach, and the test that users run."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from paged_jax import LLM, AsyncEngine, ConfigError, Engine, EngineConfig, SamplingParams
from paged_jax.attention import dense
from paged_jax.errors import ModelLoadError
from paged_jax.models import AttentionFn, ServedModel, from_attention_fn, from_function, from_nnx
from paged_jax.progress import SilentProgress
from paged_jax.testing import check_model
from tests import linen_models, nnx_models
from tests.dense_decoding import DenseDecoder

pytestmark = pytest.mark.usefixtures("quick_compiles")

E, H, D, VOCAB_SIZE = 16, 2, 8, 40
SMALL = {
    "max_model_len": 48,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "num_blocks": 16,
    "warmup": "none",
    "attention_backend": "reference",  # compiles fastest
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def quiet(make, *args, **options) -> Engine:
    return make(*args, progress=SilentProgress(), **(SMALL | options))


def greedy(engine: Engine) -> list[int]:
    llm = LLM(engine, progress=SilentProgress())
    output = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_progress=False)[0]
    engine.close()
    return list(output.outputs[0].token_ids)


def expected(model: ServedModel) -> list[int]:
    decoded = DenseDecoder(model, 24).greedy(PROMPT, GREEDY.max_tokens)
    assert decoded.is_clear
    return list(decoded.token_ids)


class ScannedNNX(nnx.Module):
    """Layers stacked by `nnx.vmap` and run by `nnx.scan`, rematerialised or not."""

    def __init__(self, num_layers: int = 3, remat: bool = False):
        self.remat = remat
        self.num_layers = num_layers
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(VOCAB_SIZE, E, rngs=rngs)
        self.places = nnx.Embed(64, E, rngs=rngs)

        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap
        def stack(rngs):
            return ScannedLayer(rngs)

        self.layers = stack(rngs)

    def __call__(self, token_ids, positions, attend):
        def body(x, layer, index):
            return layer(x, index, attend)

        run = nnx.scan(
            nnx.remat(body) if self.remat else body,
            in_axes=(nnx.Carry, 0, 0),
            out_axes=nnx.Carry,
        )
        x = self.tokens(token_ids) + self.places(positions)
        return run(x, self.layers, jnp.arange(self.num_layers))

    def logits(self, hidden):
        return self.tokens.attend(hidden)


class ScannedLayer(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.Linear(E, 3 * H * D, rngs=rngs)
        self.out = nnx.Linear(H * D, E, rngs=rngs)

    def __call__(self, x, index, attend):
        q, k, v = jnp.split(self.qkv(x).reshape(len(x), 3 * H, D), 3, axis=1)
        return x + self.out(attend(q, k, v, layer=index).reshape(len(x), -1))


def function_params():
    keys = jax.random.split(jax.random.key(3), 3)
    shapes = {"tokens": (VOCAB_SIZE, E), "places": (64, E), "qkv": (E, 3 * H * D)}
    return {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def function(params, token_ids, positions, attend):
    """Scores of every token: a model without a module."""
    x = params["tokens"][token_ids] + params["places"][positions]
    q, k, v = jnp.split((x @ params["qkv"]).reshape(len(x), 3 * H, D), 3, axis=1)
    return (x + attend(q, k, v, layer=0).reshape(len(x), -1)) @ params["tokens"].T


def two_layers() -> nnx_models.Decoder:
    return nnx_models.Decoder([(6, 1), (None, 2)], vocab_size=VOCAB_SIZE)


def linen_decoder(**options):
    module = linen_models.Decoder(vocab_size=VOCAB_SIZE, num_layers=2, **options)
    ids = jnp.arange(4)
    init = jax.jit(lambda key: module.init(key, ids, ids, dense(jnp.zeros_like(ids))))
    return module, init(jax.random.key(1))["params"]


# -- the ways in --------------------------------------------------------------------------------


def test_an_nnx_module_is_served():
    assert greedy(quiet(Engine.from_nnx, two_layers())) == expected(from_nnx(two_layers()))


def test_a_linen_module_with_scanned_layers_is_served():
    module, params = linen_decoder()
    engine = quiet(Engine.from_linen, module, params, num_layers=2)
    assert engine.model_name == "Decoder"
    served = from_function(
        lambda p, t, pos, attend: module.apply({"params": p}, t, pos, attend),
        params,
        logits=lambda p, h: module.apply({"params": p}, h, method="logits"),
        num_layers=2,
    )
    assert greedy(engine) == expected(served)


def test_a_function_of_parameters_is_served():
    params = function_params()
    engine = quiet(Engine, function, params, name="mine")
    assert (engine.model_name, engine.vocab_size) == ("mine", VOCAB_SIZE)
    assert greedy(engine) == expected(from_function(function, params))


def test_a_configured_dtype_is_that_of_the_parameters():
    engine = quiet(Engine, function, function_params(), dtype="bfloat16")
    leaves = jax.tree.leaves(engine.runner._params)
    engine.close()
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("bfloat16")}


def test_a_config_and_its_fields_do_not_go_together():
    config = EngineConfig(model="mine", **SMALL)
    with pytest.raises(ConfigError, match="not both: max_num_seqs"):
        Engine(function, function_params(), config, max_num_seqs=2)
    engine = Engine(function, function_params(), config, progress=SilentProgress())
    with pytest.raises(ConfigError, match="block_size come too late"):
        LLM(engine, block_size=4)
    engine.close()


def test_an_async_engine_takes_an_engine_that_is_made():
    async def run():
        engine = AsyncEngine(quiet(Engine, function, function_params()))
        await engine.start()
        outputs = [o async for o in engine.generate({"prompt_token_ids": PROMPT}, GREEDY)]
        await engine.shutdown()
        return [t for o in outputs for t in o.outputs[0].token_ids]

    assert asyncio.run(run()) == expected(from_function(function, function_params()))


# -- modules with an attention_fn ---------------------------------------------------------------


class HookedNNX(nnx.Module):
    """Flax's own attention layers, batched, with a causal mask of its own."""

    def __init__(self):
        rngs = nnx.Rngs(5)
        self.tokens = nnx.Embed(VOCAB_SIZE, E, rngs=rngs)
        self.places = nnx.Embed(64, E, rngs=rngs)
        self.layers = nnx.List(
            [nnx.MultiHeadAttention(H, E, decode=False, rngs=rngs) for _ in range(2)]
        )

    def __call__(self, token_ids, positions):
        x = self.tokens(token_ids) + self.places(positions)
        for layer in self.layers:
            x = x + layer(x, mask=nnx.make_causal_mask(token_ids))
        return self.tokens.attend(x)


class HookedLinen(linen.Module):
    attention_fn: object = linen.dot_product_attention

    @linen.compact
    def __call__(self, token_ids):
        embed = linen.Embed(VOCAB_SIZE, E)
        x = embed(token_ids)
        for _ in range(2):
            attention = linen.MultiHeadDotProductAttention(H, attention_fn=self.attention_fn)
            x = x + attention(x, mask=linen.make_causal_mask(token_ids))
        return embed.attend(x)


def test_flax_attention_layers_are_served_through_their_hook():
    module = HookedNNX()
    served = from_attention_fn(module)
    conforms(served)
    ids = jnp.asarray(PROMPT, jnp.int32)
    positions = jnp.arange(len(ids), dtype=jnp.int32)
    own = nnx.jit(lambda module: module(ids[None], positions[None])[0])(module)
    attend = dense(jnp.zeros_like(ids))
    ours = jax.jit(lambda params: served.apply(params, ids, positions, attend))(served.params)
    np.testing.assert_allclose(ours, own, atol=1e-5)


def test_linen_attention_layers_are_served_through_their_hook():
    ids = jnp.asarray(PROMPT, jnp.int32)
    params = jax.jit(HookedLinen().init)(jax.random.key(0), ids[None])["params"]

    def apply(params, token_ids, positions, attend):
        model = HookedLinen(attention_fn=AttentionFn(attend))
        return model.apply({"params": params}, token_ids[None])[0]

    served = from_function(apply, params, uses_positions=False)
    assert set(conforms(served).errors) == {"paged", "chunked", "batched"}
    ours = jax.jit(lambda params: apply(params, ids, ids, dense(jnp.zeros_like(ids))))(params)
    own = jax.jit(lambda params: HookedLinen().apply({"params": params}, ids[None])[0])(params)
    np.testing.assert_allclose(ours, own, atol=1e-5)


def test_a_module_without_the_hook_is_told_of_the_other_way():
    with pytest.raises(ModelLoadError, match="no layer with an attention_fn"):
        from_attention_fn(nnx.Embed(4, 4, rngs=nnx.Rngs(0)))


# -- the test that users run --------------------------------------------------------------------


def conforms(*model, **options):
    """`check_model` with the back end that compiles fastest."""
    return check_model(*model, attention_backend="reference", **options)


@pytest.mark.parametrize("remat", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_scanned_and_rematerialised_nnx_layers_conform(remat):
    found = conforms(ScannedNNX(remat=remat), num_layers=3)
    assert len(found.layers) == 3 and found.vocab_size == VOCAB_SIZE
    assert 0 < max(found.errors.values()) < found.tolerance


def test_windows_conform():
    assert [layer.window for layer in check_model(two_layers()).layers] == [6, None]


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_rematerialised_linen_layers_conform(scan):
    module, params = linen_decoder(remat=True, scan=scan)
    found = conforms(module, params, num_layers=2)
    assert len(found.layers) == 2
    assert 0 < max(found.errors.values()) < found.tolerance


def test_a_rematerialised_scan_that_flax_checks_is_told_what_to_say():
    module, params = linen_decoder(remat=True, checked=True)
    with pytest.raises(ModelLoadError, match=r"Decoder rematerialises .*check_constancy_invaria"):
        conforms(module, params, num_layers=2)


def test_rematerialised_layers_give_the_gradients_of_others():
    _, params = linen_decoder()
    ids = jnp.asarray(PROMPT)

    def gradients(**options):
        def loss(params):
            model = linen_models.Decoder(vocab_size=VOCAB_SIZE, num_layers=2, **options)
            attend = dense(jnp.zeros_like(ids))
            hidden = model.apply({"params": params}, ids, jnp.arange(len(ids)), attend)
            return jnp.sum(hidden**2)

        return jax.jit(jax.grad(loss))(params)

    for one, other in zip(*map(jax.tree.leaves, (gradients(), gradients(remat=True))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def counts_its_own_positions(params, token_ids, positions, attend):
    return function(params, token_ids, jnp.arange(len(token_ids)), attend)


def attends_by_itself(params, token_ids, positions, attend):
    own = dense(jnp.zeros_like(token_ids))

    def both(q, k, v, *, layer):
        return attend(q, k, v, layer=layer) * 0 + own(q, k, v, layer=layer)

    return function(params, token_ids, positions, both)


@pytest.mark.parametrize("wrong", [counts_its_own_positions, attends_by_itself])
def test_a_model_that_is_right_in_form_only_fails_by_name(wrong):
    served = from_function(wrong, function_params(), uses_positions=False)
    with pytest.raises(AssertionError, match=r"paged: the scores of token .* `positions`"):
        conforms(served)


def test_scores_that_depend_on_neighbours_fail_by_name():
    def convolved(params, token_ids, positions, attend):
        x = function(params, token_ids, positions, attend)
        behind = jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])
        return x + jnp.where(positions[:, None] > 0, behind, 0.0)

    with pytest.raises(AssertionError, match=r"chunked: .* of sequence 0 .* count them"):
        conforms(from_function(convolved, function_params()))


# -- errors that teach --------------------------------------------------------------------------


def attend_with(**wrong):
    """A function whose only layer calls `attend` in a wrong way."""

    def apply(params, token_ids, positions, attend):
        x = params["tokens"][token_ids] + params["places"][positions]
        heads = (x @ params["qkv"]).reshape(len(x), 3 * H, D)
        for layer in wrong.get("layers", (0,)):
            k = wrong.get("num_kv_heads", 2)
            attend(heads[:, :2], heads[:, 2 : 2 + k], heads[:, 2 : 2 + k], layer=layer)
        return x @ params["tokens"].T

    return apply


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": ()}, r"never called attend\(q, k, v, layer=...\): its attention must go"),
        ({"layers": (0, 0)}, "called twice with layer=0: each layer needs its own number"),
        ({"layers": (0, 2)}, r"missing \[1\], unexpected \[2\]"),
        ({"num_kv_heads": 3}, r"num_heads=2 must be a multiple of num_kv_heads=3"),
    ],
)
def test_a_wrong_call_of_attend_is_explained(wrong, message):
    with pytest.raises((ModelLoadError, ValueError), match=message):
        quiet(Engine, attend_with(**wrong), function_params())


def test_positions_that_are_ignored_are_explained():
    with pytest.raises(ModelLoadError, match=r"never reads `positions`.*uses_positions=False"):
        quiet(Engine, counts_its_own_positions, function_params())


def test_a_scanned_model_without_its_depth_is_asked_for_it():
    with pytest.raises(ModelLoadError, match=r"say num_layers=\.\.\."):
        quiet(Engine.from_nnx, ScannedNNX())
