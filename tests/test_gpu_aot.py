"""The Hopper kernel, compiled by XLA and NVIDIA's assembler for the real chips: no GPU needed.

What is asserted is what they say: the kernel fits, nothing is spilled from registers to memory, and
the pool is updated where it is.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import GpuBackend, KVPool, KVSpec, choose_backend, paged_attention, write_kv
from pallas_kernels import gpu_attention as attention
from pallas_kernels.aot_gpu import TARGETS, compile_for_gpu, why_no_gpu_compiler
from pallas_kernels.gpu_tuning import TuningConfig, stored_head_size, tune, unit_dtype
from tests.conftest import CI
from tests.kernel_steps import attn_shapes, shape_of

MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def compiler():
    """Fails in CI where the compiler should be and is not; skips where there is none."""
    if reason := why_no_gpu_compiler():
        if CI and "not installed" in reason:
            pytest.fail(reason)
        pytest.skip(f"needs a GPU compiler: {reason}")


def spec_of(
    head_size: int, num_kv_heads: int = 8, block_size: int = 16, dtype: str = "bfloat16"
) -> KVSpec:
    return KVSpec(2, 2048, block_size, num_kv_heads, head_size, jnp.dtype(dtype))


def compile_layer(
    chip: str,
    spec: KVSpec,
    backend,
    *,
    decode_rows=0,
    chunk_tokens=0,
    q_dtype: str | None = None,
    **scoring,
):
    """One layer's write and attention, 32 heads or 4 a KV head, over a pool that is donated."""
    chunk_rows = 4 if chunk_tokens else 0
    num_heads = 4 * spec.num_kv_heads
    sinks = shape_of(num_heads, dtype="float32") if scoring.pop("sinks", False) else None
    tokens = decode_rows + chunk_tokens
    layout = backend.layout(spec)
    dtype = q_dtype or (unit_dtype(spec).name if backend.name == "gpu" else spec.dtype.name)

    def step(pool, q, k, v, attn, sinks):
        pool = write_kv(pool, k, v, attn, layer=1, backend=backend)
        out = paged_attention(
            q, pool, attn, layer=1, decode_rows=decode_rows, sinks=sinks, backend=backend, **scoring
        )
        return out, pool

    compiled, kernels = compile_for_gpu(
        chip,
        step,
        KVPool(layout.arrays, spec),
        shape_of(tokens, num_heads, spec.head_size, dtype=dtype),
        shape_of(tokens, spec.num_kv_heads, spec.head_size, dtype=dtype),
        shape_of(tokens, spec.num_kv_heads, spec.head_size, dtype=dtype),
        attn_shapes(decode_rows, chunk_rows, chunk_tokens, 256),
        sinks,
        donate_argnums=0,
    )
    assert compiled.alias_bytes == layout.num_bytes
    assert compiled.temporary_bytes < layout.num_bytes / 2
    return kernels


ALL = {"window": 1024, "softcap": 50.0, "sinks": True}
LAYERS = {
    "decode": (spec_of(128), {"decode_rows": 64}),
    "decode_one_row_many_splits": (spec_of(64), {"decode_rows": 1}),
    "decode_80_float16": (spec_of(80, dtype="float16"), {"decode_rows": 64}),
    "decode_256_all": (spec_of(256, 4, block_size=64), {"decode_rows": 64, **ALL}),
    "prefill": (spec_of(128), {"chunk_tokens": 2048}),
    "prefill_64_all": (spec_of(64, block_size=8), {"chunk_tokens": 1024, **ALL}),
    "prefill_256": (spec_of(256, block_size=128), {"chunk_tokens": 1024}),
    "decode_int8": (spec_of(128, dtype="int8"), {"decode_rows": 64}),
    "prefill_e4m3_all": (
        spec_of(64, block_size=8, dtype="float8_e4m3fn"),
        {"chunk_tokens": 1024, **ALL},
    ),
    "prefill_e5m2_256_all": (
        spec_of(256, block_size=64, dtype="float8_e5m2"),
        {"chunk_tokens": 1024, **ALL},
    ),
}
MORE_HEADS = {64: "bfloat16", 80: "bfloat16", 96: "float16", 128: "float16", 256: "bfloat16"}
MORE_LAYERS = {
    f"{name}_{size}_{dtype}_{'all' if options else 'plain'}_blocks_of_{block_size}": (
        spec_of(size, block_size=block_size, dtype=dtype),
        {**what, **options},
    )
    for name, what in (("decode", {"decode_rows": 16}), ("prefill", {"chunk_tokens": 512}))
    for size, own_dtype in MORE_HEADS.items()
    for dtype, block_sizes in ((own_dtype, (16, 256)), ("int8", (16,)), ("float8_e5m2", (256,)))
    for block_size in block_sizes
    for options in ({}, ALL)
    if stored_head_size(spec_of(size, dtype=dtype)) == size  # 80 over bytes is the kernel of 96
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_kernel_compiles_for_hopper_and_spills_nothing(name):
    spec, what = LAYERS[name]
    (kernel,) = compile_layer("h200", spec, GpuBackend(), **what)
    assert kernel.architecture == "sm_90a"
    assert kernel.spill_bytes == kernel.stack_bytes == 0
    # 64 K registers: those of two computing warpgroups are capped so that a third can copy.
    assert kernel.registers <= (255 if what.get("decode_rows") or spec.head_size == 256 else 168)


@pytest.mark.sweep
@pytest.mark.parametrize("name", MORE_LAYERS)
def test_more_kernels_compile_for_hopper_and_spill_nothing(name):
    spec, what = MORE_LAYERS[name]
    (kernel,) = compile_layer("h200", spec, GpuBackend(), **what)
    assert kernel.spill_bytes == kernel.stack_bytes == 0


@pytest.mark.parametrize("chip", ["a100", "b200"])
def test_other_generations_run_through_xla(chip):
    spec = spec_of(128)
    backend, reason = choose_backend("auto", TARGETS[chip].name, [spec])
    assert reason.startswith("xla: auto") and TARGETS[chip].name in reason
    kernels = compile_layer(chip, spec, backend, decode_rows=16, chunk_tokens=64)
    assert kernels == ()


@pytest.mark.sweep
@pytest.mark.parametrize("chip", ["a100", "b200"])
def test_the_kernel_is_for_hopper_only(chip, capfd):
    """Why `auto` does not take it elsewhere: the compiler says, on stderr, what the chip lacks."""
    with pytest.raises(Exception, match="Pass pipeline failed"):
        compile_layer(chip, spec_of(128), GpuBackend(), decode_rows=16)
    assert re.search(r"wgmma.*not supported on sm_", capfd.readouterr().err)


def test_an_illegal_tile_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="tile_len=72 must be 64, 128, 192 or 256"):
        TuningConfig(8, 1, 72, 2, 1, False)
    with pytest.raises(ValueError, match="rows=72 must be a multiple of 8, 64 at most"):
        TuningConfig(72, 1, 64, 2, 1, False)
    # One that only the compiler can judge: more stages than there is shared memory.
    tile = TuningConfig(8, 1, 64, 8, 1, False)
    monkeypatch.setattr(attention, "tune_decodes", lambda *_: tile)
    with pytest.raises(ValueError, match="exceeds available shared memory"):
        compile_layer("h200", spec_of(128), GpuBackend(), decode_rows=64)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("head_size", [16, 64, 80, 96, 112, 128, 256])
