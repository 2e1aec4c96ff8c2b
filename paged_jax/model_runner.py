"""The device side of a step: parameters, KV cache and the compiled programs.

    forward(batch, sizes) -> hidden              the backbone, without waiting
    draw(hidden, batch, sizes, edits) -> tokens  the sampler, without waiting

Two programs make a step, so that their sizes add instead of multiplying: the backbone, by decode
rows or, with prefill, by tokens, gives the hidden states of the rows that sample; the sampler, by
rows R, makes logits and tokens of them. A third one, of one size, scores prompts.
"""

import concurrent.futures
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from paged_jax.attention import PagedAttend, dense
from paged_jax.compile_options import compile_options
from paged_jax.host_blocks import PARCEL_SIZES, HostBlocks, Parcel, split_into_parcels
from paged_jax.kv_cache import init_pool, pool_shapes, values_shardings
from paged_jax.logit_edits import LogitEdits, add_biases, mask_tokens, no_edits
from paged_jax.lora import Adapter, LoraWeight, fill_slot, with_adapter_ids
from paged_jax.models import ServedModel
from paged_jax.params import laid_out, leaves_like, place, spread
from paged_jax.penalties import TokenCounts, add_tokens, count_row, penalize
from paged_jax.sampling import Logprobs, draw, logprobs_of, sample
from paged_jax.sharding import num_bytes_a_device, on_host, replicated, weight_sharding
from paged_jax.taps import Steering, TappedAttend
from paged_jax.weights import is_weight, tree_paths
from pallas_kernels import Backend, KVPool, KVSpec, copy_blocks, read_blocks, write_blocks
from scheduler import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    AttentionMetadata,
    Batch,
    BlockCopy,
    BlockMoves,
    Buckets,
    PenaltyMetadata,
    SamplingMetadata,
)

__all__ = ["DeviceState", "Hidden", "ModelRunner", "Program", "StepResult", "StepSizes", "Wants"]


SCORED_TOKENS = 64  # of a prompt, in one go: their logits are what takes memory
PADDING_WORTH_COMPILING = 2000  # padded tokens; a CPU computes them in the time of one program


class DeviceState(NamedTuple):
    """What lives on the device between steps. Every program donates what it changes."""

    pools: tuple[KVPool, ...]  # one of each block group
    last_tokens: jax.Array  # i32[max_num_seqs + 1], by row; the last entry takes the padding


class Program(NamedTuple):
    """A compiled size: `backbone` (D, C) as `Buckets` says, `sample` or `sample_full` (R,),
    `count` or `score` (tokens), or one that moves M blocks of a group: `copy`, `swap_out`,
    `swap_in` (group, M).
    """

    kind: str
    size: tuple[int, ...]

    def __str__(self) -> str:
        if self.kind == "backbone":
            rows, num_tokens = self.size
            if num_tokens:
                return f"step of {num_tokens} tokens with prefill, {rows} decode rows at most"
            return f"step of {rows} decode rows"
        if self.kind == "sample":
            return f"sampler of {self.size[0]} rows"
        if self.kind == "sample_full":
            return f"sampler of {self.size[0]} rows with penalties, masks and log-probabilities"
        if self.kind == "count":
            return f"count of {self.size[0]} tokens"
        if self.kind == "score":
            return f"log-probabilities of {self.size[0]} prompt tokens"
        return f"{self.kind} of {self.size[1]} blocks in group {self.size[0]}"


class StepSizes(NamedTuple):
    """Padded sizes of one step: D decode rows, C tokens if there is prefill, R sampled rows.

    `full` samplers know everything that a request can ask for; `score` if prompts are scored.
    """

    decodes: int
    chunk_tokens: int
    samples: int
    full: bool = False
    score: bool = False

    @property
    def backbone(self) -> tuple[int, int]:
        return self.decodes, self.chunk_tokens

    @property
    def num_tokens(self) -> int:
        """That the backbone computes, padding included."""
        return _num_computed(self.backbone)

    @property
    def sampler(self) -> "Program":
        return Program("sample_full" if self.full else "sample", (self.samples,))


class Hidden(NamedTuple):
    """Hidden states of one step: of the rows that sample, and of all that was computed."""

    sampled: jax.Array  # [R_max, E]
    decodes: jax.Array  # [R_max, E]
    chunks: jax.Array  # [C_max, E]


class Wants(NamedTuple):
    """What a full sampler has to bother with; the rest of its work is left out on the device."""

    penalties: np.ndarray  # bool[], whether any row has some
    logprobs: np.ndarray  # bool[], whether any row wants them
    processed: np.ndarray  # bool[R], rows that want those of what was drawn from

    @classmethod
    def nothing(cls, rows: int) -> "Wants":
        return cls(np.zeros((), np.bool_), np.zeros((), np.bool_), np.zeros(rows, np.bool_))


