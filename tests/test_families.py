"""Every family against the published implementation: logits, and greedy tokens through pages.

`data/families` holds tiny random models in Hugging Face's layout. The files were written, and what
they must give was computed, by transformers 5.24 in float32 with eager attention.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax.attention import dense
from paged_jax.models import FAMILIES, ServedModel, load_model
from paged_jax.progress import SilentProgress
from tests.engine_runs import Run, assert_idle

GOLDENS = Path(__file__).parent / "data" / "families"
NAMES = sorted(path.name for path in GOLDENS.iterdir())
BLOCK, CHUNK = 8, 8
# Sequences of 61 tokens take 8 blocks: two of them do not fit. Layers that all have a window keep
# few blocks of a sequence, so that fewer still are needed for one to be preempted.
NUM_BLOCKS = {"mistral-window": 6}


@pytest.fixture(scope="module", autouse=True)
def quick_compiles() -> Iterator[None]:
    """Nineteen models are compiled here, and run for a moment each."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def golden(name) -> dict:
    return json.loads((GOLDENS / name / "golden.json").read_text())


@pytest.fixture(scope="module")
def model(name) -> ServedModel:
    return load_model(GOLDENS / name, dtype="float32")


@pytest.fixture(scope="module")
def engine(name) -> Iterator[Engine]:
    """Chunks of 8 tokens, and blocks for one of the sequences below and a part of another."""
    config = EngineConfig(
        model=str(GOLDENS / name),
        skip_tokenizer_init=True,
        max_num_seqs=2,
        max_num_batched_tokens=CHUNK,
        max_model_len=80,
        block_size=BLOCK,
        num_blocks=NUM_BLOCKS.get(name, 10),
    )
    engine = Engine.from_pretrained(config, progress=SilentProgress())
    yield engine
    assert_idle(engine)
    engine.close()


def test_logits_equal_the_published_implementation(model, golden):
    ids = jnp.asarray(golden["prompt_token_ids"], jnp.int32)

    @jax.jit
    def run(params, ids):
        positions = jnp.arange(len(ids), dtype=jnp.int32)
        hidden = model.apply(params, ids, positions, dense(jnp.zeros_like(ids)))
        return model.logits(params, hidden)

    got = np.asarray(run(model.params, ids))[np.array(golden["logits_rows"])]
    np.testing.assert_allclose(got, golden["logits"], atol=2e-4)


def test_a90_greedy_tokens_survive_chunks_preemption_and_the_prefix_cache(engine, golden):
    """In chunks of 8, beside a neighbour for which the blocks do not suffice, then from cache."""
    prompt, wanted = golden["prompt_token_ids"], golden["greedy_token_ids"]
    params = SamplingParams(temperature=0.0, max_tokens=len(wanted), ignore_eos=True)
    run = Run(engine)
    run.add("one", prompt, params)
    run.add("neighbour", prompt[::-1], params)
    run.drain()
    assert engine.stats().preemptions > 0
    assert list(run.tokens("one")) == wanted

    run.add("alone", prompt, params)
    run.drain()
    before = engine.stats().prefix_hit_tokens
    run.add("cached", prompt, params)
    run.drain()
    assert engine.stats().prefix_hit_tokens - before >= BLOCK
    assert list(run.tokens("alone")) == list(run.tokens("cached")) == wanted


def test_every_family_has_a_golden():
    architectures = {
        json.loads((GOLDENS / name / "config.json").read_text())["architectures"][0]
        for name in NAMES
    }
    # The text model inside a model that sees images is tested from its own files.
    known = {family.architecture for family in FAMILIES} - {"Gemma3ForConditionalGeneration"}
    assert architectures == known
