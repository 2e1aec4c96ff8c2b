"""What is asked of the engine, from what a request says and what the model's authors recommend."""

from collections.abc import Mapping
from typing import Any

from paged_jax import BeamSearchParams, RequestError, SamplingParams
from serve.fields import SAMPLING, Fields
from serve.protocol import CompletionRequest, GenerationRequest


def sampling_params(
    fields: Fields[GenerationRequest],
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    **shaped: Any,
) -> SamplingParams:
    """The request's fields before the model's `defaults`, those before SamplingParams' own.

    max_tokens: what applies when neither names one; None runs to the context's end. shaped: what
    fields of other names and kinds come to.
    Raises RequestError naming the field that is wrong.
    """
    recommended = {name: value for name, value in defaults.items() if name in SAMPLING}
    given = _given(fields) | shaped
    params = SamplingParams(**({"max_tokens": max_tokens} | recommended | given))
    if fields.body.stream and params.num_samples > params.n:
        raise RequestError(
            f"best_of={params.num_samples} with n={params.n} cannot be streamed: which samples are "
            "the best is known at the end",
            param="best_of",
        )
    return params


def _given(fields: Fields[GenerationRequest]) -> dict[str, Any]:
    if fields.body.max_completion_tokens is None:
        return fields.sampling
    if "max_tokens" in fields.sampling:  # is not used, and may still be wrong
        SamplingParams(max_tokens=fields.sampling["max_tokens"])
    return fields.sampling | {"max_tokens": fields.body.max_completion_tokens}


def beam_search_params(
    fields: Fields[CompletionRequest], max_tokens: int
) -> tuple[SamplingParams, BeamSearchParams]:
    """How many choices of how many tokens are wanted, and the search that finds them.

    `n` beams are kept and returned. The search draws nothing: a `seed` changes nothing, and fields
    that shape sampling or stop a text are refused unless they leave everything as it is; so is a
    temperature other than 0, whatever the model's authors recommend for sampling.
    """
    if fields.body.stream:
        raise RequestError(
            "use_beam_search cannot be streamed: the best beam is known at the end",
            param="use_beam_search",
        )
    params = SamplingParams(**({"max_tokens": max_tokens, "temperature": 0.0} | _given(fields)))
    neutral: Mapping[str, Any] = {
        "best_of": (None, params.n),
        "temperature": (0.0,),
        "top_k": (-1, 0),
    }
    for name in fields.sampling.keys() - {"n", "max_tokens", "ignore_eos", "seed"}:
        value = getattr(params, name)
        if value not in neutral.get(name, (getattr(_DEFAULTS, name),)):
            raise RequestError(
                f"{name} is not supported with use_beam_search, which samples nothing and stops "
                "only at the end of a sequence: leave it out",
                param=name,
            )
    return params, _search(params)


_DEFAULTS = SamplingParams()


def _search(params: SamplingParams) -> BeamSearchParams:
    assert params.max_tokens is not None
    try:
        return BeamSearchParams(
            beam_width=params.n, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos
        )
    except RequestError as error:
        if error.param != "beam_width":
            raise
        raise RequestError(f"n is the beam width: {error}", param="n") from error
