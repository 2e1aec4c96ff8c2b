"""What is said of a run, as plain JSON values. Every figure's name says what it counts."""

from collections.abc import Sequence
from typing import Any

from paged_jax.bench.drive import Run
from paged_jax.bench.timing import percentiles
from scheduler import SchedulerConfig, StepRecord

__all__ = ["scheduling_figures", "static_rectangle", "timing_figures"]


def scheduling_figures(run: Run, config: SchedulerConfig) -> dict[str, Any]:
    """What the scheduler decided: the same with a model and without one.

    steps, decode_steps         steps in all, and those in which a sequence decodes
    occupancy                   share of slot-steps that do work (steps x max_num_seqs of them);
                                `_while_queued` looks at steps that left somebody in the queue
    padding_share               padding among the tokens that the step programs computed
    block_utilisation           share of the token slots in held blocks that hold a token
    wasted_tokens               the others: mean over steps, `_max` of them; at most `_bound` =
                                max_num_seqs x (block_size - 1) where blocks come one at a time
    wasted_per_sequence         their mean for a running sequence, to hold against block_size / 2
    computed_tokens             tokens that went through the model, padding not counted
    prefill_tokens              those beyond one for each output token but a request's last:
                                prompts, and what preemption made it compute again
    ttft_steps                  steps until a request's first token
    """
    records, slots = run.records, config.max_num_seqs
    queued = [record for record in records if record.num_waiting]
    computed = sum(record.num_tokens for record in records)
    padded = sum(record.num_padded_tokens for record in records)
    wasted = [record.wasted_tokens for record in records]
    capacity = sum(record.capacity_tokens for record in records)
    sequence_steps = sum(record.num_running for record in records)
    decoded = sum(one.num_output_tokens - 1 for one in run.requests)
    return {
        "requests": len(run.requests),
        "prompt_tokens": sum(one.num_prompt_tokens for one in run.requests),
        "output_tokens": sum(one.num_output_tokens for one in run.requests),
        "steps": len(records),
        "decode_steps": sum(record.num_decodes > 0 for record in records),
        "occupancy": _occupancy(records, slots),
        "occupancy_while_queued": _occupancy(queued, slots),
        "steps_while_queued": len(queued),
        "padding_share": padded / (computed + padded),
        "block_utilisation": 1 - sum(wasted) / capacity,
        "wasted_tokens": sum(wasted) / len(records),
        "wasted_tokens_max": max(wasted),
        "wasted_tokens_bound": slots * (config.block_size - 1),
        "wasted_per_sequence": sum(wasted) / sequence_steps,
        "preemptions": run.num_preemptions,
        "computed_tokens": computed,
        "prefill_tokens": computed - decoded,
        "prefix_lookup_tokens": run.num_lookup_tokens,
        "prefix_hit_tokens": run.num_hit_tokens,
        "ttft_steps": percentiles([one.first_step for one in run.requests]),
    }


def _occupancy(records: Sequence[StepRecord], slots: int) -> float | None:
    """Share of the slot-steps that do work; None if there are no steps."""
    if not records:
        return None
    return sum(r.num_decodes + r.num_chunks for r in records) / (len(records) * slots)


def timing_figures(run: Run) -> dict[str, Any]:
    """What the clock said; seconds of wall time.

    total_tok_s, output_tok_s   prompt and output tokens, or output tokens alone, by `seconds`
    host_s                      spent on scheduling, batches, dispatch and updates
    device_s                    spent on waiting for the device; it also works while the host does
    ttft_s, tpot_s, itl_s, e2el_s   first token, mean gap of a request's tokens, all gaps, whole
                                request; from its arrival
    """
    prompt = sum(one.num_prompt_tokens for one in run.requests)
    output = sum(one.num_output_tokens for one in run.requests)
    several = [one for one in run.requests if one.num_output_tokens > 1]
    return {
        "seconds": run.seconds,
        "total_tok_s": (prompt + output) / run.seconds,
        "output_tok_s": output / run.seconds,
        "host_s": sum(record.host_s for record in run.records),
        "device_s": sum(record.device_s for record in run.records),
        "ttft_s": percentiles([one.first_s for one in run.requests]),
        "tpot_s": percentiles(
            [(one.last_s - one.first_s) / (one.num_output_tokens - 1) for one in several]
        ),
        "itl_s": percentiles([gap for one in run.requests for gap in one.gaps_s]),
        "e2el_s": percentiles([one.last_s for one in run.requests]),
    }


def static_rectangle(run: Run) -> dict[str, Any]:
    """What padding the batches that static batching formed to rectangles costs.

    A batch of B pads its prompts by B x longest - sum, and its outputs likewise: a slot whose
    sequence has ended computes on until the longest ends.
    """
    batches = [[run.requests[i] for i in members] for members in run.static_batches]
    prompts = [[one.num_prompt_tokens for one in batch] for batch in batches]
    outputs = [[one.num_output_tokens for one in batch] for batch in batches]
    return {
        "batch_sizes": [len(batch) for batch in batches],
        "padded_prompt_tokens": sum(map(_padding, prompts)),
        "padded_output_tokens": sum(map(_padding, outputs)),
    }


def _padding(lengths: Sequence[int]) -> int:
    return len(lengths) * max(lengths) - sum(lengths)
