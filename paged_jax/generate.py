"""`paged-jax generate`: prompts in, answers out, all of them in one continuous batch."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from paged_jax.config import EngineConfig
from paged_jax.errors import RequestError
from paged_jax.flags import add_flags, chosen
from paged_jax.jobs import Job, read_jobs, text_job
from paged_jax.outputs import RequestOutput
from paged_jax.progress import ConsoleProgress
from scheduler import SamplingParams

if TYPE_CHECKING:
    from paged_jax.engine_stats import EngineStats
    from paged_jax.llm import LLM

__all__ = ["add_arguments", "run"]

DEFAULTS = {"max_tokens": 128}
# What the help says of fields that the model's makers may have a word on.
RECOMMENDED = dict.fromkeys(
    ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), "as the model recommends"
)
FAILED = 1
SAY_EVERY_S = 10.0
HEADING_LEN = 72


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Prompts and answers")
    group.add_argument(
        "-p",
        "--prompt",
        dest="prompts",
        action="append",
        default=[],
        metavar="TEXT",
        help="a prompt; may be given several times",
    )
    group.add_argument(
        "--input",
        metavar="FILE",
        help="JSON lines, each with prompt, prompt_token_ids or messages and any sampling fields; "
        "- is standard input",
    )
    group.add_argument(
        "--output",
        metavar="FILE",
        help="write the answers as JSON lines in the prompts' order; - is standard output",
    )
    group.add_argument(
        "--chat", action="store_true", help="apply the model's chat template to the prompts"
    )
    # --seed is the engine's: each request derives its own from it.
    shown = {**DEFAULTS, **RECOMMENDED}
    add_flags(
        parser,
        SamplingParams,
        group="Sampling",
        leave_out={"seed", "logit_bias", "structured_outputs"},
        defaults=shown,
    )


def run(arguments: argparse.Namespace) -> int:
    """Answer everything; returns the exit code. Bad input is found before the model is loaded."""
    jobs = list(gather_jobs(arguments))
    if not jobs:
        raise RequestError("nothing to answer: give -p TEXT or --input FILE")
    with contextlib.ExitStack() as stack:
        shown = make_show(arguments, jobs, stack)

        from paged_jax.llm import LLM

        llm = LLM(**chosen(arguments, EngineConfig))
        encoded, params = prepare(llm, jobs)
        began, compiled_s = time.perf_counter(), llm.stats().compile_s
        failed = False
        with watched(len(jobs), on_terminal=shown.on_terminal) as advance:
            for index, output in llm.stream(encoded, params, use_progress=False):
                shown.show(index, output)
                if output.finished:
                    failed |= any(part.finish_reason == "error" for part in output.outputs)
                    advance()
    stats, elapsed_s = llm.stats(), time.perf_counter() - began
    print("\n" + figures(stats, elapsed_s, stats.compile_s - compiled_s), file=sys.stderr)
    return FAILED if failed else 0


def gather_jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    """The prompts of the flags, then those of the file. RequestError names a bad one."""
    sampling = {**DEFAULTS, **chosen(arguments, SamplingParams)}
    # --seed is the engine's, see above.
    sampling.pop("seed", None)
    SamplingParams(**sampling)
    for number, prompt in enumerate(arguments.prompts, start=1):
        yield text_job(prompt, f"prompt {number}", sampling, chat=arguments.chat)
    if arguments.input == "-":
        yield from read_jobs(sys.stdin.buffer, "standard input", sampling, chat=arguments.chat)
    elif arguments.input is not None:
        try:
            with open(arguments.input, "rb") as file:
                yield from read_jobs(file, arguments.input, sampling, chat=arguments.chat)
        except OSError as error:
            raise RequestError(f"{arguments.input} cannot be read: {error.strerror}") from error


def prepare(
    llm: "LLM", jobs: Sequence[Job]
) -> tuple[list[tuple[str | None, Sequence[int]]], list[SamplingParams]]:
    """What `LLM.stream` takes, every request checked. RequestError names the job."""
    encoded, params = [], []
    for job in jobs:
        try:
            text, token_ids = encode(llm, job)
            params.append(job.params(llm.engine.generation_defaults))
            llm.engine.check_request(token_ids, params[-1])
        except RequestError as error:
            raise RequestError(
                f"{job.place}: {error}", param=error.param, code=error.code
            ) from error
        encoded.append((text, token_ids))
    return encoded, params


def encode(llm: "LLM", job: Job) -> tuple[str | None, Sequence[int]]:
    """The prompt's text, where it has one, and its token ids."""
    if job.prompt_token_ids is not None:
        return None, job.prompt_token_ids
    if llm.tokenizer is None:
        raise RequestError("without a tokenizer only prompt_token_ids can be answered")
    if job.messages is not None:
        text = llm.tokenizer.apply_chat_template(job.messages)
        return text, llm.tokenizer.encode(text, add_special_tokens=False)
    assert job.prompt is not None
    return job.prompt, llm.tokenizer.encode(job.prompt)


# -- showing answers ----------------------------------------------------------------------------


class Show(Protocol):
    """Where answers go as they come."""

    on_terminal: bool  # whether they are seen on the terminal, where a bar would be in the way

    def show(self, index: int, output: RequestOutput) -> None:
        """Take all that is known of answer `index`; the last time it is `finished`."""


