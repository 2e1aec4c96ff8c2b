"""What this machine can do at best: reading memory, and multiplying float32 matrices.

Other benchmarks divide by these rates, so each is the best of several ways to reach it.
"""

import concurrent.futures
import os
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.bench.report import environment, require_writable, write_json
from paged_jax.bench.table import number, show_facts
from paged_jax.bench.timing import repeat_timed
from paged_jax.sharding import choose_device

__all__ = ["Rates", "calibrate", "run_calibrate"]

NUM_BYTES = 2**28  # far more than a cache holds
MATRIX_SIZE = 2048
REPEAT = 5


class Rates(NamedTuple):
    """Of one device, by the median of several tries of the best way; all ways in `ways`.

    On a CPU, of as many threads as this process may use.
    """

    device: str
    num_threads: int
    read_bytes_s: float
    matmul_flop_s: float
    ways: dict[str, float]

    def summary(self) -> dict[str, Any]:
        return self._asdict()

    def facts(self) -> list[tuple[str, str]]:
        where = f"{self.num_threads} threads" if self.device == "cpu" else self.device
        return [
            (f"reads memory, {where}, GB/s", number(self.read_bytes_s / 1e9)),
            (f"multiplies float32, {where}, GFLOP/s", number(self.matmul_flop_s / 1e9)),
        ]


def run_calibrate(device: str, json_path: str | None) -> int:
    """Measure, print and write; returns the exit code."""
    require_writable(json_path)
    about = environment()
    rates = calibrate(choose_device(device))
    show_facts("This machine", rates.facts())
    write_json(json_path, {"environment": about, **rates.summary()})
    return 0


def calibrate(
    device: jax.Device,
    *,
    num_bytes: int = NUM_BYTES,
    matrix_size: int = MATRIX_SIZE,
    repeat: int = REPEAT,
) -> Rates:
    """Read an array of `num_bytes`, and multiply two square matrices, in every way we have."""
    num_threads = len(os.sched_getaffinity(0))
    reads = {"xla sum": _xla_sum(device, num_bytes)}
    matmuls = {"xla matmul": _xla_matmul(device, matrix_size)}
    with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
        if device.platform == "cpu":
            reads["numpy dot"] = _numpy_dot(threads, num_threads, num_bytes)
            matmuls["numpy matmul"] = _numpy_matmul(matrix_size)
        read_rates = {way: _rate(call, num_bytes, repeat) for way, call in reads.items()}
        flop = 2 * matrix_size**3
        flop_rates = {way: _rate(call, flop, repeat) for way, call in matmuls.items()}
    return Rates(
        device.platform,
        num_threads,
        max(read_rates.values()),
        max(flop_rates.values()),
        {**read_rates, **flop_rates},
    )


def _rate(call: Callable[[], Any], amount: float, repeat: int) -> float:
    """Amount a second, by the median time."""
    return amount / statistics.median(repeat_timed(call, repeat))


def _xla_sum(device: jax.Device, num_bytes: int) -> Callable[[], Any]:
    values = jax.device_put(np.ones(num_bytes // 4, np.float32), device)
    total = jax.jit(jnp.sum)
    return lambda: total(values).block_until_ready()


def _xla_matmul(device: jax.Device, size: int) -> Callable[[], Any]:
    matrix = jax.device_put(np.ones((size, size), np.float32), device)
    # On an accelerator the default precision of a float32 product is a lower one.
    multiply = jax.jit(lambda a: jnp.matmul(a, a, precision=jax.lax.Precision.HIGHEST))
    return lambda: multiply(matrix).block_until_ready()


def _numpy_dot(
    threads: concurrent.futures.Executor, num_threads: int, num_bytes: int
) -> Callable[[], Any]:
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), num_threads)
    return lambda: list(threads.map(lambda part: np.dot(part, part), parts))


def _numpy_matmul(size: int) -> Callable[[], Any]:
    matrix = np.ones((size, size), np.float32)
    return lambda: matrix @ matrix
