"""Penalties against a NumPy oracle, and through the engine: alone, forked, preempted."""

import jax
import numpy as np
import pytest

from paged_jax import LLM, SamplingParams
from paged_jax.penalties import TokenCounts, add_tokens, count_row, penalize
from paged_jax.progress import SilentProgress
from scheduler import PenaltyMetadata, RequestError, derive_seed
from tests.tiny_models import write_tiny_llama

V = 12


def metadata(presence=0.0, frequency=0.0, repetition=1.0, rows=1):
    return PenaltyMetadata(
        *(np.full(rows, x, np.float32) for x in (presence, frequency, repetition))
    )


def counted(prompt, output):
    counts = TokenCounts(np.zeros((3, V), np.bool_), np.ones((3, V), np.int32))
    ids = np.zeros(16, np.int32)
    ids[: len(prompt) + len(output)] = [*prompt, *output]
    numbers = (np.int32(1), ids, np.int32(len(prompt)), np.int32(len(prompt) + len(output)))
    return jax.jit(count_row)(counts, *numbers)


def test_counts_are_of_prompt_and_output_apart_and_grow():
    counts = counted([3, 3, 5], [7, 7, 3])
    assert np.flatnonzero(counts.in_prompt[1]).tolist() == [3, 5]
    assert {t: int(counts.in_output[1, t]) for t in (0, 3, 5, 7)} == {0: 0, 3: 1, 5: 0, 7: 2}
    assert (np.asarray(counts.in_output[0]) == 1).all()  # other rows are left alone
    rows, tokens = np.array([1, 0], np.int32), np.array([5, -1], np.int32)
    grown = jax.jit(add_tokens)(counts, rows, tokens)
    assert int(grown.in_output[1, 5]) == 1
    assert (np.asarray(grown.in_output[0]) == 1).all()  # a failed row draws nothing


def test_logits_lose_what_was_said():
    prompt, output = [3, 3, 5], [7, 7, 3]
    logits = np.random.default_rng(0).normal(size=(1, V)).astype(np.float32)
    got = jax.jit(penalize)(
        logits, counted(prompt, output), np.array([1], np.int32), metadata(0.5, 0.25, 2.0)
    )
    want = logits[0].copy()
    for token in set(prompt + output):
        want[token] = want[token] / 2.0 if want[token] > 0 else want[token] * 2.0
    for token in set(output):
        want[token] -= 0.5 + 0.25 * output.count(token)
    np.testing.assert_allclose(np.asarray(got)[0], want, atol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [("presence_penalty", 2.5), ("frequency_penalty", -3), ("repetition_penalty", 0)],
)
def test_penalties_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(RequestError, match=f"{field} must be between"):
        SamplingParams(**{field: value})


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(directory)
    return LLM(
        str(directory),
        progress=SilentProgress(),
        skip_tokenizer_init=True,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        block_size=4,
        max_model_len=64,
        num_blocks=24,
    )


def generate(llm, prompts, params):
    results = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    return [[list(output.token_ids) for output in result.outputs] for result in results]


PROMPTS = [[3 + i, 7, 9, 11, 20 + i] * (i + 1) for i in range(6)]


def test_a37_frequency_counts_the_output_and_repetition_the_prompt_too(llm):
    free = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    strict = SamplingParams(
        temperature=0.0, max_tokens=30, ignore_eos=True, repetition_penalty=100.0
    )
    ((plain,),) = generate(llm, PROMPTS[:1], free)
    ((varied,),) = generate(llm, PROMPTS[:1], strict)
    assert len(set(plain)) < len(set(varied)) == 30  # nothing is said twice
    assert not set(varied) & set(PROMPTS[0])
    assert varied[0] == plain[0] or plain[0] in PROMPTS[0]


def test_a42_samples_have_counts_of_their_own(llm):
    fields = {"temperature": 1.0, "frequency_penalty": 2.0, "presence_penalty": 1.0}
    several = SamplingParams(n=3, seed=9, max_tokens=20, **fields)
    together = generate(llm, PROMPTS[:3], several)
    for index in range(3):
        own = SamplingParams(seed=derive_seed(9, index), max_tokens=20, **fields)
        alone = [generate(llm, [prompt], own)[0][0] for prompt in PROMPTS[:3]]
        assert [samples[index] for samples in together] == alone


def test_counts_survive_preemption_and_neighbours_do_not_matter(llm):
    params = SamplingParams(temperature=0.0, max_tokens=25, frequency_penalty=1.5)
    alone = [generate(llm, [prompt], params)[0] for prompt in PROMPTS]
    before = llm.stats().preemptions
    plain = SamplingParams(temperature=0.0, max_tokens=25)
    mixed = llm.generate([{"prompt_token_ids": p} for p in PROMPTS * 2], [params] * 6 + [plain] * 6)
    assert [[list(r.outputs[0].token_ids)] for r in mixed[:6]] == alone
    assert llm.stats().preemptions > before
    assert [[list(r.outputs[0].token_ids)] for r in mixed[6:]] == generate(llm, PROMPTS, plain)
