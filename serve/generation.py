"""The engine's work for one request: every prompt at once, watched, and closed at the end."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from paged_jax import RequestError, SamplingParams
from serve.engine import Output, OutputStream
from serve.errors import ABORTS, GenerationError
from serve.gate import Gate
from serve.metrics import Metrics
from serve.prompts import Prompt
from serve.tracing import Report

Take = Callable[[int, Output], None]


class Submit(Protocol):
    """Hands a prompt to the engine; nothing happens before the outputs are read."""

    def __call__(self, prompt: list[int], *, request_id: str) -> OutputStream: ...


@dataclass(frozen=True)
class Generation:
    """Prompts that go to the engine with the same parameters. Nothing is submitted before `run`.

    params: how many choices of how many tokens each prompt gets, in whatever way `submit` finds
    them. arrived: `time.perf_counter()` when the request came in. report: is told what became of
    each prompt.
    """

    submit: Submit
    gate: Gate
    metrics: Metrics
    prompts: Sequence[Prompt]
    params: SamplingParams
    request_id: str
    arrived: float
    report: Report | None = None

    async def run(self, take: Take) -> None:
        """Hand each output to `take`, with the index of its prompt, as soon as it is there.

        The first error, of the engine or of `take`, ends all of it and is raised. Cancelling
        aborts what runs. QueueFullError comes before anything is submitted.
        """
        with self.gate.queue(len(self.prompts) * self.params.num_samples):
            await _all_or_none([self._run_one(i, take) for i in range(len(self.prompts))])

    async def _run_one(self, i: int, take: Take) -> None:
        token_ids = self.prompts[i].token_ids
        watch = self.metrics.watch(self.params, len(token_ids), self.arrived)
        error: BaseException | None = None
        try:
            outputs = self.submit(token_ids, request_id=f"{self.request_id}-{i}")
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    watch.saw(output)
                    if any(choice.finish_reason == "error" for choice in output.outputs):
                        raise GenerationError
                    take(i, output)
        except RequestError as refusal:
            error = refusal  # was never taken in
            raise
        except (asyncio.CancelledError, *ABORTS) as end:
            error = end
            watch.ended("abort")
            raise
        except Exception as failure:
            error = failure
            watch.ended("error")
            raise
        finally:
            if self.report is not None:
                self.report(watch.work(f"{self.request_id}-{i}", error))


async def _all_or_none(work: Sequence[Coroutine[None, None, None]]) -> None:
    if len(work) == 1:
        await work[0]
        return
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
