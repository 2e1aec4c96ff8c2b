"""GGUF files: the folder made from one holds the same weights, numbers and tokens."""

import itertools
import json
import math
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paged_jax.checkpoint import convert_gguf, gguf_file, open_checkpoint
from paged_jax.checkpoint.gguf_families import FAMILIES, Family
from paged_jax.checkpoint.gguf_file import GGUFFile
from paged_jax.checkpoint.gguf_tokenizer import SPLITS, build_tokenizer
from paged_jax.errors import ModelLoadError
from paged_jax.tokenizer import load_tokenizer
from tests.tiny_gguf import (
    CONTEXT,
    FFN,
    HEAD_SIZE,
    HIDDEN,
    NORMAL,
    NUM_HEADS,
    NUM_KV_HEADS,
    TEMPLATE,
    TEXTS,
    USER_DEFINED,
    byte_level_metadata,
    gguf_tensors,
    interleaved,
    llama_metadata,
    llama_tensors,
    sentencepiece_metadata,
    trained_byte_level,
    write_gguf,
    write_tiny_gguf,
)


@pytest.fixture(scope="module")
def tokenizer():
    return trained_byte_level("smollm")


@pytest.fixture(scope="module")
def token_metadata(tokenizer) -> dict[str, Any]:
    return byte_level_metadata(tokenizer, "smollm")


def converted(path: Path, **options: Any):
    directory = path.with_suffix(".d")
    directory.mkdir()
    convert_gguf(path, directory, **options)
    return open_checkpoint(directory)


def refused(path: Path, *words: str) -> None:
    directory = path.with_suffix(".d")
    directory.mkdir()
    with pytest.raises(ModelLoadError) as caught:
        convert_gguf(path, directory)
    for word in (str(path), *words):
        assert word in str(caught.value)


def test_the_header_says_what_the_library_says(tmp_path):
    path = tmp_path / "a.gguf"
    write_tiny_gguf(path)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    keys = {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert ours.metadata.keys() == keys
    for key in keys:
        value = ours.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == theirs.fields[
            key
        ].contents()
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(tensor.shape[::-1].tolist())
        assert (found.type, found.offset, found.num_bytes) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )


def test_every_kind_of_value_is_read(tmp_path):
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "uint8": 200,
        "int8": -3,
        "uint16": 60_000,
        "int16": -30_000,
        "uint32": 4_000_000_000,
        "int32": -2_000_000_000,
        "uint64": 2**63,
        "int64": -(2**62),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "naïve 🎉",
        "array": ["a", "", "🎉"],
    }
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("numbers", [-1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFFile(path).metadata
    assert {kind: metadata[kind] for kind in values} == values
    assert metadata["numbers"].tolist() == [-1, 2, 3]


def test_a74_query_and_key_rows_of_llama_are_put_back(tmp_path, token_metadata):
    tensors = llama_tensors(400, biased=True)
    in_file = gguf_tensors(tensors, permuted=True)
    assert not np.array_equal(
        in_file["blk.0.attn_k.weight"], tensors["model.layers.0.self_attn.k_proj.weight"]
    )
    path = tmp_path / "a.gguf"
    write_gguf(path, llama_metadata() | token_metadata, in_file)
    checkpoint = converted(path)
    assert checkpoint.names() == sorted(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), array, err_msg=name)
    assert checkpoint.config["attention_bias"]
    assert checkpoint.config["mlp_bias"]


def test_the_order_is_the_one_of_rotary_pairs():
    """Rotating interleaved rows pair by pair gives what rotating the halves gives, reordered."""
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(HEAD_SIZE, 1))
    angles = rng.normal(size=(HEAD_SIZE // 2, 1))
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = np.split(rows, 2)
    halves = np.concatenate([first * cos - second * sin, second * cos + first * sin])
    pairs = interleaved(rows, 1).reshape(-1, 2, 1)
    turned = np.stack(
        [pairs[:, 0] * cos - pairs[:, 1] * sin, pairs[:, 1] * cos + pairs[:, 0] * sin], axis=1
    )
    np.testing.assert_allclose(turned.reshape(-1, 1), interleaved(halves, 1))


def test_a74_rows_of_a_family_that_is_not_interleaved_stay(tmp_path, token_metadata):
    tensors = llama_tensors(400)
    metadata = {
        key.replace("llama.", "other."): value for key, value in llama_metadata().items()
    } | token_metadata
    path = tmp_path / "a.gguf"
    write_gguf(path, metadata, gguf_tensors(tensors, permuted=False), architecture="other")
    family = Family("other", "OtherForCausalLM", interleaved=False)
    checkpoint = converted(path, families={"other": family})
    assert checkpoint.config["architectures"] == ["OtherForCausalLM"]
    for name, array in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), array, err_msg=name)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path, token_metadata):
    path = tmp_path / "a.gguf"
    write_gguf(path, token_metadata, {}, architecture="mamba")
    refused(path, "'mamba'", ", ".join(sorted(FAMILIES)))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1, Kind.Q8_0])
