"""The figures of a load, under the names that vLLM's `bench serve` gives them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paged_jax.bench.load import Reply
from paged_jax.errors import ConfigError

__all__ = ["LIMITS", "load_facts", "load_figures", "parse_slo"]

LIMITS = ("ttft_ms", "tpot_ms", "e2el_ms")


def parse_slo(limits: Sequence[str]) -> dict[str, float]:
    """`["ttft_ms:500", "tpot_ms:50"]` as numbers. ConfigError names what is wrong."""
    slo = {}
    for limit in limits:
        name, _, value = limit.partition(":")
        try:
            slo[name] = float(value)
        except ValueError:
            raise ConfigError(f"slo {limit!r} must look like ttft_ms:500") from None
        if name not in LIMITS or not slo[name] > 0:
            raise ConfigError(
                f"slo {limit!r}: one of {', '.join(LIMITS)}, and a time above 0 milliseconds"
            )
    return slo


def load_figures(
    replies: Sequence[Reply], seconds: float, slo: Mapping[str, float]
) -> dict[str, Any]:
    """Rates by the whole time of the load; times, in milliseconds, of the requests that succeeded.

    ttft is until the first event with a choice, itl the gaps between those events, tpot a
    request's mean gap between tokens, e2el until the end, wait how long a due request was held
    back by max_concurrency. `request_goodput` counts the requests that stayed within every limit
    of `slo`; it is None without limits.
    """
    good = [reply for reply in replies if reply.error is None]
    num_input = sum(reply.num_prompt_tokens for reply in good)
    num_output = sum(reply.num_output_tokens for reply in good)
    times = {
        "ttft": [reply.ttft_s for reply in good],
        "tpot": [reply.tpot_s for reply in good if reply.tpot_s is not None],
        "itl": [gap for reply in good for gap in reply.itl_s],
        "e2el": [reply.e2el_s for reply in good],
        "wait": [reply.wait_s for reply in good],
    }
    errors: dict[str, int] = {}
    for reply in replies:
        if reply.error is not None:
            errors[reply.error] = errors.get(reply.error, 0) + 1
    return {
        "duration": seconds,
        "num_prompts": len(replies),
        "completed": len(good),
        "failed": len(replies) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / seconds,
        "request_goodput": _num_within(good, slo) / seconds if slo else None,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        **{key: value for name, of in times.items() for key, value in _summary(name, of).items()},
        "slo": dict(slo),
        "errors": errors,
    }


def _summary(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """mean_, median_, std_, p90_, p99_ of the times in milliseconds; None without times."""
    if not seconds:
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "std", "p90", "p99")}
    times = 1000 * np.asarray(seconds)
    median, p90, p99 = np.percentile(times, (50, 90, 99)).tolist()
    return {
        f"mean_{name}_ms": float(times.mean()),
        f"median_{name}_ms": median,
        f"std_{name}_ms": float(times.std()),
        f"p90_{name}_ms": p90,
        f"p99_{name}_ms": p99,
    }


def _num_within(replies: Sequence[Reply], slo: Mapping[str, float]) -> int:
    def within(reply: Reply) -> bool:
        times = {"ttft_ms": reply.ttft_s, "tpot_ms": reply.tpot_s or 0.0, "e2el_ms": reply.e2el_s}
        return all(1000 * times[name] <= limit for name, limit in slo.items())

    return sum(map(within, replies))


def load_facts(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a person reads first."""

    def time(name: str) -> str:
        values = (figures[f"{kind}_{name}_ms"] for kind in ("median", "p99"))
        return " / ".join("-" if value is None else f"{value:.1f}" for value in values)

    facts = [
        ("requests completed / failed", f"{figures['completed']} / {figures['failed']}"),
        ("seconds", f"{figures['duration']:.2f}"),
        ("requests/s", f"{figures['request_throughput']:.2f}"),
        ("output tokens/s", f"{figures['output_throughput']:.1f}"),
        ("total tokens/s", f"{figures['total_token_throughput']:.1f}"),
        ("time to first token, p50 / p99, ms", time("ttft")),
        ("time per output token, p50 / p99, ms", time("tpot")),
        ("gap between events, p50 / p99, ms", time("itl")),
        ("whole request, p50 / p99, ms", time("e2el")),
    ]
    if figures["request_goodput"] is not None:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in figures["slo"].items())
        facts.insert(
            3, (f"goodput under {limits}, requests/s", f"{figures['request_goodput']:.2f}")
        )
    return facts