class StepResult(NamedTuple):
    """What a dispatched step gives, still on the device."""

    tokens: jax.Array  # i32[R]
    logprobs: Logprobs | None


class ModelRunner:
    """Owns the device state; the engine's thread is its only caller.

    `specs[g]` is the pool of block group g (of several devices, what each holds of it),
    `layer_slots[layer]` says where a layer lives. With `swaps`, blocks can go to the host and come
    back. If `patient`, steps may use a larger program than they need while theirs is not compiled.

    Over a mesh, weights are cut as the model says and pools by KV head; what is small (a step's
    inputs, hidden states, what rows remember) is whole on every device. A model of shapes can be
    compiled, also for devices that are not there, and not run.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        mesh: Mesh,
        backend: Backend,
        layer_slots: Sequence[tuple[int, int]],
        specs: Sequence[KVSpec],
        buckets: Buckets,
        table_width: int,
        max_num_seqs: int,
        max_num_chunks: int,
        swaps: bool = False,
        patient: bool = False,
        capture_layers: Sequence[int] = (),
        steering_layers: Sequence[int] = (),
    ):
        self.model = model._replace(params=None)  # ours alone: they are freed when replaced
        self.backend = backend
        self.specs = tuple(specs)
        self.buckets = buckets
        self.max_num_chunks = max_num_chunks
        self._layer_slots = tuple(layer_slots)
        self._table_width = table_width
        self._max_num_seqs = max_num_seqs
        self._mesh = mesh
        self._sharding = replicated(mesh)
        self._params: Any = spread(model.params, model.splits, mesh)
        self._params_like: Any = None  # shapes and shardings of parameters that were dropped
        self._swaps = swaps
        self._patient = patient
        self._capture_layers = tuple(capture_layers)
        self._steering_layers = tuple(steering_layers)
        self._steering: jax.Array | None = None  # [max_num_seqs + 1, L, E], by row
        self._num_padded: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._host_blocks = HostBlocks()
        self._compiled: dict[Program, Callable] = {}
        self._state: DeviceState | None = None
        self._counts: TokenCounts | None = None
        self._no_edits: dict[int, LogitEdits] = {}  # by rows, on the device
        self._no_chunks: jax.Array | None = None  # stands in for a step without

    # -- memory -----------------------------------------------------------------------------

    def allocate(self) -> None:
        """Make the pools, empty; whatever there was is dropped first, also of a failed step.

        Separate from compiling, which needs their shapes only.
        """
        self.release()
        pools = tuple(init_pool(self.backend, spec, self._mesh) for spec in self.specs)
        last_tokens = np.zeros(self._max_num_seqs + 1, np.int32)
        self._state = DeviceState(pools, jax.device_put(last_tokens, self._sharding))
        if self._steering_layers:
            like = self._abstract_steering()
            self._steering = jax.device_put(np.zeros(like.shape, like.dtype), self._sharding)

    def release(self) -> None:
        """Free the pools and everything else that `allocate` and requests made."""
        self._state = self._counts = self._no_chunks = self._steering = None
        self._no_edits.clear()
        self._host_blocks = HostBlocks()

    @property
    def has_params(self) -> bool:
        return self._params is not None

    def drop_params(self) -> None:
        """Free the parameters, but for adapters; `replace_params` brings others."""
        if self._params is not None:
            self._params_like = jax.tree.map(_forgotten, self._params, is_leaf=is_weight)
            self._params = None

    def params_on_host(self) -> Any:
        """A copy of the parameters in host memory, for `restore_params`."""
        return jax.tree.map(np.array, self._params)

    def restore_params(self, params: Any) -> None:
        self._params = jax.tree.map(
            lambda x, like: place(x, x.dtype, like.sharding), params, self._params_like
        )

    def check_params(self, tree: Any) -> None:
        """ModelLoadError, with everything that differs, if the tree does not fit the model."""
        leaves_like(tree, self._params_like if self._params is None else self._params)

    def fill_adapter_slot(self, slot: int, adapter: Adapter | None) -> None:
        """Put an adapter on the device, in the place of what was in that slot."""
        self._params = fill_slot(self._params, slot, adapter)

    def replace_params(self, tree: Any) -> None:
        """Copy other parameters into the dtypes and onto the devices of those there are.

        One after the other, the old one first given up: both are never there whole. No step may
        be in flight. Raises what `check_params` raises, before anything changes.
        """
        old = self._params_like if self._params is None else self._params
        new = leaves_like(tree, old)
        leaves, treedef = jax.tree.flatten(old, is_leaf=is_weight)
        splits = [self.model.splits.get(path) for path in tree_paths(old)]
        self.drop_params()
        del old
        for i, (leaf, split) in enumerate(zip(new, splits, strict=True)):
            before, leaves[i] = leaves[i], None
            if is_weight(before):
                matrix = place(leaf, before.dtype, weight_sharding(self._mesh, split, leaf.shape))
                leaves[i] = laid_out(before.replaced(matrix), split, self._mesh)
            else:
                dtype, sharding = before.dtype, before.sharding
                del before
                leaves[i] = place(leaf, dtype, sharding)
            jax.block_until_ready(leaves[i])
        self._params = treedef.unflatten(leaves)

    @property
    def num_weight_bytes(self) -> int:
        """Of the parameters, on each device."""
        return sum(map(num_bytes_a_device, jax.tree.leaves(self._params)))

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        return tuple(self._mesh.devices.flat)

    @property
    def _compile_options(self) -> dict[str, str]:
        return compile_options(self.devices[0])

    @property
    def num_block_bytes(self) -> int:
        """Bytes of one block in every group, on each device."""
        layouts = [self.backend.layout(spec) for spec in self.specs]
        return sum(
            layout.num_bytes // spec.num_blocks
            for layout, spec in zip(layouts, self.specs, strict=True)
        )

    @property
    def num_pool_bytes(self) -> int:
        """Bytes of the KV cache, all groups together, on each device."""
        return sum(self.backend.layout(spec).num_bytes for spec in self.specs)

    def num_temporary_bytes(self, program: Program) -> int:
        analysis = self.compile(program).memory_analysis()
        return 0 if analysis is None else analysis.temp_size_in_bytes

    # -- programs ---------------------------------------------------------------------------

    def programs(self) -> Iterator[Program]:
        """Every program that a step can need, the largest first."""
        for size in self.buckets.backbones():
            yield Program("backbone", size)
        for rows in reversed(self.buckets.samples):
            yield Program("sample", (rows,))
            yield Program("sample_full", (rows,))
        yield self._count_program
        yield SCORE
        if self._steering_layers:
            yield STEER
        for group in range(len(self.specs)):
            yield Program("copy", (group, self._max_num_seqs))
            for num_blocks in PARCEL_SIZES if self._swaps else ():
                yield Program("swap_out", (group, num_blocks))
                yield Program("swap_in", (group, num_blocks))

    def programs_of(self, moves: BlockMoves, sizes: StepSizes) -> Iterator[Program]:
        """Those that one step needs."""
        for group in {copy.group for copy in moves.copies}:
            yield Program("copy", (group, self._max_num_seqs))
        for kind, swaps in (("swap_out", moves.swap_outs), ("swap_in", moves.swap_ins)):
            for group in {swap.group for swap in swaps}:
                yield from (Program(kind, (group, size)) for size in PARCEL_SIZES)
        if any(sizes.backbone):
            yield Program("backbone", sizes.backbone)
        if sizes.samples:
            yield sizes.sampler
        if sizes.score:
            yield SCORE

    def largest_programs(self) -> tuple[Program, Program]:
        """Those with the most temporaries: the longest chunk, and the sampler of every row."""
        return (
            Program("backbone", next(self.buckets.backbones())),
            Program("sample", (self.buckets.samples[-1],)),
        )

    def sizes(
        self,
        num_decodes: int,
        num_chunk_tokens: int,
        num_samples: int,
        *,
        full: bool = False,
        score: bool = False,
    ) -> StepSizes:
        """The padded sizes that a step of these needs; 0 for what it has none of."""
        if not num_decodes and not num_chunk_tokens:
            return StepSizes(0, 0, 0)
        ideal = self.buckets.pick(num_decodes, num_chunk_tokens)
        decodes, chunk_tokens = self._choose("backbone", ideal, self.buckets.backbones())
        samples = 0
        if num_samples:
            kind = "sample_full" if full else "sample"
            rows = ((r,) for r in self.buckets.samples)
            (samples,) = self._choose(kind, (self.buckets.pick_samples(num_samples),), rows)
        return StepSizes(decodes, chunk_tokens, samples, full, score)

    def _choose(
        self, kind: str, ideal: tuple[int, ...], sizes: Iterable[tuple[int, ...]]
    ) -> tuple[int, ...]:
        """The ideal size; while it is not compiled, a larger one that is.

        Until the padding that this costs would have paid for compiling: `generate` then answers
        sooner, and a size that is really used gets its program.
        """
        if not self._patient or Program(kind, ideal) in self._compiled:
            return ideal
        larger = [
            size
            for size in sizes
            if Program(kind, size) in self._compiled
            and all(have >= need for have, need in zip(size, ideal, strict=True))
            and _num_computed(size) >= _num_computed(ideal)
        ]
        if not larger:
            return ideal
        chosen = min(larger, key=_num_computed)
        self._num_padded[kind, ideal] += _num_computed(chosen) - _num_computed(ideal)
        return chosen if self._num_padded[kind, ideal] <= PADDING_WORTH_COMPILING else ideal

    def is_compiled(self, program: Program) -> bool:
        return program in self._compiled

    def compile(self, program: Program) -> Any:
        """The executable of a program, compiled from shapes when it is first asked for."""
        if program not in self._compiled:
            self._compiled[program] = self._lower(program).compile(self._compile_options)
        return self._compiled[program]

    def compile_all(
        self,
        programs: Sequence[Program],
        done: Callable[[Program], None],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Compile several at once, as many as there are processors; `done` hears of each.

        Python traces one after the other; XLA's part needs no interpreter and runs beside it.
        When `wanted` says no, the programs that are not begun stay uncompiled.
        """
        pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        compiling: dict[concurrent.futures.Future[Any], Program] = {}
        try:
            for program in programs:
                if not wanted():
                    return
                if program not in self._compiled:
                    compiler = self._lower(program).compile
                    compiling[pool.submit(compiler, self._compile_options)] = program
            for future in concurrent.futures.as_completed(compiling):
                self._compiled[compiling[future]] = future.result()
                done(compiling[future])
                if not wanted():
                    return
        finally:
            pool.shutdown(cancel_futures=True)

    def dummy_run(self, program: Program) -> None:
        """Run a backbone or a plain sampler once, over the null block: what XLA makes ready only at
        a program's first run (on a CPU up to two and a half seconds) holds up no request.

        Other programs are left as they are. Nobody's keys, values or tokens are changed.
        """
        run = self.compile(program)
        if program.kind == "backbone":
            inputs = self._dummy_inputs(*program.size)
            pools, last_tokens = self._take_state()
            pools, _, hidden = run(self._params, pools, last_tokens, self._steering, inputs)
            self._state = DeviceState(pools, last_tokens)
            jax.block_until_ready(hidden)
        elif program.kind == "sample":
            hidden, sampling = _zeros(
                (self._abstract_hidden(), self._abstract_sampling(*program.size))
            )
            sampling.top_p[:] = 1.0
            padding = np.full(program.size, self._max_num_seqs, np.int32)
            pools, last_tokens = self._take_state()
            last_tokens, _ = run(self._params, last_tokens, hidden, sampling, padding)
            self._state = DeviceState(pools, jax.block_until_ready(last_tokens))

    def _dummy_inputs(self, decodes: int, chunk_tokens: int) -> "_BackboneInputs":
        """A full step, of one-token rows and one prompt, whose every block is the null block."""
        inputs: _BackboneInputs = _zeros(self._backbone_inputs(decodes, chunk_tokens))
        attn = inputs.attn
        num_decodes = min(decodes, chunk_tokens - 1) if chunk_tokens else decodes
        attn.seq_lens[:num_decodes] = 1
        attn.query_start_loc[: decodes + 1] = np.arange(decodes + 1)
        if chunk_tokens:
            room = self._table_width * self.specs[0].block_size
            prompt_len = min(chunk_tokens - num_decodes, room)
            attn.seq_lens[decodes] = prompt_len
            attn.query_start_loc[decodes + 1 :] = decodes + prompt_len
            inputs.positions[decodes : decodes + prompt_len] = np.arange(prompt_len)
        attn.num_decodes[...] = num_decodes
        attn.num_seqs[...] = num_decodes + bool(chunk_tokens)
        return inputs

    def _lower(self, program: Program) -> Any:
        if program.kind == "backbone":
            return self._lower_backbone(*program.size)
        if program.kind == "sample":
            return self._lower_sample(*program.size)
        if program.kind == "sample_full":
            return self._lower_sample_full(*program.size)
        if program.kind == "count":
            return self._lower_count(*program.size)
        if program.kind == "score":
            return self._lower_score(*program.size)
        if program.kind == "steer":
            return self._lower_steer()
        if program.kind == "copy":
            return self._lower_copy(*program.size)
        if program.kind == "swap_out":
            return self._lower_swap_out(*program.size)
        return self._lower_swap_in(*program.size)

    def _abstract(self, tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), tree
        )

    def _abstract_pools(self) -> tuple[KVPool, ...]:
        return tuple(pool_shapes(self.backend, spec, self._mesh) for spec in self.specs)

    def _lower_backbone(self, decodes: int, chunk_tokens: int) -> Any:
        step = self._backbone_inputs(decodes, chunk_tokens)

        def backbone(params, pools, last_tokens, steering, step):
            # Only one-token rows can have a token that the host has not seen.
            device_tokens = last_tokens[step.rows[:decodes]]
            token_ids = jnp.concatenate(
                [
                    jnp.where(step.from_device[:decodes], device_tokens, step.token_ids[:decodes]),
                    step.token_ids[decodes:],
                ]
            )
            attend = PagedAttend(
                pools,
                step.attn,
                layer_slots=self._layer_slots,
                decode_rows=decodes,
                packed=bool(chunk_tokens),
                backend=self.backend,
                mesh=self._mesh,
            )

            def of_tokens(by_row):
                return attend.pack(_of_tokens(by_row, step.attn, decodes))

            params = with_adapter_ids(params, of_tokens(step.adapter_ids))
            taps = self._taps(attend, steering, of_tokens(step.rows))
            token_ids, positions = attend.pack(token_ids), attend.pack(step.positions)
            hidden = attend.unpack(self.model.apply(params, token_ids, positions, taps or attend))
            states = Hidden(
                hidden[step.logits_indices],
                _padded(hidden[:decodes], self._max_num_seqs),
                _padded(hidden[decodes:], self.buckets.chunks[-1] if chunk_tokens else 0),
            )
            return attend.pools(), taps and taps.captured(), states

        pools = self._abstract_pools()
        outputs = (_shardings(pools), self._sharding, self._sharding)
        return jax.jit(backbone, donate_argnums=1, out_shardings=outputs).lower(
            _shapes(self._params),
            pools,
            self._abstract_array(self._max_num_seqs + 1),
            self._abstract_steering() if self._steering_layers else None,
            step,
        )

    def _backbone_inputs(self, decodes: int, chunk_tokens: int) -> "_BackboneInputs":
        """Shapes of what the backbone of this size reads of a batch."""
        array = self._abstract_array
        num_tokens = decodes + chunk_tokens
        num_seqs = decodes + (self.max_num_chunks if chunk_tokens else 0)
        num_groups = len(self.specs)
        return _BackboneInputs(
            token_ids=array(num_tokens),
            from_device=array(num_tokens, dtype=jnp.bool_),
            positions=array(num_tokens),
            rows=array(num_seqs),
            adapter_ids=array(num_seqs),
            logits_indices=array(self._max_num_seqs),
            attn=AttentionMetadata(
                slot_mapping=array(num_groups, num_tokens),
                block_tables=array(num_groups, num_seqs, self._table_width),
                seq_lens=array(num_seqs),
                query_start_loc=array(num_seqs + 1),
                num_decodes=array(),
                num_seqs=array(),
            ),
        )

    def _taps(
        self, attend: PagedAttend, steering: jax.Array | None, rows: jax.Array
    ) -> TappedAttend | None:
        if steering is None and not self._capture_layers:
            return None
        added = None if steering is None else Steering(self._steering_layers, steering, rows)
        return TappedAttend(attend, capture_layers=self._capture_layers, steering=added)

    def _abstract_steering(self) -> jax.ShapeDtypeStruct:
        shape = (self._max_num_seqs + 1, len(self._steering_layers), self.model.hidden_size)
        return self._abstract_array(*shape, dtype=jnp.float32)

    def _lower_steer(self) -> Any:
        table, scalar = self._abstract_steering(), self._abstract_array()
        vectors = self._abstract_array(*table.shape[1:], dtype=jnp.float32)
        put = self._jit(lambda table, row, new: table.at[row].set(new), donate_argnums=0)
        return put.lower(table, scalar, vectors)

    def _abstract_array(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def _abstract_sampling(self, rows: int) -> SamplingMetadata:
        array, float32 = self._abstract_array, jnp.float32
        return SamplingMetadata(
            temperature=array(rows, dtype=float32),
            top_k=array(rows),
            top_p=array(rows, dtype=float32),
            min_p=array(rows, dtype=float32),
            seeds=array(rows, 2, dtype=jnp.uint32),
            positions=array(rows),
        )

    def _abstract_hidden(self) -> jax.ShapeDtypeStruct:
        shape = (self._max_num_seqs, self.model.hidden_size)
        return self._abstract_array(*shape, dtype=self._hidden_dtype)

    def _abstract_counts(self) -> TokenCounts:
        shape = (self._max_num_seqs + 1, self.model.vocab_size)
        in_prompt = self._abstract_array(*shape, dtype=jnp.bool_)
        return TokenCounts(in_prompt, self._abstract_array(*shape))

    def _lower_sample(self, rows: int) -> Any:
        def sampler(params, last_tokens, hidden, sampling, sample_rows):
            tokens = sample(self.model.logits(params, hidden[:rows]), sampling)
            return last_tokens.at[sample_rows].set(tokens), StepResult(tokens, None)

        return self._jit(sampler, donate_argnums=1).lower(
            _shapes(self._params),
            self._abstract_array(self._max_num_seqs + 1),
            self._abstract_hidden(),
            self._abstract_sampling(rows),
            self._abstract_array(rows),
        )

    def _lower_sample_full(self, rows: int) -> Any:
        def sampler(
            params, last_tokens, counts, hidden, sampling, penalties, edits, wants, sample_rows
        ):
            raw = self.model.logits(params, hidden[:rows])
            logits = add_biases(raw, edits)
            logits = lax.cond(
                wants.penalties,
                lambda: penalize(logits, counts, sample_rows, penalties),
                lambda: logits,
            )
            tokens, shaped = draw(mask_tokens(logits, edits), sampling)
            # What a mask hides must not hide what is wrong with the model.
            tokens = jnp.where(jnp.isfinite(jnp.max(raw, axis=-1)), tokens, -1)
            logprobs = lax.cond(
                wants.logprobs,
                lambda: logprobs_of(
                    jnp.where(wants.processed[:, None], shaped, raw), tokens, MAX_LOGPROBS
                ),
                lambda: _no_logprobs(rows, min(MAX_LOGPROBS, raw.shape[1])),
            )
            last_tokens = last_tokens.at[sample_rows].set(tokens)
            counts = add_tokens(counts, sample_rows, tokens)
            return last_tokens, counts, StepResult(tokens, logprobs)

        array = self._abstract_array
        penalty = array(rows, dtype=jnp.float32)
        return self._jit(sampler, donate_argnums=(1, 2)).lower(
            _shapes(self._params),
            array(self._max_num_seqs + 1),
            self._abstract_counts(),
            self._abstract_hidden(),
            self._abstract_sampling(rows),
            PenaltyMetadata(penalty, penalty, penalty),
            self._abstract(self._empty_edits(rows)),
            self._abstract(Wants.nothing(rows)),
            array(rows),
        )

    def _empty_edits(self, rows: int) -> LogitEdits:
        return no_edits(rows, self.model.vocab_size, MAX_LOGIT_BIAS)

    def _lower_score(self, num_tokens: int) -> Any:
        """Log-probabilities of prompt tokens, from the hidden states before them."""

        def score(params, hidden, indices, targets):
            states = jnp.concatenate([hidden.decodes, hidden.chunks])[indices]
            return logprobs_of(self.model.logits(params, states), targets, MAX_LOGPROBS)

        rows, array = self._abstract_hidden(), self._abstract_array
        chunks = array(self.buckets.chunks[-1], self.model.hidden_size, dtype=rows.dtype)
        return self._jit(score, keep_unused=True).lower(
            _shapes(self._params),
            Hidden(rows, rows, chunks),
            array(num_tokens),
            array(num_tokens),
        )

    @property
    def _count_program(self) -> Program:
        return Program("count", (self._table_width * self.specs[0].block_size,))

    def _lower_count(self, num_tokens: int) -> Any:
        scalar = self._abstract_array()
        return self._jit(count_row, donate_argnums=0).lower(
            self._abstract_counts(), scalar, self._abstract_array(num_tokens), scalar, scalar
        )

    def _lower_copy(self, group: int, num_copies: int) -> Any:
        ids = self._abstract_array(num_copies)
        pool = self._abstract_pools()[group]
        copy = jax.jit(copy_blocks, donate_argnums=0, out_shardings=_shardings(pool))
        return copy.lower(pool, ids, ids)

    def _lower_swap_out(self, group: int, size: int) -> Any:
        pool = self._abstract_pools()[group]
        there = tuple(map(on_host, values_shardings(pool)))
        swap_out = jax.jit(read_blocks, out_shardings=there)
        return swap_out.lower(pool, self._abstract_array(size))

    def _lower_swap_in(self, group: int, size: int) -> Any:
        pool = self._abstract_pools()[group]
        ids = self._abstract_array(size)
        here = values_shardings(pool)
        values = tuple(
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_host(sharding))
            for x, sharding in zip(jax.eval_shape(read_blocks, pool, ids), here, strict=True)
        )

        def swap_in(pool, values, ids):
            return write_blocks(pool, ids, jax.device_put(values, here))

        jitted = jax.jit(swap_in, donate_argnums=0, out_shardings=_shardings(pool))
        return jitted.lower(pool, values, ids)

    def _jit(self, function: Callable, **options: Any) -> Any:
        """One whose results are whole on every device."""
        return jax.jit(function, out_shardings=self._sharding, **options)

    @functools.cached_property
    def _hidden_dtype(self) -> Any:
        tokens = jax.ShapeDtypeStruct((8,), jnp.int32)
        attend = dense(jnp.zeros(8, jnp.int32))
        hidden = jax.eval_shape(
            lambda params, t: self.model.apply(params, t, t, attend), self._params, tokens
        )
        return hidden.dtype

    # -- a step -----------------------------------------------------------------------------

    def move_blocks(self, moves: BlockMoves) -> None:
        """Dispatch the copies that come before a step: to the host, from the host, on the device.

        The device runs them in this order, and before the step that follows.
        """
        for group in range(len(self.specs)):
            self._swap_out(group, _pairs(group, moves.swap_outs))
            self._swap_in(group, _pairs(group, moves.swap_ins))
            self._copy(group, _pairs(group, moves.copies))

    def _swap_out(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        for parcel in split_into_parcels(pairs):
            size = PARCEL_SIZES[-1] if len(parcel) > 1 else 1
            ids = np.zeros(size, np.int32)
            ids[: len(parcel)] = [block_id for block_id, _ in parcel]
            swap_out = self.compile(Program("swap_out", (group, size)))
            assert self._state is not None
            arrays = swap_out(self._state.pools[group], ids)
            self._host_blocks.put(group, [host_id for _, host_id in parcel], Parcel(arrays))

    def _swap_in(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        for parcel, targets in self._host_blocks.find(group, pairs):
            swap_in = self.compile(Program("swap_in", (group, len(targets))))
            self._change_pool(group, swap_in, parcel.arrays, np.asarray(targets, np.int32))

    def _copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        sources, targets = np.zeros((2, self._max_num_seqs), np.int32)
        sources[: len(pairs)], targets[: len(pairs)] = zip(*pairs, strict=True)
        copy = self.compile(Program("copy", (group, self._max_num_seqs)))
        self._change_pool(group, copy, sources, targets)

    def _change_pool(self, group: int, change: Callable[..., KVPool], *args: Any) -> None:
        pools, last_tokens = self._take_state()
        changed = change(pools[group], *args)
        self._state = DeviceState((*pools[:group], changed, *pools[group + 1 :]), last_tokens)

    def execute(self, batch: Batch, sizes: StepSizes) -> StepResult | None:
        """Dispatch a step of which nobody asks anything special; its result stays on the device."""
        return self.draw(self.forward(batch, sizes)[0], batch, sizes)

    def forward(self, batch: Batch, sizes: StepSizes) -> tuple[Hidden, jax.Array | None]:
        """Dispatch the backbone: keys and values are written, tokens not drawn yet. With it come
        the states behind the layers to capture, if there are some: [C, T, E], the decodes' first
        and those of the chunks right behind them."""
        backbone = self.compile(Program("backbone", sizes.backbone))
        inputs = _BackboneInputs(
            batch.token_ids,
            batch.from_device,
            batch.positions,
            batch.rows,
            batch.adapter_ids,
            batch.logits_indices,
            batch.attn,
        )
        pools, last_tokens = self._take_state()
        pools, captured, hidden = backbone(self._params, pools, last_tokens, self._steering, inputs)
        self._state = DeviceState(pools, last_tokens)
        return hidden, captured

    def steer(self, row: int, vectors: np.ndarray) -> None:
        """From the next step on, add float32[L, E] behind the steering layers of a row."""
        self._steering = self.compile(STEER)(self._steering, np.int32(row), vectors)

    def draw(
        self,
        hidden: Hidden,
        batch: Batch,
        sizes: StepSizes,
        edits: LogitEdits | None = None,
        wants: Wants | None = None,
    ) -> StepResult | None:
        """Dispatch the sampler; None if nothing samples. `edits` and `wants` are a full one's."""
        if not sizes.samples:
            return None
        sampler = self.compile(sizes.sampler)
        pools, last_tokens = self._take_state()
        if sizes.full:
            last_tokens, self._counts, result = sampler(
                self._params,
                last_tokens,
                self._take_counts(),
                hidden.sampled,
                batch.sampling,
                batch.penalties,
                edits or self._edits_of_none(sizes.samples),
                wants or Wants.nothing(sizes.samples),
                batch.sample_rows,
            )
        else:
            last_tokens, result = sampler(
                self._params, last_tokens, hidden.sampled, batch.sampling, batch.sample_rows
            )
        self._state = DeviceState(pools, last_tokens)
        return result

    def _edits_of_none(self, rows: int) -> LogitEdits:
        """Kept on the device: nothing of it has to be sent for a step that edits nothing."""
        if rows not in self._no_edits:
            self._no_edits[rows] = jax.device_put(self._empty_edits(rows), self._sharding)
        return self._no_edits[rows]

    def score(
        self, hidden: Hidden, places: Sequence[tuple[bool, int]], targets: Sequence[int]
    ) -> list[Logprobs]:
        """Dispatch the scoring of prompt tokens: `targets[i]` after the state at `places[i]`.

        A place is an index among the decodes, or (True) among the chunks' tokens. Results come in
        pieces of SCORED_TOKENS, the last one padded.
        """
        program = self.compile(SCORE)
        if not hidden.chunks.shape[0]:
            hidden = hidden._replace(chunks=self._chunks_of_none(hidden.sampled))
        first_chunk = self._max_num_seqs
        indices = [first_chunk * in_chunks + index for in_chunks, index in places]
        pieces = []
        for start in range(0, len(indices), SCORED_TOKENS):
            part = np.zeros((2, SCORED_TOKENS), np.int32)
            end = min(start + SCORED_TOKENS, len(indices))
            part[0, : end - start] = indices[start:end]
            part[1, : end - start] = targets[start:end]
            pieces.append(program(self._params, hidden, part[0], part[1]))
        return pieces

    def _chunks_of_none(self, like: jax.Array) -> jax.Array:
        if self._no_chunks is None:
            shape = (self.buckets.chunks[-1], like.shape[1])
            self._no_chunks = jax.device_put(np.zeros(shape, like.dtype), self._sharding)
        return self._no_chunks

    def count_tokens(self, row: int, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Start a row's token counts over, with the tokens of the sequence that got the row."""
        padded = np.zeros(self._count_program.size, np.int32)
        padded[: len(token_ids)] = token_ids
        numbers = (np.int32(num_prompt_tokens), np.int32(len(token_ids)))
        count = self.compile(self._count_program)
        self._counts = count(self._take_counts(), np.int32(row), padded, *numbers)

    def _take_counts(self) -> TokenCounts:
        """The token counts, to be donated; made when the first request needs them."""
        counts, self._counts = self._counts, None
        if counts is None:
            counts = jax.tree.map(
                lambda x: jax.device_put(np.zeros(x.shape, x.dtype), self._sharding),
                self._abstract_counts(),
            )
        return counts

    def _take_state(self) -> DeviceState:
        """The state, to be donated: until its successor is stored there is none."""
        assert self._state is not None, "allocate() first, and again after a failed step"
        state, self._state = self._state, None
        return state


class _BackboneInputs(NamedTuple):
    """The part of a batch that the backbone reads."""

    token_ids: Any
    from_device: Any
    positions: Any
    rows: Any
    adapter_ids: Any
    logits_indices: Any
    attn: AttentionMetadata


def _num_computed(size: tuple[int, ...]) -> int:
    """Tokens of a step program (D, C), rows of a sampler (R,); padding included."""
    return size[-1] or size[0]


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)


def _of_tokens(by_row: jax.Array, attn: AttentionMetadata, decodes: int) -> jax.Array:
    """A value for each token, from one for each row: D rows of one token, then ragged chunks."""
    num_chunk_tokens = attn.slot_mapping.shape[1] - decodes
    if not num_chunk_tokens:
        return by_row
    tokens = jnp.arange(decodes, decodes + num_chunk_tokens, dtype=jnp.int32)
    ends = attn.query_start_loc[decodes + 1 :]
    chunk = jnp.searchsorted(ends, tokens, side="right")
    chunk = jnp.minimum(chunk, by_row.shape[0] - decodes - 1)
    return jnp.concatenate([by_row[:decodes], by_row[decodes:][chunk]])


SCORE = Program("score", (SCORED_TOKENS,))
STEER = Program("steer", ())


def _shapes(tree: Any) -> Any:
    """Arrays as shapes, with their shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def _forgotten(leaf: Any) -> Any:
    """The shapes of a parameter; an adapter is kept."""
    if isinstance(leaf, LoraWeight):
        return dataclasses.replace(leaf, base=_shapes(leaf.base))
    return _shapes(leaf)


def _padded(hidden: jax.Array, size: int) -> jax.Array:
    """`size` rows, those that are there first."""
    return jnp.pad(hidden, ((0, size - hidden.shape[0]), (0, 0)))


def _no_logprobs(rows: int, num_top: int) -> Logprobs:
    return Logprobs(
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((rows, num_top), jnp.int32),
        jnp.zeros((rows, num_top), jnp.float32),
    )


def _pairs(group: int, copies: Sequence[BlockCopy]) -> list[tuple[int, int]]:
    return [(copy.source, copy.target) for copy in copies if copy.group == group]
