"""When an engine's programs are compiled, and what is said and counted about it."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from paged_jax.compile_log import CompileCounter
from paged_jax.errors import LateCompileError
from paged_jax.model_runner import ModelRunner, Program
from paged_jax.progress import Progress
from paged_jax.step_clock import StepClock

__all__ = ["Compiling"]

logger = logging.getLogger(__name__)


class Compiling:
    """Owned by the engine's thread; `clock` may be read by any.

    Whatever is compiled after `all` is late: counted and logged, or refused.
    """

    def __init__(
        self,
        runner: ModelRunner,
        counter: CompileCounter,
        progress: Progress,
        *,
        late_compile: bool = True,
    ):
        self.counter = counter
        self.clock = StepClock()
        self.num_late = 0
        self._runner = runner
        self._progress = progress
        self._warm = False
        self._late_compile = late_compile

    def all(self, programs: Sequence[Program], wanted: Callable[[], bool]) -> None:
        """Compile these and run each once, with a progress bar. `wanted` is asked between programs;
        when it says no, the rest is left."""
        began = time.perf_counter()
        with self._progress.track("compiling", len(programs), unit="programs") as advance:
            self._runner.compile_all(programs, lambda program: advance(1), wanted)
        if not wanted():
            return
        self._progress.say(
            f"compiled {len(programs)} programs in {time.perf_counter() - began:.1f} s, "
            f"{self.counter.num_cache_hits} of them found on disk"
        )
        with self._progress.track("running each once", len(programs), unit="programs") as advance:
            for program in programs:
                if not wanted():
                    return
                self._runner.dummy_run(program)
                advance(1)
        self._warm = True

    def missing(self, programs: Iterable[Program]) -> None:
        """Compile those that are not, and say which: in service it would look like a hang.

        LateCompileError, before anything is compiled, if it is late and that is not wanted.
        """
        missing = [program for program in programs if not self._runner.is_compiled(program)]
        if not missing:
            return
        if self._warm and not self._late_compile:
            raise LateCompileError(
                f"late_compile=False, and the warm-up did not compile this program: {missing[0]}"
            )
        for program in missing:
            if self._warm:
                self.num_late += 1
                logger.warning("compiling after warm-up: %s", program)
            self._progress.say(f"compiling: {program}")
        with self.clock.compiling():
            self._runner.compile_all(missing, lambda program: None)