def make_show(
    arguments: argparse.Namespace, jobs: Sequence[Job], stack: contextlib.ExitStack
) -> Show:
    """JSON lines if a file was named; else text: live for one prompt on a terminal."""
    if arguments.output is not None:
        return stack.enter_context(JsonLines.open(arguments.output, arguments.input))
    samples = chosen(arguments, SamplingParams).get("n", 1)
    if len(jobs) == 1 and jobs[0].sampling.get("n", samples) == 1:
        return Live(sys.stdout) if sys.stdout.isatty() else Plain(sys.stdout)
    return Headed(sys.stdout, jobs)


class Live:
    """One answer, as it is written."""

    def __init__(self, stream: TextIO):
        self.on_terminal = stream.isatty()
        self._stream = stream
        self._num_shown = 0

    def show(self, index: int, output: RequestOutput) -> None:
        text = output.outputs[0].text
        self._stream.write(text[self._num_shown :] + "\n" * output.finished)
        self._stream.flush()
        self._num_shown = len(text)


class Plain:
    """One answer and nothing else, for a pipe."""

    def __init__(self, stream: TextIO):
        self.on_terminal = stream.isatty()
        self._stream = stream

    def show(self, index: int, output: RequestOutput) -> None:
        if output.finished:
            print(output.outputs[0].text, file=self._stream, flush=True)


class Headed:
    """Each answer when it is complete, under its prompt."""

    def __init__(self, stream: TextIO, jobs: Sequence[Job]):
        self.on_terminal = stream.isatty()
        self._stream = stream
        self._jobs = jobs

    def show(self, index: int, output: RequestOutput) -> None:
        if not output.finished:
            return
        prompt = " ".join(self._jobs[index].shown.split())
        if len(prompt) > HEADING_LEN:
            prompt = prompt[: HEADING_LEN - 3] + "..."
        lines = [f"\n[{index + 1} of {len(self._jobs)}] {prompt}"]
        for part in output.outputs:
            if len(output.outputs) > 1:
                lines.append(f"({part.index + 1})")
            lines.append(part.text)
        print("\n".join(lines), file=self._stream, flush=True)


class JsonLines:
    """Answers as JSON lines in the prompts' order; one that comes early waits for its turn.

    Leaving the context writes those that still wait: an interrupted run loses none it finished.
    """

    def __init__(self, stream: TextIO):
        self.on_terminal = stream.isatty()
        self._stream = stream
        self._next = 0
        self._waiting: dict[int, RequestOutput] = {}

    @classmethod
    @contextlib.contextmanager
    def open(cls, name: str, input_name: str | None) -> Iterator["JsonLines"]:
        """Over a new file, or standard output for `-`. RequestError if it cannot be written."""
        with contextlib.ExitStack() as stack:
            stream = sys.stdout
            if name != "-":
                if input_name and Path(name).exists() and os.path.samefile(name, input_name):
                    raise RequestError(f"--output {name} would overwrite the input")
                try:
                    stream = stack.enter_context(open(name, "w", encoding="utf-8"))
                except OSError as error:
                    raise RequestError(f"{name} cannot be written: {error.strerror}") from error
            lines = cls(stream)
            try:
                yield lines
            finally:
                for index in sorted(lines._waiting):
                    lines._write(index)

    def show(self, index: int, output: RequestOutput) -> None:
        if not output.finished:
            return
        self._waiting[index] = output
        while self._next in self._waiting:
            self._write(self._next)
            del self._waiting[self._next]
            self._next += 1

    def _write(self, index: int) -> None:
        output = self._waiting[index]
        line: dict[str, Any] = {
            "index": index,
            "prompt": output.prompt,
            "outputs": [asdict(part) for part in output.outputs],
            "num_prompt_tokens": len(output.prompt_token_ids),
            "num_cached_tokens": output.num_cached_tokens,
        }
        print(json.dumps(line, ensure_ascii=False), file=self._stream, flush=True)


@contextlib.contextmanager
def watched(total: int, *, on_terminal: bool) -> Iterator[Any]:
    """Yields `advance()`, to be called at each answer; shows how many there are so far.

    A bar on a terminal that the answers do not go to; a line now and then where there is no
    terminal at all.
    """
    if sys.stderr.isatty():
        if on_terminal:
            yield lambda: None
            return
        with ConsoleProgress().track("answering", total, unit="prompts") as advance:
            yield lambda: advance(1)
        return
    done, said_at = 0, time.monotonic()

    def count() -> None:
        nonlocal done, said_at
        done += 1
        if time.monotonic() - said_at > SAY_EVERY_S:
            said_at = time.monotonic()
            print(f"{done} of {total} answered", file=sys.stderr, flush=True)

    yield count


def figures(stats: "EngineStats", elapsed_s: float, compile_s: float) -> str:
    """One line on what a run took; its rates leave out the time that compiling took."""
    busy_s = max(elapsed_s - compile_s, 1e-9)
    compiling = f" (and {compile_s:.1f} s of compiling)" if compile_s >= 0.1 else ""
    cached = f", {stats.prefix_hit_tokens} from the cache" if stats.prefix_hit_tokens else ""
    return "; ".join(
        [
            f"{_count(stats.num_requests, 'request')} in {busy_s:.1f} s{compiling}",
            f"{stats.prompt_tokens} tokens in ({stats.prompt_tokens / busy_s:.0f}/s{cached})",
            f"{stats.generation_tokens} out ({stats.generation_tokens / busy_s:.0f}/s)",
            f"{_count(stats.num_steps, 'step')}, "
            f"{stats.mean_occupancy * stats.max_num_seqs:.1f} of {stats.max_num_seqs} slots busy",
            f"blocks {stats.mean_block_utilization:.0%} full",
            _count(stats.preemptions, "preemption"),
        ]
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
