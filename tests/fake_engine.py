"""An engine without a model: it says what it was told to say, and counts what is done to it.

Run as a program it serves itself, for tests that need a process to signal:
`python -m tests.fake_engine --port 8000 --delay-s 0.05`.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paged_jax import (
    Beam,
    BeamSearchOutput,
    BeamSearchParams,
    CompletionOutput,
    ConfigError,
    EngineDeadError,
    ModelLoadError,
    RequestError,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

BOS = 256
EOS = 257
VOCAB_SIZE = 300  # more than the tokenizer knows, as in many a model
PIECES = ("one ", "two ", "three ", "four ", "five ", "six ", "seven ", "eight ")
MAX_MODEL_LEN = 20_000


class FakeTokenizer:
    """A token for every byte of UTF-8, and a BOS before a text."""

    chat_template = "{{ tools }} <tool_call>"

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < BOS else b"<special>"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def describe(self) -> dict[str, Any]:
        return {"vocab_size": BOS + 2, "bos_token_id": BOS, "eos_token_id": [EOS]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        plain = bytes(token_id for token_id in token_ids if token_id < BOS)
        bos = "" if skip_special_tokens or BOS not in token_ids else "<bos>"
        return bos + plain.decode(errors="replace")


@dataclass(frozen=True)
class FakeStats:
    num_running: int
    num_waiting: int = 0
    max_num_seqs: int = 64
    num_blocks: int = 65
    block_size: int = 16
    kv_cache_usage: float = 0.0
    preemptions: int = 3
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    padded_tokens: int = 7
    prefix_lookup_tokens: int = 40
    prefix_hit_tokens: int = 16
    compiles: int = 5
    compile_s: float = 1.5
    late_compiles: int = 0
    compile_cache_hits: int = 4
    params_number: int = 2
    weight_bytes: int = 1000
    kv_cache_bytes: int = 3000
    blocks_in_use: int = 10
    blocks_cached: int = 20
    num_host_blocks: int = 50
    host_blocks_in_use: int = 6
    host_blocks_cached: int = 2
    num_swaps: int = 8
    num_swap_outs: int = 9
    num_swap_ins: int = 11
    num_copies: int = 12
    scheduled_tokens: int = 0
    steps_by_kind: Mapping[str, int] = field(default_factory=dict)
    steps_by_size: Mapping[int, int] = field(default_factory=dict)
    host_s: float = 0.25
    device_s: float = 0.75


@dataclass
class FakeEngine:
    """Token i of every choice is `pieces[i % len(pieces)]`, with that remainder as its id.

    lengths: where each choice ends with "stop", in turn; a choice without one ends with "length"
    at max_tokens. The other fields say when to wait and what goes wrong when.
    """

    pieces: Sequence[str] = PIECES
    lengths: Sequence[int | None] = (None,)
    delay_s: float = 0.0  # before every token
    prefill_s: float = 0.0  # before the first one, in addition
    start_s: float = 0.0
    start_error: Exception | None = None
    dies_after: int | None = None  # tokens of a request
    fails_after: int | None = None  # tokens, then finish_reason "error"
    raises_after: tuple[int, BaseException] | None = None
    stop_reason: str | int | None = None
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    has_tokenizer: bool = True
    model_name: str = "fake/model"
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCAB_SIZE
    step_age_s: float = 0.0
    max_num_seqs: int = 64
    adapters: Sequence[str] = ()
    queue_s: float = 0.0  # that every request claims to have waited

    def __post_init__(self):
        self.settings = {"model": self.model_name}
        self.state = "loading"
        self.tokenizer = FakeTokenizer() if self.has_tokenizer else None
        self.running: set[str] = set()
        self.seen: list[tuple[str, tuple[int, ...], SamplingParams | BeamSearchParams]] = []
        self.callers: list[dict[str, Any]] = []
        self.adapter_names: list[str] = list(self.adapters)
        self.rendered: list[tuple[list[dict], dict]] = []
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.params_version: str | int = 0
        self.num_aborted = 0
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.num_starts = 0
        self.num_shutdowns = 0

    async def load_adapter(self, name: str) -> None:
        if "/" in name:
            raise ModelLoadError(f"{name!r} is no adapter's name")
        self.adapter_names.append(name)

    async def unload_adapter(self, name: str) -> None:
        if name not in self.adapter_names:
            raise ConfigError(f"no adapter {name!r} is loaded")
        self.adapter_names.remove(name)

    async def start(self) -> None:
        self.num_starts += 1
        await asyncio.sleep(self.start_s / 2)
        self.state = "compiling"
        await asyncio.sleep(self.start_s / 2)
        if self.start_error is not None:
            raise self.start_error
        self.state = "ready"

    async def shutdown(self, *, drain_s: float) -> None:
        self.num_shutdowns += 1
        self.state = "dead"

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> list[int]:
        self.rendered.append((messages, dict(variables)))
        if messages[0]["role"] == "refused":
            raise RequestError("roles must alternate", param="messages", code="chat_template")
        for name, value in variables.items():
            if name not in ("mood", "reasoning_effort") or value == "unheard of":
                raise RequestError(
                    f"this model's chat template does not read {name!r}",
                    param="chat_template_kwargs",
                )
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        if add_generation_prompt:
            text += "<assistant>"
        elif not continue_final_message:
            text += "<end>"
        return self.tokenizer.encode(text)

    async def generate(
        self, prompt: list[int], params: SamplingParams, *, request_id: str, **caller: Any
    ) -> AsyncIterator[RequestOutput]:
        with self._request(request_id, prompt, params, caller):
            num_tokens = 0
            scores = None
            if params.prompt_logprobs is not None:
                scores = (None, *(TokenLogprob(token_id, -1.5, {}) for token_id in prompt[1:]))
            async for new in self._outputs(len(prompt), params):
                num_tokens += sum(len(output.token_ids) for output in new)
                yield RequestOutput(
                    request_id=request_id,
                    prompt=None,
                    prompt_token_ids=tuple(prompt),
                    outputs=new if params.num_samples == params.n else (),
                    finished=False,
                    num_cached_tokens=1,
                    num_generated_tokens=num_tokens,
                    queue_s=self.queue_s,
                    prompt_logprobs=scores,
                )
                scores = None
            if params.num_samples > params.n:
                best = (
                    CompletionOutput(k, text_of(4, self.pieces), (0, 1, 2, 3), "stop")
                    for k in range(params.n)
                )
                yield RequestOutput(
                    request_id, None, tuple(prompt), tuple(best), True, 1, num_tokens
                )

    async def beam_search(
        self, prompt: list[int], params: BeamSearchParams, *, request_id: str, **caller: Any
    ) -> BeamSearchOutput:
        with self._request(request_id, prompt, params, caller):
            for i in range(params.max_tokens):
                await asyncio.sleep(self.delay_s)
                self._go_wrong(i)
            reason = "length" if self.fails_after is None else "error"
            beams = [Beam((k, k), -0.5 * k, reason, f"beam {k}") for k in range(params.beam_width)]
            return BeamSearchOutput(None, tuple(prompt), tuple(beams), num_cached_tokens=1)

    @contextlib.contextmanager
    def _request(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams | BeamSearchParams,
        caller: dict[str, Any],
    ) -> Iterator[None]:
        """Keep the books of a request."""
        self._check(prompt, params)
        assert request_id not in self.running, "ids must be unique"
        self.seen.append((request_id, tuple(prompt), params))
        self.callers.append(caller)
        self.num_prompt_tokens += len(prompt)
        self.running.add(request_id)
        try:
            yield
        except BaseException:
            self.num_aborted += 1
            raise
        finally:
            self.running.discard(request_id)

    def _check(self, prompt: list[int], params: SamplingParams | BeamSearchParams) -> None:
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        max_tokens = 1 if params.max_tokens is None else params.max_tokens
        if len(prompt) + max_tokens > self.max_model_len:
            raise RequestError(
                f"this model's maximum context length is {self.max_model_len} tokens, but the "
                f"prompt has {len(prompt)} and max_tokens asks for {max_tokens} more",
                param="prompt",
                code="context_length_exceeded",
            )
        for token_id in prompt:
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(f"prompt holds {token_id}", param="prompt")

    async def _outputs(
        self, prompt_len: int, params: SamplingParams
    ) -> AsyncIterator[tuple[CompletionOutput, ...]]:
        limit = self.max_model_len - prompt_len
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        if limit == 0:
            yield tuple(CompletionOutput(k, "", (), "length") for k in range(params.num_samples))
            return
        lengths = [self._length(k) for k in range(params.num_samples)]
        ends = [limit if length is None else min(length, limit) for length in lengths]
        await asyncio.sleep(self.prefill_s)
        for i in range(max(ends)):
            await asyncio.sleep(self.delay_s)
            self._go_wrong(i)
            yield tuple(self._token(k, i, ends[k]) for k in range(len(ends)) if i < ends[k])

    def _length(self, k: int) -> int | None:
        return self.lengths[k % len(self.lengths)]

    def _go_wrong(self, i: int) -> None:
        if i == self.dies_after:
            self.state = "dead"
        if self.state == "dead":
            raise EngineDeadError("Traceback: the innards of the engine")
        if self.raises_after is not None and i == self.raises_after[0]:
            raise self.raises_after[1]

    def _token(self, k: int, i: int, end: int) -> CompletionOutput:
        self.num_tokens += 1
        token_id = i % len(self.pieces)
        reason, stop_reason = None, None
        if i == self.fails_after:
            reason = "error"
        elif i + 1 == end:
            stopped = self._length(k) == end
            reason = "stop" if stopped else "length"
            stop_reason = self.stop_reason if stopped else None
        return CompletionOutput(k, self.pieces[token_id], (token_id,), reason, stop_reason)

    async def reset_prefix_cache(self) -> None:
        self.told.append(("reset_prefix_cache", {}))

    async def load_weights(self, path: str, **how: Any) -> str | int:
        if path != "good":
            raise ModelLoadError(f"{path} is no folder")
        self.told.append(("load_weights", how))
        self.params_version = how["version"] or 1
        return self.params_version

    async def sleep(self, **how: Any) -> None:
        self.told.append(("sleep", how))

    async def wake(self) -> None:
        self.told.append(("wake", {}))

    async def abort(self, request_id: str) -> None:
        raise AssertionError("the door ends a request by closing its outputs")

    def stats(self) -> FakeStats:
        return FakeStats(
            num_running=len(self.running),
            max_num_seqs=self.max_num_seqs,
            kv_cache_usage=len(self.running) / 64,
            num_steps=self.num_tokens,
            scheduled_tokens=self.num_tokens,
            steps_by_kind={"decode": self.num_tokens, "prefill": 0},
            steps_by_size={1: self.num_tokens, 8: self.num_tokens},
            prompt_tokens=self.num_prompt_tokens,
            generation_tokens=self.num_tokens,
        )


def text_of(num_tokens: int, pieces: Sequence[str] = PIECES) -> str:
    """What a choice of that many tokens says."""
    return "".join(pieces[i % len(pieces)] for i in range(num_tokens))


def main() -> int:
    from serve import ServeOptions, run_server

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--delay-s", type=float, default=0.02)
    parser.add_argument("--start-s", type=float, default=0.0)
    parser.add_argument("--start-fails", action="store_true")
    parser.add_argument("--dies-after", type=int)
    parser.add_argument("--exit-when-dead", action="store_true")
    parser.add_argument("--drain-timeout-s", type=float, default=10.0)
    parser.add_argument("--log-format", default="text")
    parser.add_argument("--enable-admin", action="store_true")
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    given = parser.parse_args()
    engine = FakeEngine(
        delay_s=given.delay_s,
        start_s=given.start_s,
        start_error=ModelLoadError("no such weights") if given.start_fails else None,
        dies_after=given.dies_after,
        max_model_len=given.max_model_len,
    )
    options = ServeOptions(
        drain_timeout_s=given.drain_timeout_s,
        exit_when_dead=given.exit_when_dead,
        log_format=given.log_format,
        enable_admin=given.enable_admin,
    )
    return run_server(engine, options, port=given.port)


if __name__ == "__main__":
    sys.exit(main())
