"""Streamed text: whole characters, stop strings that never leak, nothing lost at the end."""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from paged_jax.checkpoint.gguf_tokenizer import build_tokenizer
from paged_jax.detokenizer import Detokenizer
from paged_jax.stop_strings import StopStrings
from paged_jax.tokenizer import Tokenizer
from scheduler import SamplingParams
from tests.tiny_gguf import byte_level_metadata, sentencepiece_metadata, trained_byte_level

PIECES = ["▁Hello", "▁world", "▁", "!", "▁!", "▁a", "ab", "b", "▁▁"]
SENTENCEPIECE = Tokenizer(
    build_tokenizer(sentencepiece_metadata({piece: -float(i) for i, piece in enumerate(PIECES)}))
)
BYTE_LEVEL = Tokenizer(build_tokenizer(byte_level_metadata(trained_byte_level("gpt-2"), "gpt-2")))


def byte_ids(text: str) -> list[int]:
    """Ids of the single bytes of a text, one token each."""
    words = BYTE_LEVEL.backend.pre_tokenizer.pre_tokenize_str(text)
    return [BYTE_LEVEL.backend.token_to_id(letter) for word, _ in words for letter in word]


def piece_ids(*pieces: str) -> list[int]:
    return [SENTENCEPIECE.backend.token_to_id(piece) for piece in pieces]


def strings_as_tokens(*texts: str) -> tuple[Tokenizer, list[int]]:
    """A tokenizer whose tokens are these texts, and their ids in this order."""
    vocabulary = {text: i for i, text in enumerate(dict.fromkeys(("x", *texts)))}
    backend = Backend(models.WordLevel(vocabulary, unk_token="x"))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend), [vocabulary[text] for text in texts]


