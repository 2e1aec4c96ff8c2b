"""Checks the attention kernels on the device at hand and times them; see device_check.sh.

Needs only JAX, NumPy and jaxtyping. First what the device can do at best (a copy, a product), then
each case against `reference`, then times beside `xla` and, for decodes on a GPU, JAX's own op.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    KVPool,
    KVSpec,
    choose_backend,
    get_backend,
    paged_attention,
    write_kv,
)
from pallas_kernels.metadata import GroupMetadata
from pallas_kernels.roofline import attention_work

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
DECODES = [(b, c) for c in (4096, 512, 32768) for b in (64, 16, 256, 1)]
PREFILLS = (8192, 2048, 512)
CHECKS = {
    "plain": {},
    "window": {"window": 100},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": True},
}


class Case:
    """A batch of equal rows over random blocks, for one back end."""

    def __init__(self, rows: int, query_len: int, seq_len: int, block_size: int = BLOCK_SIZE):
        self.query_lens, self.seq_lens = [query_len] * rows, [seq_len] * rows
        self.decode_rows = rows if query_len == 1 else 0
        width = -(-seq_len // block_size)
        self.num_blocks = rows * width + 1
        self.block_size = block_size
        order = np.random.default_rng(0).permutation(np.arange(1, self.num_blocks))
        tables = order.astype(np.int32).reshape(rows, width)
        position = np.arange(seq_len - query_len, seq_len)
        slots = tables[:, position // block_size] * block_size + position % block_size
        self.attn = GroupMetadata(
            jnp.asarray(slots.reshape(1, -1).astype(np.int32)),
            jnp.asarray(tables[None]),
            jnp.full(rows, seq_len, jnp.int32),
            jnp.arange(rows + 1, dtype=jnp.int32) * query_len,
            jnp.int32(self.decode_rows),
            jnp.int32(rows),
        )

    def spec(self, heads: int, head_size: int, dtype: Any) -> KVSpec:
        return KVSpec(1, self.num_blocks, self.block_size, heads, head_size, jnp.dtype(dtype))

    def arguments(self, backend: Any, dtype: Any, heads=(NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE)):
        """Queries and a pool with the same random numbers, whichever the layout."""
        num_heads, num_kv_heads, head_size = heads
        spec = self.spec(num_kv_heads, head_size, dtype)
        tokens = sum(self.query_lens)
        q = jax.random.normal(jax.random.key(0), (tokens, num_heads, head_size), dtype)
        room = self.num_blocks * self.block_size
        everything = self.attn._replace(slot_mapping=jnp.arange(room, dtype=jnp.int32)[None])

        def fill():
            layout = backend.layout(spec)
            pool = KVPool(tuple(jnp.zeros(a.shape, a.dtype) for a in layout.arrays), spec)
            kv = (room, num_kv_heads, head_size)
            k, v = (jax.random.normal(jax.random.key(i), kv, dtype) for i in (1, 2))
            return write_kv(pool, k, v, everything, layer=0, backend=backend)

        return q, jax.jit(fill)()

    def attend(self, backend: Any, **scoring: Any) -> Callable[..., jax.Array]:
        def attend(q, pool, attn):
            rows = self.decode_rows
            return paged_attention(
                q, pool, attn, layer=0, decode_rows=rows, backend=backend, **scoring
            )

        return jax.jit(attend)


def seconds(function: Callable[..., Any], *args: Any, enough_s: float = 0.15) -> float:
    """The best mean of a few batches of calls, each batch waited for once."""
    jax.block_until_ready(function(*args))
    started = time.perf_counter()
    jax.block_until_ready(function(*args))
    count = max(1, min(100, int(enough_s / 3 / max(time.perf_counter() - started, 1e-6))))
    best = math.inf
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(count):
            result = function(*args)
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - started) / count)
    return best


def limits(smoke: bool) -> dict[str, float]:
    """What this device reaches: bytes a second of a copy (read and written), and operations."""
    size = 2**20 if smoke else 2**30
    array = jnp.zeros(size // 4, jnp.float32)
    copy_s = seconds(jax.jit(lambda a: a + 1), array)
    n = 256 if smoke else 8192
    square = jnp.ones((n, n), jnp.bfloat16)
    product_s = seconds(jax.jit(lambda a: a @ a), square)
    return {"copy_bytes_per_s": 2 * size / copy_s, "matmul_flops_per_s": 2 * n**3 / product_s}


def checks(backend: Any, dtype: Any) -> Iterator[dict[str, Any]]:
    """Small cases of every kind against `reference`, in the pool's dtype."""
    reference = get_backend("reference")
    for shape, (heads, case) in {
        "decode": ((8, 2, 128), Case(3, 1, 300)),
        "prefill": ((8, 2, 128), Case(2, 70, 200)),
        "decode 64": ((9, 3, 64), Case(2, 1, 130)),
        "prefill 256": ((4, 2, 256), Case(1, 90, 90, 64)),
        "decode 80": ((4, 4, 80), Case(2, 1, 77, 64)),
        "prefill 96": ((6, 2, 96), Case(1, 129, 300, 128)),
    }.items():
        if refusal := backend.refusal(case.spec(heads[1], heads[2], dtype)):
            yield {"check": shape, "refused": refusal}
            continue
        for name, options in CHECKS.items():
            scoring = dict(options)
            if scoring.pop("sinks", False):
                scoring["sinks"] = jnp.linspace(-1.0, 2.0, heads[0])
            out, expected = (
                np.asarray(
                    case.attend(b, **scoring)(*case.arguments(b, dtype, heads), case.attn),
                    np.float32,
                )
                for b in (backend, reference)
            )
            error = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
            limit = 2e-5 if jnp.dtype(dtype) == jnp.float32 else 1.5e-2
            yield {"check": f"{shape} {name}", "error": error, "ok": error <= limit}


