"""A log of what the scheduler was told and decided, from which it can be replayed exactly.

One JSON object a line: the configuration, then every `add`, `abort`, `step`, `update`, `recompute`
and `resalt` in the order in which they happened. Prompts are in it as token ids.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from scheduler.config import SchedulerConfig
from scheduler.output import Scheduled, SchedulerOutput
from scheduler.policy import ORDER_POLICIES
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.step_record import StepRecord

VERSION = 1


class ReplayError(ValueError):
    """A log that does not replay: damaged, of another version, or of another scheduler."""


class StepLog:
    """Writes the log to a text file, which it owns from here on."""

    def __init__(self, file: TextIO, config: SchedulerConfig, order: str):
        self._file = file
        self._write("config", version=VERSION, order=order, config=dataclasses.asdict(config))

    def _write(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()

    def add(self, request: Request, now: float) -> None:
        self._write(
            "add",
            now=now,
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            params=dataclasses.asdict(request.params),
            seed=request.sequences[0].seed,
            max_total_tokens=request.max_total_tokens,
            stop_token_ids=sorted(request.stop_token_ids),
            priority=request.priority,
            tenant=request.tenant,
            salt=request.salt.hex(),
        )

    def resalt(self, salts: Mapping[str, bytes]) -> None:
        self._write("resalt", salts={key: salt.hex() for key, salt in salts.items()})

    def abort(self, request_id: str, index: int | None) -> None:
        self._write("abort", request_id=request_id, index=index)

    def step(self, output: SchedulerOutput, now: float) -> None:
        self._write("step", now=now, **describe(output))

    def recompute(self) -> None:
        self._write("recompute")

    def update(self, output: SchedulerOutput, tokens: list[int], record: StepRecord) -> None:
        self._write(
            "update", step_id=output.step_id, tokens=tokens, record=dataclasses.asdict(record)
        )
        self._file.flush()


def describe(output: SchedulerOutput) -> dict[str, Any]:
    """A step's decisions as JSON values: rows as [request, sample, row, start, tokens]."""

    def row(scheduled: Scheduled) -> list[Any]:
        sequence = scheduled.sequence
        return [sequence.request.request_id, sequence.index, *scheduled[1:]]

    return {
        "step_id": output.step_id,
        "decodes": [row(x) for x in output.decodes],
        "chunks": [row(x) for x in output.chunks],
        "samples": [[x.sequence.request.request_id, x.sequence.index] for x in output.samples],
        "moves": [[list(move) for move in moves] for moves in output.moves],
        "preempted": [[s.request.request_id, s.index] for s in output.preempted],
    }


def replay(lines: Iterable[str]) -> Iterator[SchedulerOutput]:
    """Run the log's events through a new scheduler; yields its steps as they are scheduled.

    Raises ReplayError at the first step that is not the one in the log.
    """
    events = map(json.loads, lines)
    head: dict[str, Any] = next(events, {})
    if head.get("event") != "config" or head.get("version") != VERSION:
        raise ReplayError(f"not a step log of version {VERSION}: {head!r:.80}")
    config: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in head["config"].items()
    }
    now = 0.0
    scheduler = Scheduler(
        SchedulerConfig(**config), ORDER_POLICIES[head["order"]](), clock=lambda: now
    )
    in_flight: dict[int, SchedulerOutput] = {}
    for event in events:
        match event["event"]:
            case "add":
                now = event["now"]
                scheduler.add(_request(event))
            case "abort":
                scheduler.abort(event["request_id"], event["index"])
            case "step":
                now = event["now"]
                output = scheduler.schedule()
                expected = {k: v for k, v in event.items() if k not in ("event", "now")}
                got = json.loads(json.dumps(describe(output)))
                if got != expected:
                    raise ReplayError(f"the log says {expected}, the replay gives {got}")
                if not output.is_empty:
                    in_flight[output.step_id] = output
                yield output
            case "recompute":
                scheduler.recompute_all()
                in_flight.clear()
            case "update":
                scheduler.update(in_flight.pop(event["step_id"]), event["tokens"])
            case "resalt":
                salts = event["salts"].items()
                scheduler.resalt({key: bytes.fromhex(salt) for key, salt in salts})


def _request(event: dict[str, Any]) -> Request:
    # Which tokens were drawn, and why, does not matter here.
    drawn_anyhow = {"ignore_eos": True, "structured_outputs": None}
    params = SamplingParams(**{**event["params"], **drawn_anyhow})
    return Request(
        event["request_id"],
        event["prompt_token_ids"],
        dataclasses.replace(params, stop_token_ids=event["stop_token_ids"]),
        seed=event["seed"],
        max_total_tokens=event["max_total_tokens"],
        priority=event["priority"],
        tenant=event["tenant"],
        salt=bytes.fromhex(event["salt"]),
    )
