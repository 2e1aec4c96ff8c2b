"""A step's arrays: fresh NumPy copies in the very shape that the jitted step consumes."""

from typing import NamedTuple

import numpy as np

from scheduler.output import Scheduled, SchedulerOutput
from scheduler.rows import Rows


class AttentionMetadata(NamedTuple):
    """Where keys and values are. G groups, T tokens, S sequences, B blocks a sequence.

    Rows with one token come first: row i < D owns token i, padded or not. Then come the chunks,
    ragged by `query_start_loc`. Padding rows have `seq_lens` 0; padding tokens write slot 0, in
    the null block.
    """

    slot_mapping: np.ndarray  # i32[G, T]
    block_tables: np.ndarray  # i32[G, S, B]
    seq_lens: np.ndarray  # i32[S], this step's tokens included
    query_start_loc: np.ndarray  # i32[S + 1]
    num_decodes: np.ndarray  # i32[]
    num_seqs: np.ndarray  # i32[]


class SamplingMetadata(NamedTuple):
    """How each sampled row draws its token. R sampled rows, padded with greedy ones."""

    temperature: np.ndarray  # f32[R], 0 is greedy
    top_k: np.ndarray  # i32[R], 0 keeps all
    top_p: np.ndarray  # f32[R]
    min_p: np.ndarray  # f32[R]
    seeds: np.ndarray  # u32[R, 2]
    positions: np.ndarray  # i32[R], of the token that is drawn


class PenaltyMetadata(NamedTuple):
    """What each sampled row loses for tokens said before. R sampled rows."""

    presence: np.ndarray  # f32[R]
    frequency: np.ndarray  # f32[R]
    repetition: np.ndarray  # f32[R], 1 changes nothing


class Batch(NamedTuple):
    """One step for the device. T = D + C padded tokens, R sampled rows, M copied blocks.

    Where `from_device` is set the token is not known to the host yet: the step takes the row's
    last sampled token instead. `rows` and `sample_rows` use `max_num_seqs` for padding.
    """

    token_ids: np.ndarray  # i32[T]
    from_device: np.ndarray  # bool[T]
    positions: np.ndarray  # i32[T]
    rows: np.ndarray  # i32[S]
    adapter_ids: np.ndarray  # i32[S], 0 for none
    logits_indices: np.ndarray  # i32[R_max], into the T tokens; may repeat
    sample_rows: np.ndarray  # i32[R]
    attn: AttentionMetadata
    sampling: SamplingMetadata
    penalties: PenaltyMetadata


