"""Times taken several times over, and what is said of them: medians and spreads."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

__all__ = ["Spread", "alternate", "percentiles", "ratio_of_pairs", "repeat_timed", "spread"]

T = TypeVar("T")


class Spread(NamedTuple):
    """Several measurements of one thing: the median, and the least and the greatest of them."""

    median: float
    low: float
    high: float
    num: int


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), len(values))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, 50th, 90th and 99th percentile and maximum; empty if there are no values."""
    if not values:
        return {}
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {
        "mean": statistics.fmean(values),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": max(values),
    }


def repeat_timed(call: Callable[[], Any], count: int, *, warm_up: int = 1) -> list[float]:
    """Seconds of each of `count` calls, after some that are not counted.

    `call` waits for its own result.
    """
    for _ in range(warm_up):
        call()
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


def alternate(runs: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Results of each of the runs, taken in turn (A B C, A B C, ...).

    What drifts while they are taken (heat, neighbours) then touches all of them alike.
    """
    results: dict[str, list[T]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            results[name].append(run())
    return results


def ratio_of_pairs(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """`ours / theirs`, round by round."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])