def test_quantised_weights_are_what_the_library_makes_of_them(
    tmp_path, token_metadata, monkeypatch, kind
):
    monkeypatch.setattr(gguf_file, "MAX_PIECE_BYTES", 5000)  # several pieces for each tensor
    tensors = llama_tensors(400, tied=False)
    path = tmp_path / "a.gguf"
    write_gguf(
        path, llama_metadata() | token_metadata, gguf_tensors(tensors, permuted=True), kind=kind
    )
    checkpoint = converted(path)
    assert not checkpoint.config["tie_word_embeddings"]
    for name, array in tensors.items():
        found = checkpoint.tensor(name)
        assert found.dtype == np.float32
        if array.ndim == 1:
            expected = array
        else:
            expected = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        np.testing.assert_array_equal(found, expected, err_msg=name)


def test_a_tensor_type_without_arithmetic_is_refused(tmp_path, token_metadata):
    tensors = gguf_tensors(llama_tensors(400), permuted=True)
    tensors["blk.1.ffn_up.weight"] = np.ones((FFN, HIDDEN), np.int32)
    path = tmp_path / "a.gguf"
    write_gguf(path, llama_metadata() | token_metadata, tensors)
    refused(path, "blk.1.ffn_up.weight", "I32")


def test_conversion_needs_little_memory(tmp_path, token_metadata, monkeypatch):
    monkeypatch.setattr(gguf_file, "MAX_PIECE_BYTES", 1 << 20)
    vocab_size = 200_000  # 51 MB of embeddings
    tensors = llama_tensors(vocab_size)
    path = tmp_path / "a.gguf"
    write_gguf(path, llama_metadata() | token_metadata, gguf_tensors(tensors, permuted=True))
    tracemalloc.start()
    try:
        checkpoint = converted(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert checkpoint.num_bytes > 50e6
    assert peak < 10e6


def test_the_config_says_all_of_the_metadata(tmp_path):
    path = tmp_path / "a.gguf"
    tensors = write_tiny_gguf(path)
    checkpoint = converted(path)
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "max_position_embeddings": CONTEXT,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }
    generation = json.loads((checkpoint.directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None}
    assert (checkpoint.directory / "chat_template.jinja").read_text() == TEMPLATE


def test_what_the_metadata_leaves_out_has_its_usual_value(tmp_path):
    path = tmp_path / "a.gguf"
    write_tiny_gguf(
        path,
        **{
            "rope.freq_base": None,
            "rope.dimension_count": None,
            "attention.value_length": None,
            "attention.head_count_kv": [NUM_KV_HEADS] * 2,  # one for each layer
        },
    )
    config = converted(path).config
    assert config["rope_theta"] == 10000.0
    assert config["num_key_value_heads"] == NUM_KV_HEADS


def test_several_ends_of_text(tmp_path, token_metadata):
    path = tmp_path / "a.gguf"
    tensors = gguf_tensors(llama_tensors(400), permuted=True)
    ends = {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 2}
    write_gguf(path, llama_metadata() | token_metadata | ends, tensors)
    checkpoint = converted(path)
    assert checkpoint.config["eos_token_id"] == [2, 1]
    assert load_tokenizer(checkpoint.directory).eos_token_ids == {1, 2}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 8.0, "original_context_length": 128},
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling(tmp_path, keys, expected):
    path = tmp_path / "a.gguf"
    write_tiny_gguf(path, **{f"rope.scaling.{key}": value for key, value in keys.items()})
    assert converted(path).config["rope_scaling"] == expected


