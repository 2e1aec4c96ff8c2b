"""A request's text and tokens as they come: between the engine's updates and the caller."""

from collections.abc import Iterable, Sequence
from typing import cast

from paged_jax.detokenizer import Detokenizer
from paged_jax.outputs import CompletionOutput, RequestOutput, TokenLogprob
from paged_jax.tokenizer import Tokenizer
from scheduler import FinishReason, Request, SequenceUpdate

__all__ = ["Response"]


class _Sample:
    """What one sample has produced so far."""

    def __init__(self, detokenizer: Detokenizer | None):
        self.detokenizer = detokenizer
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.logprobs: list[TokenLogprob] = []
        self.cumulative_logprob = 0.0


class Response:
    """Collects the updates of one request. Without a tokenizer the text stays empty.

    A stop string ends a sample here, before the engine knows: `push` says so, and the caller
    aborts the sample.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, prompt: str | None = None):
        self.request = request
        self.prompt = prompt
        self._num_generated_tokens = 0
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._told_prompt_logprobs = False
        params = request.params
        self._samples = [
            _Sample(
                None
                if tokenizer is None
                else Detokenizer(tokenizer, params, request.prompt_token_ids)
            )
            for _ in range(params.num_samples)
        ]

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self._samples)

    def push(self, update: SequenceUpdate) -> CompletionOutput | None:
        """What the update adds to its sample; None after the sample's end.

        If the result has a `finish_reason` and the update has none, a stop string was found.
        """
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = cast(tuple[TokenLogprob | None, ...], update.prompt_logprobs)
        index = update.sequence.index
        sample = self._samples[index]
        if sample.finish_reason is not None:
            return None
        new_ids = () if update.token_id is None else (update.token_id,)
        sample.token_ids += new_ids
        self._num_generated_tokens += len(new_ids)
        new_logprobs = () if update.logprobs is None else (cast(TokenLogprob, update.logprobs),)
        sample.logprobs += new_logprobs
        sample.cumulative_logprob += sum(entry.logprob for entry in new_logprobs)
        text = self._text_of(sample, update)
        if sample.finish_reason is None and update.finish_reason is not None:
            sample.finish_reason = str(update.finish_reason)
            sample.stop_reason = update.stop_reason
        return self._output(index, sample, text, new_ids, new_logprobs)

    def _text_of(self, sample: _Sample, update: SequenceUpdate) -> str:
        detokenizer = sample.detokenizer
        if detokenizer is None:
            return ""
        text = ""
        if update.token_id is not None and not self._is_hidden(update):
            text = detokenizer.push([update.token_id])
        if update.finish_reason is not None and detokenizer.stop_reason is None:
            text += detokenizer.finish()
        if detokenizer.stop_reason is not None:
            sample.finish_reason = str(FinishReason.STOP)
            sample.stop_reason = detokenizer.stop_reason
        return text

    def _is_hidden(self, update: SequenceUpdate) -> bool:
        """The token that ended a sequence shows only where the caller wants stops in the text."""
        params = self.request.params
        if update.finish_reason is not FinishReason.STOP:
            return False
        return not (params.include_stop_str_in_output and update.stop_reason is not None)

    def _output(
        self,
        index: int,
        sample: _Sample,
        text: str,
        token_ids: Iterable[int],
        logprobs: Iterable[TokenLogprob],
    ) -> CompletionOutput:
        params = self.request.params
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=tuple(token_ids),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            logprobs=None if params.logprobs is None else tuple(logprobs),
            cumulative_logprob=sample.cumulative_logprob if params.needs_logprobs else None,
        )

    @property
    def streams(self) -> bool:
        """False while it cannot be known which samples will be returned."""
        return self.request.params.num_samples == self.request.params.n

    def delta(self, *outputs: CompletionOutput) -> RequestOutput:
        """A `RequestOutput` of these new parts."""
        prompt_logprobs = None if self._told_prompt_logprobs else self._prompt_logprobs
        self._told_prompt_logprobs |= prompt_logprobs is not None
        return self._request_output(outputs, prompt_logprobs)

    def _request_output(
        self,
        outputs: Sequence[CompletionOutput],
        prompt_logprobs: tuple[TokenLogprob | None, ...] | None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=tuple(outputs),
            finished=self.finished,
            num_cached_tokens=self.request.num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            queue_s=self.request.queue_s,
            prompt_logprobs=prompt_logprobs,
        )

    def whole(self) -> RequestOutput:
        """A `RequestOutput` of everything so far: with `best_of`, of the most likely samples."""
        samples = self._samples
        if not self.streams:
            samples = sorted(samples, key=lambda sample: -sample.cumulative_logprob)
        outputs = [
            self._output(
                index,
                sample,
                "" if sample.detokenizer is None else sample.detokenizer.text,
                sample.token_ids,
                sample.logprobs,
            )
            for index, sample in enumerate(samples[: self.request.params.n])
        ]
        return self._request_output(outputs, self._prompt_logprobs)
