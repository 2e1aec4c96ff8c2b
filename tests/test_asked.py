"""What a request may ask of its tokens, through the engine: alone, beside others, preempted."""

import json
import re

import numpy as np
import pytest

from paged_jax import Engine, EngineConfig, RequestError, SamplingParams
from paged_jax.models import load_model
from paged_jax.progress import SilentProgress
from scheduler import FinishReason, StructuredOutputs, derive_seed
from tests.dense_decoding import DenseDecoder
from tests.engine_runs import Run, Sample, assert_idle, run_all
from tests.tiny_models import write_tiny_llama
from tests.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

LENGTH = 96
BLOCK = 8
PROMPT = [40, 41, 42, 43, 44]
PROMPTS = [[40 + i, 7, 9, 11, 20 + i] * (i + 1) for i in range(6)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_tiny_llama(path, vocab_size=VOCAB_SIZE)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def programs() -> dict:
    return {}


def make_engine(directory, programs, **fields) -> Engine:
    """Engines of a size share what they compile."""
    sizes = {
        "max_model_len": LENGTH,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": BLOCK,
        "num_blocks": 19,
    }
    config = EngineConfig(model=str(directory), **{**sizes, **fields})
    engine = Engine.from_pretrained(config, progress=SilentProgress())
    runner = engine.runner
    runner._patient = False  # sizes must not depend on what is compiled already
    runner._compiled = programs.setdefault((runner.specs, runner.buckets), {})
    return engine


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no-overlap"])
def engine(request, directory, programs):
    """Its pool holds 144 tokens, which four requests outgrow."""
    engine = make_engine(directory, programs, overlap=request.param)
    yield engine
    assert_idle(engine)
    engine.close()


@pytest.fixture(scope="module")
def decoder(directory):
    return DenseDecoder(load_model(directory, dtype="float32"), LENGTH)


def greedy(max_tokens: int = 12, **fields) -> SamplingParams:
    fields = {"temperature": 0.0, "ignore_eos": "structured_outputs" not in fields, **fields}
    return SamplingParams(max_tokens=max_tokens, **fields)


def sampled(max_tokens: int = 12, **fields) -> SamplingParams:
    return greedy(max_tokens, **{"temperature": 1.0, "seed": 1, **fields})


def one(engine, params, prompt=PROMPT) -> Sample:
    return run_all(engine, {"a": (prompt, params)})["a", 0]


def text_of(engine, sample: Sample) -> str:
    """Without the token that ended it."""
    ended = sample.finish_reason == "stop"
    return engine.tokenizer.decode(sample.token_ids[: -1 if ended else None])


# Biases and masks


def test_a38_a_bias_of_100_decides_and_ids_outside_the_vocabulary_are_refused(engine):
    plain = one(engine, greedy(3)).token_ids
    (first,) = one(engine, greedy(1, logprobs=2)).logprobs
    best, runner_up = first.top
    assert one(engine, greedy(1, logit_bias={best: -100})).token_ids == [runner_up]
    assert one(engine, greedy(4, logit_bias={"200": 100.0})).token_ids == [200] * 4
    for bias in ({VOCAB_SIZE: 1}, {-1: 1}, {"abc": 1}, {5: 101}, {5: 1e9}):
        with pytest.raises(RequestError) as refused:
            one(engine, greedy(logit_bias=bias))
        assert refused.value.param == "logit_bias"
    assert one(engine, greedy(3)).token_ids == plain


def test_a_bias_gives_the_tokens_of_the_plain_model_with_it(engine, decoder):
    bias = {17: 3.0, 90: -5.0, 250: 2.5}
    token_ids = list(PROMPT)
    for token in one(engine, greedy(20, logit_bias=bias)).token_ids:
        scores = decoder.logprobs(token_ids).copy()
        for biased, value in bias.items():
            scores[biased] += value
        assert scores[token] > scores.max() - 1e-3
        token_ids.append(token)


def test_allowed_token_ids_are_all_that_is_drawn(engine):
    allowed = [3, 64, 65, 127, VOCAB_SIZE - 1]
    for params in (greedy(30, allowed_token_ids=allowed), sampled(30, allowed_token_ids=allowed)):
        assert set(one(engine, params).token_ids) <= set(allowed)
    hot = sampled(80, allowed_token_ids=allowed, temperature=20.0)
    assert set(one(engine, hot).token_ids) == set(allowed)
    with pytest.raises(RequestError, match=f"allowed_token_ids holds {VOCAB_SIZE}"):
        one(engine, greedy(allowed_token_ids=[VOCAB_SIZE]))


@pytest.mark.parametrize("has_eos", [True, False])
def test_a39_min_tokens_holds_back_every_end(engine, has_eos, monkeypatch):
    monkeypatch.setattr(engine, "eos_token_ids", frozenset({1, 2}) if has_eos else frozenset())
    fields = {"temperature": 0.0, "max_tokens": 9, "min_tokens": 3, "stop_token_ids": [3]}
    bias = {1: 100, 2: 90, 3: 80, 4: 50}
    sample = one(engine, SamplingParams(logit_bias=bias, **fields))
    if has_eos:
        assert (sample.token_ids, sample.finish_reason) == ([4, 4, 4, 1], "stop")
    else:
        assert (sample.token_ids, sample.finish_reason) == ([1] * 9, "length")
    sample = one(engine, SamplingParams(logit_bias={3: 100, 4: 50}, **fields))
    assert (sample.token_ids, sample.stop_reason) == ([4, 4, 4, 3], 3)


def test_bad_words_never_come_whole(engine):
    plain = one(engine, greedy(30))
    pieces = [engine.tokenizer.decode([token]) for token in plain.token_ids]
    printable = [piece.isascii() and piece.isprintable() and bool(piece) for piece in pieces]
    pair = next(pieces[i] + pieces[i + 1] for i in range(29) if printable[i] and printable[i + 1])
    for word in (pair, pieces[printable.index(True)]):
        assert word in text_of(engine, plain)
        samples = run_all(
            engine,
            {"a": (PROMPT, greedy(30, bad_words=[word])), "b": (PROMPT, greedy(30))},
        )
        assert word not in text_of(engine, samples["a", 0])
        assert len(samples["a", 0].token_ids) == 30
        assert samples["b", 0] == plain
    with pytest.raises(RequestError) as refused:
        one(engine, greedy(bad_words=["\ud800"]))
    assert refused.value.param == "bad_words"


def test_rules_that_leave_nothing_give_way(engine):
    """First the words that are bad and the end that is too early, then what is allowed."""
    word = engine.tokenizer.decode([70])
    assert one(engine, sampled(6, allowed_token_ids=[70], bad_words=[word])).token_ids == [70] * 6
    ab = {"structured_outputs": {"choice": ["ab"]}}
    for fields in ({"min_tokens": 6}, {"allowed_token_ids": [70]}, {"bad_words": ["b"]}):
        sample = one(engine, greedy(6, **fields, **ab))
        assert (text_of(engine, sample), sample.finish_reason) == ("ab", "stop")
        assert sample.token_ids[-1] in engine.eos_token_ids


# Neighbours

MIX = {
    "greedy": greedy(),
    "drawn": sampled(seed=5),
    "filtered": sampled(seed=6, top_k=5, top_p=0.9, min_p=0.01),
    "penalized": sampled(seed=7, frequency_penalty=1.0, repetition_penalty=1.2),
    "biased": sampled(seed=8, logit_bias={9: 2.0, 100: -3.0}),
    "scored": sampled(seed=9, logprobs=3),
    "processed": sampled(seed=10, logprobs=3, logprobs_mode="processed", top_k=4),
    "shaped": sampled(seed=11, structured_outputs={"regex": "[a-z]{12}"}),
    "allowed": sampled(seed=12, allowed_token_ids=list(range(50, 90))),
    "bad words": sampled(seed=13, bad_words=["ab", "c"]),
    "late": sampled(seed=14, min_tokens=12, stop_token_ids=list(range(0, 256))),
}


def test_a41_a_row_gets_its_own_sampler_whoever_is_beside_it(engine):
    alone = {name: one(engine, params) for name, params in MIX.items()}
    assert len({tuple(sample.token_ids) for sample in alone.values()}) == len(MIX)
    names = list(MIX)
    for shift in (1, 4):
        order = names[shift:] + names[:shift]
        samples = run_all(engine, {name: (PROMPT, MIX[name]) for name in order})
        for name in names:
            got, want = samples[name, 0], alone[name]
            assert got.token_ids == want.token_ids, name
            for a, b in zip(got.logprobs, want.logprobs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_a_row_is_the_same_to_the_bit_beside_others_of_its_bucket(engine):
    """Four prompts of one length, so that every step has the same size."""
    prompts = [[60 + i, *PROMPT] for i in range(4)]

    def logprobs(neighbours):
        engine.scheduler.forget_prefixes()
        jobs = {"row": (prompts[0], sampled(logprobs=2))}
        for i, fields in enumerate(neighbours, start=1):
            jobs[f"n{i}"] = (prompts[i], sampled(seed=i, logprobs=1, **fields))
        sample = run_all(engine, jobs)["row", 0]
        return [(e.token_id, e.logprob, tuple(e.top.items())) for e in sample.logprobs]

    plain = logprobs([{}, {}, {}])
    assert logprobs([{"frequency_penalty": 1.0}, {"logit_bias": {9: 2.0}}, {"top_k": 3}]) == plain
    assert logprobs([{"allowed_token_ids": [5, 6]}, {"temperature": 0.0}, {"n": 1}]) == plain


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"allowed_token_ids": [5, 6, 7]}])
def test_a40_a_row_of_nan_ends_its_request_and_no_other(engine, fields, monkeypatch):
    """Also where a mask would have hidden it."""
    jobs = {
        "before": (PROMPTS[0], greedy(8)),
        "broken": (PROMPTS[1], greedy(8, **fields)),
        "after": (PROMPTS[2], sampled(8)),
    }
    want = run_all(engine, jobs)
    run, forward = Run(engine), engine.runner.forward
    for request_id, job in jobs.items():
        run.add(request_id, *job)

    def break_third_token(batch, sizes):
        hidden, captured = forward(batch, sizes)
        rows = [s.row for s in engine.scheduler.running if s.request.request_id == "broken"]
        for i in np.flatnonzero(np.isin(batch.sample_rows, rows)):
            if batch.sampling.positions[i] == len(PROMPTS[1]) + 2:
                broken = hidden.sampled.at[int(i)].set(np.nan)
                hidden = hidden._replace(sampled=broken)
        return hidden, captured

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", break_third_token)
        run.drain()
    assert_idle(engine)
    broken = run.samples["broken", 0]
    assert broken.token_ids == want["broken", 0].token_ids[:2]
    assert broken.finish_reason == FinishReason.ERROR
    for name in ("before", "after"):
        assert run.samples[name, 0] == want[name, 0]
    again = run_all(engine, jobs)
    assert {k: s.token_ids for k, s in again.items()} == {k: s.token_ids for k, s in want.items()}


