"""The real model: the tokens of an independent float32 implementation, however they are run.

All engines here have the same few sizes, so that they share their compiled programs; a small pool
is made by taking blocks away from a large one.
"""

import json
from pathlib import Path

import pytest

from paged_jax import LLM, SamplingParams, StructuredOutputs
from paged_jax.progress import SilentProgress
from scheduler import derive_seed
from tests.random_schemas import conforms, random_schema

pytestmark = pytest.mark.smollm2

GOLDENS = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["cases"]
PROMPTS = [{"prompt_token_ids": case["prompt_token_ids"]} for case in GOLDENS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=16)
NUM_BLOCKS, FEW_BLOCKS = 200, 24


def make(directory, **config):
    sizes = {
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "num_blocks": NUM_BLOCKS,
    }
    return LLM(str(directory), dtype="float32", progress=SilentProgress(), **(sizes | config))


@pytest.fixture(scope="module")
def llm(smollm2):
    return make(smollm2)


def check(results):
    for result, case in zip(results, GOLDENS, strict=True):
        output = result.outputs[0]
        assert list(output.token_ids) == case["token_ids"], case["prompt"]
        assert output.text == case["text"]
        assert output.finish_reason == case["finish_reason"]


def take_blocks_away(llm):
    pool = llm.engine.scheduler.pools[0]
    for _ in range(NUM_BLOCKS - 1 - FEW_BLOCKS):
        pool.allocate()


@pytest.fixture(scope="module")
def seeded(llm):
    """Tokens drawn with a seed, one request at a time."""
    return [llm.generate(prompt, SEEDED)[0].outputs[0].token_ids for prompt in PROMPTS[:6]]


def test_alone(llm):
    check([llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS])


def test_in_one_batch_cold_and_warm(smollm2, seeded):
    llm = make(smollm2)
    check(llm.generate(PROMPTS, GREEDY))
    hits = llm.stats().prefix_hit_tokens
    check(llm.generate(PROMPTS, GREEDY))
    assert llm.stats().prefix_hit_tokens >= hits + 100
    assert [r.outputs[0].token_ids for r in llm.generate(PROMPTS[:6], SEEDED)] == seeded


def test_text_and_chats_give_the_goldens(llm):
    for case in GOLDENS[::3]:
        if case["kind"] == "chat":
            (result,) = llm.chat(case["messages"], GREEDY)
        else:
            (result,) = llm.generate(case["prompt"], GREEDY)
        assert list(result.prompt_token_ids) == case["prompt_token_ids"]
        assert list(result.outputs[0].token_ids) == case["token_ids"]


WAYS = {
    "16 tokens a step, preempted": {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
    "swapped": {"preemption_mode": "swap", "swap_space": 1.0},
}
MORE_WAYS = {
    "static and reserved": {"batching": "static", "allocation": "reserved"},
    "256 tokens a step, preempted": {"max_num_batched_tokens": 256},
    "dedicated prefill": {"prefill": "dedicated", "scheduling_policy": "shortest"},
}


@pytest.mark.parametrize(
    "way", [*WAYS, *(pytest.param(way, marks=pytest.mark.sweep) for way in MORE_WAYS)]
)
def test_every_mechanism_gives_the_goldens(smollm2, seeded, way):
    """A tiny model goes through all of them, alone and together, in test_mechanisms.py."""
    llm = make(smollm2, **(WAYS | MORE_WAYS)[way])
    if "preempted" in way or way == "swapped":
        take_blocks_away(llm)
    check(llm.generate(PROMPTS, GREEDY))
    assert [r.outputs[0].token_ids for r in llm.generate(PROMPTS[:6], SEEDED)] == seeded
    if "preempted" in way:
        assert llm.stats().preemptions > 0
    if way == "swapped":
        assert sum(record.num_swap_ins for record in llm.engine.records) > 0


def test_samples_equal_requests_of_their_own(llm, seeded):
    several = SamplingParams(temperature=1.0, seed=7, max_tokens=16, n=3)
    results = llm.generate(PROMPTS[:2], several)
    assert [r.outputs[0].token_ids for r in results] == seeded[:2]
    for index in (1, 2):
        own = SamplingParams(temperature=1.0, seed=derive_seed(7, index), max_tokens=16)
        singles = llm.generate(PROMPTS[:2], own)
        assert [r.outputs[index].token_ids for r in results] == [
            s.outputs[0].token_ids for s in singles
        ]


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_has_the_form_of_a_schema(llm, seed):
    """The same for 100 schemas over HTTP: scripts/json_schemas.py."""
    schema = random_schema(seed)
    params = SamplingParams(
        seed=seed, max_tokens=300, structured_outputs=StructuredOutputs(json=schema)
    )
    (result,) = llm.chat([{"role": "user", "content": "Make something up, please."}], params)
    assert conforms(json.loads(result.outputs[0].text), schema)
