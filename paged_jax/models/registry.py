"""Which family serves which architecture."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx
from jax.typing import DTypeLike

from paged_jax.errors import ModelLoadError
from paged_jax.models import (
    gemma2,
    gemma3,
    gpt2,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from paged_jax.models.decoder import Decoder
from paged_jax.models.decoder_config import DecoderConfig
from paged_jax.models.sources import Path, Source, Tensor, tensor_name

__all__ = ["FAMILIES", "Family", "find_family"]


def _own_name(config: Any, path: Path) -> Source:
    return Tensor(tensor_name(path))


def _build_decoder(config: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Module:
    return Decoder(config, dtype=dtype, rngs=rngs)


def _tied_head(config: DecoderConfig) -> Mapping[str, str]:
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}


class Family(NamedTuple):
    """What loading needs to know of a family. A new family is one file and one entry below."""

    architecture: str  # one of config.json's `architectures`
    model_type: str  # its `model_type`, where it names no architecture
    parse: Callable[[Mapping[str, Any]], Any]  # config.json -> the family's config
    source: Callable[[Any, Path], Source] = _own_name  # (config, parameter) -> its values on disk
    build: Callable[[Any, DTypeLike, nnx.Rngs], nnx.Module] = _build_decoder
    aliases: Callable[[Any], Mapping[str, str]] = _tied_head  # {tensor not used: used instead}
    canonical: Callable[[str], str] = str  # a tensor's name in the file -> as `source` has it
    is_ignored: Callable[[str], bool] = lambda name: name.endswith(".rotary_emb.inv_freq")


FAMILIES = (
    Family("LlamaForCausalLM", "llama", llama.parse),
    Family("MistralForCausalLM", "mistral", mistral.parse),
    Family("MixtralForCausalLM", "mixtral", mixtral.parse, mixtral.source),
    Family("Qwen2ForCausalLM", "qwen2", qwen2.parse),
    Family("Qwen3ForCausalLM", "qwen3", qwen3.parse),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", qwen3_moe.parse, qwen3_moe.source),
    Family("Gemma2ForCausalLM", "gemma2", gemma2.parse),
    Family("Gemma3ForCausalLM", "gemma3_text", gemma3.parse, canonical=gemma3.canonical),
    Family(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        gemma3.parse_nested,
        canonical=gemma3.canonical,
        is_ignored=gemma3.is_not_text,
    ),
    Family("Phi3ForCausalLM", "phi3", phi3.parse, phi3.source),
    Family("Olmo2ForCausalLM", "olmo2", olmo2.parse),
    Family("GraniteForCausalLM", "granite", granite.parse),
    Family("SmolLM3ForCausalLM", "smollm3", smollm3.parse),
    Family("GptOssForCausalLM", "gpt_oss", gpt_oss.parse, gpt_oss.source),
    Family(
        "GPT2LMHeadModel",
        "gpt2",
        gpt2.GPT2Config.parse,
        gpt2.source,
        build=lambda config, dtype, rngs: gpt2.GPT2(config, dtype=dtype, rngs=rngs),
        aliases=gpt2.aliases,
        canonical=gpt2.canonical,
        is_ignored=lambda name: name.endswith((".attn.bias", ".attn.masked_bias")),
    ),
)


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ModelLoadError with the known ones if there is none."""
    architectures = config.get("architectures") or []
    model_type = config.get("model_type")
    for family in FAMILIES:
        named = family.architecture in architectures
        if named or (not architectures and model_type == family.model_type):
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ModelLoadError(
        f"no support for {architectures=}, {model_type=}; the supported architectures are {known}"
    )