# Log-probabilities


def test_a43_processed_logprobs_are_of_what_was_drawn_from(engine, decoder):
    fields = {"temperature": 0.7, "top_k": 3, "logit_bias": {5: 1.0}}
    sample = one(engine, sampled(logprobs=5, logprobs_mode="processed", **fields))
    token_ids = list(PROMPT)
    for token, entry in zip(sample.token_ids, sample.logprobs, strict=True):
        scores = decoder.logprobs(token_ids).copy()
        scores[5] += 1.0
        best = np.argsort(-scores)[:3]
        want = scores[best] / 0.7
        want -= np.log(np.exp(want).sum())
        assert list(entry.top) == best.tolist()
        np.testing.assert_allclose(list(entry.top.values()), want, atol=1e-3)
        assert entry.top[token] == entry.logprob
        token_ids.append(token)
    raw = one(engine, sampled(logprobs=5, **fields))
    assert raw.token_ids == sample.token_ids
    assert all(len(entry.top) == 5 for entry in raw.logprobs)
    (first,) = one(engine, greedy(1, logprobs=2, logprobs_mode="processed")).logprobs
    assert first.logprob == pytest.approx(decoder.logprobs(PROMPT).max(), abs=1e-3)


def scores_of(engine, prompt, params):
    """The prompt's log-probabilities and the sample."""
    run, found = Run(engine), []
    run.add("a", prompt, params)
    while engine.has_unfinished:
        found += [u.prompt_logprobs for u in run.step() if u.prompt_logprobs is not None]
    assert_idle(engine)
    (scores,) = found
    return scores, run.samples["a", 0]


