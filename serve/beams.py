"""Beam search in the shape of a request: a choice for each beam, all in one output."""

from collections.abc import AsyncGenerator
from typing import Any

from paged_jax import BeamSearchParams, CompletionOutput, RequestOutput
from serve.engine import Engine


async def beam_outputs(
    engine: Engine,
    prompt: list[int],
    params: BeamSearchParams,
    *,
    request_id: str,
    **standing: Any,
) -> AsyncGenerator[RequestOutput]:
    """The one output of a search. Closing the generator, or cancelling who reads it, aborts it.

    standing: of who asks, as `Caller.standing` says it.
    """
    found = await engine.beam_search(prompt, params, request_id=request_id, **standing)
    choices = tuple(
        CompletionOutput(index, beam.text, beam.token_ids, beam.finish_reason)
        for index, beam in enumerate(found.beams)
    )
    yield RequestOutput(
        request_id=request_id,
        prompt=found.prompt,
        prompt_token_ids=found.prompt_token_ids,
        outputs=choices,
        finished=True,
        num_cached_tokens=found.num_cached_tokens,
        num_generated_tokens=sum(len(choice.token_ids) for choice in choices),
    )
