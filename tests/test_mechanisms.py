"""Whatever mechanism runs a request, its tokens are the same: greedy and with a seed."""

import itertools

import pytest

from paged_jax import LLM, SamplingParams
from paged_jax.beam_search import BeamSearchParams
from paged_jax.progress import SilentProgress
from scheduler import MAX_LOGPROBS, RequestError, derive_seed, replay
from tests.tiny_models import write_tiny_llama

PROMPTS = [{"prompt_token_ids": [3 + i, 7, 9, 11, 20 + i] * (i + 1)} for i in range(6)] * 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=25)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=25)
FEW_BLOCKS = 24  # the longest request alone takes 14


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(directory)
    return str(directory)


def make(model, **config):
    defaults = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "max_model_len": 64,
        "num_blocks": 200,
    }
    return LLM(model, progress=SilentProgress(), **(defaults | config))


def tokens(llm, prompts=PROMPTS, *params):
    results = (llm.generate(prompts, one) for one in params or (GREEDY, SEEDED))
    return [result.outputs[0].token_ids for result in itertools.chain(*results)]


@pytest.fixture(scope="module")
def alone(model):
    """One request at a time, nothing shared."""
    llm = make(model, enable_prefix_caching=False)
    return [
        token_ids
        for params in (GREEDY, SEEDED)
        for prompt in PROMPTS
        for token_ids in tokens(llm, [prompt], params)
    ]


SWAP = {"num_blocks": FEW_BLOCKS, "preemption_mode": "swap"}
WAYS = {
    "batched": {},
    "no overlap": {"overlap": False},
    "no prefix cache": {"enable_prefix_caching": False},
    "recompute": {"num_blocks": FEW_BLOCKS},
    "swap": SWAP,
    "swap, no prefix cache": SWAP | {"enable_prefix_caching": False},
    "offload": {"num_blocks": FEW_BLOCKS, "kv_offload": True},
    "swap and offload": SWAP | {"kv_offload": True, "overlap": False},
    "dedicated": {"prefill": "dedicated"},
    "static": {"batching": "static"},
    "reserved": {"allocation": "reserved", "num_blocks": 100},
    "static and reserved": {"batching": "static", "allocation": "reserved", "num_blocks": 100},
    "shortest": {"scheduling_policy": "shortest"},
    "fair": {"scheduling_policy": "fair", "num_blocks": FEW_BLOCKS},
    "priority": {"scheduling_policy": "priority"},
} | {f"chunks of {n}": {"max_num_batched_tokens": n, "max_num_seqs": 3} for n in (3, 4, 5, 64)}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_tokens_of_a_request_alone(model, alone, way, tmp_path):
    log = tmp_path / "steps.jsonl"
    llm = make(model, step_log=str(log), **WAYS[way])
    assert tokens(llm) == alone
    stats, records, scheduler = llm.stats(), llm.engine.records, llm.engine.scheduler
    if "num_blocks" in WAYS[way] and WAYS[way]["num_blocks"] == FEW_BLOCKS:
        assert stats.preemptions > 0
    if "swap" in way:
        assert scheduler.num_swaps > 0
    if "swap" in way or "offload" in way:
        assert sum(r.num_swap_ins for r in records) > 0
    if way in ("batched", "offload", "swap and offload"):
        assert stats.prefix_hit_tokens > 0
    scheduler.check_invariants()
    llm.engine.close()
    with log.open() as lines:
        assert sum(not output.is_empty for output in replay(lines)) == stats.num_steps


NEAR = 0.1  # between log-probabilities in 16 bits, of logits up to about 10


def compare_until_a_near_tie(alone, others):
    """How many tokens are the same. Where the first one differs, the best two were near."""
    same = 0
    for one, other in zip(alone, others, strict=True):
        for theirs, ours in zip(one.logprobs, other.logprobs, strict=True):
            if theirs.token_id != ours.token_id:
                best, second = theirs.top.values()
                assert best - second < NEAR
                break
            assert abs(theirs.logprob - ours.logprob) < NEAR
            same += 1
    return same


def test_a90_in_bfloat16_only_near_ties_are_decided_otherwise(model):
    """Alone, in a batch, from the prefix cache, in chunks and after preemption."""
    narrow = {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "attention_backend": "reference"}
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, ignore_eos=True)
    prompts = PROMPTS[:6]
    roomy = make(model, **narrow)
    tight = make(model, **narrow, num_blocks=FEW_BLOCKS, max_num_batched_tokens=5, max_num_seqs=3)
    alone = [roomy.generate(prompt, params)[0].outputs[0] for prompt in prompts]
    roomy.engine.scheduler.forget_prefixes()
    for llm in (roomy, roomy, tight):  # cold, warm, and with chunks of 5
        outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
        assert compare_until_a_near_tie(alone, outputs) > 0.8 * 20 * len(prompts)
    assert roomy.stats().prefix_hit_tokens > 0
    assert tight.stats().preemptions > 0


