"""Scores of given tokens, and the engine behind Tunix's rollout interface."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import ConfigError, Engine, RequestError, SamplingParams
from paged_jax.models import from_nnx
from paged_jax.progress import SilentProgress
from paged_jax.tunix_rollout import TunixRollout
from tests import nnx_models
from tests.dense_decoding import DenseDecoder
from tests.engine_runs import Run, assert_idle

EOS, VOCAB_SIZE = 2, 60
TEXTS = [list(range(5, 40)), [7], [9, 8, 7, 9, 8, 7], list(range(20, 37))]


def module() -> nnx_models.Decoder:
    return nnx_models.Decoder([(6, 1), (None, 2)], vocab_size=VOCAB_SIZE, max_position=64)


@pytest.fixture(scope="module")
def decoder() -> DenseDecoder:
    return DenseDecoder(from_nnx(module()), 48)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.from_nnx(
        module(),
        max_model_len=48,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        block_size=4,
        num_blocks=40,
        warmup="none",
        eos_token_ids=[EOS],
        progress=SilentProgress(),
    )
    yield engine
    assert_idle(engine)
    engine.close()


def expected(decoder: DenseDecoder, ids: list[int]) -> np.ndarray:
    return np.array([decoder.logprobs(ids[:i])[ids[i]] for i in range(1, len(ids))], np.float32)


def test_scores_are_those_of_the_plain_model(engine, decoder):
    for ids, scores in zip(TEXTS, engine.score(TEXTS), strict=True):
        assert scores.dtype == np.float32 and scores.shape == (len(ids) - 1,)
        np.testing.assert_allclose(scores, expected(decoder, ids), atol=1e-4)
    assert engine.score([]) == []
    with pytest.raises(RequestError, match="holds 60, which is no token id"):
        engine.score([[1, 2], [3, VOCAB_SIZE]])


def test_sampled_tokens_score_what_they_were_sampled_with(engine):
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True, logprobs=0)
    run = Run(engine)
    run.add("r", TEXTS[0][:11], params)
    run.drain()
    sample = run.samples["r", 0]
    (scores,) = engine.score([TEXTS[0][:11] + sample.token_ids])
    rollout = np.array([entry.logprob for entry in sample.logprobs])
    assert np.abs(scores[10:] - rollout).max() < 1e-5


def test_requests_go_on_while_others_are_scored(engine, decoder):
    run = Run(engine)
    run.add("r", TEXTS[2], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    run.step()
    engine.score([TEXTS[0]])
    run.drain()
    assert run.tokens("r") == decoder.greedy(TEXTS[2], 12).token_ids


@dataclass
class Config:
    """As Tunix's, with what other engines want."""

    max_tokens_to_generate: int = 6
    temperature: float = 0.7
    top_p: float | None = 0.9
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 8
    kv_cache_size: int = 1024
    eos_tokens: list[int] | None = None
    rollout_vllm_model_version: str = ""


def test_a_rollout_is_padded_and_scored_as_tunix_has_it(engine, decoder):
    rollout = TunixRollout(engine)
    assert (rollout.eos_id(), rollout.pad_id(), rollout.model()) == (EOS, EOS, engine)
    prompts = [TEXTS[2], TEXTS[0], TEXTS[2]]
    first = rollout.generate(prompts, Config(seed=5))
    assert first.tokens.shape == (3, 6) and first.tokens.dtype == np.int32
    assert first.left_padded_prompt_tokens.tolist() == [
        [EOS, EOS, *TEXTS[2]],
        TEXTS[0][-8:],
        [EOS, EOS, *TEXTS[2]],
    ]
    assert first.tokens[0].tolist() != first.tokens[2].tolist()  # each draws by itself
    key = jax.random.key_data(jax.random.key(5))
    for seed in (5, jnp.asarray(5), key, jax.random.key(5)):
        np.testing.assert_array_equal(
            rollout.generate(prompts, Config(seed=seed)).tokens, first.tokens
        )
    raw = Config(seed=5, temperature=1.0, top_p=None, top_k=-1, eos_tokens=[EOS])
    plain = rollout.generate(prompts, raw)
    scores = np.asarray(rollout.get_per_token_logps(plain.left_padded_prompt_tokens, plain.tokens))
    for row, (line, sampled) in enumerate(zip(scores, plain.logprobs, strict=True)):
        count = len(sampled)
        np.testing.assert_allclose(line[:count], sampled, atol=1e-4)
        assert not line[count:].any()
        assert plain.tokens[row, count:].tolist() == [EOS] * (6 - count)
    mask = np.zeros((3, 6), np.int32)
    mask[:, :2] = 1
    masked = rollout.get_per_token_logps(plain.left_padded_prompt_tokens, plain.tokens, mask)
    np.testing.assert_allclose(masked[:, :2], scores[:, :2], atol=1e-6)
    assert not np.asarray(masked)[:, 2:].any()


def test_a_rollout_takes_new_weights(engine):
    rollout = TunixRollout(engine)
    before = rollout.generate([TEXTS[0]], Config(temperature=0.0)).tokens
    state = nnx.state(module(), nnx.Param)
    rollout.update_params(jax.tree.map(lambda leaf: leaf[::-1], state))
    after = rollout.generate([TEXTS[0]], Config(temperature=0.0)).tokens
    assert before.tolist() != after.tolist()
    rollout.update_params(state, filter_types=(nnx.Param,))
    again = rollout.generate([TEXTS[0]], Config(temperature=0.0)).tokens
    assert before.tolist() == again.tolist()
    with pytest.raises(ConfigError, match="all parameters are replaced at once"):
        rollout.update_params(state, filter_types=(nnx.LoRAParam,))
