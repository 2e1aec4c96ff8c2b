"""A scheduler with everything it is told on record, so that what it decided can be replayed."""

import time
from collections.abc import Mapping
from pathlib import Path

from paged_jax.config import EngineConfig
from paged_jax.errors import ConfigError
from scheduler import (
    OrderPolicy,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    Sequence,
    StepLog,
    StepRecord,
)

__all__ = ["LoggedScheduler", "open_step_log"]


class LoggedScheduler:
    """What changes a scheduler goes through here; what it knows, `scheduler` tells.

    Its clock stands still between a request or step and the next: the log holds every time that it
    has seen. Owned by the engine's thread.
    """

    def __init__(self, config: SchedulerConfig, order: OrderPolicy, log: StepLog | None):
        self._now = time.monotonic()
        self._log = log
        self.scheduler = Scheduler(config, order, clock=lambda: self._now)

    def add(self, request: Request) -> None:
        self._now = time.monotonic()
        self.scheduler.add(request)
        if self._log is not None:
            self._log.add(request, self._now)

    def schedule(self) -> SchedulerOutput:
        self._now = time.monotonic()
        output = self.scheduler.schedule()
        if self._log is not None:
            self._log.step(output, self._now)
        return output

    def note_update(self, output: SchedulerOutput, tokens: list[int], record: StepRecord) -> None:
        """What the scheduler's `update` was given, once the step's record is whole."""
        if self._log is not None:
            self._log.update(output, tokens, record)

    def abort(self, request_id: str, index: int | None = None) -> list[Sequence]:
        """The sequences that this ended."""
        ended = self.scheduler.abort(request_id, index)
        if ended and self._log is not None:
            self._log.abort(request_id, index)
        return ended

    def recompute_all(self) -> None:
        self.scheduler.recompute_all()
        if self._log is not None:
            self._log.recompute()

    def resalt(self, salts: Mapping[str, bytes]) -> None:
        """Give requests other salts, by their ids."""
        self.scheduler.resalt(salts)
        if salts and self._log is not None:
            self._log.resalt(salts)

    def close(self) -> None:
        """Close the log. Nothing is scheduled afterwards."""
        if self._log is not None:
            self._log.close()


def open_step_log(config: EngineConfig, scheduler_config: SchedulerConfig) -> StepLog | None:
    """The log that is configured. ConfigError where its file cannot be written."""
    if config.step_log is None:
        return None
    try:
        file = Path(config.step_log).open("w")  # noqa: SIM115 - the log owns it
    except OSError as error:
        raise ConfigError(f"step_log={config.step_log!r}: {error.strerror}") from error
    return StepLog(file, scheduler_config, config.scheduling_policy)