def check_scores(scores, prompt, num_top, decoder) -> None:
    assert len(scores) == len(prompt)
    assert scores[0] is None
    for position, entry in enumerate(scores[1:], start=1):
        want = decoder.logprobs(prompt[:position])
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(want[prompt[position]], abs=1e-3)
        best = np.sort(want)[::-1][:num_top]
        np.testing.assert_allclose(list(entry.top.values()), best, atol=1e-3)


@pytest.mark.parametrize("batched", [1, 7, 16, 33])
def test_a45_prompt_logprobs_whatever_the_chunks_and_the_cache(
    batched, directory, programs, decoder
):
    prompt = np.random.default_rng(1).integers(3, 250, 33).tolist()
    sizes = {"max_num_batched_tokens": batched, "max_num_seqs": min(batched, 4)}
    engine = make_engine(directory, programs, block_size=16, **sizes)
    for _ in range(2):  # cold and warm
        scores, sample = scores_of(engine, prompt, greedy(3, prompt_logprobs=1))
        check_scores(scores, prompt, 1, decoder)
        assert len(sample.token_ids) == 3
    before = engine.stats().prefix_hit_tokens
    assert one(engine, greedy(3), prompt) == sample  # what was scored is in the cache
    assert engine.stats().prefix_hit_tokens == before + 32
    engine.close()


