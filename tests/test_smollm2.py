"""The real model: greedy tokens of an independent float32 implementation, however they are run."""

import json
from pathlib import Path

import pytest

from paged_jax import LLM, SamplingParams

pytestmark = pytest.mark.smollm2

GOLDENS = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["cases"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


@pytest.fixture(scope="module")
def llm(smollm2):
    return LLM(str(smollm2), dtype="float32", max_model_len=512, max_num_seqs=16)


def prompts():
    return [{"prompt_token_ids": case["prompt_token_ids"]} for case in GOLDENS]


def check(results):
    for result, case in zip(results, GOLDENS, strict=True):
        output = result.outputs[0]
        assert list(output.token_ids) == case["token_ids"], case["prompt"]
        assert output.text == case["text"]
        assert output.finish_reason == case["finish_reason"]


def test_all_in_one_batch(llm):
    check(llm.generate(prompts(), GREEDY))


def test_text_and_chats_give_the_goldens(llm):
    for case in GOLDENS[::3]:
        if case["kind"] == "chat":
            (result,) = llm.chat(case["messages"], GREEDY)
        else:
            (result,) = llm.generate(case["prompt"], GREEDY)
        assert list(result.prompt_token_ids) == case["prompt_token_ids"]
        assert list(result.outputs[0].token_ids) == case["token_ids"]


def test_alone(llm):
    check([llm.generate(prompt, GREEDY)[0] for prompt in prompts()])


def test_small_chunks_and_preemption(smollm2):
    """16 tokens a step, and so few blocks that sequences push each other out."""
    llm = LLM(
        str(smollm2),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=16,
        num_blocks=25,
        enable_prefix_caching=False,
    )
    check(llm.generate(prompts(), GREEDY))
    assert llm.stats().preemptions > 0
    assert llm.stats().prefix_hit_tokens == 0
