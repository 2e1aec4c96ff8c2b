"""Runs traces on engines over one loaded model."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from paged_jax.bench.beds import Measured, described
from paged_jax.bench.drive import drive
from paged_jax.bench.figures import scheduling_figures, timing_figures
from paged_jax.bench.trace import Trace, TraceRequest
from paged_jax.compile_cache import use_compile_cache
from paged_jax.config import EngineConfig
from paged_jax.engine import Engine
from paged_jax.errors import RequestError
from paged_jax.hub import resolve_model
from paged_jax.models import ServedModel, load_model
from paged_jax.plan import choose_dtype
from paged_jax.progress import Progress
from paged_jax.sharding import choose_device
from paged_jax.tokenizer import load_tokenizer

__all__ = ["ModelBed", "ModelSize", "load_bed"]

NEEDED = ("backbone", "sample", "swap_out", "swap_in")  # kinds of programs
WARM_PROMPT_LEN, WARM_OUTPUT_LEN, NUM_WARM_REQUESTS = 32, 3, 2


def load_bed(config: EngineConfig, progress: Progress) -> "ModelBed":
    """Load the model that the configuration names."""
    files = resolve_model(config.model, progress=progress)
    use_compile_cache(config.compilation_cache_dir)
    device = choose_device(config.device)
    with jax.default_device(device):
        model = load_model(
            files.directory,
            dtype=choose_dtype(config, device),
            max_model_len=config.max_model_len,
            progress=progress,
        )
    return ModelBed(model, files.name, progress, directory=files.directory)


class ModelBed:
    """The engines share parameters and, through the disk, compiled programs."""

    def __init__(
        self, model: ServedModel, name: str, progress: Progress, *, directory: Path | None = None
    ):
        """`directory` is where the model's tokenizer lies, for a trace of texts."""
        self.model = model
        self.name = name
        self._progress = progress
        self._directory = directory

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a prompt; the tokenizer is loaded at the first one."""
        assert self._directory is not None, "this model came without files"
        return load_tokenizer(self._directory).encode(text)

    def check(self, trace: Trace, config: EngineConfig) -> None:
        """RequestError for the first request that the model cannot serve: before compiling."""
        limit = config.max_model_len or self.model.max_position
        for request in trace.requests:
            if limit is not None and request.num_tokens > limit:
                raise RequestError(
                    f"request {request.id} of the trace has {request.num_tokens} tokens, prompt "
                    f"and output together, where the most are {limit}",
                    param="max_tokens",
                )
            if max(request.prompt_token_ids) >= self.model.vocab_size:
                raise RequestError(
                    f"request {request.id} of the trace holds token id "
                    f"{max(request.prompt_token_ids)}, where the vocabulary of {self.name} ends "
                    f"at {self.model.vocab_size - 1}",
                    param="prompt_token_ids",
                )

    @property
    def size(self) -> "ModelSize":
        return ModelSize.of(self.model)

    @contextlib.contextmanager
    def cold_engine(self, config: EngineConfig) -> Iterator[Engine]:
        """A new engine that compiles what it needs, no larger, when it needs it."""
        config = dataclasses.replace(config, warmup="full")  # for steps in programs of their size
        engine = Engine(self.model, config, name=self.name, progress=self._progress)
        try:
            yield engine
        finally:
            engine.close()

    @contextlib.contextmanager
    def engine(self, config: EngineConfig) -> Iterator["PreparedEngine"]:
        """A new engine with every program compiled that a greedy request without extras needs."""
        with self.cold_engine(config) as engine:
            programs = [p for p in engine.runner.programs() if p.kind in NEEDED]
            began = time.perf_counter()
            track, num = self._progress.track, len(programs)
            with track("compiling", num, unit="programs") as advance:
                engine.runner.compile_all(programs, done=lambda program: advance(1))
            with track("running each once", num, unit="programs") as advance:
                for program in programs:
                    engine.runner.dummy_run(program)
                    advance(1)
            warm_up = {"programs": len(programs), "seconds": time.perf_counter() - began}
            yield PreparedEngine(engine, self.size, warm_up, self._progress)


class PreparedEngine:
    """A warm engine; every measurement begins with an empty prefix cache."""

    def __init__(
        self, engine: Engine, size: "ModelSize", warm_up: dict[str, float], progress: Progress
    ):
        """`warm_up` says what was compiled, and in how many seconds."""
        self.engine = engine
        self._size = size
        self._warm_up = warm_up
        self._progress = progress

    def measure(self, trace: Trace, *, label: str, arrivals: bool = False) -> Measured:
        """Serve the trace. What was compiled before is not in its time."""
        engine = self.engine
        drive(engine, _warm_requests(trace))
        engine.scheduler.forget_prefixes()
        before = engine.stats()
        with self._progress.track(label, trace.num_output_tokens, unit="tokens") as advance:
            run = drive(engine, trace.requests, arrivals=arrivals, advance=advance)
        after = engine.stats()
        computed = sum(record.num_tokens for record in run.records)
        sampled = sum(record.num_sampled for record in run.records)
        figures = {
            **timing_figures(run),
            **scheduling_figures(run, engine.scheduler.config),
            "compiles": after.compiles - before.compiles,
            "compile_s": after.compile_s - before.compile_s,
            "warm_up": self._warm_up,
            "flop_s": self._size.flop(computed, sampled) / run.seconds,
            "config": described(engine.config, engine.scheduler.config),
        }
        return Measured(run, figures)


def _warm_requests(trace: Trace) -> list[TraceRequest]:
    """A few short ones: what is slow only the first time is over when the clock starts."""
    return [
        dataclasses.replace(
            request,
            prompt_token_ids=request.prompt_token_ids[:WARM_PROMPT_LEN],
            max_tokens=min(request.max_tokens, WARM_OUTPUT_LEN),
        )
        for request in trace.requests[:NUM_WARM_REQUESTS]
    ]


@dataclass(frozen=True)
class ModelSize:
    """Parameters by what they cost: a table of V x E is looked up, or multiplies as the head."""

    num_matrix_params: int  # all but the tables of V x E
    num_head_params: int  # V x E
    num_bytes_read: int  # in a step: every parameter but a table that is only looked up

    @classmethod
    def of(cls, model: ServedModel) -> "ModelSize":
        shape = (model.vocab_size, model.hidden_size)
        tables: list[jax.Array] = []
        others: list[jax.Array] = []
        for leaf in jax.tree.leaves(model.params):
            (tables if leaf.shape == shape else others).append(leaf)
        return cls(
            num_matrix_params=sum(leaf.size for leaf in others),
            num_head_params=model.vocab_size * model.hidden_size,
            num_bytes_read=sum(leaf.nbytes for leaf in (*others, *tables[:1])),
        )

    def flop(self, num_tokens: int, num_sampled: int) -> int:
        """Two for each matrix parameter and token, and for the head's at each sampled row."""
        return 2 * (self.num_matrix_params * num_tokens + self.num_head_params * num_sampled)
