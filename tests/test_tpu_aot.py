"""The TPU kernels, compiled for real chips by the compiler that will be used there: no TPU needed.

What is asserted is what the compiler says: it takes the kernels, the pool is updated where it is,
and the temporaries do not grow with it.
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import KVPool, KVSpec, TpuBackend, aot, paged_attention, tpu_attention, write_kv
from tests.kernel_steps import attn_shapes, shape_of

MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def compiler():
    """Fails where the compiler should be and is not; skips where there is none."""
    if reason := aot.why_no_tpu_compiler():
        if "not installed" in reason:
            pytest.fail(reason)
        pytest.skip(f"needs a TPU compiler: {reason}")


def compile_step(
    chip: str,
    *,
    decode_rows: int = 16,
    chunk_rows: int = 0,
    chunk_tokens: int = 0,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_size: int = 128,
    dtype: str = "bfloat16",
    pool_dtype: str = "bfloat16",
    block_size: int = 16,
    pool_mib: int = 256,
    table_width: int = 128,
    **scoring,
):
    """One layer's write and attention over a pool of at least `pool_mib`, which is donated."""
    device = aot.tpu_device(chip)
    backend = TpuBackend().for_device(device.device_kind)
    assert backend.chip.name == chip
    spec = KVSpec(1, 1, block_size, num_kv_heads, head_size, jnp.dtype(pool_dtype))
    block_bytes = backend.layout(spec).num_bytes
    spec = spec._replace(num_blocks=-(-pool_mib * MIB // block_bytes))
    layout = backend.layout(spec)
    sinks = scoring.pop("sinks", None)

    def step(pool, q, k, v, attn, sinks):
        pool = write_kv(pool, k, v, attn, layer=0, backend=backend)
        out = paged_attention(
            q, pool, attn, layer=0, decode_rows=decode_rows, sinks=sinks, backend=backend, **scoring
        )
        return out, pool

    num_tokens = decode_rows + chunk_tokens
    kv = shape_of(num_tokens, num_kv_heads, head_size, dtype=dtype)
    compiled = aot.compile_for(
        device,
        step,
        KVPool(layout.arrays, spec),
        shape_of(num_tokens, num_heads, head_size, dtype=dtype),
        kv,
        kv,
        attn_shapes(decode_rows, chunk_rows, chunk_tokens, table_width),
        None if sinks is None else shape_of(num_heads, dtype="float32"),
        donate_argnums=0,
    )
    return compiled, layout.num_bytes


EVERYTHING = {"window": 200, "softcap": 5.0, "sinks": True}
PREFILL = {"decode_rows": 0, "chunk_rows": 2, "chunk_tokens": 128}
# Each chip, each head size, each dtype, decodes and prefills; groups and heads that are no powers
# of two; K odd and even, a line of scales shared and filled.
CASES = {
    "v4_64": ("v4", {"head_size": 64}),
    "v4_int8": ("v4", {"pool_dtype": "int8"}),
    "v5e_64": ("v5e", {"head_size": 64, "num_heads": 9, "num_kv_heads": 3, **EVERYTHING}),
    "v5e_f32_prefill": ("v5e", {**PREFILL, "dtype": "float32", "pool_dtype": "float32"}),
    "v5e_e4m3_prefill": ("v5e", {**PREFILL, "pool_dtype": "float8_e4m3fn"}),
    "v5p_256": ("v5p", {"head_size": 256, "num_heads": 3, "num_kv_heads": 1, **EVERYTHING}),
    "v5p_e5m2": ("v5p", {"pool_dtype": "float8_e5m2", "head_size": 256, "block_size": 32}),
    "v6e_80": ("v6e", {"head_size": 80, "num_kv_heads": 1, "block_size": 64}),
    "v6e_int8_prefill": ("v6e", {**PREFILL, "pool_dtype": "int8", "num_kv_heads": 1}),
    "v7x_96": ("v7x", {"head_size": 96, "num_kv_heads": 4}),
    "v7x_prefill": ("v7x", {**PREFILL, "block_size": 128}),
    "v7x_e4m3_f32": (
        "v7x",
        {"pool_dtype": "float8_e4m3fn", "dtype": "float32", "block_size": 256, "num_kv_heads": 1},
    ),
}
MORE_CASES = {
    "v4": ("v4", {}),
    "v4_prefill": ("v4", PREFILL),
    "v5e": ("v5e", {}),
    "v5e_prefill": ("v5e", {**PREFILL, **EVERYTHING}),
    "v5e_int8": ("v5e", {"pool_dtype": "int8", "num_kv_heads": 8, "block_size": 64}),
    "v5e_int8_64": (
        "v5e",
        {"pool_dtype": "int8", "head_size": 64, "num_heads": 9, "num_kv_heads": 3, **EVERYTHING},
    ),
    "v5p_f32": ("v5p", {"dtype": "float32", "pool_dtype": "float32", "block_size": 256}),
    "v6e_blocks_of_8": ("v6e", {"block_size": 8}),
    "v6e_64_prefill": ("v6e", {**PREFILL, "head_size": 64, "num_kv_heads": 1, "num_heads": 3}),
    "v6e_e4m3": ("v6e", {"pool_dtype": "float8_e4m3fn", "num_kv_heads": 8, "block_size": 128}),
    "v7x_f32_over_bf16": ("v7x", {"dtype": "float32"}),
}
EVERY_CASE = [
    *CASES,
    *(pytest.param(case, marks=pytest.mark.sweep) for case in MORE_CASES),
]


@pytest.mark.parametrize("case", EVERY_CASE)
def test_a_kernel_compiles_and_leaves_the_pool_where_it_is(case):
    chip, options = (CASES | MORE_CASES)[case]
    compiled, pool_bytes = compile_step(chip, **options)
    assert compiled.alias_bytes == pool_bytes > 128 * MIB
    assert compiled.temporary_bytes < 4 * MIB


def test_block_tables_larger_than_scalar_memory_compile():
    """256 rows of 128k tokens in blocks of 64: 2 MiB of tables."""
    compiled, _ = compile_step("v6e", decode_rows=256, table_width=2048, block_size=64)
    assert compiled.temporary_bytes < 16 * MIB


def test_an_illegal_tile_is_refused_by_the_compiler(monkeypatch):
    """So that a compile here is worth something."""
    plain = tpu_attention.tiles_for
    monkeypatch.setattr(
        tpu_attention, "tiles_for", lambda *args: plain(*args)._replace(fetch_blocks=32)
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_step("v5e", block_size=1024, num_kv_heads=8)


@pytest.mark.parametrize(
    ("chip", "dtype"),
    [
        ("v5e", "bfloat16"),
        ("v6e", "float8_e4m3fn"),
        pytest.param("v6e", "bfloat16", marks=pytest.mark.sweep),
        pytest.param("v5e", "int8", marks=pytest.mark.sweep),
    ],
)
def test_a_whole_serving_step_leaves_the_pool_where_it_is(chip, dtype):
    """Layers of Llama's shape under `lax.scan`, chunks and decodes in one step."""
    device = aot.tpu_device(chip)
    backend = TpuBackend().for_device(device.device_kind)
    layers, heads, kv_heads, size, width = 4, 16, 4, 128, 2048
    spec = KVSpec(layers, 1024, 32, kv_heads, size, jnp.dtype(dtype))
    layout = backend.layout(spec)

    def step(pool, weights, x, attn):
        def one_layer(carry, inputs):
            x, pool = carry
            layer, (wq, wkv, wo, w1, w2) = inputs
            h = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)
            q = (h @ wq).reshape(-1, heads, size)
            k, v = jnp.split((h @ wkv).reshape(-1, 2 * kv_heads, size), 2, axis=1)
            pool = write_kv(pool, k, v, attn, layer=layer, backend=backend)
            out = paged_attention(q, pool, attn, layer=layer, decode_rows=32, backend=backend)
            x = x + out.reshape(-1, heads * size) @ wo
            return (x + jax.nn.silu(x @ w1) @ w2, pool), None

        numbers = jnp.arange(layers, dtype=jnp.int32)
        return jax.lax.scan(one_layer, (x, pool), (numbers, weights))[0]

    def weight(*shape):
        return shape_of(layers, *shape, dtype="bfloat16")

    weights = (
        weight(width, heads * size),
        weight(width, 2 * kv_heads * size),
        weight(heads * size, width),
        weight(width, 2 * width),
        weight(2 * width, width),
    )
    compiled = aot.compile_for(
        device,
        step,
        KVPool(layout.arrays, spec),
        weights,
        shape_of(32 + 128, width, dtype="bfloat16"),
        attn_shapes(32, 2, 128, 64),
        donate_argnums=0,
    )
    assert layout.num_bytes == {2: 256, 1: 128 + 16}[spec.dtype.itemsize] * MIB
    assert compiled.alias_bytes >= layout.num_bytes
    assert compiled.temporary_bytes < 16 * MIB
    hlo = compiled.program.as_text()
    for array in layout.arrays:
        pool_type = f"[{','.join(map(str, array.shape))}]"
        assert pool_type in hlo
        copies = [line for line in hlo.splitlines() if " copy(" in line and pool_type in line]
        assert not copies
