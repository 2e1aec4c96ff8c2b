"""The engine called from Python: prompts in, results in their order, text as it should end."""

import io
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from paged_jax import LLM, ModelNotFoundError, RequestError, SamplingParams
from paged_jax.progress import ConsoleProgress, SilentProgress
from scheduler import derive_seed
from tests.engine_runs import Run, assert_idle
from tests.tiny_models import write_tiny_llama
from tests.tiny_tokenizer import BOS, END, VOCAB_SIZE, write_scripted_llama, write_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["the", "other thing", "a third one, longer than a block", "4"]
SMALL = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "num_blocks": 65,
}


class Recorded:
    """A progress that remembers."""

    def __init__(self):
        self.lines: list[str] = []
        self.tracked: list[tuple[str, int, str, list[int]]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def track(self, text: str, total: int, *, unit: str = ""):
        amounts: list[int] = []
        self.tracked.append((text, total, unit, amounts))
        yield amounts.append


@pytest.fixture(scope="module")
def progress() -> Recorded:
    return Recorded()


@pytest.fixture(scope="module")
def random_llm(tmp_path_factory, progress) -> LLM:
    """Random weights: every prompt has an answer of its own."""
    directory = tmp_path_factory.mktemp("random")
    write_tiny_llama(directory, vocab_size=VOCAB_SIZE)
    write_tokenizer(directory)
    recommended = {"temperature": 0.5, "top_k": 7, "eos_token_id": [5, 9]}
    (directory / "generation_config.json").write_text(json.dumps(recommended))
    return LLM(str(directory), progress=progress, **SMALL)


@pytest.fixture(scope="module")
def scripted_llm(tmp_path_factory) -> LLM:
    """What it says follows from the last token of the prompt: see `write_scripted_llama`."""
    directory = tmp_path_factory.mktemp("scripted")
    scripts = [
        [b"h", "😀".encode(), b"i", "你".encode(), b"!"],
        ["Q?", "\nUser", b":", " x", " tail"],
        ["XY?", "abXYcd", "ef"],
        ["H?", "hello", " ZZ"],
        ["P?", "one", " two", " three", " four"],
    ]
    write_scripted_llama(directory, scripts)
    return LLM(str(directory), progress=SilentProgress(), **SMALL)


@pytest.fixture
def llm(random_llm) -> Iterator[LLM]:
    yield random_llm
    assert_idle(random_llm.engine)


@pytest.fixture
def scripted(scripted_llm) -> Iterator[LLM]:
    yield scripted_llm
    assert_idle(scripted_llm.engine)


def texts(results) -> list[str]:
    return [result.outputs[0].text for result in results]


def alone(llm: LLM, prompt: str, params: SamplingParams = GREEDY) -> str:
    """The text of the engine's own tokens."""
    run = Run(llm.engine)
    run.add("alone", llm.tokenizer.encode(prompt), params)
    run.drain()
    return llm.tokenizer.decode(run.tokens("alone"))


# Prompts and parameters


def test_every_kind_of_prompt(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    (want,) = texts(llm.generate(PROMPTS[0], GREEDY))
    assert want == alone(llm, PROMPTS[0])
    kinds = [
        PROMPTS[0],
        {"prompt": PROMPTS[0]},
        {"prompt_token_ids": ids},
        ids,
        tuple(ids),
        np.array(ids).tolist(),
        list(np.array(ids)),
    ]
    for kind in kinds:
        assert texts(llm.generate(kind, GREEDY)) == [want], kind
        assert texts(llm.generate([kind], GREEDY)) == [want], kind
    results = llm.generate(kinds, GREEDY)
    assert texts(results) == [want] * len(kinds)
    assert [result.prompt for result in results] == [PROMPTS[0]] * 2 + [None] * 5
    assert {result.prompt_token_ids for result in results} == {tuple(ids)}


def test_results_come_in_the_order_of_the_prompts_whoever_ends_first(llm):
    want = [alone(llm, prompt) for prompt in PROMPTS]
    assert len(set(want)) == len(want)
    for order in itertools.permutations(range(4)):
        params = [
            SamplingParams(temperature=0.0, max_tokens=3 * i + 1, ignore_eos=True) for i in order
        ]
        results = llm.generate([PROMPTS[i] for i in order], params)
        for i, result in zip(order, results, strict=True):
            assert result.prompt == PROMPTS[i]
            (output,) = result.outputs
            assert (output.index, len(output.token_ids)) == (0, 3 * i + 1)
            assert llm.tokenizer.decode(output.token_ids) == output.text
            assert result.finished and output.finish_reason == "length"
            assert result.num_generated_tokens == 3 * i + 1


def test_a28_a_second_call_starts_afresh(llm):
    first, second = PROMPTS[:3], [PROMPTS[3], PROMPTS[0], "new"]
    want = {prompt: alone(llm, prompt) for prompt in {*first, *second}}
    ids = set()
    for prompts in (first, second, first):
        results = llm.generate(prompts, GREEDY)
        assert [result.prompt for result in results] == prompts
        assert texts(results) == [want[prompt] for prompt in prompts]
        ids |= {result.request_id for result in results}
        assert_idle(llm.engine)
    assert len(ids) == 9


def test_more_prompts_than_rows(llm):
    prompts = [f"{i} of many" for i in range(20)]
    assert texts(llm.generate(prompts, GREEDY)) == [alone(llm, prompt) for prompt in prompts]


def test_no_prompts_no_results(llm):
    assert llm.generate([], GREEDY) == []


def test_the_models_recommendation_is_the_default(llm):
    default = llm.default_sampling_params()
    assert default == SamplingParams(temperature=0.5, top_k=7)
    assert len(llm.generate("the")[0].outputs[0].token_ids) <= 16
    assert llm.engine.eos_token_ids == {5, 9, llm.tokenizer.backend.token_to_id(END)}


def test_samples_are_those_of_requests_with_derived_seeds(llm):
    params = SamplingParams(seed=9, max_tokens=10, n=3, ignore_eos=True)
    (result,) = llm.generate(PROMPTS[1], params)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert len({output.text for output in result.outputs}) == 3
    for index, output in enumerate(result.outputs):
        single = SamplingParams(seed=derive_seed(9, index), max_tokens=10, ignore_eos=True)
        assert texts(llm.generate(PROMPTS[1], single)) == [output.text]
    assert result.num_generated_tokens == 30


def test_a_seed_repeats_and_its_absence_does_not(llm):
    seeded, unseeded = (SamplingParams(seed=s, max_tokens=10, ignore_eos=True) for s in (4, None))
    assert texts(llm.generate(["the"] * 4, seeded)) == texts(llm.generate("the", seeded)) * 4
    told = texts(llm.generate(["the"] * 4, unseeded)) + texts(llm.generate("the", unseeded))
    assert len(set(told)) == 5


# Refusals


@contextmanager
def nothing_starts(llm: LLM) -> Iterator[None]:
    """No request is taken in, not even for a moment."""
    before = llm.stats()
    yield
    assert_idle(llm.engine)
    llm.engine.step()  # figures are of the last step
    assert llm.stats() == before


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ([], "prompt"),
        ("x" * 200, "prompt"),
        ({"text": "x"}, "prompt"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "prompt"),
        ({}, "prompt"),
        (3.5, "prompt"),
        (None, "prompt"),
        (b"bytes", "prompt"),
        ([VOCAB_SIZE], "prompt"),
        ([True, False], "prompt"),
        ([[1, 2], [3]], "prompt"),
        ({"prompt_token_ids": "12"}, "prompt"),
        ({"prompt_token_ids": 3}, "prompt"),
        ("\ud83d", "prompt"),
    ],
)
def test_one_bad_prompt_stops_all_before_any_is_started(llm, bad, param):
    with nothing_starts(llm), pytest.raises(RequestError) as caught:
        llm.generate([PROMPTS[0], bad, PROMPTS[1]], GREEDY)
    assert caught.value.param == param
    assert texts(llm.generate(PROMPTS[0], GREEDY)) == [alone(llm, PROMPTS[0])]


