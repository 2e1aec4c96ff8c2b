"""Serve language models in pure JAX: continuous batching over a paged KV cache.

    from paged_jax import LLM, SamplingParams

    llm = LLM("smollm2")
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text)

The names below are loaded when they are first used, so that `import paged_jax` stays quick: JAX,
Flax and Orbax take seconds to import, and a command line's `--help` needs none of them.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PACKAGES_BESIDE = ("scheduler", "pallas_kernels")


def _refuse_intruders() -> None:
    """Raise ImportError unless `scheduler` and `pallas_kernels` are those that lie beside us.

    Their names are general enough for a stray folder on `sys.path` to bear one of them; what would
    follow is an error that speaks of anything but the cause.
    """
    ours = Path(__file__).resolve().parent.parent
    for name in _PACKAGES_BESIDE:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ImportError(f"paged_jax needs its package {name!r} at {ours / name}: not found")
        places = [*([spec.origin] if spec.origin else []), *(spec.submodule_search_locations or [])]
        for place in places:
            if ours / name not in (Path(place).resolve(), Path(place).resolve().parent):
                raise ImportError(
                    f"paged_jax needs its own package {name!r} at {ours / name}, but {place} "
                    f"comes first on sys.path. Rename it, or start Python from another folder."
                )


_refuse_intruders()

if TYPE_CHECKING:
    from paged_jax.async_engine import AsyncEngine
    from paged_jax.beam_search import Beam, BeamSearchOutput, BeamSearchParams
    from paged_jax.config import EngineConfig
    from paged_jax.engine import Engine
    from paged_jax.engine_stats import EngineStats
    from paged_jax.errors import (
        ConfigError,
        EngineDeadError,
        LateCompileError,
        ModelLoadError,
        ModelNotFoundError,
        PagedJaxError,
        RequestError,
    )
    from paged_jax.llm import LLM
    from paged_jax.outputs import CompletionOutput, RequestOutput, TokenLogprob
    from scheduler import SamplingParams, StructuredOutputs

_HOMES = {
    "AsyncEngine": "paged_jax.async_engine",
    "Beam": "paged_jax.beam_search",
    "BeamSearchOutput": "paged_jax.beam_search",
    "BeamSearchParams": "paged_jax.beam_search",
    "CompletionOutput": "paged_jax.outputs",
    "ConfigError": "paged_jax.errors",
    "Engine": "paged_jax.engine",
    "EngineConfig": "paged_jax.config",
    "EngineDeadError": "paged_jax.errors",
    "EngineStats": "paged_jax.engine_stats",
    "LLM": "paged_jax.llm",
    "LateCompileError": "paged_jax.errors",
    "ModelLoadError": "paged_jax.errors",
    "ModelNotFoundError": "paged_jax.errors",
    "PagedJaxError": "paged_jax.errors",
    "RequestError": "paged_jax.errors",
    "RequestOutput": "paged_jax.outputs",
    "SamplingParams": "scheduler",
    "StructuredOutputs": "scheduler",
    "TokenLogprob": "paged_jax.outputs",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "Beam",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "LateCompileError",
    "ModelLoadError",
    "ModelNotFoundError",
    "PagedJaxError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "TokenLogprob",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'paged_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
