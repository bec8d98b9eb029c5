"""Product of a few rows with a matrix: one GPU kernel, which also computes the norm, gate or residual sum around it.

XLA starts one or two kernels for a norm, one or two for the product of a few rows after it, and one for gated units or
for the residual sum. Here all of this is one Triton kernel. Each program computes some columns for all rows. It reads
its part of the matrix once. It also computes the norm of all rows, which takes little time compared with that read.

Shape letters: `R` rows, `E` inputs, `F` outputs, and `N` columns of the matrix (`2 F` for gated units).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from speccascade_jax.core.types import Array
from speccascade_jax.runtime import platforms

MOST_ROWS = 64
"""Largest number of rows; with more rows, the library that XLA calls is faster."""
CHUNK = 128
"""Largest number of inputs per step. A step's part of the matrix is loaded while the step before it multiplies."""
PROGRAMS = 128
"""Number of programs to aim at, about as many as a large GPU has multiprocessors."""
_TILE = 16
"""Smallest size of a product's operands in Triton."""


class Norm(NamedTuple):
    """A root mean square norm `x / sqrt(mean x² + epsilon) · (offset + scale)` before a product; `scale` is `[E]`."""

    scale: Array
    epsilon: float
    offset: float = 0.0


def fits(rows: int, sizes: tuple[int, ...], dtype: Any) -> bool:
    """Returns whether the kernel can multiply `rows` rows by matrices of `sizes` input features."""
    name = jnp.dtype(dtype).name
    whole = all(size % _TILE == 0 for size in sizes)
    return platforms.uses_gpu_kernels() and rows <= MOST_ROWS and whole and name in ("bfloat16", "float32")


def multiply(
    x: Array,
    matrix: Array,
    dtype: Any,
    *,
    norm: Norm | None = None,
    gate: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
) -> Array:
    """Returns the product of rows `x` `[..., E]` with a matrix `[E, N]`, `[..., F]`, with sums in float32.

    Args:
        x: the rows.
        matrix: the matrix.
        dtype: dtype to which the norm's result and the matrix are rounded.
        norm: norm of the rows before the product.
        gate: function of gated units: the result is `gate(first half of the columns) · second half`, `F = N / 2`, in
            `dtype`.
        residual: array `[..., F]` that is added to the product; the result is in `dtype`. Without a gate and a
            residual, the result is float32.
    """
    (inputs, columns), rows = matrix.shape, x.reshape(-1, x.shape[-1])
    # Gated units combine two columns into one.
    outputs = columns // 2 if gate is not None else columns
    kernel = _Kernel(
        rows=len(rows), inputs=inputs, outputs=outputs, dtype=jnp.dtype(dtype).name, gate=gate,
        epsilon=None if norm is None else norm.epsilon, offset=0.0 if norm is None else norm.offset,
        adds=residual is not None,
    )  # fmt: skip
    others = [] if norm is None else [norm.scale]
    others += [] if residual is None else [residual.reshape(-1, outputs)]
    return kernel.call(rows, matrix, others).reshape(*x.shape[:-1], outputs)


@dataclass(frozen=True)
class _Kernel:
    """The sizes of one kernel, and its call. The kernel's body is `_run`, once for each block of columns.

    Attributes:
        rows, inputs, outputs: `R`, `E` and `F`.
        dtype, gate: as in `multiply`.
        epsilon, offset: those of the norm; without a norm, `epsilon` is `None`.
        adds: whether a residual is added.
    """

    rows: int
    inputs: int
    outputs: int
    dtype: str
    gate: Callable[[Array], Array] | None
    epsilon: float | None
    offset: float
    adds: bool

    @property
    def padded(self) -> int:
        """Number of rows, rounded up to a size that Triton can multiply."""
        return max(_TILE, pl.next_power_of_2(self.rows))

    @property
    def chunk(self) -> int:
        """Number of inputs per step."""
        return math.gcd(CHUNK, self.inputs)

    @property
    def width(self) -> int:
        """Number of result columns per program."""
        return next((w for w in (64, 32) if self.outputs // w >= PROGRAMS), _TILE)

    def call(self, rows: Array, matrix: Array, others: list[Array]) -> Array:
        """Returns the result `[R, F]`; `others` are the norm's scale and the residual, if there are any."""
        # Without a residual or a gate, the result stays float32, and the caller rounds it, as after XLA's product.
        wide = self.gate is None and not self.adds
        result: Array = pl.pallas_call(
            partial(_run, self),
            grid=(pl.cdiv(self.outputs, self.width),),
            out_shape=jax.ShapeDtypeStruct((self.rows, self.outputs), jnp.float32 if wide else self.dtype),
            compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=3),
            interpret=bool(platforms.interpreter()),
            name="product",
        )(rows, matrix, *others)
        return result


def _run(kernel: _Kernel, x: Any, matrix: Any, *refs: Any) -> None:
    """Runs the kernel for one block of columns; `refs` are `others` of `_Kernel.call`, and the result."""
    # A name whose array this kernel does not have is an alias of another array, and is not used below.
    scale, residual, result = refs[0], refs[-2:][0], refs[-1]
    row, column = jnp.arange(kernel.padded), pl.program_id(0) * kernel.width + jnp.arange(kernel.width)
    real, inside = (row < kernel.rows)[:, None], (column < kernel.outputs)[None]
    # Padding of rows and columns is loaded as zeros, and not stored.
    halves = (0,) if kernel.gate is None else (0, kernel.outputs)

    def load(step: Any) -> Any:
        index = step * kernel.chunk + jnp.arange(kernel.chunk)
        return index, pltriton.load(x.at[row[:, None], index[None]], mask=real, other=0)

    # The norm is computed in float32, as `RMSNorm` does.
    def square(step: Any, total: Any) -> Any:
        part = load(step)[1].astype(jnp.float32)
        return total + (part * part).sum(-1)

    # The rows are read twice, because the norm needs all their entries before the first product.
    steps, factor = kernel.inputs // kernel.chunk, None
    if kernel.epsilon is not None:
        total = jax.lax.fori_loop(0, steps, square, jnp.zeros((kernel.padded,), jnp.float32))
        factor = jax.lax.rsqrt(total / kernel.inputs + kernel.epsilon)[:, None]

    def add(step: Any, sums: Any) -> Any:
        index, part = load(step)
        if factor is not None:
            part = part.astype(jnp.float32) * factor * (scale[index].astype(jnp.float32) + kernel.offset)[None]
        # The two columns of a gated unit are half a matrix apart.
        blocks = [matrix.at[index[:, None], column[None] + half] for half in halves]
        parts = [pltriton.load(ref, mask=inside, other=0).astype(kernel.dtype) for ref in blocks]
        return tuple(s + _dot(part.astype(kernel.dtype), m) for s, m in zip(sums, parts, strict=True))

    zeros = jnp.zeros((kernel.padded, kernel.width), jnp.float32)
    sums = jax.lax.fori_loop(0, steps, add, (zeros,) * len(halves))
    y = sums[0] if kernel.gate is None else kernel.gate(sums[0]) * sums[1]
    if kernel.adds:
        y += pltriton.load(residual.at[row[:, None], column[None]], mask=real & inside, other=0).astype(jnp.float32)
    pltriton.store(result.at[row[:, None], column[None]], y.astype(result.dtype), mask=real & inside)


def _dot(x: Any, y: Any) -> Any:
    # Without the precision, Triton would round float32 operands to TF32.
    precision = jax.lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)
