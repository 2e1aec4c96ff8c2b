"""The engine called from Python, offline: prompts in, results out, in the prompts' order."""

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from paged_jax.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from paged_jax.engine import Engine
from paged_jax.engine_stats import EngineStats
from paged_jax.errors import ConfigError, RequestError
from paged_jax.outputs import RequestOutput
from paged_jax.progress import ConsoleProgress, Progress, SilentProgress
from paged_jax.prompts import Prompt, encode_prompt
from paged_jax.response import Response
from scheduler import SamplingParams

__all__ = ["LLM"]

Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model ready to answer. Not thread-safe.

    `model` is an alias (`smollm2`), a Hugging Face id, a folder or a .gguf file, and the keywords
    are the fields of `EngineConfig`; or it is an `Engine`, of one's own model perhaps. Raises
    ConfigError, ModelNotFoundError or ModelLoadError.
    """

    def __init__(self, model: str | Engine, *, progress: Progress | None = None, **config: Any):
        self._progress = progress or ConsoleProgress()
        if isinstance(model, Engine):
            if config:
                raise ConfigError(f"the engine is made already: {', '.join(config)} come too late")
            self.engine = model
        else:
            self.engine = Engine.from_pretrained(model, progress=self._progress, **config)
        self.engine.warm_up()
        self._num_requests = 0

    @property
    def tokenizer(self):
        return self.engine.tokenizer

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without parameters: the model's recommendation."""
        return SamplingParams(**self.engine.generation_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        adapter: str | None = None,
        use_progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one prompt or many; results come in the order of the prompts.

        A prompt is a string or `{"prompt_token_ids": [...]}`; `sampling_params` is one object for
        all or one a prompt; `adapter` names a LoRA adapter that `engine.load_adapter` loaded. Such
        an object says everything: the model's recommendation is not added to it. To keep that,
        begin with `dataclasses.replace(llm.default_sampling_params(), ...)`.
        Raises RequestError for the first prompt that cannot be served, before any is started.
        """
        prompts = _as_list(prompts)
        encoded = [encode_prompt(prompt, self.tokenizer) for prompt in prompts]
        return self._run(encoded, sampling_params, use_progress, adapter)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        adapter: str | None = None,
        use_progress: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: each a list of `{"role": ..., "content": ...}`.

        `template` takes what `Tokenizer.apply_chat_template` takes. Raises RequestError if the
        model has no chat template or its template refuses.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        if self.tokenizer is None:
            raise RequestError(
                "chat needs a tokenizer, and this engine runs without one", param="messages"
            )
        encoded = []
        for conversation in conversations:
            text = self.tokenizer.apply_chat_template(conversation, **template)
            encoded.append((text, self.tokenizer.encode(text, add_special_tokens=False)))
        return self._run(encoded, sampling_params, use_progress, adapter)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt, best first.

        Prompt and `max_tokens` together must fit the model; RequestError otherwise.
        """
        encoded = [encode_prompt(prompt, self.tokenizer) for prompt in _as_list(prompts)]
        whole = SamplingParams(max_tokens=params.max_tokens)
        for _, token_ids in encoded:
            self.engine.check_request(token_ids, whole)
        searches = [
            BeamSearch(token_ids, params, eos_token_ids=self.engine.eos_token_ids)
            for _, token_ids in encoded
        ]
        with self._progress.track("searching", params.max_tokens, unit="tokens") as advance:
            while asked := [(s, ids) for s in searches for ids in s.pending()]:
                self._advance(searches, asked)
                advance(1)
        return [
            search.output(text, self.tokenizer)
            for (text, _), search in zip(encoded, searches, strict=True)
        ]

    def _advance(
        self, searches: Sequence[BeamSearch], asked: Sequence[tuple[BeamSearch, tuple[int, ...]]]
    ) -> None:
        """One round: the next tokens of every live beam of every search, in one batch."""
        params = searches[0].request_params
        results = self._run([(None, ids) for _, ids in asked], params, use_progress=False)
        answers: dict[BeamSearch, list[RequestOutput]] = {search: [] for search, _ in asked}
        for (search, _), result in zip(asked, results, strict=True):
            answers[search].append(result)
        for search, found in answers.items():
            search.advance(found)

    def _run(
        self,
        encoded: Sequence[tuple[str | None, Sequence[int]]],
        sampling_params: Params,
        use_progress: bool,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        params = self._params_of_each(sampling_params, len(encoded))
        for (_, token_ids), one in zip(encoded, params, strict=True):
            self.engine.check_request(token_ids, one, adapter=adapter)
        results: dict[str, RequestOutput] = {}
        order: list[str] = []
        results_of = self.stream(
            encoded, params, use_progress=use_progress, order=order, adapter=adapter
        )
        for _, result in results_of:
            if result.finished:
                results[result.request_id] = result
        return [results[request_id] for request_id in order]

    def stream(
        self,
        encoded: Sequence[tuple[str | None, Sequence[int]]],
        params: Sequence[SamplingParams],
        *,
        use_progress: bool = True,
        order: list[str] | None = None,
        adapter: str | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield (index of the prompt, everything so far) whenever a request gained a token.

        `encoded` holds (text or None, token ids) for each prompt; `order` receives the request
        ids. Leaving the loop early aborts what still runs.
        """
        responses: dict[str, tuple[int, Response]] = {}
        progress = self._progress if use_progress else SilentProgress()
        try:
            prepared = [self.engine.prepare(one) for one in params]
            for i, ((text, token_ids), one) in enumerate(zip(encoded, params, strict=True)):
                name = f"llm-{self._num_requests}"
                request = self.engine.add_request(
                    name, token_ids, one, adapter=adapter, prepared=prepared[i]
                )
                self._num_requests += 1
                responses[request.request_id] = (i, Response(request, self.tokenizer, text))
                if order is not None:
                    order.append(request.request_id)
            with progress.track("generating", len(encoded), unit="requests") as advance:
                while self.engine.has_unfinished and responses:
                    for request_id in self._step(responses):
                        i, response = responses[request_id]
                        if response.finished:
                            del responses[request_id]
                            advance(1)
                        yield i, response.whole()
            while self.engine.has_unfinished:
                self.engine.step()  # what was dispatched ahead of the last stop
        finally:
            for request_id in responses:
                self.engine.abort(request_id)

    def _step(self, responses: Mapping[str, tuple[int, Response]]) -> list[str]:
        """Run a step; the ids of the requests that gained something, each once."""
        gained: dict[str, None] = {}
        for update in self.engine.step():
            request_id = update.sequence.request.request_id
            if request_id not in responses:
                continue  # aborted by a caller who left an earlier loop
            output = responses[request_id][1].push(update)
            if output is None:
                continue
            if output.finish_reason is not None and update.finish_reason is None:
                self.engine.abort(request_id, update.sequence.index)
            gained[request_id] = None
        return list(gained)

    def _params_of_each(self, params: Params, num_prompts: int) -> list[SamplingParams]:
        if params is None:
            params = self.default_sampling_params()
        each = [params] * num_prompts if isinstance(params, SamplingParams) else list(params)
        for one in each:
            if not isinstance(one, SamplingParams):
                raise RequestError(
                    f"sampling_params must be SamplingParams, one or a list, got {one!r:.60}",
                    param="sampling_params",
                )
        if len(each) != num_prompts:
            raise RequestError(
                f"sampling_params has {len(each)} entries for {num_prompts} prompts",
                param="sampling_params",
            )
        return each


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], Integral)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))
