"""A comparison as a person reads it: a row for each run, then what was expected of them."""

import statistics
from collections.abc import Mapping
from typing import Any

from paged_jax.bench.compare import BASELINE, PAGED
from paged_jax.bench.table import Table, number

__all__ = ["comparison_table", "gain_facts", "indirection_facts", "ratio_text"]


def comparison_table(report: Mapping[str, Any], title: str) -> Table:
    """A row for each run."""
    rows = []
    for name, run in report["runs"].items():
        ratio = report["ratios"][name]
        row = [
            name,
            number(run["steps"]),
            number(run["decode_steps"]),
            f"{run['occupancy']:.0%}",
            _percent(run["occupancy_while_queued"]),
            f"{run['padding_share']:.0%}",
            f"{run['block_utilisation']:.0%}",
            number(run["wasted_tokens"]),
            number(run["prefill_tokens"]),
            number(run["preemptions"]),
            f"{ratio['decode_steps']:.2f}x",
        ]
        if "seconds" in run:
            row += [
                f"{run['seconds']:.1f}",
                number(run["total_tok_s"]),
                f"{run['ttft_s']['p50']:.2f}",
                f"{ratio['seconds']:.2f}x",
            ]
        rows.append(tuple(row))
    columns = (
        "run",
        "steps",
        "decode steps",
        "slots busy",
        "while queued",
        "padding",
        "blocks full",
        "wasted tokens a step",
        "prefill tokens",
        "preemptions",
        "fewer decode steps",
        "seconds",
        "tokens/s",
        "TTFT p50, s",
        "faster",
    )
    return Table(title, columns[: len(rows[0])], tuple(rows))


def gain_facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was expected, and what came out."""
    runs, want, prefix = report["runs"], report["expected"], report["prefix"]
    paged, rectangle = runs[PAGED], report["static_rectangle"]
    control, gains = report["control"], report["ratios"][PAGED]
    facts = [
        ("slots busy while somebody waits", _percent(paged["occupancy_while_queued"])),
        ("decode steps, static by continuous", f"{gains['decode_steps']:.2f}x"),
        (
            f"the same with equal lengths ({control['trace']['requests']} requests)",
            f"{control['ratios']['decode_steps']:.3f}x",
        ),
        ("reserved blocks full", f"{runs[BASELINE]['block_utilisation']:.1%}"),
        ("  mean length / reserved length", f"{want['reserved_block_utilisation']:.1%}"),
        ("paged blocks full", f"{paged['block_utilisation']:.1%}"),
        ("  wasted tokens a sequence", number(paged["wasted_per_sequence"])),
        ("  expected: (b - 1) / 2", number(want["paged_wasted_per_sequence"])),
        ("  most in a step", number(paged["wasted_tokens_max"])),
        ("  bound: slots x (b - 1)", number(want["paged_wasted_bound"])),
        ("static batches", _runs_of(rectangle["batch_sizes"])),
        ("  padded to rectangles: prompt tokens", number(rectangle["padded_prompt_tokens"])),
        ("  padded to rectangles: output tokens", number(rectangle["padded_output_tokens"])),
        ("prompt tokens that whole blocks can share", number(prefix["shareable_tokens"])),
        ("  saved by the prefix cache", number(prefix["saved_tokens"])),
        ("  share", _percent(prefix["saved_share"])),
    ]
    if "seconds" in control["ratios"]:
        facts.insert(3, ("  in time", f"{control['ratios']['seconds']:.3f}x"))
    return facts


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _runs_of(sizes: list[int]) -> str:
    """How many batches of how many on average."""
    return f"{len(sizes)} of {statistics.fmean(sizes):.1f}"


def ratio_text(spread: Mapping[str, float]) -> str:
    """The median ratio, and how far the rounds were apart."""
    return f"{spread['median']:.2f}x ({spread['low']:.2f} to {spread['high']:.2f})"


def indirection_facts(times: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What blocks cost one sequence, and what attention costs at all."""
    context = f"one sequence of {times['context_len']} tokens"
    facts = [(f"decode step of {context}, ms", f"{1000 * times['paged_step_s']['median']:.2f}")]
    for name in ("contiguous", "without_attention"):
        if f"{name}_step_s" in times:
            step_ms = 1000 * times[f"{name}_step_s"]["median"]
            shown = name.replace("_", " ")
            facts.append((f"  {shown}, ms", f"{step_ms:.2f}"))
            facts.append((f"  paged by {shown}", ratio_text(times[f"paged_by_{name}"])))
    return facts
