"""Tokenizers from a model's folder: ids, text, special tokens, chats; nothing twice."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from paged_jax.checkpoint.gguf_tokenizer import build_tokenizer
from paged_jax.errors import ModelLoadError, RequestError
from paged_jax.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_gguf import sentencepiece_metadata, trained_byte_level

GOLDENS = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["cases"]
USER = {"role": "user", "content": "the dog"}
WITH_BOS = "{{ bos_token }}{% for m in messages %}<|s|>{{ m.content }}<|e|>{% endfor %}"

BYTE_LEVEL = trained_byte_level("smollm")
PIECES = ["▁", "▁Hello", "▁world", "Hello", "world", "!", "▁!", "▁▁", "é"]
SENTENCEPIECE = build_tokenizer(
    sentencepiece_metadata({piece: -float(i) for i, piece in enumerate(PIECES)})
)


def add_bos(backend: tokenizers.Tokenizer, bos: str) -> tokenizers.Tokenizer:
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=None, special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return copy


def write_folder(
    directory: Path, backend: tokenizers.Tokenizer = BYTE_LEVEL, **tokenizer_config: Any
) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|b|>", "eos_token": "<|e|>", **tokenizer_config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


# SmolLM2


@pytest.mark.smollm2
@pytest.mark.parametrize("case", GOLDENS, ids=lambda case: case["prompt"][:20])
def test_smollm2_tokens_and_text_are_those_of_the_reference(smollm2, case):
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.encode(case["prompt"]) == case["prompt_token_ids"]
    assert tokenizer.decode(case["token_ids"]) == case["text"]


@pytest.mark.smollm2
@pytest.mark.parametrize(
    "case", [case for case in GOLDENS if case["kind"] == "chat"], ids=lambda case: case["text"][:20]
)
def test_smollm2_chats_are_those_of_the_reference(smollm2, case):
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.apply_chat_template(case["messages"]) == case["prompt"]
    assert tokenizer.encode_chat(case["messages"]) == case["prompt_token_ids"]


@pytest.mark.smollm2
def test_smollm2_special_tokens(smollm2):
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.vocab_size == 49152
    assert tokenizer.has_chat_template
    ids = tokenizer.encode("<|im_start|>user\n12<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "user\n12"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\n12<|im_end|>"
    prompt = tokenizer.apply_chat_template([USER])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    system = {"role": "system", "content": "Be brief."}
    assert "SmolLM" not in tokenizer.apply_chat_template([system, USER])


@pytest.mark.smollm2
# Its vocabulary has no byte F1 and lacks some control characters: those are lost.
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x1FFFF)))
@example("12345 ²½ ٣\u3000\u200b\r\n\t é e\u0301 👩‍👩‍👧‍👦")
def test_smollm2_text_comes_back(smollm2, text):
    tokenizer = load_once(smollm2)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


_LOADED: dict[Path, Tokenizer] = {}


def load_once(directory: Path) -> Tokenizer:
    if directory not in _LOADED:
        _LOADED[directory] = load_tokenizer(directory)
    return _LOADED[directory]


# One BOS


@pytest.mark.parametrize("source", ["post-processor", "tokenizer_config", "both"])
def test_a57_there_is_one_bos(tmp_path, source):
    backend = BYTE_LEVEL if source == "tokenizer_config" else add_bos(BYTE_LEVEL, "<|b|>")
    options = {} if source == "post-processor" else {"add_bos_token": True}
    tokenizer = load_tokenizer(write_folder(tmp_path, backend, **options, chat_template=WITH_BOS))
    plain = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.bos_token_id == 0
    assert 0 not in plain
    assert tokenizer.encode("the dog") == [0, *plain]
    assert tokenizer.encode("<|b|>the dog") == [0, *plain]
    assert tokenizer.encode("") == [0]
    assert tokenizer.encode_chat([USER]) == [0, 1, *plain, 2]
    assert tokenizer.encode(tokenizer.apply_chat_template([USER])) == [0, 1, *plain, 2]


def test_a57_a_chat_has_the_special_tokens_that_its_template_writes(tmp_path):
    backend = add_bos(BYTE_LEVEL, "<|b|>")
    tokenizer = load_tokenizer(write_folder(tmp_path, backend, chat_template="<|s|>the dog"))
    assert tokenizer.encode_chat([USER]) == [1, *tokenizer.encode("the dog")[1:]]


def test_no_bos_is_added_unless_the_files_say_so(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path, add_bos_token=False))
    assert 0 not in tokenizer.encode("the dog")
    assert tokenizer.encode("<|b|>the dog").count(0) == 1


# What a folder may say


def test_end_of_text_ids_come_from_every_file_that_names_them(tmp_path):
    write_folder(tmp_path, eos_token={"content": "<|e|>", "lstrip": False})
    assert load_tokenizer(tmp_path).eos_token_ids == {2}
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert load_tokenizer(tmp_path).eos_token_ids == {2, 7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 1]}')
    assert load_tokenizer(tmp_path).eos_token_ids == {1, 2, 5}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert load_tokenizer(tmp_path).eos_token_ids == {2}


def test_special_tokens_may_be_in_their_own_file(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).bos_token_id is None
    (tmp_path / "special_tokens_map.json").write_text(
        '{"bos_token": {"content": "<|b|>"}, "eos_token": "<|s|>"}'
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, {1})


def rendered(directory: Path, **options: Any) -> str:
    return load_tokenizer(directory).apply_chat_template([USER], **options)


def test_chat_templates_are_found_wherever_they_are(tmp_path):
    write_folder(tmp_path)
    assert not load_tokenizer(tmp_path).has_chat_template
    write_folder(tmp_path, chat_template="text {{ bos_token }}")
    assert rendered(tmp_path) == "text <|b|>"
    named = [
        {"name": "tool_use", "template": "{{ tools | length if tools else 'no' }} tools"},
        {"name": "default", "template": "named"},
    ]
    write_folder(tmp_path, chat_template=named)
    assert rendered(tmp_path) == "named"
    assert rendered(tmp_path, tools=[{}, {}]) == "2 tools"
    write_folder(tmp_path, chat_template=named[:1])
    assert rendered(tmp_path) == "no tools"
    (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
    assert rendered(tmp_path) == "file é"
    tokenizer = load_tokenizer(tmp_path, chat_template="given")
    assert tokenizer.apply_chat_template([USER]) == "given"


def test_a_broken_template_is_a_load_error_unless_replaced(tmp_path):
    write_folder(tmp_path, chat_template="{% if %}")
    with pytest.raises(ModelLoadError, match="chat template"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, chat_template="x").has_chat_template
    write_folder(tmp_path, chat_template=3)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: chat_template is a int"):
        load_tokenizer(tmp_path)


def test_without_a_template_a_chat_is_refused(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path))
    for call in (tokenizer.apply_chat_template, tokenizer.encode_chat):
        with pytest.raises(RequestError, match="no chat template") as caught:
            call([USER])
        assert caught.value.param == "messages"


def test_options_reach_the_template(tmp_path):
    source = "{{ messages[-1].content }}{{ x }}{{ add_generation_prompt }}"
    tokenizer = load_tokenizer(write_folder(tmp_path, chat_template=source))
    options = {"add_generation_prompt": False, "variables": {"x": "!"}}
    assert tokenizer.apply_chat_template([USER], **options) == "the dog!False"
    ids = tokenizer.encode_chat([USER], **options)
    assert tokenizer.decode(ids) == "the dog!False"
    open_end = tokenizer.apply_chat_template(
        [USER], add_generation_prompt=False, continue_final_message=True
    )
    assert open_end == "the dog"


def test_saved_truncation_and_padding_are_off(tmp_path):
    backend = tokenizers.Tokenizer.from_str(BYTE_LEVEL.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    text = "the quick brown fox " * 5
    ids = load_tokenizer(write_folder(tmp_path, backend)).encode(text)
    assert ids == BYTE_LEVEL.encode(text).ids
    assert len(ids) > 3


@pytest.mark.parametrize("other", ["vocab.json", None])
def test_a_folder_without_a_tokenizer_file_is_refused(tmp_path, other):
    if other:
        (tmp_path / other).touch()
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert (other is not None) == ("save_pretrained" in str(caught.value))


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": 1}', "\x80"])
def test_a_damaged_tokenizer_file_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_outside_the_folder_is_refused(tmp_path, name):
    model = tmp_path / "model"
    model.mkdir()
    write_folder(model)
    (model / "chat_template.jinja").write_text("x")
    assert load_tokenizer(model).has_chat_template
    shutil.move(model / name, tmp_path / name)
    (model / name).symlink_to(tmp_path / name)
    with pytest.raises(ModelLoadError, match="outside the model's folder"):
        load_tokenizer(model)


# Text and tokens


def test_half_a_surrogate_pair_is_a_request_error():
    with pytest.raises(RequestError, match="not valid Unicode") as caught:
        Tokenizer(BYTE_LEVEL).encode("a\ud83dz")
    assert caught.value.param == "prompt"


def test_ids_outside_the_vocabulary_add_nothing():
    for backend in (BYTE_LEVEL, SENTENCEPIECE):
        tokenizer = Tokenizer(backend)
        assert tokenizer.vocab_size == len(backend.get_vocab())
        ids = tokenizer.encode("Hello", add_special_tokens=False)
        assert tokenizer.decode([*ids, tokenizer.vocab_size, 10**6]) == "Hello"


def test_the_vocabulary_ends_after_the_largest_id():
    gaps = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert Tokenizer(gaps).vocab_size == 10


BYTE_LEVEL_IDS = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=30)


@given(BYTE_LEVEL_IDS, st.booleans())
def test_byte_level_text_is_the_librarys(ids, skip):
    assert Tokenizer(BYTE_LEVEL).decode(ids, skip_special_tokens=skip) == BYTE_LEVEL.decode(
        ids, skip_special_tokens=skip
    )


def split_runs(ids: list[int]) -> bool:
    """Whether every run of byte tokens (ids 3 to 258) is valid UTF-8."""
    run = b""
    for token_id in [*ids, 0]:
        if 3 <= token_id < 259:
            run += bytes([token_id - 3])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


PIECE_IDS = st.integers(259, 258 + len(PIECES)).map(lambda i: [i])
CHARACTER = st.characters(exclude_categories=["Cs"])
RUN_IDS = CHARACTER.map(lambda letter: [3 + byte for byte in letter.encode()])
SPECIAL_IDS = st.integers(0, 2).map(lambda i: [i])


@given(st.lists(st.one_of(PIECE_IDS, RUN_IDS, SPECIAL_IDS), max_size=20), st.booleans())
@example([[3 + 0x20], [260]], True)
@example([[259], [260]], True)
@example([[0], [259], [0]], True)
def test_sentencepiece_text_is_the_librarys_where_its_bytes_are_valid(parts, skip):
    ids = [token_id for part in parts for token_id in part]
    assert split_runs([i for i in ids if not (skip and i < 3)])
    assert Tokenizer(SENTENCEPIECE).decode(ids, skip_special_tokens=skip) == SENTENCEPIECE.decode(
        ids, skip_special_tokens=skip
    )


def test_malformed_bytes_do_not_take_good_ones_with_them():
    tokenizer = Tokenizer(SENTENCEPIECE)
    hello, a, bad = 260, 3 + 0x41, 3 + 0xFF
    assert tokenizer.decode([hello, a, bad, a]) == "HelloA\ufffdA"
    assert SENTENCEPIECE.decode([hello, a, bad, a]) == "Hello\ufffd\ufffd\ufffd"


def test_spaces_stay_in_a_continuation():
    """Only a text that starts here loses the space that SentencePiece puts in front."""
    tokenizer = Tokenizer(SENTENCEPIECE)
    world = SENTENCEPIECE.token_to_id("▁world")
    hello = SENTENCEPIECE.token_to_id("▁Hello")
    for after, expected in (((), "world"), ((1,), "world"), ((1, hello), " world")):
        stream = tokenizer.decode_stream(after=after)
        assert stream.push([world]) + stream.finish() == expected


def test_what_a_token_adds_in_bytes():
    tokenizer = Tokenizer(SENTENCEPIECE)
    assert tokenizer.token_bytes(SENTENCEPIECE.token_to_id("▁world")) == b" world"
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    byte_level = Tokenizer(BYTE_LEVEL)
    ids = byte_level.encode("Grüße 🎉")
    assert b"".join(map(byte_level.token_bytes, ids)) == "Grüße 🎉".encode()
    assert byte_level.token_bytes(2) == b"<|e|>"


def words(decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(
        models.WordLevel({"<unk>": 0, "the": 1, "▁dog": 2, "▁the": 3}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.normalizer = normalizers.Lowercase()
    if decoder is not None:
        backend.decoder = decoder
    return backend


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Fuse(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ],
    ids=repr,
)
@given(ids=st.lists(st.integers(0, 3), max_size=8))
def test_other_decoders_give_the_librarys_text(decoder, ids):
    backend = words(decoder)
    assert Tokenizer(backend).decode(ids) == backend.decode(ids)


def test_a_decoder_that_looks_ahead_is_refused():
    backend = words(decoders.Sequence([decoders.Fuse(), decoders.CTC()]))
    with pytest.raises(ModelLoadError, match="decoder CTC is not known"):
        Tokenizer(backend)
