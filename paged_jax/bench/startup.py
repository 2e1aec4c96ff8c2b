"""`paged-jax bench startup`: from the start of a process to its first token, cold and warm.

Cold is with an empty folder of compiled programs, warm with the one that the cold start has
filled. Weights may be in the system's file cache both times: only root could empty it.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from paged_jax.bench.report import environment, require_writable, write_json
from paged_jax.bench.table import Table, number, show
from paged_jax.bench.timing import spread
from paged_jax.config import EngineConfig
from paged_jax.errors import PagedJaxError
from paged_jax.hub import resolve_model
from paged_jax.progress import ConsoleProgress

__all__ = ["PHASES", "run_startup", "start_once"]

PHASES = {
    "interpreter_s": "Python itself",
    "import_s": "importing JAX and the engine",
    "device_s": "the device's first answer",
    "weights_s": "reading the weights",
    "tokenizer_s": "the tokenizer",
    "engine_s": "sizing, KV cache, programs compiled at start",
    "first_token_s": "the first request, programs compiled for it",
    "total_s": "all, to the first token",
}
LAST_LINES = 5


def run_startup(config: EngineConfig, *, repeat: int, json_path: str | None) -> int:
    """Start `repeat` times cold and warm, print medians and write; returns the exit code."""
    require_writable(json_path)
    about = environment()
    progress = ConsoleProgress()
    resolve_model(config.model, progress=progress)  # a download is no part of a start
    cold: list[dict[str, float]] = []
    warm: list[dict[str, float]] = []
    with progress.track("starting", 2 * repeat, unit="processes") as advance:
        for _ in range(repeat):
            with tempfile.TemporaryDirectory(prefix="paged-jax-startup-") as folder:
                fresh = dataclasses.replace(config, compilation_cache_dir=folder)
                for starts in (cold, warm):
                    starts.append(start_once(fresh))
                    advance(1)
    report = {name: _medians(starts) for name, starts in (("cold", cold), ("warm", warm))}
    for one in report.values():
        least = one["import_s"]["median"] + one["weights_s"]["median"]
        one["total_by_import_and_weights"] = one["total_s"]["median"] / least
    show(_startup_table(report, f"{config.model}: seconds to the first token"))
    config_said = dataclasses.asdict(config)
    write_json(json_path, {"environment": about, **report, "config": config_said})
    return 0


def start_once(config: EngineConfig) -> dict[str, float]:
    """The times of one start in a process of its own. PagedJaxError if it fails."""
    arguments = [json.dumps(dataclasses.asdict(config)), repr(time.monotonic())]
    done = subprocess.run(
        [sys.executable, "-m", "paged_jax.bench.startup_probe", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        end = "\n".join(done.stderr.splitlines()[-LAST_LINES:])
        raise PagedJaxError(f"the process that was started failed:\n{end}")
    return json.loads(done.stdout.splitlines()[-1])


def _medians(starts: list[dict[str, float]]) -> dict[str, Any]:
    return {name: spread([one[name] for one in starts])._asdict() for name in starts[0]}


def _startup_table(report: dict[str, Any], title: str) -> Table:
    rows = [
        (text, *(f"{report[kind][name]['median']:.2f}" for kind in ("cold", "warm")))
        for name, text in PHASES.items()
    ]
    compiles = [report[kind]["compile_s"]["median"] for kind in ("cold", "warm")]
    rows.append(("  of it in the compiler", *(f"{seconds:.2f}" for seconds in compiles)))
    ratios = [report[kind]["total_by_import_and_weights"] for kind in ("cold", "warm")]
    rows.append(("  by importing + weights", *(f"{number(ratio)}x" for ratio in ratios)))
    return Table(title, ("part", "cold", "warm"), tuple(rows))