class Result:
    """What a detokenizer says about tokens that come one at a time, or in the pieces given."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        ids: Sequence[int],
        *,
        sizes: Sequence[int] | None = None,
        **params: object,
    ):
        detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
        self.deltas: list[str] = []
        ends = list(accumulate(sizes)) if sizes is not None else range(1, len(ids) + 1)
        begin = 0
        for end in [*ends, len(ids)]:
            self.deltas.append(detokenizer.push(ids[begin:end]))
            begin = max(begin, end)
            assert detokenizer.text == "".join(self.deltas)
        self.before_finish = detokenizer.text
        self.deltas.append(detokenizer.finish())
        self.text = "".join(self.deltas)
        self.stop_reason = detokenizer.stop_reason
        assert detokenizer.text == self.text
        assert detokenizer.finish() == ""
        assert detokenizer.text == self.text


# Whole characters


@pytest.mark.parametrize("text", ["🎉", "中", "a🎉b中文c", "é🎉\n", "👩‍👩‍👧‍👦 family"])
def test_a46_a_character_over_several_tokens_comes_whole(text):
    ids = byte_ids(text)
    assert len(ids) == len(text.encode())
    result = Result(BYTE_LEVEL, ids)
    assert result.text == result.before_finish == text
    assert "\ufffd" not in result.text
    assert [delta for delta in result.deltas if delta] == list(text)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a46_a_character_that_was_cut_off_is_one_mark(cut):
    result = Result(BYTE_LEVEL, byte_ids("a🎉")[: 1 + cut])
    assert result.before_finish == "a"
    assert result.text == "a\ufffd"
    fallback = [3 + byte for byte in "🎉".encode()[:cut]]
    assert Result(SENTENCEPIECE, fallback).text == "\ufffd"


def test_malformed_bytes_do_not_pile_up():
    """A model that writes malformed bytes for ever is shown as it goes."""
    ids = byte_ids("中")[1:2] * 1000
    result = Result(BYTE_LEVEL, ids)
    assert len(result.before_finish) >= 999
    assert result.text == "\ufffd" * 1000


def test_a49_spaces_between_sentencepiece_tokens_stay():
    result = Result(SENTENCEPIECE, piece_ids("▁Hello", "▁world", "▁!"))
    assert result.deltas[:3] == ["Hello", " world", " !"]
    assert result.text == "Hello world !"


def test_a_continuation_keeps_its_space():
    prompt = [1, *piece_ids("▁Hello")]
    detokenizer = Detokenizer(SENTENCEPIECE, SamplingParams(), prompt_token_ids=prompt)
    assert detokenizer.push(piece_ids("▁world")) == " world"


def test_special_tokens_are_left_out_or_not():
    ids = BYTE_LEVEL.encode("<|s|>a<|e|>")
    assert Result(BYTE_LEVEL, ids).text == "a"
    assert Result(BYTE_LEVEL, ids, skip_special_tokens=False).text == "<|s|>a<|e|>"


# Stop strings


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "reason"),
    [
        (["Hi", "\nUser", ":", " x"], ["\nUser:"], "Hi", "\nUser:"),
        (["ab", "abXYcd", "e"], ["XY"], "abab", "XY"),
        (["hello ", "ZZ"], ["ZZZZ"], "hello ZZ", None),
        (["hello ", "ZZ", "Z", "z"], ["ZZZZ"], "hello ZZZz", None),
        (["a", "aa", "ab"], ["aab"], "aa", "aab"),
        (["x", "abc"], ["abc", "ab"], "x", "ab"),
        (["x", "a", "b", "c"], ["abc", "ab"], "x", "ab"),
        (["xab", "c"], ["abc", "bc"], "x", "abc"),
        (["xabd"], ["abcd", "b"], "xa", "b"),
        (["xabcd"], ["bc", "abcde", "cd"], "xa", "bc"),
        (["ab"], ["ab"], "", "ab"),
        (["aXb", "Xc"], ["X"], "a", "X"),
        (["abab", "abc"], ["ababc"], "ab", "ababc"),
        (["一", "二三", "四"], ["三四"], "一二", "三四"),
    ],
)
def test_a47_stop_strings(tokens, stop, text, reason):
    tokenizer, ids = strings_as_tokens(*tokens)
    result = Result(tokenizer, ids, stop=stop)
    assert (result.text, result.stop_reason) == (text, reason)
    kept = Result(tokenizer, ids, stop=stop, include_stop_str_in_output=True)
    assert (kept.text, kept.stop_reason) == (text + (reason or ""), reason)
    at_once = Result(tokenizer, ids, stop=stop, sizes=[len(ids)])
    assert (at_once.text, at_once.stop_reason) == (text, reason)


def test_a47_nothing_that_may_still_be_a_stop_is_shown():
    tokenizer, ids = strings_as_tokens("Hi", "\nUs", "er", "!", "\n", "User:", "x")
    result = Result(tokenizer, ids, stop=["\nUser:"])
    assert result.deltas == ["Hi", "", "", "\nUser!", "", "", "", "", ""]
    assert result.stop_reason == "\nUser:"


def test_included_stops_are_shown_as_they_come():
    tokenizer, ids = strings_as_tokens("Hi", "\nUs", "er:x", "y")
    result = Result(tokenizer, ids, stop=["\nUser:"], include_stop_str_in_output=True)
    assert result.deltas[:4] == ["Hi", "\nUs", "er:", ""]


def test_a_stop_may_end_with_the_last_mark():
    result = Result(BYTE_LEVEL, byte_ids("a🎉")[:3], stop=["a\ufffd"])
    assert (result.text, result.stop_reason) == ("", "a\ufffd")


def test_a_stop_may_be_made_of_parts_of_characters_tokens():
    result = Result(BYTE_LEVEL, byte_ids("x🎉y🎉🎊z"), stop=["🎉🎊"])
    assert (result.text, result.stop_reason) == ("x🎉y", "🎉🎊")


# Against the plain definition, for whatever tokens and stops


def ended(text: str, stops: Sequence[str], *, included: bool) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first; of several there, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if included else end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text(st.sampled_from("ab \ufffd!中"), min_size=1, max_size=4), max_size=5)
SIZES = st.lists(st.integers(0, 4), max_size=20)
PARTS = {
    "byte-level": (
        BYTE_LEVEL,
        st.one_of(
            st.integers(0, BYTE_LEVEL.vocab_size + 2),
            st.sampled_from(byte_ids("ab! 中🎉")),
        ),
    ),
    "sentencepiece": (
        SENTENCEPIECE,
        st.one_of(
            st.integers(0, SENTENCEPIECE.vocab_size + 2),
            st.integers(259, SENTENCEPIECE.vocab_size - 1),
            st.sampled_from([3 + byte for byte in "ab! 中🎉".encode()]),
        ),
    ),
}


@pytest.mark.parametrize("kind", PARTS)
@settings(max_examples=300)
@given(data=st.data(), stops=STOPS, sizes=SIZES, included=st.booleans(), skip=st.booleans())
def test_a48_the_joined_stream_is_the_whole_text_up_to_its_stop(
    kind, data, stops, sizes, included, skip
):
    tokenizer, token = PARTS[kind]
    ids = data.draw(st.lists(token, max_size=20))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    result = Result(
        tokenizer,
        ids,
        sizes=sizes,
        stop=stops,
        include_stop_str_in_output=included,
        skip_special_tokens=skip,
    )
    assert (result.text, result.stop_reason) == ended(whole, stops, included=included)


@settings(max_examples=500)
@given(
    pieces=st.lists(st.text(st.sampled_from("ab"), max_size=3), max_size=12),
    stops=st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=5), min_size=1, max_size=6),
)
@example(pieces=["aab"], stops=["ab", "aaa"])
@example(pieces=["abaab"], stops=["abaaa", "baab"])
def test_what_is_held_back_is_what_may_become_a_stop(pieces, stops):
    finder = StopStrings(stops)
    text = ""
    for piece in pieces:
        match = finder.feed(piece)
        expected = ended(text + piece, stops, included=True)
        if match is not None:
            num_read, stop = match
            assert (text + piece[:num_read], stop) == expected
            return
        text += piece
        assert expected == (text, None)
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max(len(start) for start in beginnings if text.endswith(start))
        assert finder.num_held == held


def best_seconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        run()
        seconds.append(time.process_time() - begin)
    return min(seconds)


def test_the_cost_of_a_token_does_not_grow_with_the_text():
    """Ten times the tokens take about ten times as long; searching all again takes a hundred."""
    stops = ["a" * 500 + "b", "never"]
    ids = byte_ids("a") * 30_000

    def run(num_tokens: int) -> None:
        detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=stops))
        for token_id in ids[:num_tokens]:
            detokenizer.push([token_id])

    run(100)
    assert best_seconds(lambda: run(30_000)) < 30 * best_seconds(lambda: run(3_000))