def test_prompt_logprobs_survive_preemption_and_come_once(engine, decoder):
    jobs = {f"r{i}": (p, sampled(40, prompt_logprobs=2, n=2)) for i, p in enumerate(PROMPTS)}
    before = engine.stats().preemptions
    run, found = Run(engine), {}
    for request_id, (prompt, params) in jobs.items():
        run.add(request_id, prompt, params)
    while engine.has_unfinished:
        for update in run.step():
            if update.prompt_logprobs is not None:
                request_id = update.sequence.request.request_id
                assert request_id not in found
                found[request_id] = update.prompt_logprobs
    assert_idle(engine)
    assert engine.stats().preemptions > before
    for request_id, (prompt, _) in jobs.items():
        check_scores(found[request_id], prompt, 2, decoder)


def test_a15_a21_a_prompt_that_fills_the_model_is_scored_without_a_token(engine, decoder):
    for length in (1, LENGTH - 1, LENGTH):
        prompt = np.random.default_rng(length).integers(3, 250, length).tolist()
        scores, sample = scores_of(engine, prompt, greedy(0, prompt_logprobs=0))
        assert sample == Sample([], "length")
        check_scores(scores, prompt, 0, decoder)
    assert one(engine, greedy(0)) == Sample([], "length")
    assert len(one(engine, greedy(1)).token_ids) == 1
    with pytest.raises(RequestError):
        one(engine, greedy(0, prompt_logprobs=0), [5] * (LENGTH + 1))


def test_an_aborted_request_leaves_no_scores_or_rules_behind(engine):
    run = Run(engine)
    run.add("a", PROMPTS[5], greedy(30, prompt_logprobs=1, min_tokens=3))
    run.step()
    assert engine._asked.scores and engine._asked.rules
    engine.abort("a")
    run.step()
    run.drain()
    assert not engine._asked.scores and not engine._asked.rules


# Structured output

