"""A model that can be computed by hand, and an engine loop around it.

`FakeRunner` executes a batch as the device would: it writes (token, position) through
`slot_mapping` and derives the next token from what it gathers through the block tables, so that
a wrong table, a stale block or a lost copy gives a wrong token. `expected_tokens` says what a
request must produce, from its own tokens alone.
"""

import zlib

import numpy as np

from scheduler import (
    Batch,
    FinishReason,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    derive_seed,
    make_batch,
)

VOCAB_SIZE = 20
EOS = 0


def next_token(contexts: list[list[int]], seed: int) -> int:
    """The fake model: a checksum of what each block group's attention sees, and of the seed."""
    material = repr((contexts, seed)).encode()
    return zlib.crc32(material) % VOCAB_SIZE


def visible(token_ids: list[int], window: int | None) -> list[int]:
    return token_ids if window is None else token_ids[-window:]


def expected_tokens(
    prompt: list[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    index: int = 0,
    windows: tuple[int | None, ...] = (None,),
    max_total_tokens: int,
) -> list[int]:
    """What one sample of a request produces, computed without blocks, batches or chunks."""
    token_ids = list(prompt)
    used_seed = derive_seed(seed, index) if params.temperature else 0
    while len(token_ids) < max_total_tokens:
        token = next_token([visible(token_ids, w) for w in windows], used_seed)
        token_ids.append(token)
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            break
    return token_ids[len(prompt) :]


class FakeRunner:
    """Executes batches on NumPy arrays. Slots hold (token, position), -1 where never written."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.pools = [np.full((n * config.block_size, 2), -1, np.int64) for n in config.num_blocks]
        self.host: dict[tuple[int, int], np.ndarray] = {}
        self.last_tokens = np.zeros(config.max_num_seqs + 1, np.int64)

    def execute(self, output: SchedulerOutput, batch: Batch) -> list[int]:
        """Run one step; the sampled tokens, in the order of `output.samples`."""
        size = self.config.block_size
        by_block = [pool.reshape(-1, size, 2) for pool in self.pools]
        for copy in output.moves.swap_outs:
            self.host[copy.group, copy.target] = by_block[copy.group][copy.source].copy()
        for copy in output.moves.swap_ins:
            by_block[copy.group][copy.target] = self.host[copy.group, copy.source]
        sources = [by_block[copy.group][copy.source].copy() for copy in output.moves.copies]
        for copy, source in zip(output.moves.copies, sources, strict=True):
            by_block[copy.group][copy.target] = source
        token_ids = batch.token_ids.astype(np.int64)
        for i in np.flatnonzero(batch.from_device):
            token_ids[i] = self.last_tokens[batch.rows[i]]
        for group, pool in enumerate(self.pools):
            slots = batch.attn.slot_mapping[group]
            pool[slots, 0] = token_ids
            pool[slots, 1] = batch.positions
        tokens = []
        for i, sampled in enumerate(output.samples):
            contexts = [self._gather(group, batch, i) for group in range(len(self.pools))]
            seed = 0
            if batch.sampling.temperature[i]:
                low, high = batch.sampling.seeds[i].tolist()
                seed = low | high << 32
            token = next_token(contexts, seed)
            self.last_tokens[batch.sample_rows[i]] = token
            tokens.append(token)
            assert batch.sampling.positions[i] == sampled.position
        return tokens

    def _gather(self, group: int, batch: Batch, sample: int) -> list[int]:
        index = int(batch.logits_indices[sample])
        starts = batch.attn.query_start_loc
        row = int(np.searchsorted(starts, index, side="right")) - 1
        seq_len = int(batch.attn.seq_lens[row])
        assert index == starts[row + 1] - 1, "the sampled token is not its row's last"
        assert seq_len == batch.positions[index] + 1
        window = self.config.windows[group]
        first = 0 if window is None else max(0, seq_len - window)
        positions = np.arange(first, seq_len)
        blocks = batch.attn.block_tables[group, row, positions // self.config.block_size]
        assert (blocks > 0).all(), "a visible block is missing from the table"
        slots = blocks.astype(np.int64) * self.config.block_size
        found = self.pools[group][slots + positions % self.config.block_size]
        assert (found[:, 1] == positions).all(), "a slot holds another position"
        return found[:, 0].tolist()


class FakeEngine:
    """schedule -> make_batch -> execute -> update, with a lag of 0 or 1 steps."""

    def __init__(self, config: SchedulerConfig, *, lag: int = 0, order=None):
        self.config = config
        self.scheduler = Scheduler(config, order)
        self.runner = FakeRunner(config)
        self.lag = lag
        self.pending: list[tuple[SchedulerOutput, list[int]]] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], FinishReason] = {}
        self.outputs: list[SchedulerOutput] = []
        self.num_idle_steps = 0

    def add(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        salt: bytes = b"",
        priority: int = 0,
        tenant: str = "",
    ) -> Request:
        limit = self.max_total_tokens(prompt, params)
        request = Request(
            request_id,
            prompt,
            params,
            seed=seed,
            max_total_tokens=limit,
            eos_token_ids=frozenset({EOS}),
            salt=salt,
            priority=priority,
            tenant=tenant,
        )
        self.scheduler.add(request)
        return request

    def max_total_tokens(self, prompt: list[int], params: SamplingParams) -> int:
        limit = min(self.config.max_model_len, self.config.capacity_tokens + 1)
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        return limit

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.outputs.append(output)
        if not output.is_empty:
            batch = self._batch(output)
            self.pending.append((output, self.runner.execute(output, batch)))
        if len(self.pending) > self.lag or (output.is_empty and self.pending):
            self._update()
        elif output.is_empty:
            self.num_idle_steps += 1
        return output

    def _batch(self, output: SchedulerOutput) -> Batch:
        c = output.num_chunk_tokens
        return make_batch(
            output,
            self.scheduler.rows,
            block_size=self.config.block_size,
            num_decode_rows=len(output.decodes) + 1,
            num_chunk_rows=self.config.max_num_chunks,
            num_chunk_tokens=c + 3 if c else 0,
            num_sample_rows=self.config.max_num_seqs,
        )

    def _update(self) -> None:
        output, tokens = self.pending.pop(0)
        for update in self.scheduler.update(output, tokens):
            key = (update.sequence.request.request_id, update.sequence.index)
            assert key not in self.finished, "a token after the end"
            if update.token_id is not None:
                self.tokens.setdefault(key, []).append(update.token_id)
            if update.finish_reason is not None:
                self.finished[key] = update.finish_reason

    def abort(self, request_id: str, index: int | None = None) -> None:
        for sequence in self.scheduler.abort(request_id, index):
            key = (request_id, sequence.index)
            assert key not in self.finished, "a second end"
            self.finished[key] = FinishReason.ABORT

    def drain(self, max_steps: int = 10_000) -> int:
        """Step until nothing is left; the number of steps it took."""
        for count in range(max_steps):
            if not self.scheduler.has_unfinished and not self.pending:
                return count
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")