def timing(name: str, case: Case, backends: Any, dtype: Any, device_limits: Any) -> dict[str, Any]:
    """Times of one case, and the chosen back end's share of what the device reaches."""
    result: dict[str, Any] = {"case": name}
    for backend in backends:
        try:
            q, pool = case.arguments(backend, dtype)
            result[f"{backend.name}_s"] = seconds(case.attend(backend), q, pool, case.attn)
        except Exception as error:  # noted: the other times are worth having
            result[f"{backend.name}_error"] = f"{type(error).__name__}: {error}"[:300]
    if case.decode_rows and jax.default_backend() == "gpu":
        result |= jaxs_own(case, dtype)
    work = attention_work(
        case.query_lens,
        case.seq_lens,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        kv_itemsize=jnp.dtype(dtype).itemsize,
    )
    if taken := result.get(f"{backends[0].name}_s"):
        result["share_of_copy"] = work.num_bytes / taken / device_limits["copy_bytes_per_s"]
        result["share_of_matmul"] = work.flops / taken / device_limits["matmul_flops_per_s"]
    return result


def jaxs_own(case: Case, dtype: Any) -> dict[str, Any]:
    """JAX's paged attention for GPUs (decodes only, on its Triton back end) on pools of its own."""
    try:
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as theirs

        rows = len(case.seq_lens)
        shape = (NUM_KV_HEADS, case.num_blocks, case.block_size, HEAD_SIZE)
        pages = jax.random.normal(jax.random.key(1), shape, dtype)
        q = jax.random.normal(jax.random.key(0), (rows, NUM_HEADS, HEAD_SIZE), dtype)
        tables, lengths = case.attn.block_tables[0], case.attn.seq_lens
        return {"jax_s": seconds(jax.jit(theirs), q, pages, pages, tables, lengths)}
    except Exception as error:  # it is deprecated, and may be gone or refuse the shape
        return {"jax_error": f"{type(error).__name__}: {error}"[:300]}


