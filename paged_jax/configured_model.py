"""A model as a configuration asks for it: whose parameters, in which form, with room for what."""

from typing import Any

from paged_jax.adapters import with_adapter_slots
from paged_jax.config import EngineConfig
from paged_jax.models import ServedModel, quantized
from paged_jax.params import cast_floats, own_copy, spread
from paged_jax.sharding import choose_device
from paged_jax.taps import check_taps
from paged_jax.tensor_parallel import choose_mesh

__all__ = ["configured_model", "own_params", "with_own_params"]


def own_params(params: Any, config: EngineConfig) -> Any:
    """A copy of somebody else's parameters, in the dtype and on the device that are configured."""
    return own_copy(cast_floats(params, config.dtype), choose_device(config.device))


def with_own_params(model: ServedModel, config: EngineConfig) -> ServedModel:
    """The model with such a copy, each parameter cut over the devices as the model says."""
    mesh = choose_mesh(model, config)
    params = cast_floats(model.params, config.dtype)
    return model._replace(params=spread(params, model.splits, mesh, may_alias=False))


def configured_model(model: ServedModel, config: EngineConfig) -> ServedModel:
    """The model with its matrices quantized, and with slots for adapters, where that is asked for.

    Raises ConfigError where it has no such matrix, ModelLoadError where a layer that is to be
    captured or steered has no tap.
    """
    if config.quantization is not None:
        model = quantized(model, config.quantization)
    if config.enable_lora:
        model = with_adapter_slots(model, config.max_loras, config.max_lora_rank)
    if tapped := {*config.capture_layers, *config.steering_layers}:
        check_taps(model.apply, model.params, sorted(tapped))
    return model