def llama3_divisors(factor: float, theta: float) -> np.ndarray:
    """The formula of Llama 3.1, frequency by frequency."""
    divisors = []
    for i in range(HEAD_SIZE // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / HEAD_SIZE)
        if wavelength < 8192 / 4.0:
            divisors.append(1.0)
        elif wavelength > 8192 / 1.0:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_told_from_its_divisors(tmp_path, token_metadata, factor):
    path = tmp_path / "a.gguf"
    tensors = gguf_tensors(llama_tensors(400), permuted=True)
    tensors["rope_freqs.weight"] = llama3_divisors(factor, 500000.0)
    assert len(set(tensors["rope_freqs.weight"].tolist())) > 2
    metadata = llama_metadata(**{"rope.freq_base": 500000.0}) | token_metadata
    write_gguf(path, metadata, tensors)
    assert converted(path).config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_divisors_are_refused(tmp_path, token_metadata):
    path = tmp_path / "a.gguf"
    tensors = gguf_tensors(llama_tensors(400), permuted=True)
    tensors["rope_freqs.weight"] = np.linspace(1, 8, HEAD_SIZE // 2, dtype=np.float32)
    write_gguf(path, llama_metadata() | token_metadata, tensors)
    refused(path, "rope_freqs.weight")


REFUSED = {
    "experts": ({"expert_count": 8}, "tensor 'blk.0.ffn_gate.weight'"),
    "no layers": ({"block_count": None}, "llama.block_count is missing"),
    "more layers": ({"block_count": 3}, "model.layers.2."),
    "fewer layers": ({"block_count": 1}, "blk.1."),
    "text for a number": ({"context_length": "long"}, "llama.context_length is 'long'"),
    "no heads": ({"attention.head_count": 0}, "llama.attention.head_count is 0"),
    "uneven heads": ({"attention.head_count_kv": 3}, "num_kv_heads=3"),
    "heads by layer": ({"attention.head_count_kv": [1, 2]}, "llama.attention.head_count_kv"),
    "other width": ({"embedding_length": 32}, "expected"),
    "partial rotary": ({"rope.dimension_count": 8}, "rotary"),
    "value length": ({"attention.value_length": 8}, "different lengths"),
    "rope type": ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "longrope"),
    "rope type, no text": ({"rope.scaling.type": 3}, "llama.rope.scaling.type is 3"),
    "epsilon": ({"attention.layer_norm_rms_epsilon": None}, "epsilon is missing"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_metadata_that_cannot_be_served_is_named(tmp_path, kind):
    overrides, word = REFUSED[kind]
    path = tmp_path / "a.gguf"
    write_tiny_gguf(path, **overrides)
    refused(path, word)


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_q.weight"])
def test_a_missing_tensor_is_named(tmp_path, token_metadata, name):
    path = tmp_path / "a.gguf"
    tensors = gguf_tensors(llama_tensors(400), permuted=True)
    del tensors[name]
    write_gguf(path, llama_metadata() | token_metadata, tensors)
    refused(path, "missing")


def test_an_unknown_tensor_is_named(tmp_path, token_metadata):
    path = tmp_path / "a.gguf"
    tensors = gguf_tensors(llama_tensors(400), permuted=True)
    tensors["blk.0.attn_q_norm.weight"] = np.ones(HEAD_SIZE, np.float32)
    write_gguf(path, llama_metadata() | token_metadata, tensors)
    refused(path, "blk.0.attn_q_norm.weight")


def test_a_part_of_a_split_file_is_refused(tmp_path, token_metadata):
    path = tmp_path / "a.gguf"
    write_gguf(path, {"split.count": 3} | token_metadata, {})
    refused(path, "llama-gguf-split --merge")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory) -> bytes:
    """A short file with every part: the header's damage is not hidden by many weights."""
    path = tmp_path_factory.mktemp("small") / "a.gguf"
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"]}
    metadata = llama_metadata() | tokens | {"tokenizer.ggml.scores": [0.5, 1.5, 2.5]}
    write_gguf(path, metadata, {"output_norm.weight": np.ones(64, np.float32)})
    return path.read_bytes()


@given(length=st.integers(0, 1500))
def test_a_cut_off_file_is_refused(tmp_path_factory, small_file, length):
    path = tmp_path_factory.mktemp("cut") / "a.gguf"
    assert len(small_file) < 1500
    path.write_bytes(small_file[: min(length, len(small_file) - 1)])
    with pytest.raises(ModelLoadError, match=str(path)):
        GGUFFile(path)


@given(at=st.integers(4), value=st.binary(min_size=1, max_size=8))
@example(at=8, value=b"\xff" * 8)  # 2^64 - 1 tensors
@example(at=16, value=b"\xff" * 7 + b"\x7f")
@settings(max_examples=300)
def test_damage_is_noticed_or_harmless(tmp_path_factory, small_file, at, value):
    path = tmp_path_factory.mktemp("damage") / "a.gguf"
    content = bytearray(small_file)
    at %= len(content)
    content[at : at + len(value)] = value
    path.write_bytes(content)
    try:
        file = GGUFFile(path)
        for name in file.tensors:
            file.values(name)
    except ModelLoadError:
        pass


def header(version: int = 3, num_tensors: int = 0, num_keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "does not begin with GGUF"),
        (b"PK\3\4" + bytes(100), "does not begin with GGUF"),
        (header(version=1), "version 1"),
        (header(version=3 << 24), "version"),  # big-endian
        (header(num_tensors=2**40), "more than fit"),
        (header(num_keys=2**63), "more than fit"),
        (header(num_keys=1) + struct.pack("<Q", 2**62) + bytes(8), "announced"),
        (header(num_keys=1) + struct.pack("<Q1sI", 1, b"k", 99) + bytes(8), "value type 99"),
        (header(num_keys=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 0, 2**60), "more than fit"),
        (header(num_keys=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1) + bytes(8), "arrays of"),
        (header(num_keys=1) + struct.pack("<Q1s", 1, b"\xff") + bytes(16), "not UTF-8"),
        (header(num_keys=2) + struct.pack("<Q1sIB", 1, b"k", 0, 1) * 2, "twice"),
    ],
)
def test_a_damaged_header_is_named(tmp_path, content, word):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    refused(path, word)