OBJECT = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 5},
        "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = {
    "regex": ({"regex": "(ab|cd){3}x"}, re.compile("(ab|cd){3}x").fullmatch),
    "choice": ({"choice": ["yes", 'no "\n']}, {"yes", 'no "\n'}.__contains__),
    "gbnf": ({"grammar": 'root ::= "(" root ")" | "x"'}, re.compile(r"\(*x\)*").fullmatch),
    "lark": ({"grammar": 'start: "a" start "b" | "c"'}, re.compile("a*cb*").fullmatch),
    "json": ({"json": OBJECT}, lambda text: set(json.loads(text)) == {"a", "b"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_text_has_the_form_that_was_asked_for(engine, form):
    fields, fits = FORMS[form]
    jobs = {
        f"r{seed}": (PROMPT, sampled(70, seed=seed, structured_outputs=fields)) for seed in range(6)
    }
    samples = run_all(engine, {**jobs, "plain": (PROMPT, greedy(20))})
    assert samples.pop(("plain", 0)) == one(engine, greedy(20))
    ended = [sample for sample in samples.values() if sample.finish_reason == "stop"]
    assert len(ended) >= (6 if form in ("regex", "choice") else 1)
    for sample in ended:
        assert fits(text_of(engine, sample)), text_of(engine, sample)


def test_a_form_holds_for_every_sample_and_through_preemption(engine):
    """Each sample equals a request of its own, whoever shares its batch and its blocks."""
    fields = {"structured_outputs": {"regex": "([a-z]{3} ){4}[0-9]{20}.*"}}
    own = [one(engine, sampled(60, seed=derive_seed(3, i), **fields), PROMPTS[2]) for i in range(3)]
    params = sampled(60, n=3, seed=3, **fields)
    before = engine.stats()
    jobs = {"a": (PROMPTS[2], params), "b": (PROMPTS[3], params), "c": (PROMPTS[4], sampled(60))}
    samples = run_all(engine, jobs)
    after = engine.stats()
    assert after.preemptions > before.preemptions
    assert after.prefix_hit_tokens > before.prefix_hit_tokens
    for i in range(3):
        assert samples["a", i] == own[i]
        assert re.match("([a-z]{3} ){4}[0-9]{20}", text_of(engine, own[i]))


def test_a_form_ends_with_its_text(engine):
    sample = one(engine, greedy(20, structured_outputs={"choice": ["abc"]}))
    assert (text_of(engine, sample), sample.finish_reason) == ("abc", "stop")
    short = one(engine, greedy(2, structured_outputs={"choice": ["abc"]}))
    assert (text_of(engine, short), short.finish_reason) == ("ab", "length")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "("}, "structured_outputs.regex"),
        ({"json": {"type": "strung"}}, "structured_outputs.json"),
        ({"grammar": "start: ("}, "structured_outputs.grammar"),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar"),
    ],
)
def test_what_is_no_form_is_refused_before_anything_runs(engine, fields, param):
    before = engine.stats().num_requests
    with pytest.raises(RequestError) as refused:
        one(engine, greedy(structured_outputs=fields))
    assert refused.value.param == param
    assert engine.stats().num_requests == before


def test_a_form_needs_an_end_to_come_to(engine):
    with pytest.raises(RequestError, match="ignore_eos"):
        one(engine, greedy(structured_outputs={"regex": "a"}, ignore_eos=True))


class Lost:
    """A form that cannot be followed."""

    def advance(self, token_ids):
        return False

    def mask(self):
        return np.full(VOCAB_SIZE // 32, -1, np.int32)


def test_a_form_that_cannot_be_followed_ends_its_own_request_only(engine, caplog):
    want = one(engine, greedy(20))
    run = Run(engine)
    run.add("lost", PROMPT, greedy(structured_outputs={"regex": "a{9}"}))
    run.add("well", PROMPT, greedy(20))
    engine._asked.rules["lost"]._form = (Lost(),)
    run.drain()
    assert_idle(engine)
    lost = run.samples["lost", 0]
    assert (len(lost.token_ids), lost.finish_reason) == (1, FinishReason.ERROR)
    assert run.samples["well", 0] == want
    assert "its grammar is too hard to follow" in caplog.text
    assert engine.stats().blocks_cached > 0


def test_compiled_forms_are_kept(engine):
    compiler = engine._grammar_compiler()
    form = compiler.compile(StructuredOutputs(regex="kept{3}"))
    assert compiler.compile(StructuredOutputs(regex="kept{3}")) is form
    for i in range(70):
        compiler.compile(StructuredOutputs(choice=[f"{i}"]))
    assert len(compiler._kept) == 64