def test_parameters_must_be_as_many_as_the_prompts(llm):
    with nothing_starts(llm):
        with pytest.raises(RequestError, match="2 entries for 3 prompts") as caught:
            llm.generate(PROMPTS[:3], [GREEDY] * 2)
        assert caught.value.param == "sampling_params"
        with pytest.raises(RequestError, match="sampling_params"):
            llm.generate(PROMPTS[:2], [GREEDY, None])
        with pytest.raises(RequestError, match="sampling_params"):
            llm.generate(PROMPTS[0], {"temperature": 0.0})


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"), progress=SilentProgress())


# How a text ends


def told(llm: LLM, prompt: str, **fields):
    """The only output, greedy; streamed text must join to it."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **fields})
    (result,) = llm.generate(prompt, params)
    encoded = [(prompt, llm.tokenizer.encode(prompt))]
    seen = [output for _, output in llm.stream(encoded, [params])]
    for earlier, later in itertools.pairwise(seen):
        assert later.outputs[0].text.startswith(earlier.outputs[0].text)
    assert seen[-1].outputs == result.outputs
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    (output,) = result.outputs
    return output.text, output.finish_reason, output.stop_reason


def test_a46_characters_of_several_tokens(scripted):
    assert told(scripted, "h") == ("😀i你!", "stop", None)
    assert told(scripted, "h", max_tokens=4) == ("😀", "length", None)
    for cut in (1, 2, 3):
        assert told(scripted, "h", max_tokens=cut) == ("�", "length", None)
    assert told(scripted, "h", max_tokens=7) == ("😀i�", "length", None)


def test_a46_no_half_character_is_ever_shown(scripted):
    params = SamplingParams(temperature=0.0, max_tokens=20)
    stream = scripted.stream([("h", scripted.tokenizer.encode("h"))], [params])
    seen = [output.outputs[0].text for _, output in stream]
    assert seen == ["", "", "", "😀", "😀i", "😀i", "😀i", "😀i你", "😀i你!", "😀i你!"]


def test_a47_a_stop_string_over_several_tokens(scripted):
    assert told(scripted, "Q?") == ("\nUser: x tail", "stop", None)
    assert told(scripted, "Q?", stop=["\nUser:"]) == ("", "stop", "\nUser:")
    assert told(scripted, "Q?", stop="ser: x") == ("\nU", "stop", "ser: x")
    included = {"stop": ["ser: x"], "include_stop_str_in_output": True}
    assert told(scripted, "Q?", **included) == ("\nUser: x", "stop", "ser: x")


def test_a47_a_stop_string_inside_one_token(scripted):
    assert told(scripted, "XY?", stop=["XY"]) == ("ab", "stop", "XY")
    included = {"stop": ["XY"], "include_stop_str_in_output": True}
    assert told(scripted, "XY?", **included) == ("abXY", "stop", "XY")


def test_a47_of_stops_that_begin_alike_the_first_complete_one_wins(scripted):
    assert told(scripted, "P?", stop=["two three", "two"]) == ("one ", "stop", "two")
    assert told(scripted, "P?", stop=["two thx", "three f"]) == ("one two ", "stop", "three f")
    assert told(scripted, "P?", stop=["never"]) == ("one two three four", "stop", None)


@pytest.mark.parametrize(("max_tokens", "reason"), [(20, "stop"), (2, "length")])
def test_a48_what_was_held_back_comes_at_the_end(scripted, max_tokens, reason):
    got = told(scripted, "H?", stop=["ZZZZ"], max_tokens=max_tokens)
    assert got == ("hello ZZ", reason, None)


def test_a55_each_end_has_its_reason(scripted):
    two = scripted.tokenizer.backend.token_to_id(" two")
    end = scripted.tokenizer.backend.token_to_id(END)
    whole = "one two three four"
    assert told(scripted, "P?") == (whole, "stop", None)
    assert told(scripted, "P?", stop=["hre"]) == ("one two t", "stop", "hre")
    assert told(scripted, "P?", stop_token_ids=[two]) == ("one", "stop", two)
    assert told(scripted, "P?", max_tokens=3) == ("one two three", "length", None)
    assert told(scripted, "P?", max_tokens=None, ignore_eos=True) == (whole, "length", None)
    assert told(scripted, "P?", max_tokens=9, ignore_eos=True) == (whole, "length", None)
    assert told(scripted, "P?", stop_token_ids=[end]) == (whole, "stop", end)
    assert told(scripted, "P?", max_tokens=0) == ("", "length", None)
    # The end of a text and its last allowed token may fall together.
    assert told(scripted, "P?", max_tokens=5) == (whole, "stop", None)
    assert told(scripted, "P?", max_tokens=4, stop=["four"]) == ("one two three ", "stop", "four")


def test_a_stop_token_shows_only_where_it_is_asked_for(scripted):
    two = scripted.tokenizer.backend.token_to_id(" two")
    fields = {"stop_token_ids": [two], "include_stop_str_in_output": True}
    assert told(scripted, "P?", **fields) == ("one two", "stop", two)
    params = SamplingParams(temperature=0.0, stop_token_ids=[two])
    (result,) = scripted.generate("P?", params)
    assert result.outputs[0].token_ids[-1] == two  # it is a token of the output all the same


def test_special_tokens_show_only_where_they_are_asked_for(scripted):
    fields = {"ignore_eos": True, "max_tokens": 6}
    assert told(scripted, "P?", **fields)[0] == "one two three four"
    shown = told(scripted, "P?", skip_special_tokens=False, **fields)[0]
    assert shown == f"one two three four{END}{END}"
    assert told(scripted, "P?", skip_special_tokens=False)[0] == "one two three four"


def test_a_stop_string_ends_its_own_sample_only(scripted):
    """Stops come between the samples of one request, and between requests."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, stop=["two"], n=2),
        SamplingParams(temperature=0.0, max_tokens=20, n=2),
    ]
    first, second = scripted.generate(["P?", "P?"], params)
    assert [output.text for output in first.outputs] == ["one "] * 2
    assert [output.text for output in second.outputs] == ["one two three four"] * 2