def make_batch(
    output: SchedulerOutput,
    rows: Rows,
    *,
    block_size: int,
    num_decode_rows: int,
    num_chunk_rows: int,
    num_chunk_tokens: int,
    num_sample_rows: int,
) -> Batch:
    """Lay a step out in padded arrays: D = `num_decode_rows`, C = `num_chunk_tokens`.

    `num_chunk_rows` rows are kept for chunks (none if C is 0). Nothing returned is shared with
    the scheduler, which goes on changing its tables while the device reads these.
    """
    max_num_seqs = len(rows.temperature)
    d, c = num_decode_rows, num_chunk_tokens
    s = d + (num_chunk_rows if c else 0)
    t = d + c
    token_ids = np.zeros(t, np.int32)
    from_device = np.zeros(t, np.bool_)
    positions = np.zeros(t, np.int32)
    seq_lens = np.zeros(s, np.int32)
    batch_rows = np.full(s, max_num_seqs, np.int32)
    adapter_ids = np.zeros(s, np.int32)
    query_start_loc = np.arange(s + 1, dtype=np.int32)
    query_start_loc[d:] = d
    slot_mapping = np.zeros((rows.tables.shape[0], t), np.int32)
    block_tables = np.zeros((rows.tables.shape[0], s, rows.tables.shape[2]), np.int32)
    last_token = np.empty(len(output.decodes) + len(output.chunks), np.int32)

    n = len(output.decodes)
    if n:
        used = np.fromiter((x.row for x in output.decodes), np.int32, n)
        starts = np.fromiter((x.start for x in output.decodes), np.int32, n)
        known = [_token_at(x) for x in output.decodes]
        token_ids[:n] = known
        from_device[:n] = token_ids[:n] < 0
        np.maximum(token_ids, 0, out=token_ids)
        positions[:n] = starts
        seq_lens[:n] = starts + 1
        batch_rows[:n] = used
        adapter_ids[:n] = rows.adapter_ids[used]
        block_tables[:, :n] = rows.tables[:, used]
        blocks = rows.tables[:, used, starts // block_size]
        slot_mapping[:, :n] = blocks * block_size + starts % block_size
        last_token[:n] = np.arange(n)

    at = d
    for i, x in enumerate(output.chunks):
        end = at + x.num_tokens
        span = np.arange(x.start, x.start + x.num_tokens, dtype=np.int32)
        token_ids[at:end] = x.sequence.token_ids[x.start : x.start + x.num_tokens]
        positions[at:end] = span
        seq_lens[d + i] = x.start + x.num_tokens
        batch_rows[d + i] = x.row
        adapter_ids[d + i] = rows.adapter_ids[x.row]
        query_start_loc[d + i + 1 :] = end
        block_tables[:, d + i] = rows.tables[:, x.row]
        blocks = rows.tables[:, x.row, span // block_size]
        slot_mapping[:, at:end] = blocks * block_size + span % block_size
        last_token[n + i] = end - 1
        at = end

    return Batch(
        token_ids=token_ids,
        from_device=from_device,
        positions=positions,
        rows=batch_rows,
        adapter_ids=adapter_ids,
        logits_indices=_logits_indices(output, last_token, max_num_seqs),
        sample_rows=_pad([x.row for x in output.samples], num_sample_rows, max_num_seqs),
        attn=AttentionMetadata(
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            num_decodes=np.asarray(n, np.int32),
            num_seqs=np.asarray(n + len(output.chunks), np.int32),
        ),
        sampling=_sampling_metadata(output, rows, num_sample_rows),
        penalties=_penalty_metadata(output, rows, num_sample_rows),
    )


def _token_at(scheduled: Scheduled) -> int:
    """The token to compute, or -1 while only the device knows it."""
    token_ids = scheduled.sequence.token_ids
    return token_ids[scheduled.start] if scheduled.start < len(token_ids) else -1


def _logits_indices(output: SchedulerOutput, last_token: np.ndarray, size: int) -> np.ndarray:
    indices = np.zeros(size, np.int32)
    indices[: len(output.samples)] = last_token[[x.batch_index for x in output.samples]]
    return indices


def _pad(values: list[int], size: int, fill: int) -> np.ndarray:
    padded = np.full(size, fill, np.int32)
    padded[: len(values)] = values
    return padded


def _gather(output: SchedulerOutput, by_row: np.ndarray, size: int, fill: float) -> np.ndarray:
    """The entries of the sampled rows, padded."""
    out = np.full((size, *by_row.shape[1:]), fill, by_row.dtype)
    out[: len(output.samples)] = by_row[[x.row for x in output.samples]]
    return out


def _sampling_metadata(output: SchedulerOutput, rows: Rows, size: int) -> SamplingMetadata:
    return SamplingMetadata(
        temperature=_gather(output, rows.temperature, size, 0.0),
        top_k=_gather(output, rows.top_k, size, 0),
        top_p=_gather(output, rows.top_p, size, 1.0),
        min_p=_gather(output, rows.min_p, size, 0.0),
        seeds=_gather(output, rows.seeds, size, 0),
        positions=_pad([x.position for x in output.samples], size, 0),
    )


def _penalty_metadata(output: SchedulerOutput, rows: Rows, size: int) -> PenaltyMetadata:
    return PenaltyMetadata(
        presence=_gather(output, rows.presence, size, 0.0),
        frequency=_gather(output, rows.frequency, size, 0.0),
        repetition=_gather(output, rows.repetition, size, 1.0),
    )
