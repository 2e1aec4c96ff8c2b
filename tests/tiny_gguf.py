"""Tiny GGUF files, written with the `gguf` library, and tokenizers trained on a few sentences."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 1234567 o'clock!",
    "def f(x):\n    return x ** 2  # naïve\n\n\n\tprint('don't')",
    "getHTTPResponse() isn't camelCase / I'LL see; McDonald'S 12345",
    "Grüße aus Köln, 你好世界, привет мир, 🎉🎉 and the the the dog",
]
TEMPLATE = "{% for m in messages %}<|s|>{{ m.role }}\n{{ m.content }}<|e|>\n{% endfor %}"
CONTROL, NORMAL, UNKNOWN, USER_DEFINED, BYTE = 3, 1, 2, 4, 6

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, HIDDEN, FFN, LAYERS, CONTEXT = 8, 2, 16, 64, 96, 2, 512

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LOWER, UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SHORTENED}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SHORTENED}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")


def published_splits(pre: str) -> tuple[list, Any]:
    """The pre-tokenizers and the normalizer in the tokenizer.json of models of that kind."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre in ("smollm", "refact", "starcoder"):
        digits = pre_tokenizers.Digits(individual_digits=True)
        return [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)], None
    if pre == "gpt-2":
        return [pre_tokenizers.ByteLevel(add_prefix_space=False)], None
    patterns = {"gpt-4o": GPT4O_SPLIT, "tekken": TEKKEN_SPLIT}
    patterns |= dict.fromkeys(("llama-bpe", "llama3", "dbrx", "smaug-bpe"), LLAMA3_SPLIT)
    if pre in patterns:
        return [pre_tokenizers.Split(Regex(patterns[pre]), "isolated"), byte_level], None
    assert pre in ("qwen2", "deepseek-r1-qwen")
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    return [split, byte_level], normalizers.NFC()


def trained_byte_level(pre: str, vocab_size: int = 400) -> Tokenizer:
    """A byte-level BPE with the special tokens <|b|>, <|s|> and <|e|> as ids 0, 1, 2."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "llama3", "tekken")))
    splits, normalizer = published_splits(pre)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|b|>", "<|s|>", "<|e|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer, pre: str | None) -> dict[str, Any]:
    """The tokenizer's keys in a GGUF file."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [CONTROL if i in special else NORMAL for _, i in vocabulary],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    return metadata | ({} if pre is None else {"tokenizer.ggml.pre": pre})


def sentencepiece_metadata(pieces: Mapping[str, float]) -> dict[str, Any]:
    """A SentencePiece vocabulary: <unk>, <s>, </s>, 256 bytes, then the pieces by score."""
    ordered = sorted(pieces, key=pieces.__getitem__, reverse=True)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *ordered],
        "tokenizer.ggml.scores": [0.0] * 259 + [float(pieces[piece]) for piece in ordered],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL]
        + [BYTE] * 256
        + [NORMAL] * len(ordered),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def llama_metadata(**overrides: Any) -> dict[str, Any]:
    """Keys of the architecture `llama`; `overrides` by their last parts, None leaves one out."""
    keys = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": NUM_HEADS,
        "attention.head_count_kv": NUM_KV_HEADS,
        "attention.key_length": HEAD_SIZE,
        "attention.value_length": HEAD_SIZE,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 50000.0,
        "rope.dimension_count": HEAD_SIZE,
        **overrides,
    }
    return {f"llama.{key}": value for key, value in keys.items() if value is not None}


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k in the order of GGUF files of the llama family: pairs side by side."""
    out = np.empty_like(rows)
    head_size = len(rows) // num_heads
    for head in range(num_heads):
        for i in range(head_size // 2):
            out[head * head_size + 2 * i] = rows[head * head_size + i]
            out[head * head_size + 2 * i + 1] = rows[head * head_size + head_size // 2 + i]
    return out


def llama_tensors(
    vocab_size: int, *, seed: int = 0, tied: bool = True, biased: bool = False
) -> dict[str, np.ndarray]:
    """Random weights of a tiny Llama under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    HD, KD = NUM_HEADS * HEAD_SIZE, NUM_KV_HEADS * HEAD_SIZE
    shapes = {"model.embed_tokens.weight": (vocab_size, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab_size, HIDDEN)
    for i in range(LAYERS):
        layer = {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HD, HIDDEN),
            "self_attn.k_proj": (KD, HIDDEN),
            "self_attn.v_proj": (KD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HD),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }
        for name, shape in layer.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
            if biased and "proj" in name:
                shapes[f"model.layers.{i}.{name}.bias"] = shape[:1]
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(tensors: Mapping[str, np.ndarray], *, permuted: bool) -> dict[str, np.ndarray]:
    """The same tensors as a GGUF file names and orders them."""
    out = {}
    for name, array in tensors.items():
        stem, kind = name.rsplit(".", 1)
        layer = ""
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            layer = f"blk.{index}."
        if permuted and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            array = interleaved(array, NUM_HEADS if "q_proj" in stem else NUM_KV_HEADS)
        out[f"{layer}{GGUF_NAMES[stem]}.{kind}"] = array
    return out


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    kinds: Mapping[str, gguf.GGMLQuantizationType] = MappingProxyType({}),
) -> None:
    """Write a file; matrices are stored as `kind`, some as `kinds` says, vectors as float32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in tensors.items():
        stored = kinds.get(name, kind)
        if array.ndim == 1 or stored == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tiny_gguf(path: Path, *, pre: str = "smollm", **overrides: Any) -> dict[str, np.ndarray]:
    """A whole tiny model; returns its weights under their Hugging Face names."""
    tokenizer = trained_byte_level(pre)
    tensors = llama_tensors(tokenizer.get_vocab_size())
    metadata = llama_metadata(**overrides) | byte_level_metadata(tokenizer, pre)
    write_gguf(path, metadata, gguf_tensors(tensors, permuted=True))
    return tensors