# Tokenizers: the rebuilt one gives the same ids as the one that the metadata came from.

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
WORDY = st.lists(st.sampled_from([*"".join(TEXTS), " ", "12", "\n", "'s", "DON'T"])).map("".join)


@pytest.mark.parametrize("pre", sorted(SPLITS.keys() - {"default"}))
def test_byte_level_tokens_are_those_of_the_published_tokenizers(pre):
    original = trained_byte_level(pre)
    rebuilt = build_tokenizer(byte_level_metadata(original, pre) | {"tokenizer.ggml.pre": pre})
    assert rebuilt.get_vocab() == original.get_vocab()

    @given(st.one_of(WORDY, UNICODE))
    @example("".join(TEXTS))
    @example("<|s|>user\nhi 1234<|e|>\n")
    @example("e\u0301 A\u030a")
    def check(text):
        ids = original.encode(text).ids
        assert rebuilt.encode(text, add_special_tokens=False).ids == ids
        assert rebuilt.decode(ids) == original.decode(ids)

    check()


def test_the_splits_differ():
    """So that the test above cannot pass with any of them."""
    text = "Don't 1234 isOK  x/\n\nÅ"
    ids = {}
    for pre in ("smollm", "llama-bpe", "qwen2", "gpt-2", "gpt-4o", "tekken", "default"):
        metadata = byte_level_metadata(trained_byte_level("gpt-2", 500), pre)
        rebuilt = build_tokenizer(metadata)
        words = rebuilt.pre_tokenizer.pre_tokenize_str(text)
        ids[pre] = tuple(word for word, _ in words)
    assert len(set(ids.values())) == len(ids)


def test_digits_of_smollm_stand_alone_and_default_takes_three():
    for pre, expected in (("smollm", ["1", "2", "3", "4"]), ("default", ["123", "4"])):
        metadata = byte_level_metadata(trained_byte_level("gpt-2"), pre)
        words = build_tokenizer(metadata).pre_tokenizer.pre_tokenize_str("1234")
        assert [word for word, _ in words] == expected


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("dbrx", False)])
def test_a_word_that_is_a_token_stays_whole_in_llama_bpe(pre, whole):
    metadata = byte_level_metadata(trained_byte_level(pre), pre)
    metadata["tokenizer.ggml.tokens"] += ["Ġzqx"]  # no merge leads to it
    metadata["tokenizer.ggml.token_type"] += [NORMAL]
    ids = build_tokenizer(metadata).encode("a zqx", add_special_tokens=False).ids
    assert (len(metadata["tokenizer.ggml.tokens"]) - 1 in ids) == whole


def test_a_missing_pre_is_the_default(token_metadata):
    without = {key: value for key, value in token_metadata.items() if not key.endswith(".pre")}
    named = build_tokenizer({**without, "tokenizer.ggml.pre": "default"})
    assert build_tokenizer(without).to_str() == named.to_str()


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
    ],
)
def test_bos_is_added_where_the_file_or_the_kind_says_so(pre, flag, expected):
    metadata = byte_level_metadata(trained_byte_level(pre), pre)
    del metadata["tokenizer.ggml.add_bos_token"]
    if flag is not None:
        metadata["tokenizer.ggml.add_bos_token"] = flag
    ids = build_tokenizer(metadata).encode("the").ids
    assert (ids[0] == 0) == expected
    assert ids.count(0) == expected