def test_work_ends_at_a_stop_string(scripted):
    before = scripted.stats().generation_tokens
    scripted.generate("P?", SamplingParams(temperature=0.0, stop=["one"], max_tokens=100))
    assert scripted.stats().generation_tokens - before <= 2


def test_a_character_split_by_the_prompts_end_is_continued(llm):
    """What the tokens are is told in ids; the text begins at the first output token."""
    euro = "€".encode()
    prompt = [
        llm.tokenizer.encode("a")[-1],
        *map(int, llm.tokenizer.encode("€", add_special_tokens=False)[:2]),
    ]
    assert len(euro) == 3
    (result,) = llm.generate({"prompt_token_ids": prompt}, GREEDY)
    output = result.outputs[0]
    assert output.text == llm.tokenizer.decode(output.token_ids)


# Chat

USER = {"role": "user", "content": "the other"}
SYSTEM = {"role": "system", "content": "be brief"}


def test_a57_a_text_has_one_bos_and_a_chat_what_its_template_writes(llm):
    text = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nthe other<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    (result,) = llm.chat([SYSTEM, USER], GREEDY)
    assert result.prompt == text
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    assert list(result.prompt_token_ids) == ids == llm.tokenizer.encode_chat([SYSTEM, USER])
    assert texts([result]) == texts(llm.generate({"prompt_token_ids": ids}, GREEDY))
    bos = llm.tokenizer.bos_token_id
    assert bos not in ids
    for prompt in (text, f"{BOS}{text}"):
        (result,) = llm.generate(prompt, GREEDY)
        assert list(result.prompt_token_ids) == [bos, *ids]


