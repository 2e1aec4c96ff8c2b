"""What the door needs of an engine: the part of `paged_jax.AsyncEngine` that it touches."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from paged_jax import BeamSearchOutput, BeamSearchParams, SamplingParams

EngineState = Literal["loading", "compiling", "ready", "draining", "dead"]


class Tokenizer(Protocol):
    """Text to token ids and back. Its methods may be called from any thread."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def describe(self) -> Mapping[str, Any]:
        """Its facts as JSON values, under the names that Hugging Face's files give them."""

    @property
    def chat_template(self) -> str:
        """The source of all chat templates, in Jinja; empty if there is none."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text; not always whole characters."""


class TokenLogprob(Protocol):
    """A token's log-probability, and those of the most likely ones in its place."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> Mapping[int, float]: ...


class Choice(Protocol):
    """What one sample of a request gained since the last output."""

    @property
    def index(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> str | int | None: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprob] | None: ...


class Output(Protocol):
    """What one request gained: new text and token ids of some of its choices."""

    @property
    def outputs(self) -> Sequence[Choice]: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob | None] | None:
        """Of the prompt's tokens; in the first output of those that hold something new."""

    @property
    def num_generated_tokens(self) -> int:
        """Tokens so far of all samples, also of those that are not returned."""

    @property
    def queue_s(self) -> float:
        """Seconds that the request waited in the engine until it first ran."""


class Stats(Protocol):
    """The engine as an operator sees it: counts since the start, and how full it is now."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def max_num_seqs(self) -> int:
        """Sequences that may run at the same time."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def kv_cache_usage(self) -> float: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def generation_tokens(self) -> int: ...
    @property
    def padded_tokens(self) -> int: ...
    @property
    def prefix_lookup_tokens(self) -> int: ...
    @property
    def prefix_hit_tokens(self) -> int: ...
    @property
    def compiles(self) -> int: ...
    @property
    def compile_s(self) -> float: ...
    @property
    def late_compiles(self) -> int: ...
    @property
    def compile_cache_hits(self) -> int: ...
    @property
    def params_number(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_cache_bytes(self) -> int: ...
    @property
    def blocks_in_use(self) -> int: ...
    @property
    def blocks_cached(self) -> int: ...
    @property
    def num_host_blocks(self) -> int: ...
    @property
    def host_blocks_in_use(self) -> int: ...
    @property
    def host_blocks_cached(self) -> int: ...
    @property
    def num_swaps(self) -> int: ...
    @property
    def num_swap_outs(self) -> int: ...
    @property
    def num_swap_ins(self) -> int: ...
    @property
    def num_copies(self) -> int: ...
    @property
    def scheduled_tokens(self) -> int: ...
    @property
    def steps_by_kind(self) -> Mapping[str, int]: ...
    @property
    def steps_by_size(self) -> Mapping[int, int]: ...
    @property
    def host_s(self) -> float: ...
    @property
    def device_s(self) -> float: ...


class OutputStream(Protocol):
    """The outputs of one request. Closing it, or cancelling who reads it, aborts the request."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def aclose(self) -> None: ...


class Engine(Protocol):
    """An engine that lives in this process. Every method is called on the event loop."""

    @property
    def state(self) -> EngineState: ...
    @property
    def step_age_s(self) -> float:
        """Seconds since the running step began, compiling not counted; 0 when none runs."""

    @property
    def model_name(self) -> str: ...
    @property
    def adapter_names(self) -> Sequence[str]:
        """LoRA adapters: a request may name one as its model."""
        ...

    async def load_adapter(self, name: str) -> None:
        """From the configured folder; PagedJaxError says why not."""

    async def unload_adapter(self, name: str) -> None: ...

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def settings(self) -> Mapping[str, Any]:
        """What was chosen about the engine, as JSON values."""

    @property
    def generation_defaults(self) -> Mapping[str, Any]: ...

    async def start(self) -> None:
        """Load and compile; returns when the engine is ready, raises what went wrong."""

    async def shutdown(self, *, drain_s: float) -> None: ...

    def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int,
        tenant: str,
        cache_salt: str,
        adapter: str | None = None,
    ) -> OutputStream:
        """Raises RequestError before the first output, EngineDeadError if the engine dies."""

    async def beam_search(
        self,
        prompt: list[int],
        params: BeamSearchParams,
        *,
        request_id: str,
        priority: int,
        tenant: str,
        cache_salt: str,
        adapter: str | None = None,
    ) -> BeamSearchOutput:
        """Raises what `generate` raises. Cancelling it aborts the search."""

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> list[int]:
        """Token ids of a conversation. May be called from any thread; RequestError on refusal."""

    def stats(self) -> Stats: ...

    # What an operator may ask for, and gets when the engine is between two steps.

    @property
    def params_version(self) -> str | int: ...

    async def reset_prefix_cache(self) -> None: ...

    async def load_weights(
        self, path: str, *, version: str | int | None, drain: Literal["abort", "wait", "keep"]
    ) -> str | int:
        """Raises PagedJaxError for weights that cannot be read or are of other shapes."""

    async def sleep(
        self, *, weights: Literal["keep", "host", "drop"], drain: Literal["abort", "wait", "keep"]
    ) -> None: ...

    async def wake(self) -> None:
        """Raises PagedJaxError while weights that were dropped have not come back."""
