"""Vocabularies in other files than tokenizer.json: SentencePiece's and tekken.

`data/tokenizers` holds small SentencePiece models, trained on this project's documents, and what
sentencepiece 0.2.3 and tiktoken 0.14 make of some texts.
"""

import base64
import json
import shutil
from pathlib import Path

import pytest

from paged_jax.errors import ModelLoadError
from paged_jax.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parent / "data" / "tokenizers"
EXPECTED = json.loads((DATA / "expected.json").read_text())
NUM_SPECIAL = 20


def sentencepiece_folder(folder: Path, name: str, **config) -> Path:
    shutil.copy(DATA / f"{name}.model", folder / "tokenizer.model")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def tekken_file(**changes) -> dict:
    tekken = EXPECTED["tekken"]
    single = [base64.b64encode(bytes([byte])).decode() for byte in range(256)]
    config = {
        "pattern": tekken["pattern"],
        "default_vocab_size": tekken["num_vocab"] + NUM_SPECIAL,  # fewer than there are
        "default_num_special_tokens": NUM_SPECIAL,
        "version": "v3",
    }
    vocab = [
        {"rank": rank, "token_bytes": token, "token_str": None}
        for rank, token in enumerate(single + tekken["tokens"])
    ]
    return {"config": config, "vocab": vocab[::-1]} | changes


def tekken(folder: Path, content: dict, **config) -> Tokenizer:
    (folder / "tekken.json").write_text(json.dumps(content))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


@pytest.mark.parametrize("name", ["bpe", "unigram"])
def test_sentencepiece_files_give_the_ids_and_texts_of_the_reference(tmp_path, name):
    tokenizer = load_tokenizer(sentencepiece_folder(tmp_path, name))
    for case in EXPECTED[name]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
        if 0 not in case["ids"]:  # an unknown piece has no text here, and a mark there
            assert tokenizer.decode(case["ids"]) == case["decoded"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})
    assert tokenizer.encode("a") == [1, *tokenizer.encode("a", add_special_tokens=False)]


def test_tokenizer_config_goes_before_a_sentencepiece_file(tmp_path):
    folder = sentencepiece_folder(
        tmp_path,
        "unigram",
        add_bos_token=False,
        eos_token="<turn>",
        chat_template="{{ eos_token }}{{ unk_token }}",
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == "<turn><unk>"
    assert tokenizer.eos_token_ids == {tokenizer.backend.token_to_id("<turn>")}


def test_tokenizer_json_goes_before_the_other_files(tmp_path):
    sentencepiece_folder(tmp_path, "bpe")
    load_tokenizer(tmp_path).backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.model").write_bytes(b"\xff")
    assert load_tokenizer(tmp_path).vocab_size == 420


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x0a\xff\xff", "is no SentencePiece model: "),
        (b"\x0a\x7fabc", "it ends at byte 5, within a field"),
        (b"\x0b", "wire type 3"),
        (b"\x08" + b"\xff" * 12, "a number without an end"),
        (b"", "tokenizer.ggml.tokens is missing"),
        # One piece "a", and a trainer whose type is words.
        (b"\x0a\x03\x0a\x01a\x12\x02\x18\x03", r"model_type=3; only unigram \(1\) and BPE"),
    ],
)
def test_a_damaged_sentencepiece_file_is_refused(tmp_path, content, message):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(tmp_path)


def test_tekken_files_give_the_ids_of_the_reference(tmp_path):
    tokenizer = tekken(tmp_path, tekken_file())
    for case in EXPECTED["tekken"]["cases"]:
        ids = [token_id + NUM_SPECIAL for token_id in case["ids"]]
        assert tokenizer.encode(case["text"], add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == case["text"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})
    assert tokenizer.vocab_size == EXPECTED["tekken"]["num_vocab"] + NUM_SPECIAL
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("[INST]hi") == [1, 3, *plain]  # what a file means that lists none


def test_special_tokens_that_a_tekken_file_lists_are_used(tmp_path):
    listed = [{"rank": 0, "token_str": "<s>"}, {"rank": 2, "token_str": "[X]"}]
    tokenizer = tekken(tmp_path, tekken_file(special_tokens=listed), add_bos_token=False)
    ids = tokenizer.encode("[X]a<SPECIAL_5>")
    assert (ids[0], ids[-1], tokenizer.bos_token_id) == (2, 5, 0)
    assert tokenizer.eos_token_ids == set()


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {}},
        {"config": None},
        {"vocab": [{"rank": 0}]},
        {"vocab": [{"rank": 0, "token_bytes": "?"}]},
        {"special_tokens": [{"rank": 0}]},
    ],
)
def test_a_damaged_tekken_file_is_refused(tmp_path, changes):
    with pytest.raises(ModelLoadError, match=r"tekken\.json cannot be read: "):
        tekken(tmp_path, tekken_file(**changes))
