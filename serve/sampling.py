"""SamplingParams from what a request says and what the model's authors recommend."""

from collections.abc import Mapping
from typing import Any

from paged_jax import RequestError, SamplingParams
from serve.fields import SAMPLING, Fields
from serve.protocol import GenerationRequest

MAX_N = 128


def sampling_params(
    fields: Fields[GenerationRequest], defaults: Mapping[str, Any], max_tokens: int | None
) -> SamplingParams:
    """The request's fields before the model's `defaults`, those before SamplingParams' own.

    max_tokens: what applies when neither names one; None runs to the context's end.
    Raises RequestError naming the field that is wrong.
    """
    given = dict(fields.sampling)
    if fields.body.max_completion_tokens is not None:
        given["max_tokens"] = fields.body.max_completion_tokens
    n = given.get("n")
    if isinstance(n, int) and n > MAX_N:
        raise RequestError(f"n must be at most {MAX_N}, got {n}", param="n")
    recommended = {name: value for name, value in defaults.items() if name in SAMPLING}
    return SamplingParams(**({"max_tokens": max_tokens} | recommended | given))


def num_choices(params: SamplingParams) -> int:
    """How many samples of each prompt are wanted."""
    return params.n if "n" in SamplingParams.field_names() else 1