def whole_step(backend: Any, dtype: Any, smoke: bool) -> dict[str, Any]:
    """A decode step of 64 rows through layers of Llama-3-8B's shape, without the sampler."""
    embed, hidden, layers = (256, 512, 1) if smoke else (4096, 14336, 4)
    case = Case(2 if smoke else 64, 1, 64 if smoke else 2048)
    spec = case.spec(NUM_KV_HEADS, HEAD_SIZE, dtype)._replace(num_layers=layers)
    sizes = {
        "qkv": (embed, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE),
        "out": (NUM_HEADS * HEAD_SIZE, embed),
        "up": (embed, hidden),
        "down": (hidden, embed),
    }
    params = [{n: jnp.full(s, 1e-3, dtype) for n, s in sizes.items()} for _ in range(layers)]

    def step(pool, x, attn, params):
        for layer, p in enumerate(params):
            qkv = (x @ p["qkv"]).reshape(x.shape[0], -1, HEAD_SIZE)
            q, k, v = jnp.split(qkv, (NUM_HEADS, NUM_HEADS + NUM_KV_HEADS), axis=1)
            pool = write_kv(pool, k, v, attn, layer=layer, backend=backend)
            rows = case.decode_rows
            out = paged_attention(q, pool, attn, layer=layer, decode_rows=rows, backend=backend)
            x = x + out.reshape(x.shape[0], -1) @ p["out"]
            x = x + jax.nn.silu(x @ p["up"]) @ p["down"]
        return pool, x

    program = jax.jit(step, donate_argnums=0)
    pool = backend.init_pool(spec)
    x = jnp.ones((case.decode_rows, embed), dtype)
    pool, y = program(pool, x, case.attn, params)
    jax.block_until_ready(y)
    started, count = time.perf_counter(), 2 if smoke else 20
    for _ in range(count):
        pool, y = program(pool, x, case.attn, params)
    jax.block_until_ready(y)
    return {"layers": layers, f"{backend.name}_s": (time.perf_counter() - started) / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="where the results are written")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--seconds", type=float, default=240.0, help="no new case after these")
    arguments = parser.parse_args()
    started = time.monotonic()
    device = jax.devices()[0]
    dtype = jnp.dtype("float32" if device.platform == "cpu" else "bfloat16")
    specs = [KVSpec(1, 8, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, dtype)]
    backend, reason = choose_backend("auto", device.device_kind, specs)
    backends = [backend, *([get_backend("xla")] if backend.name != "xla" else [])]
    results: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__}
    results |= {"backend": reason, "checks": [], "times": [], "steps": []}

    def note(kind: str, value: dict[str, Any]) -> None:
        results[kind].append(value)
        results["elapsed_s"] = time.monotonic() - started
        print(kind, json.dumps(value), flush=True)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(results, file, indent=1)

    print(f"{device.device_kind}, JAX {jax.__version__}; {reason}", flush=True)
    results["limits"] = limits(arguments.smoke)
    print("limits", json.dumps(results["limits"]), flush=True)
    for check in itertools.islice(checks(backend, dtype), 2 if arguments.smoke else None):
        note("checks", check)
    decodes, prefills = ([(2, 64)], (64,)) if arguments.smoke else (DECODES, PREFILLS)
    cases = [(f"decode {b} x {c}", lambda b=b, c=c: Case(b, 1, c)) for b, c in decodes]
    cases += [(f"prefill {n}", lambda n=n: Case(1, n, n)) for n in prefills]
    if not arguments.smoke:  # one of each kind first
        cases.insert(1, cases.pop(len(decodes)))
    note("steps", whole_step(backend, dtype, arguments.smoke))
    for name, make in cases:
        if time.monotonic() - started > arguments.seconds:
            results["left_out"] = [*results.get("left_out", []), name]
            continue
        note("times", timing(name, make(), backends, dtype, results["limits"]))
    if any(check.get("ok") is False for check in results["checks"]):
        raise SystemExit("the kernels are wrong on this device: see the checks above")


if __name__ == "__main__":
    main()
