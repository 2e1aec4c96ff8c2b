"""What a model's own files say about generating: how it samples, and what ends its text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paged_jax.checkpoint.model_files import read_json
from paged_jax.config import EngineConfig
from paged_jax.progress import Progress

__all__ = ["GenerationConfig", "read_generation_config", "sampling_defaults"]

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GenerationConfig:
    """`sampling` holds the sampling fields that the model's makers recommend."""

    eos_token_ids: frozenset[int] = frozenset()
    sampling: Mapping[str, Any] = field(default_factory=dict)


def read_generation_config(directory: Path) -> GenerationConfig:
    """generation_config.json, with config.json behind it for the end-of-sequence tokens."""
    generation = read_json(directory, "generation_config.json") or {}
    config = read_json(directory, "config.json") or {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [eos]
    sampling = {name: generation[name] for name in SAMPLING_FIELDS if _is_number(generation, name)}
    if generation.get("do_sample") is False:
        penalty = {name: v for name, v in sampling.items() if name == "repetition_penalty"}
        sampling = {"temperature": 0.0, **penalty}
    return GenerationConfig(frozenset(i for i in ids if isinstance(i, int)), sampling)


def _is_number(generation: Mapping[str, Any], name: str) -> bool:
    value = generation.get(name)
    return isinstance(value, int | float) and not isinstance(value, bool)


def sampling_defaults(
    generation: GenerationConfig, config: EngineConfig, progress: Progress
) -> Mapping[str, Any]:
    """The recommended sampling fields, said aloud: nobody should wonder where they come from."""
    if config.generation_config == "none" or not generation.sampling:
        return {}
    told = ", ".join(f"{name} {value:g}" for name, value in generation.sampling.items())
    progress.say(
        f"unless a request says otherwise: {told} (the model's generation_config.json; "
        "generation_config=none leaves it out)"
    )
    return generation.sampling
