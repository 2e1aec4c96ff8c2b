"""Modules that keep a cache of their own, `(tokens[B, L], positions, cache, mask)`, in pages."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import Engine, SamplingParams
from paged_jax.attention import dense
from paged_jax.errors import ModelLoadError
from paged_jax.models import ServedModel, from_cached
from paged_jax.progress import SilentProgress
from paged_jax.taps import TappedAttend
from paged_jax.testing import check_model
from tests.cached_models import VOCAB_SIZE, D, K, LinenDecoder, NNXDecoder, layer_cache
from tests.engine_runs import Run, assert_idle

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def nnx_model() -> ServedModel:
    module = NNXDecoder()
    return from_cached(module, module.init_cache)


def linen_params(module: LinenDecoder):
    ids = jnp.zeros((1, 3), jnp.int32)
    mask = jnp.ones((1, 3, 3), jnp.bool_)
    return module.init(jax.random.key(0), ids, positions=ids, attention_mask=mask)["params"]


def linen_model() -> ServedModel:
    module = LinenDecoder()

    def call(module, tokens, positions, cache, mask):
        out = module(tokens, positions=positions, cache=cache, attention_mask=mask)
        return out.hidden, out.cache

    return from_cached(
        module,
        module.init_cache,
        linen_params(module),
        call=call,
        logits=lambda module, hidden: module.logits(hidden),
    )


def own_greedy(module: NNXDecoder, prompt: list[int], num_tokens: int) -> list[int]:
    """As the module's own package would: a prompt into the cache, then token by token."""
    length = len(prompt) + num_tokens
    cache = module.init_cache(length)
    ids, start, tokens = prompt, 0, []
    for _ in range(num_tokens):
        positions = jnp.arange(start, start + len(ids))
        mask = jnp.arange(length)[None, :] <= positions[:, None]
        scores, cache = module(jnp.asarray(ids)[None], positions[None], cache, mask[None])
        start += len(ids)
        ids = [int(scores[0, -1].argmax())]
        tokens += ids
    return tokens


@pytest.mark.parametrize("make", [nnx_model, linen_model])
def test_a_module_with_a_cache_of_its_own_conforms(make):
    found = check_model(make())
    assert [layer[1:] for layer in found.layers] == [(K, D, None, jnp.dtype("float32"))] * 2
    assert found.vocab_size == VOCAB_SIZE
    assert 0 < max(found.errors.values()) < found.tolerance


