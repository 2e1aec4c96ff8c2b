"""A request (one client call) and its sequences (one a sample)."""

import enum
import hashlib
from collections.abc import Iterable

from scheduler.sampling_params import SamplingParams


class Status(enum.Enum):
    """Where a sequence is. A preempted sequence is WAITING with its output kept."""

    FORKING = "forking"  # waits for its elder sibling's prompt, to share the blocks
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Request:
    """One client call. Holds what its sequences share; owned by the engine thread.

    `stop_token_ids` joins the model's end-of-sequence ids (unless ignored) and the request's own.
    `max_total_tokens` is the length, prompt included, at which a sequence ends. `adapter_id` is
    what the device knows its adapter by, 0 if it has none. `came_at` and `began_at` are in seconds
    of the scheduler's clock: when it was queued, and first ran.
    """

    __slots__ = (
        "adapter_id",
        "began_at",
        "came_at",
        "max_total_tokens",
        "num_cached_tokens",
        "order_key",
        "params",
        "priority",
        "prompt_token_ids",
        "request_id",
        "salt",
        "sequences",
        "stop_token_ids",
        "tenant",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        seed: int,
        max_total_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        tenant: str = "",
        salt: bytes = b"",
        adapter_id: int = 0,
    ):
        self.request_id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.params = params
        self.max_total_tokens = max_total_tokens
        eos = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_token_ids = eos | frozenset(params.stop_token_ids)
        self.priority = priority
        self.tenant = tenant
        self.salt = salt
        self.adapter_id = adapter_id
        self.num_cached_tokens = 0
        self.order_key = (0.0, 0)
        self.came_at = 0.0
        self.began_at: float | None = None
        self.sequences = [
            Sequence(self, i, derive_seed(seed, i)) for i in range(params.num_samples)
        ]
        for younger in self.sequences[1:]:
            younger.status = Status.FORKING

    @property
    def queue_s(self) -> float:
        """Seconds from its arrival to its first step; 0 before that."""
        return 0.0 if self.began_at is None else self.began_at - self.came_at


class Sequence:
    """One sample of a request: its tokens, and how far their keys and values are computed.

    `num_in_flight` counts tokens that dispatched steps sample and the host has not seen yet;
    `blocks[g]` lists the block ids of group g, 0 where a block slid out of the window;
    `host_blocks[g]` those of the host pool while it is swapped out.
    """

    __slots__ = (
        "blocks",
        "capacity",
        "digests",
        "host_blocks",
        "index",
        "last_step_id",
        "num_computed_tokens",
        "num_in_flight",
        "num_preemptions",
        "num_registered",
        "request",
        "row",
        "seed",
        "shares_tail",
        "status",
        "token_ids",
    )

    def __init__(self, request: Request, index: int, seed: int):
        self.request = request
        self.index = index
        self.seed = seed
        self.token_ids = list(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_in_flight = 0
        self.num_preemptions = 0
        self.num_registered = 0
        self.row = -1
        self.status = Status.WAITING
        self.blocks: list[list[int]] = []
        self.host_blocks: list[list[int]] = []
        self.capacity = 0
        self.shares_tail = False
        self.digests: list[bytes] = []
        self.last_step_id = -1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}/{self.index} {self.status.value} "
            f"{self.num_computed_tokens}/{self.num_tokens})"
        )


def derive_seed(seed: int, index: int) -> int:
    """Seed of sample `index`: `derive_seed(seed, 0) == seed`, the others are hashed from it.

    A request of its own with the derived seed draws the same random numbers.
    """
    seed &= 2**64 - 1
    if index == 0:
        return seed
    material = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(material).digest()[:8], "little")