@pytest.mark.parametrize("config", [{}, {"num_blocks": FEW_BLOCKS}, SWAP, {"max_num_seqs": 2}])
def test_samples_equal_requests_of_their_own(model, config):
    llm = make(model, **config)
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12, n=3)
    results = llm.generate(PROMPTS[:4], params)
    for index in range(3):
        single = SamplingParams(temperature=1.0, seed=derive_seed(11, index), max_tokens=12)
        assert tokens(llm, PROMPTS[:4], single) == [r.outputs[index].token_ids for r in results]
    assert len({r.token_ids for r in results[0].outputs}) == 3


def test_samples_share_the_prompt_and_copy_on_write(model):
    llm = make(model, enable_prefix_caching=False)
    prompt = {"prompt_token_ids": list(range(3, 24))}  # 21 tokens: the sixth block has one
    llm.generate(prompt, SamplingParams(temperature=1.0, max_tokens=2, n=4))
    records = llm.engine.records
    assert sum(r.num_copies for r in records) == 3  # the last holder writes in place
    assert max(r.blocks_referenced for r in records) == 5 + 4
    assert sum(r.num_tokens for r in records) == 21 + 4


def test_best_of_returns_the_most_likely(model):
    llm = make(model)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, n=5, logprobs=0)
    every = llm.generate(PROMPTS[0], params)[0].outputs
    best = llm.generate(
        PROMPTS[0], SamplingParams(temperature=1.0, seed=5, max_tokens=6, n=2, best_of=5)
    )[0].outputs
    ranked = sorted(every, key=lambda output: -output.cumulative_logprob)
    assert [b.token_ids for b in best] == [r.token_ids for r in ranked[:2]]
    assert [b.index for b in best] == [0, 1]
    with pytest.raises(RequestError, match="best_of must be between 3"):
        SamplingParams(n=3, best_of=2)


def test_logprobs_are_those_of_the_raw_logits(model):
    llm = make(model)
    greedy = SamplingParams(temperature=0.0, max_tokens=5, logprobs=5)
    drawn = SamplingParams(temperature=2.0, seed=1, top_k=3, max_tokens=5, logprobs=5)
    for params in (greedy, drawn):
        output = llm.generate(PROMPTS[1], params)[0].outputs[0]
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
        for entry in output.logprobs:
            values = list(entry.top.values())
            assert len(values) == 5 and values == sorted(values, reverse=True)
            if entry.token_id in entry.top:
                assert entry.logprob == pytest.approx(entry.top[entry.token_id], abs=1e-5)
        total = sum(entry.logprob for entry in output.logprobs)
        assert output.cumulative_logprob == pytest.approx(total)
    first = llm.generate(PROMPTS[1], greedy)[0].outputs[0].logprobs[0]
    assert first.logprob == max(first.top.values())


def test_beam_search_finds_the_best_of_all_continuations(model):
    """Against every continuation of two tokens, scored one by one."""
    llm = make(model)
    prompt = [3, 7, 9]
    width = MAX_LOGPROBS // 2
    (found,) = llm.beam_search(
        [{"prompt_token_ids": prompt}],
        BeamSearchParams(beam_width=width, max_tokens=2, ignore_eos=True),
    )
    ask = SamplingParams(temperature=0.0, max_tokens=1, logprobs=MAX_LOGPROBS, ignore_eos=True)
    (first,) = llm.generate({"prompt_token_ids": prompt}, ask)
    scores = {}
    for token, logprob in first.outputs[0].logprobs[0].top.items():
        (second,) = llm.generate({"prompt_token_ids": [*prompt, token]}, ask)
        for next_token, next_logprob in second.outputs[0].logprobs[0].top.items():
            scores[token, next_token] = logprob + next_logprob
    best = sorted(scores, key=scores.get, reverse=True)[:3]
    assert [beam.token_ids for beam in found.beams[:3]] == best
    assert found.beams[0].cumulative_logprob == pytest.approx(scores[best[0]], abs=1e-4)
    assert len(found.beams) == width


def test_beam_search_stops_at_end_of_sequence_and_shares_blocks(model):
    llm = make(model)
    llm.engine.eos_token_ids = frozenset(range(0, 160, 4))
    prompts = [{"prompt_token_ids": list(range(5, 30))}, {"prompt_token_ids": [8, 9]}]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=6))
    for output in outputs:
        assert output.beams[0].finish_reason in ("stop", "length")
        for beam in output.beams:
            ends = [t % 4 == 0 for t in beam.token_ids]
            assert ends[-1] == (beam.finish_reason == "stop") and not any(ends[:-1])
    assert llm.stats().prefix_hit_tokens > 0
    with pytest.raises(RequestError, match="beam_width must be between 1 and 10"):
        BeamSearchParams(beam_width=11, max_tokens=1)