def test_several_chats_come_in_their_order(llm):
    chats = [[USER], [SYSTEM, USER], [USER, {"role": "assistant", "content": "x"}, USER]]
    together = llm.chat(chats, GREEDY)
    assert texts(together) == [text for chat in chats for text in texts(llm.chat(chat, GREEDY))]
    assert len(set(texts(together))) == 3


def test_a_chat_may_go_on_with_its_last_message(llm):
    open_end = [USER, {"role": "assistant", "content": "I say"}]
    (result,) = llm.chat(open_end, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert result.prompt.endswith("<|im_start|>assistant\nI say")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "judge", "content": "x"}], "the role judge is not known"),
        ([[USER], []], "at least one message"),
        ([{"role": "user"}], "content is missing"),
        ([USER, "x"], r"messages\[1\] must be an object"),
    ],
)
def test_a56_what_a_template_refuses_starts_nothing(llm, messages, message):
    with nothing_starts(llm), pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY)


def test_without_a_tokenizer_there_are_tokens_and_no_text(random_llm):
    llm = LLM(
        random_llm.engine.config.model,
        skip_tokenizer_init=True,
        progress=SilentProgress(),
        **SMALL,
    )
    (want,) = random_llm.generate([7, 8, 9], GREEDY)
    (result,) = llm.generate([7, 8, 9], GREEDY)
    (output,) = result.outputs
    assert (output.text, output.token_ids) == ("", want.outputs[0].token_ids)
    with pytest.raises(RequestError, match="a text prompt needs a tokenizer"):
        llm.generate("the", GREEDY)
    with pytest.raises(RequestError, match="chat needs a tokenizer"):
        llm.chat([USER], GREEDY)
    assert_idle(llm.engine)


