"""Load and multiply: all in which the compiled and the interpreted Hopper kernel differ.

The interpreter of JAX 0.10 knows copies, barriers and shared memory, but neither register layouts
nor transposed operands; `Interpreted` says the same with plain `jnp`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# JAX before 0.11 wants an index; later ones warn of it.
_WHOLE: tuple[tuple[()], ...] = ((),) if jax.__version_info__ < (0, 11) else ()


def _load(ref, *, layout, optimized: bool = True) -> jax.Array:
    return plgpu.load(ref, *_WHOLE, layout=layout, optimized=optimized)


@dataclass(frozen=True)
class Wgmma:
    """A Hopper warpgroup's matrix instruction, and its layout of values in registers."""

    def row_vector(self, ref) -> jax.Array:
        """`[M]` in shared memory, each value with the thread that holds its row."""
        return _load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def column_vector(self, ref) -> jax.Array:
        """`[J]` in shared memory, each value with the threads that hold its column."""
        return _load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)

    def widen(self, bytes_ref, scales_ref, dtype: jnp.dtype, wide_ref) -> None:
        """Numbers of one byte, `[J, D]` in shared memory, times `[J]` scales, in bfloat16."""
        # A thread takes four bytes, which are the numbers that it writes.
        layout = plgpu.Layout.WGMMA_UPCAST_2X
        scales = _load(scales_ref, layout=layout.reduce(1), optimized=False)
        num_columns = bytes_ref.shape[1]
        width = min(num_columns, 128)  # at a time, for want of registers
        for column in range(0, num_columns, width):
            part = (slice(None), pl.ds(column, min(width, num_columns - column)))
            narrow = _load(bytes_ref.at[part], layout=layout)
            if dtype != jnp.int8:
                narrow = lax.bitcast_convert_type(narrow, dtype)
            # The one step that Hopper has for each; either holds all that a byte can.
            numbers = narrow.astype(jnp.bfloat16 if dtype == jnp.int8 else jnp.float16)
            of_rows = plgpu.layout_cast(lax.broadcast_in_dim(scales, narrow.shape, [0]), layout)
            scaled = numbers.astype(jnp.float32) * of_rows
            wide_ref.at[part][...] = scaled.astype(wide_ref.dtype)

    def fill_rows(self, value: float, num_rows: int) -> jax.Array:
        full = jnp.full((num_rows,), value, jnp.float32)
        return plgpu.layout_cast(full, plgpu.Layout.WGMMA.reduce(1))

    def zeros(self, shape: tuple[int, int]) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)

    def iota(self, shape: tuple[int, int], axis: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def scores(self, q_ref, k_ref) -> jax.Array:
        """`[M, D]` times `[J, D]` transposed, both in shared memory, in float32."""

        def multiply(acc_ref):
            plgpu.wgmma(acc_ref, q_ref, k_ref.transpose((1, 0)))
            return acc_ref[...]

        shape = (q_ref.shape[0], k_ref.shape[0])
        return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

    def add_values(self, acc: jax.Array, weights: jax.Array, v_ref) -> jax.Array:
        """`acc [M, D]` plus `weights [M, J]`, rounded to the values' dtype, times `[J, D]`."""

        def multiply(acc_ref):
            plgpu.wgmma(acc_ref, weights.astype(v_ref.dtype), v_ref)

        return pl.run_state(multiply)(plgpu.ACC.init(acc))


@dataclass(frozen=True)
class Interpreted:
    """The same products in plain `jnp`, for the interpreter."""

    def row_vector(self, ref) -> jax.Array:
        return ref[...]

    def column_vector(self, ref) -> jax.Array:
        return ref[...]

    def widen(self, bytes_ref, scales_ref, dtype: jnp.dtype, wide_ref) -> None:
        narrow, scales = bytes_ref[...], scales_ref[...]
        if dtype != jnp.int8:
            narrow = lax.bitcast_convert_type(narrow, dtype)
        scaled = narrow.astype(jnp.float32) * lax.broadcast_in_dim(scales, narrow.shape, [0])
        wide_ref[...] = scaled.astype(wide_ref.dtype)

    def fill_rows(self, value: float, num_rows: int) -> jax.Array:
        return jnp.full((num_rows,), value, jnp.float32)

    def zeros(self, shape: tuple[int, int]) -> jax.Array:
        return jnp.zeros(shape, jnp.float32)

    def iota(self, shape: tuple[int, int], axis: int) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, shape, axis)

    def scores(self, q_ref, k_ref) -> jax.Array:
        q, k = q_ref[...].astype(jnp.float32), k_ref[...].astype(jnp.float32)
        return lax.dot_general(q, k, (((1,), (1,)), ((), ())), precision="highest")

    def add_values(self, acc: jax.Array, weights: jax.Array, v_ref) -> jax.Array:
        rounded = weights.astype(v_ref.dtype).astype(jnp.float32)
        v = v_ref[...].astype(jnp.float32)
        return acc + lax.dot_general(rounded, v, (((1,), (0,)), ((), ())), precision="highest")


MatrixUnit = Wgmma | Interpreted
