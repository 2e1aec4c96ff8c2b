"""The engine on its own thread, streaming to an event loop.

The inbox is the single door between the threads: requests and aborts go in through it, and each
step's updates come back with one call into the event loop. Text is made on the event loop.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from paged_jax.asked import Prepared
from paged_jax.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from paged_jax.config import EngineConfig
from paged_jax.engine import Drain, Engine, Version, Weights
from paged_jax.engine_stats import EngineStats
from paged_jax.errors import EngineDeadError, PagedJaxError, RequestError
from paged_jax.outputs import RequestOutput
from paged_jax.progress import Progress
from paged_jax.prompts import Prompt, encode_prompt
from paged_jax.response import Response
from paged_jax.tokenizer import Tokenizer
from scheduler import Request, SamplingParams, SequenceUpdate

__all__ = ["AsyncEngine"]

logger = logging.getLogger(__name__)

State = Literal["loading", "compiling", "ready", "draining", "dead"]
Command = Callable[[Engine], None]
Event = Request | SequenceUpdate | Exception  # the request itself when the engine has taken it
Events = asyncio.Queue[Event]

JOIN_S = 10.0  # a step that hangs must not keep the process from ending
COMPILE_S = 30.0  # a grammar's limits end it after about one, unless the machine is very busy
LONG_TEXT = 4096  # characters; tokenizing more than this would hold up the other streams


class AsyncEngine:
    """Requests from coroutines, each an async iterator of what is new.

    Made cheaply; `start` loads the model. Everything but `stats` and `render_chat` is called on
    the event loop that called `start`.
    """

    def __init__(
        self,
        config: EngineConfig | Engine,
        *,
        progress: Progress | None = None,
        make_engine: Callable[[], Engine] | None = None,
    ):
        """`config` names what to load, or is an engine made already, which is then nobody else's;
        `make_engine` makes one on the engine's thread."""
        self.config = config.config if isinstance(config, Engine) else config
        self.state: State = "loading"
        if isinstance(config, Engine):
            self._make_engine: Callable[[], Engine] = lambda: config
        else:
            self._make_engine = make_engine or (
                lambda: Engine.from_pretrained(config, progress=progress)
            )
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._streams: dict[str, Events] = {}
        self._stream_ended = asyncio.Event()
        self._request_numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()  # shut down, perhaps before the engine was there
        self._engine: Engine | None = None

    @classmethod
    async def from_pretrained(cls, config: EngineConfig) -> Self:
        engine = cls(config)
        await engine.start()
        return engine

    # -- life -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load and compile, then begin to serve; raises what went wrong."""
        self._loop = asyncio.get_running_loop()
        ready: concurrent.futures.Future[Engine] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name="paged-jax engine", daemon=True
        )
        self._thread.start()
        try:
            self._engine = await asyncio.wrap_future(ready)
        except Exception:
            self.state = "dead"
            raise
        if not self._ended.is_set():
            self.state = "ready"

    async def shutdown(self, *, drain_s: float = 0.0) -> None:
        """Refuse new work, let running requests go on for `drain_s` seconds, then end the rest."""
        if self.state != "dead":
            self.state = "draining"
        self._ended.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._until_streams_end(), drain_s)
        for events in list(self._streams.values()):
            events.put_nowait(EngineDeadError("the engine is shutting down"))
        self._inbox.put(None)
        if self._thread is not None and self._engine is not None:
            await asyncio.to_thread(self._thread.join, JOIN_S)
        self.state = "dead"

    async def _until_streams_end(self) -> None:
        while self._streams:
            self._stream_ended.clear()
            await self._stream_ended.wait()

    def _run(self, ready: concurrent.futures.Future[Engine]) -> None:
        """The engine's thread, from loading to the end."""
        ready.set_running_or_notify_cancel()  # whoever waits may give up; loading goes on
        try:
            engine = self._make_engine()
            if not self._ended.is_set():
                self._loop.call_soon_threadsafe(self._begin_to_compile)
                engine.warm_up(wanted=lambda: not self._ended.is_set())
            if self._ended.is_set():
                engine.close()
                raise EngineDeadError("the engine was shut down before it was ready")
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(engine)
        try:
            self._serve(engine)
        except Exception as error:
            logger.exception("the engine stopped")
            dead = EngineDeadError(f"the engine stopped: {type(error).__name__}")
            with contextlib.suppress(RuntimeError):  # the event loop may be gone
                self._loop.call_soon_threadsafe(self._die, dead)
        finally:
            engine.close()

    def _begin_to_compile(self) -> None:
        if self.state == "loading":
            self.state = "compiling"

    def _serve(self, engine: Engine) -> None:
        while True:
            commands = [] if engine.has_unfinished else [self._inbox.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    commands.append(self._inbox.get_nowait())
            for command in commands:
                if command is None:
                    return
                command(engine)
            with engine.step_clock.running():
                updates = engine.step()
            if updates:
                self._loop.call_soon_threadsafe(self._deliver, updates)

    def _deliver(self, updates: Sequence[SequenceUpdate]) -> None:
        for update in updates:
            self._tell(update.sequence.request.request_id, update)

    def _tell(self, engine_id: str, event: Event) -> None:
        events = self._streams.get(engine_id)
        if events is not None:
            events.put_nowait(event)

    def _die(self, error: EngineDeadError) -> None:
        self.state = "dead"
        for events in self._streams.values():
            events.put_nowait(error)

    # -- requests ---------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield what is new: each output holds new text and token ids of one sample.

        While it cannot be known which samples are the best of `best_of`, an output only counts
        the tokens; the last one holds the samples whole.

        Closing the iterator or cancelling its reader aborts the request; its blocks are free
        within two steps. `request_id` is for logs; the engine's own ids are unique. `priority`,
        `tenant`, `cache_salt` and `adapter` are those of `Engine.add_request`. Raises RequestError
        before the first output, EngineDeadError if the engine dies.
        """
        engine = self._ready_engine()
        text, token_ids = await self._encode(prompt)
        standing: dict[str, Any] = {
            "priority": priority,
            "tenant": tenant,
            "cache_salt": cache_salt,
            "adapter": adapter,
        }
        engine.check_request(token_ids, params, **standing)
        prepared = await self._prepare(engine, params)
        self._ready_engine()  # it may have ended while a long text was tokenized
        number = next(self._request_numbers)
        engine_id = f"{request_id or 'request'}#{number}"
        events: Events = asyncio.Queue()
        self._streams[engine_id] = events
        standing["prepared"] = prepared
        self._inbox.put(lambda engine: self._submit(engine, engine_id, token_ids, params, standing))
        response = None
        try:
            while response is None or not response.finished:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Request):
                    response = Response(event, self.tokenizer, prompt=text)
                    continue
                assert response is not None, "a token before its request was taken"
                output = response.push(event)
                if output is None:
                    continue
                if output.finish_reason is not None and event.finish_reason is None:
                    self._abort(engine_id, output.index)
                if response.streams:
                    yield response.delta(output)
                elif response.finished:
                    yield response.whole()
                else:
                    yield response.delta()
        finally:
            del self._streams[engine_id]
            self._stream_ended.set()
            self._abort(engine_id)

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> BeamSearchOutput:
        """The most likely continuations of a prompt, as `LLM.beam_search` finds them.

        Every round asks for the next tokens of all beams at once, in requests that share their
        batch with everybody else's. Cancelling it aborts them. Raises what `generate` raises; a
        search that has not ended when the engine starts to drain does so, too.
        """
        engine = self._ready_engine()
        text, token_ids = await self._encode(prompt)
        standing: dict[str, Any] = {
            "priority": priority,
            "tenant": tenant,
            "cache_salt": cache_salt,
            "adapter": adapter,
        }
        engine.check_request(token_ids, SamplingParams(max_tokens=params.max_tokens), **standing)
        search = BeamSearch(token_ids, params, eos_token_ids=engine.eos_token_ids)
        options = {"request_id": request_id, **standing}
        while asked := search.pending():
            answers = [
                asyncio.create_task(self._whole(ids, search.request_params, options))
                for ids in asked
            ]
            try:
                search.advance(await asyncio.gather(*answers))
            finally:  # the first error, or our own cancellation, ends the others
                for answer in answers:
                    answer.cancel()
                await asyncio.gather(*answers, return_exceptions=True)
        return search.output(text, self.tokenizer)

    async def _whole(
        self, token_ids: Sequence[int], params: SamplingParams, options: Mapping[str, Any]
    ) -> RequestOutput:
        """The only output of a request for one token."""
        async with contextlib.aclosing(self.generate(token_ids, params, **options)) as outputs:
            return await anext(outputs)

    # -- adapters ---------------------------------------------------------------------------

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """LoRA adapters that requests may name."""
        return () if self._engine is None else self._engine.adapter_names

    async def load_adapter(self, name: str, directory: str | Path | None = None) -> None:
        """`Engine.load_adapter`."""
        await self._call(lambda engine: engine.load_adapter(name, directory))

    async def unload_adapter(self, name: str) -> None:
        """`Engine.unload_adapter`."""
        await self._call(lambda engine: engine.unload_adapter(name))

    # -- other weights ----------------------------------------------------------------------

    async def update_params(
        self, tree: Any, *, version: Version | None = None, drain: Drain = "abort"
    ) -> Version:
        """`Engine.update_params`. With `wait`, running requests go on streaming until they are
        done, and those that come meanwhile wait for the new weights."""
        return await self._call(
            lambda engine: engine.update_params(tree, version=version, drain=drain),
            finish_first=drain == "wait",
        )

    async def load_weights(
        self, path: str, *, version: Version | None = None, drain: Drain = "abort"
    ) -> Version:
        """`update_params` with the weights in a folder, which is read meanwhile in a thread.

        Raises ModelLoadError for a folder that cannot be read or holds a model of other shapes.
        """
        tree = await asyncio.to_thread(self._ready_engine().read_params, path)
        return await self.update_params(tree, version=version, drain=drain)

    async def reset_prefix_cache(self) -> None:
        """Find no cached prefix again that was computed before now."""
        await self._call(lambda engine: engine.scheduler.forget_prefixes())

    @property
    def params_version(self) -> Version:
        return 0 if self._engine is None else self._engine.params_version

    async def sleep(self, *, weights: Weights = "keep", drain: Drain = "abort") -> None:
        """`Engine.sleep`."""
        await self._call(
            lambda engine: engine.sleep(weights=weights, drain=drain), finish_first=drain == "wait"
        )

    async def wake(self) -> None:
        """`Engine.wake`."""
        await self._call(lambda engine: engine.wake())

    async def _call(self, work: Callable[[Engine], Any], *, finish_first: bool = False) -> Any:
        """Do something on the engine's thread, between two steps, and give what it gives."""
        self._ready_engine()
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run(engine: Engine) -> None:
            try:
                while finish_first and engine.has_unfinished:
                    self._loop.call_soon_threadsafe(self._deliver, engine.step())
                done.set_result(work(engine))
            except Exception as error:
                done.set_exception(error)
                if not isinstance(error, PagedJaxError | RequestError):
                    raise

        self._inbox.put(run)
        return await asyncio.wrap_future(done)

    async def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            return await asyncio.to_thread(encode_prompt, prompt, self.tokenizer)
        return encode_prompt(prompt, self.tokenizer)

    async def _prepare(self, engine: Engine, params: SamplingParams) -> Prepared:
        """Compile what the parameters ask for, beside the event loop; bounded in time."""
        if params.structured_outputs is None and not params.bad_words:
            return Prepared()
        try:
            return await asyncio.wait_for(asyncio.to_thread(engine.prepare, params), COMPILE_S)
        except TimeoutError:
            raise RequestError(
                f"structured_outputs took longer than {COMPILE_S:g} s to compile",
                param="structured_outputs",
            ) from None

    def _submit(
        self,
        engine: Engine,
        engine_id: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        standing: Mapping[str, Any],
    ) -> None:
        """On the engine's thread: queue the request; its stream hears of that, or of a refusal."""
        answer: Event
        try:
            answer = engine.add_request(engine_id, token_ids, params, **standing)
        except RequestError as error:
            answer = error
        self._loop.call_soon_threadsafe(self._tell, engine_id, answer)

    def _abort(self, engine_id: str, index: int | None = None) -> None:
        self._inbox.put(lambda engine: engine.abort(engine_id, index))

    def _ready_engine(self) -> Engine:
        if self._engine is None or self.state != "ready":
            raise EngineDeadError(f"the engine takes no requests: it is {self.state}")
        return self._engine

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation; RequestError if the template refuses. Any thread."""
        if self.tokenizer is None:
            raise RequestError(
                "chat needs a tokenizer, and this engine runs without one", param="messages"
            )
        return self.tokenizer.encode_chat(messages, **options)

    # -- what it is -------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer | None:
        return None if self._engine is None else self._engine.tokenizer

    @property
    def model_name(self) -> str:
        if self._engine is None:
            return self.config.served_model_name or self.config.model
        return self._engine.model_name

    @property
    def max_model_len(self) -> int:
        return 0 if self._engine is None else self._engine.max_model_len

    @property
    def vocab_size(self) -> int:
        return 0 if self._engine is None else self._engine.vocab_size

    @property
    def settings(self) -> Mapping[str, Any]:
        return dataclasses.asdict(self.config)

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        return {} if self._engine is None else self._engine.generation_defaults

    @property
    def step_age_s(self) -> float:
        """Seconds since the running step began, compiling not counted. Any thread."""
        return 0.0 if self._engine is None else self._engine.step_clock.age_s

    def stats(self) -> EngineStats:
        """Figures as of the last step; zeros while loading. Any thread."""
        return EngineStats.empty(self.config) if self._engine is None else self._engine.stats()
