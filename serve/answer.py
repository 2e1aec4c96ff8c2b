"""From the engine's outputs to the bytes of the response: collected, or as they come."""

from collections import defaultdict

from serve import sse
from serve.engine import Output
from serve.envelope import Envelope
from serve.formats import Format, Whole
from serve.generation import Generation
from serve.protocol import StreamOptions
from serve.sse import Outbox
from serve.usage import UsageCount


async def collect(generation: Generation, form: Format, envelope: Envelope, outbox: Outbox) -> None:
    """Put one JSON body when everything is generated."""
    usage = UsageCount(generation.prompts)
    wholes: defaultdict[int, Whole] = defaultdict(Whole)
    per_prompt = generation.params.n

    def take(i: int, output: Output) -> None:
        usage.add(i, output)
        if output.prompt_logprobs is not None:
            form.saw_prompt(i, output.prompt_logprobs)
        for new in output.outputs:
            wholes[i * per_prompt + new.index].add(new)

    await generation.run(take)
    choices = [form.choice(index, wholes[index]) for index in sorted(wholes)]
    outbox.put(envelope.around(choices, usage=usage.usage(), **form.extras()))


async def stream(
    generation: Generation,
    form: Format,
    envelope: Envelope,
    options: StreamOptions,
    outbox: Outbox,
) -> None:
    """Put an event for each thing that is new, and the usage at the end if it is wanted."""
    usage = UsageCount(generation.prompts)
    begun: set[int] = set()
    per_prompt = generation.params.n

    def take(i: int, output: Output) -> None:
        usage.add(i, output)
        if output.prompt_logprobs is not None:
            form.saw_prompt(i, output.prompt_logprobs)
        so_far = usage.usage() if options.continuous_usage_stats else None
        for new in output.outputs:
            index = i * per_prompt + new.index
            extras = form.extras() if index not in begun else {}
            for piece in form.pieces(index, new, first=index not in begun):
                outbox.put(sse.event(envelope.around([piece], usage=so_far, **extras)))
                begun.add(index)
                extras = {}

    await generation.run(take)
    if options.include_usage:
        outbox.put(sse.event(envelope.around([], usage=usage.usage())))