def test_the_engine_gives_the_tokens_of_the_modules_own_cache():
    """In chunks, beside a neighbour for which the blocks do not suffice, and from the cache."""
    engine = Engine(
        nnx_model(),
        max_model_len=40,
        max_num_seqs=2,
        max_num_batched_tokens=6,
        block_size=4,
        num_blocks=10,
        progress=SilentProgress(),
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    wanted = own_greedy(NNXDecoder(), PROMPT, 8)
    run = Run(engine)
    run.add("one", PROMPT, params)
    run.add("neighbour", PROMPT[::-1], params)
    run.drain()
    assert engine.stats().preemptions > 0
    before = engine.stats().prefix_hit_tokens
    run.add("cached", PROMPT, params)
    run.drain()
    assert engine.stats().prefix_hit_tokens - before >= 4
    assert_idle(engine)
    engine.close()
    assert list(run.tokens("one")) == list(run.tokens("cached")) == wanted
    assert list(run.tokens("neighbour")) == own_greedy(NNXDecoder(), PROMPT[::-1], 8)


def test_the_example_of_the_docs_runs():
    text = (Path(__file__).parent.parent / "docs" / "research.md").read_text()
    (example,) = (part for part in re.findall(r"```python\n(.*?)```", text, re.S) if 'k"' in part)
    names = {"jnp": jnp, "module": NNXDecoder(), "KV_HEADS": K, "HEAD_SIZE": D, "LAYERS": 2}
    exec(example, names)
    engine = names["engine"]
    assert engine.vocab_size == VOCAB_SIZE
    engine.close()


def test_new_parameters_reach_the_module():
    model = nnx_model()
    ids = jnp.arange(5)
    attend = dense(jnp.zeros_like(ids))
    doubled = jax.tree.map(lambda leaf: 2 * leaf, model.params)
    before, after = (model.apply(p, ids, ids, attend) for p in (model.params, doubled))
    assert np.abs(before - after).max() > 1e-2


def test_without_a_cache_sequences_do_not_see_each_other():
    model = nnx_model()
    ids, positions = jnp.array([1, 2, 3, 4, 5]), jnp.array([0, 1, 2, 0, 1])
    both = model.apply(model.params, ids, positions, dense(jnp.array([0, 0, 0, 1, 1])))
    one = model.apply(model.params, ids[3:], positions[3:], dense(jnp.zeros(2, jnp.int32)))
    np.testing.assert_allclose(both[3:], one, atol=1e-5)


def test_a_tapped_attend_gives_the_cache_too():
    ids = jnp.arange(5)
    model = nnx_model()
    tapped = TappedAttend(dense(jnp.zeros_like(ids)))
    plain = model.apply(model.params, ids, ids, dense(jnp.zeros_like(ids)))
    np.testing.assert_array_equal(model.apply(model.params, ids, ids, tapped), plain)


# -- wrong in form ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init_cache", "message"),
    [
        (lambda n: {}, "gives no arrays: the model has no layers"),
        (lambda n: {"a": {"k": jnp.zeros((1, n, K, D))}}, r"\['a'\] lacks v, end_index"),
        (lambda n: {"a": {**layer_cache(n), "ring": jnp.zeros(1)}}, r"\['a'\]\['ring'\].* none of"),
        (lambda n: {"a": layer_cache(n, 2)}, r"k and v \[1, 8, K, D\] .* k float32\(2, 8, 2, 8\)"),
        (lambda n: {"a": layer_cache(4)}, r"a slot for each token; .*\(1, 4, 2, 8\)"),
    ],
)
def test_a_cache_of_another_form_is_explained(init_cache, message):
    with pytest.raises(ModelLoadError, match=message):
        from_cached(NNXDecoder(), init_cache)


class Wrong(nnx.Module):
    """A decoder that does something else with what `NNXDecoder` gives."""

    def __init__(self, change):
        self.change = change
        self.inner = NNXDecoder(1)

    def __call__(self, *inputs):
        return self.change(*self.inner(*inputs), *inputs)


def served_wrongly(change) -> ServedModel:
    return from_cached(Wrong(change), NNXDecoder(1).init_cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scores, new, *_: scores, r"must give \(scores \[1, L, V\], new cache\), not a "),
        (lambda scores, new, *_: (scores[0], new), r"\(1, 8\) to \(8, 40\), not to \[1, L, V\]"),
    ],
)
def test_a_result_of_another_form_is_explained(change, message):
    with pytest.raises(ModelLoadError, match=message):
        served_wrongly(change)


def test_a_cache_that_does_not_come_back_is_explained():
    model = served_wrongly(lambda scores, new, *_: (scores, None))
    with pytest.raises(ModelLoadError, match=r"gives another one back, None: it must be the same"):
        check_model(model)


def test_params_belong_to_linen_modules():
    module = LinenDecoder()
    with pytest.raises(ModelLoadError, match="LinenDecoder is a Linen module: give its params"):
        from_cached(module, module.init_cache)
    with pytest.raises(ModelLoadError, match="give no params"):
        from_cached(NNXDecoder(), NNXDecoder().init_cache, {})


def test_an_attend_without_a_cache_to_give_is_named():
    ids = jnp.arange(3)
    model = nnx_model()
    with pytest.raises(ModelLoadError, match="function has no cache to give"):
        model.apply(model.params, ids, ids, lambda *args, **options: args[0])


# -- right in form only -------------------------------------------------------------------------


def test_a_cache_that_is_not_written_fails_by_name():
    kept = served_wrongly(lambda scores, new, tokens, positions, cache, mask: (scores, cache))
    with pytest.raises(AssertionError, match=r"chunked: the scores of token"):
        check_model(kept)


def test_a_mask_that_is_not_read_fails_by_name():
    class Unmasked(NNXDecoder):
        def __call__(self, tokens, positions, cache, mask):
            return super().__call__(tokens, positions, cache, jnp.ones_like(mask))

    with pytest.raises(AssertionError, match=r"paged: the scores of token"):
        check_model(from_cached(Unmasked(1), NNXDecoder(1).init_cache))