def test_user_defined_tokens_are_matched_whole_and_not_special(tokenizer):
    metadata = byte_level_metadata(tokenizer, "smollm")
    metadata["tokenizer.ggml.tokens"] += ["<think>"]
    metadata["tokenizer.ggml.token_type"] += [USER_DEFINED]
    rebuilt = build_tokenizer(metadata)
    ids = rebuilt.encode("a<think>b").ids
    assert len(metadata["tokenizer.ggml.tokens"]) - 1 in ids
    assert rebuilt.decode(ids) == "a<think>b"
    assert rebuilt.decode(rebuilt.encode("<|s|>a").ids) == "a"


PIECES = ["▁", *"abcdehlorw!", "é"]
PIECES += ["ab", "bc", "abc", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld"]
PIECES += ["▁world", "▁a", "▁ab", "▁▁", "▁!"]
SCORES = {piece: -float(rank) for rank, piece in enumerate(reversed(PIECES))}


def sentencepiece_ids(text: str) -> list[int]:
    """SentencePiece's BPE: merge the pair whose union has the best score, leftmost first."""
    metadata = sentencepiece_metadata(SCORES)
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [
            (SCORES[left + right], -at)
            for at, (left, right) in enumerate(itertools.pairwise(pieces))
            if left + right in SCORES
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids: list[int] = []
    for piece in pieces:
        in_bytes = [vocabulary[f"<0x{byte:02X}>"] for byte in piece.encode()]
        ids += [vocabulary[piece]] if piece in vocabulary else in_bytes
    return ids


@given(st.text(st.sampled_from([*"abcdehlorw! ", "é", "🎉", "中"]), max_size=30))
@example("hello world")
@example("  hello  abc🎉")
def test_sentencepiece_tokens_are_its_own(text):
    rebuilt = build_tokenizer(sentencepiece_metadata(SCORES))
    ids = rebuilt.encode(text).ids
    assert ids == [1, *sentencepiece_ids(text)]
    assert rebuilt.decode(ids) == text


def test_sentencepiece_without_a_space_in_front():
    metadata = sentencepiece_metadata(SCORES) | {"tokenizer.ggml.add_space_prefix": False}
    rebuilt = build_tokenizer(metadata)
    assert rebuilt.encode(" hello").tokens == ["<s>", "▁hello"]
    assert rebuilt.encode("hello").tokens == ["<s>", "hello"]
    assert rebuilt.decode(rebuilt.encode(" hello").ids) == " hello"


TOKENIZER_DAMAGE = {
    "model": ({"tokenizer.ggml.model": "bert"}, "'bert'; known are gpt2, llama"),
    "pre": ({"tokenizer.ggml.pre": "bloom"}, "'bloom'; known are dbrx, deepseek"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokens is missing"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a", "a"]}, "twice"),
    "eos outside": ({"tokenizer.ggml.eos_token_id": 400}, "eos_token_id is 400"),
    "eos as text": ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id is x"),
    "more types": ({"tokenizer.ggml.token_type": [3] * 401}, "token_type"),
    "merge of one": ({"tokenizer.ggml.merges": ["ab"]}, "'ab'"),
    "merge of unknown": ({"tokenizer.ggml.merges": ["q 中"]}, "'q 中'"),
    "no scores": ({"tokenizer.ggml.model": "llama"}, "scores"),
}


@pytest.mark.parametrize("kind", TOKENIZER_DAMAGE)
def test_a_damaged_tokenizer_is_named(token_metadata, kind):
    change, word = TOKENIZER_DAMAGE[kind]
    merged = {key: value for key, value in (token_metadata | change).items() if value is not None}
    with pytest.raises(ModelLoadError) as caught:
        build_tokenizer(merged)
    assert word in str(caught.value)


def test_a_damaged_tokenizer_names_the_file(tmp_path, token_metadata):
    path = tmp_path / "a.gguf"
    tensors = gguf_tensors(llama_tensors(400), permuted=True)
    write_gguf(path, llama_metadata() | token_metadata | {"tokenizer.ggml.pre": "x"}, tensors)
    refused(path, "tokenizer.ggml.pre")


def test_nonsense_in_place_of_numbers_names_the_file(tmp_path, token_metadata):
    path = tmp_path / "a.gguf"
    tensors = gguf_tensors(llama_tensors(262), permuted=True)
    metadata = sentencepiece_metadata({"ab": 1.0, "a": 0.5, "b": 0.2})
    metadata["tokenizer.ggml.scores"] = ["x"] * 262
    write_gguf(path, llama_metadata() | metadata, tensors)
    refused(path, "tokenizer cannot be built")
