"""Which family serves which architecture."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx
from jax.typing import DTypeLike

from paged_jax.errors import ModelLoadError
from paged_jax.models import llama

__all__ = ["FAMILIES", "Family", "find_family"]


class Family(NamedTuple):
    """What loading needs to know of a family. A new family is one file and one entry below."""

    architectures: tuple[str, ...]  # of config.json's `architectures`
    model_types: tuple[str, ...]  # of its `model_type`, where it names no architecture
    parse: Callable[[Mapping[str, Any]], Any]  # config.json -> the family's config
    build: Callable[[Any, DTypeLike, nnx.Rngs], nnx.Module]
    tensor_name: Callable[[tuple[str | int, ...]], str]  # path of a parameter -> name on disk
    aliases: Callable[[Any], Mapping[str, str]]  # config -> {tensor not used: what is used instead}
    ignored: tuple[str, ...] = ()  # endings of tensors that hold no weights


FAMILIES = (
    Family(
        architectures=("LlamaForCausalLM",),
        model_types=("llama",),
        parse=llama.LlamaConfig.from_hf,
        build=lambda config, dtype, rngs: llama.Llama(config, dtype=dtype, rngs=rngs),
        tensor_name=llama.tensor_name,
        aliases=llama.aliases,
        ignored=(".rotary_emb.inv_freq",),
    ),
)


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ModelLoadError with the known ones if there is none."""
    architectures = config.get("architectures") or []
    model_type = config.get("model_type")
    for family in FAMILIES:
        named = set(architectures) & set(family.architectures)
        if named or (not architectures and model_type in family.model_types):
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ModelLoadError(
        f"no support for {architectures=}, {model_type=}; the supported architectures are {known}"
    )
