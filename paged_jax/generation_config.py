"""What a model's own files say about generating: how it samples, and what ends its text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paged_jax.checkpoint.model_files import read_json

__all__ = ["GenerationConfig", "read_generation_config"]

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")


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
    sampling = {
        name: generation[name] for name in SAMPLING_FIELDS if generation.get(name) is not None
    }
    if generation.get("do_sample") is False:
        sampling = {"temperature": 0.0}
    return GenerationConfig(frozenset(i for i in ids if isinstance(i, int)), sampling)