def test_every_tuned_tile_fits_the_shared_memory(head_size, exact, dtype):
    spec = spec_of(head_size, dtype=dtype)
    for rows in (1, 8, 9, 64, 65, 128):
        for tiles in (1, 16, 300):
            config = tune(
                spec,
                num_tiles=lambda _, tiles=tiles: tiles,
                rows=rows,
                capacity=4096,
                exact=exact,
            )
            assert config.smem_bytes(spec, exact) < 227 * 1024 - 2048
            assert (config.wide_slots > 0) == (dtype == "int8")
            assert config.rows >= min(rows, 64)
            assert config.splits == max(1, min(-(-264 // (tiles * 8)), 16))


@pytest.mark.parametrize("head_size", [128])
def test_the_whole_step_of_a_llama_updates_its_pool_in_place(head_size):
    """Two layers of Llama-3-8B's shape, decodes and chunks in one step, then the sampler's logits:
    the pool keeps its place, and the two layers share two kernels."""
    num_heads, num_kv_heads, embed, hidden, vocab = 32, 8, 4096, 14336, 1024
    spec = KVSpec(2, 4096, 16, num_kv_heads, head_size, jnp.dtype("bfloat16"))
    backend = choose_backend("auto", TARGETS["h200"].name, [spec])[0]
    assert backend == GpuBackend()
    layout = backend.layout(spec)
    decode_rows, chunk_tokens = 32, 256

    def rms(x):
        x = x.astype(jnp.float32)
        return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)).astype("bfloat16")

    @jax.jit  # as the engine does, so that JAX 0.11 lets layers share kernels
    def attend(pool, q, k, v, attn, layer):
        where = {"layer": layer, "backend": backend}
        pool = write_kv(pool, k, v, attn, **where)
        return pool, paged_attention(q, pool, attn, decode_rows=decode_rows, **where)

    def step(pool, params, tokens, attn):
        x = params["embed"][tokens]
        for layer in range(spec.num_layers):
            p = jax.tree.map(lambda a, layer=layer: a[layer], params["layers"])
            qkv = (rms(x) @ p["qkv"]).reshape(x.shape[0], -1, head_size)
            q, k, v = jnp.split(qkv, (num_heads, num_heads + num_kv_heads), axis=1)
            pool, out = attend(pool, q, k, v, attn, jnp.int32(layer))
            x = x + out.reshape(x.shape[0], -1) @ p["out"]
            gate, up = jnp.split(rms(x) @ p["up"], 2, axis=1)
            x = x + (jax.nn.silu(gate) * up) @ p["down"]
        return rms(x) @ params["head"], pool

    def weight(*size: int) -> jax.ShapeDtypeStruct:
        return shape_of(*size, dtype="bfloat16")

    layers = {
        "qkv": weight(2, embed, (num_heads + 2 * num_kv_heads) * head_size),
        "out": weight(2, num_heads * head_size, embed),
        "up": weight(2, embed, 2 * hidden),
        "down": weight(2, hidden, embed),
    }
    params = {"embed": weight(vocab, embed), "head": weight(embed, vocab), "layers": layers}
    compiled, kernels = compile_for_gpu(
        "h200",
        step,
        KVPool(layout.arrays, spec),
        params,
        shape_of(decode_rows + chunk_tokens),
        attn_shapes(decode_rows, 4, chunk_tokens, 256),
        donate_argnums=0,
    )
    assert layout.num_bytes == 2 * 4096 * 16 * 8 * 2 * 128 * 2
    assert compiled.alias_bytes == layout.num_bytes
    assert compiled.temporary_bytes < 64 * MIB
    assert [kernel.spill_bytes for kernel in kernels] == [0, 0]