# Progress


def test_progress_counts_the_requests(llm, progress):
    del progress.lines[:], progress.tracked[:]
    llm.generate(PROMPTS, GREEDY)
    ((text, total, unit, amounts),) = progress.tracked
    assert (text, total, unit) == ("generating", 4, "requests")
    assert sum(amounts) == 4
    llm.generate(PROMPTS, GREEDY, use_progress=False)
    llm.chat([USER], GREEDY, use_progress=False)
    assert len(progress.tracked) == 1


def test_progress_of_a_start_says_what_takes_time(random_llm, tmp_path):
    out = io.StringIO()
    llm = LLM(random_llm.engine.config.model, progress=ConsoleProgress(out), **SMALL)
    llm.generate("the", GREEDY)
    lines = out.getvalue().splitlines()
    assert any("compiling: step of" in line for line in lines)
    assert lines[-1] == "generating" or "compiling" in lines[-1]
    assert "generating" in lines


# Streams


def encoded(llm: LLM, prompts: list[str]) -> list[tuple[str, list[int]]]:
    return [(prompt, llm.tokenizer.encode(prompt)) for prompt in prompts]


def test_a_stream_tells_whenever_a_request_gained_a_token(llm):
    want = llm.generate(PROMPTS, GREEDY)
    seen: dict[int, list] = {i: [] for i in range(4)}
    for i, output in llm.stream(encoded(llm, PROMPTS), [GREEDY] * 4):
        seen[i].append(output)
    for i, outputs in seen.items():
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == list(range(1, 13))
        assert outputs[-1].outputs == want[i].outputs
        assert len({output.request_id for output in outputs}) == 1


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_stream_that_is_left_early_is_aborted(llm, taken):
    engine = llm.engine
    stream = llm.stream(encoded(llm, PROMPTS), [GREEDY] * 4)
    for _ in range(taken):
        next(stream)
    assert engine.has_unfinished == bool(taken)
    stream.close()
    assert not engine.scheduler.requests
    for _ in range(2):
        engine.step()
    assert_idle(engine)
    assert texts(llm.generate(PROMPTS[0], GREEDY)) == [alone(llm, PROMPTS[0])]


def test_a_stream_that_is_left_does_not_disturb_the_next_call(llm):
    want = [alone(llm, prompt) for prompt in PROMPTS]
    stream = llm.stream(encoded(llm, PROMPTS), [GREEDY] * 4)
    next(stream)
    stream.close()
    assert texts(llm.generate(PROMPTS, GREEDY)) == want  # a step of the others is in flight


def test_a_stream_with_a_bad_request_leaves_nothing(llm):
    bad = [*encoded(llm, PROMPTS[:2]), (None, [VOCAB_SIZE])]
    with pytest.raises(RequestError, match=f"holds {VOCAB_SIZE}"):
        list(llm.stream(bad, [GREEDY] * 3))
    assert_idle(llm.engine)


def test_an_engine_that_fails_leaves_its_requests_aborted(llm, monkeypatch):
    def fail():
        raise RuntimeError("innards")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", fail)
        with pytest.raises(RuntimeError, match="innards"):
            llm.generate(PROMPTS, GREEDY)
    assert_idle(llm.engine)
    assert texts(llm.generate(PROMPTS[0], GREEDY)) == [alone(llm, PROMPTS[0])]
