"""Bad arguments are refused while tracing, by name and value, the same by every back end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    KVPool,
    KVSpec,
    copy_blocks,
    get_backend,
    paged_attention,
    read_blocks,
    write_blocks,
    write_kv,
)
from tests.kernel_steps import PORTABLE, Attn

pytestmark = pytest.mark.parametrize("backend", [*PORTABLE, "tpu", "gpu"])
BF16 = jnp.dtype("bfloat16")
SPEC = KVSpec(2, 6, 8, 2, 16, BF16)  # L N b K D
T, S, H = 7, 3, 4


def array(*shape: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


ATTN = Attn(array(1, T), array(1, S, 5), array(S), array(S + 1), array(), array())


def pool_of(backend: str) -> KVPool:
    return KVPool(get_backend(backend).layout(SPEC).arrays, SPEC)


def attend(backend, q=None, attn=ATTN, *, arrays=None, **changes):
    q = array(T, H, 16, dtype=BF16) if q is None else q
    options = {"layer": 0, "decode_rows": 2, "backend": get_backend(backend)} | changes

    def call(q, pool, attn, arrays):
        return paged_attention(q, pool, attn, **options, **arrays)

    return jax.eval_shape(call, q, pool_of(backend), attn, arrays or {})


def test_good_arguments_pass(backend):
    out = attend(backend)
    assert (out.shape, out.dtype) == ((T, H, 16), BF16)
    for good in (
        {"layer": np.int64(1)},
        {"group": np.int32(0)},
        {"window": 2**31 - 1},
        {"scale": 0},
    ):
        assert attend(backend, **good) == out
    for name, traced in {"scale": array(dtype=jnp.float32), "k_scale": array(2)}.items():
        assert attend(backend, arrays={name: traced}) == out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": array(T, H, dtype=BF16)}, r"q must have axes \[T H D\], got shape \(7, 4\)"),
        ({"q": array(T, H, 16)}, "q must be float32 or bfloat16 or float16, got int32"),
        ({"q": array(T, H, 8, dtype=BF16)}, "q has head_size 8, the pool has 16"),
        ({"q": array(T, 5, 16, dtype=BF16)}, "num_heads 5, not a multiple .* 2"),
        ({"q": array(9, H, 16, dtype=BF16)}, r"slot_mapping .*\(1, 7\) for 9 tokens"),
        ({"layer": 2}, "layer 2 is outside the pool's 2 layers"),
        ({"layer": -1}, "layer -1 is outside the pool's 2 layers"),
        ({"layer": np.zeros(2, np.int32)}, r"layer must be an int32 scalar, got int32\[2\]"),
        ({"group": 1}, "group must be a Python int below 1, got 1"),
        ({"decode_rows": 4}, r"decode_rows must be .* 0 to 3 \(3 rows, 7 tokens\), got 4"),
        ({"decode_rows": -1}, "decode_rows must be .*, got -1"),
        ({"decode_rows": 3}, "7 tokens but decode_rows=3 of 3 rows"),
        ({"window": 0}, r"window must be a positive Python int \(int32\) or None, got 0"),
        ({"window": True}, "window must be a positive .*, got True"),
        ({"window": 2**31}, "window must be a positive .*, got 2147483648"),
        ({"softcap": 0.0}, "softcap must be a positive finite number or None, got 0.0"),
        ({"softcap": float("inf")}, "softcap must be .*, got inf"),
        ({"scale": float("nan")}, "scale must be finite, got nan"),
        ({"scale": np.ones(2, np.float32)}, r"scale must be a number, got shape \(2,\)"),
        ({"sinks": np.ones(2, np.float32)}, r"sinks has shape \(2,\), expected \(4,\)"),
        ({"k_scale": np.ones(3, np.float32)}, r"k_scale has shape \(3,\), expected"),
        ({"v_scale": np.ones((2, 1), np.float32)}, r"v_scale has shape \(2, 1\), expected"),
        (
            {"attn": ATTN._replace(seq_lens=array(2))},
            r"seq_lens has shape \(2,\), expected \(3,\)",
        ),
        (
            {"attn": ATTN._replace(query_start_loc=array(3))},
            r"query_start_loc has shape \(3,\), expected \(4,\)",
        ),
        (
            {"attn": ATTN._replace(block_tables=array(2, S, 5))},
            "block_tables has 2 groups, slot_mapping has 1",
        ),
        ({"attn": ATTN._replace(block_tables=array(1, S, 0))}, "block_tables has no columns"),
        (
            {"attn": ATTN._replace(slot_mapping=array(1, T, dtype=jnp.uint32))},
            "slot_mapping must be int32, got uint32",
        ),
    ],
)
def test_attention_refuses(backend, changes, message):
    with pytest.raises(ValueError, match=message):
        attend(backend, **changes)


def test_a_layer_must_be_a_number(backend):
    with pytest.raises(TypeError, match="layer must be an int or an int32 scalar, got '0'"):
        attend(backend, layer="0")


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        (array(T, 2, 16), array(T, 2, 16), "k must be float32 or bfloat16 or float16, got int32"),
        ((T, 3, 16), (T, 3, 16), r"k has shape \(7, 3, 16\), the pool wants \[T, 2, 16\]"),
        ((T, 2, 16), (T, 2, 9), r"v has shape \(7, 2, 9\), the pool wants \[T, 2, 16\]"),
        ((T, 2, 16), (5, 2, 16), r"k has shape \(7, 2, 16\), v has \(5, 2, 16\)"),
        ((5, 2, 16), (5, 2, 16), r"slot_mapping has shape \(1, 7\) for 5 tokens"),
    ],
)
def test_writing_refuses(backend, k, v, message):
    k, v = (array(*x, dtype=BF16) if isinstance(x, tuple) else x for x in (k, v))

    def call(pool, k, v, attn):
        return write_kv(pool, k, v, attn, layer=0, backend=get_backend(backend))

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, pool_of(backend), k, v, ATTN)


def test_block_moves_refuse(backend):
    pool = get_backend(backend).init_pool(SPEC)
    two, three = jnp.zeros(2, jnp.int32), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match="dst has 3 block ids, expected 2"):
        copy_blocks(pool, two, three)
    with pytest.raises(ValueError, match="src must be int32, got float32"):
        copy_blocks(pool, jnp.zeros(2), two)
    values = read_blocks(pool, two)
    with pytest.raises(ValueError, match=r"values\[0\] is bfloat16\[2,.*expected bfloat16\[3, 2,"):
        write_blocks(pool, three, values)
    count = len(values)
    with pytest.raises(ValueError, match=f"values has {count + 1} arrays, the pool has {count}"):
        write_blocks(pool, two, (*values, values[0]))
