"""Chains of matrix products for a few rows: one TPU kernel, which reads every matrix once, in blocks of columns.

XLA compiles a norm, the product after it, gated units and a residual sum to some six operations, among them changes of
layout. The kernel computes a chain of them: the output of attention and its residual sum, then a norm, the gated units
of a feed-forward layer, its output and the next residual sum. The matrices stay in HBM, as they are stored, and their
blocks are copied to VMEM while earlier blocks are multiplied. The kernel rounds where the layers without it round.

On GPUs, `triton_products` has a kernel for each product. `chains.chain` chooses between the two, and divides a chain on
a mesh. The *state* of a chain is the residual stream: norms read it, and results are added to it.

Shape letters: `B` rows of `T` tokens, `R = B T` in whole registers, `K` inputs and `N` columns of a matrix, `E` the
width of the state, and `L` layers of a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from speccascade_jax.core.types import Array
from speccascade_jax.models.decode_attention import LANES, dot
from speccascade_jax.models.stacks import InStack
from speccascade_jax.models.triton_products import Norm
from speccascade_jax.runtime import platforms

MOST_ROWS = 64
"""Largest number of rows of a chain. With more rows, XLA's products are bound by compute, not by memory."""
NEAR = 24 * 2**20
"""Largest total size of a chain's matrices, in bytes, for which XLA copies them to VMEM before the chain runs."""
BLOCK = 2**21
"""Largest size of a block of columns, in bytes; a block has at least `LANES` columns, even if they are larger."""
DEPTH = 3
"""Number of buffers of a matrix: one for the block that is multiplied, the others for blocks that are being copied."""
_SPARE = 4 * 2**20
"""Bytes of VMEM that are kept free for operands, results and the compiler's intermediate values."""


class Rotation(NamedTuple):
    """Rotary positions of a result whose columns are heads side by side (`decoder_stack.rotate_columns`).

    Attributes:
        cosine, sine: float32 `[B or 1, T, N]`.
        size: width of a head.
        scale: factor of the queries.
        queries: number of columns of the queries, which come first.
    """

    cosine: Array
    sine: Array
    size: int
    scale: float
    queries: int


class Link(NamedTuple):
    """One product of a chain.

    Attributes:
        matrix: `[K, N]`, or its place in a stack; `None`: the result is the input.
        norm: the product's input is this norm of the state; `None`: it is the result of the link before.
        gate: function of gated units: the result is `gate(first half of the columns) · second half`.
        rotation: rotary positions that are applied to the result.
        adds: whether the product is added to the state; the result is then the sum.
        post: norm that is applied to the product before it is added.
        summed: whether the rows of the matrix are split over a mesh, whose devices each have a part of the sum.
    """

    matrix: Any
    norm: Norm | None = None
    gate: Callable[[Array], Array] | None = None
    rotation: Rotation | None = None
    adds: bool = False
    post: Norm | None = None
    summed: bool = False


def fits(rows: int, sizes: tuple[int, ...], dtype: Any) -> bool:
    """Returns whether the kernel can compute chains of `rows` rows with matrices of `sizes` input features."""
    whole = all(size % LANES == 0 for size in sizes)
    # VMEM must hold the smallest blocks of attention's output matrix, of both halves of the gated units' matrix, and of
    # the feed-forward's output matrix: four blocks of `LANES` columns.
    smallest = 4 * DEPTH * max(sizes) * LANES * jnp.dtype(dtype).itemsize
    whole = whole and smallest + _SPARE <= platforms.vmem_bytes()
    return platforms.uses_kernels() and rows <= MOST_ROWS and whole and jnp.dtype(dtype).name in ("bfloat16", "float32")


def multiply(
    x: Array, links: Sequence[Link], state: Array | None, dtype: Any, partial_sum: bool = False
) -> tuple[Array, Array]:
    """Computes a chain; returns the state after it, `[B, T, E]`, and the result of its last link, `[B, T, N]`.

    Args:
        x: the input of the first link, `[B, T, K]`.
        links: the products. A result that is neither gated, rotated nor added is float32, and the caller rounds it.
        state: the residual stream `[B, T, E]`, to which links add; `None`: it is `x`.
        dtype: dtype of the activations and the matrices.
        partial_sum: whether the result is a device's part of a sum, in `dtype`.
    """
    kernel = _Kernel(
        rows=x.shape[0], tokens=x.shape[1], width=(x if state is None else state).shape[-1],
        dtype=jnp.dtype(dtype).name, separate=state is not None, most=min(BLOCK, platforms.vmem_bytes() // 16),
        wide=not partial_sum, near=_are_near(links), steps=tuple(_Step.of(link, x.shape[-1]) for link in links),
    )  # fmt: skip
    layer = _layer(links)
    near, far = [x] if state is None else [x, state], []
    for link in links:
        near += [] if link.rotation is None else [link.rotation.cosine, link.rotation.sine]
        far += [norm.scale for norm in (link.norm, link.post) if norm is not None]
    results = kernel.call(jnp.asarray(layer, jnp.int32)[None], near, list(map(_tiles, far)), _matrices(links))
    # A chain that adds nothing has no output for the state, which did not change.
    before = x if state is None else state
    return (results[0] if kernel.adds else before), results[-1]


def _layer(links: Sequence[Link]) -> Any:
    """Returns the index of the layer that a chain reads from stacks of layers; 0 if it reads none."""
    # A link without a matrix may have a norm in a stack.
    parts = jax.tree.leaves(links, is_leaf=lambda part: isinstance(part, InStack))
    return next((part.layer for part in parts if isinstance(part, InStack)), 0)


def _matrices(links: Sequence[Link]) -> list[Array]:
    """Returns the matrices of a chain, `[K, N]` or `[L, K, N]`."""
    parts = [link.matrix for link in links if link.matrix is not None]
    return [part.stack if isinstance(part, InStack) else part for part in parts]


def _are_near(links: Sequence[Link]) -> bool:
    """Returns whether XLA should copy a chain's matrices to VMEM: they must be small, and not parts of stacks."""
    # XLA would copy a layer's part of a stack twice.
    matrices = _matrices(links)
    size = sum(matrix.size * matrix.dtype.itemsize for matrix in matrices)
    return all(matrix.ndim == 2 for matrix in matrices) and size <= min(NEAR, platforms.vmem_bytes() // 4)


def _tiles(scale: Any) -> Array:
    """Returns a norm's scale as tiles `[E / 128, 128]`; the scales in a stack of layers are tiles already."""
    # In this shape XLA copies no scale into another layout.
    tiles: Array = scale.stack if isinstance(scale, InStack) else scale.reshape(-1, LANES)
    return tiles


class _Step(NamedTuple):
    """Sizes of a link, and what the kernel computes around its product.

    A norm is described by its epsilon and its offset, and a rotation by the last three fields of `Rotation`.
    """

    inputs: int
    columns: int
    stacked: bool
    norm: tuple[float, float] | None
    gate: Callable[[Array], Array] | None
    rotation: tuple[int, float, int] | None
    adds: bool
    post: tuple[float, float] | None

    @classmethod
    def of(cls, link: Link, width: int) -> _Step:
        """Returns the sizes of a link; a link without a matrix has `width` inputs."""
        stacked = isinstance(link.matrix, InStack)
        inputs, columns = (width, 0) if link.matrix is None else _matrices([link])[0].shape[-2:]
        norm, post = (None if norm is None else (norm.epsilon, norm.offset) for norm in (link.norm, link.post))
        rotation = None if link.rotation is None else link.rotation[2:]
        return cls(inputs, columns, stacked, norm, link.gate, rotation, link.adds, post)

    @property
    def halves(self) -> int:
        """Parts of the matrix in a block: the two columns of a gated unit are half a matrix apart."""
        return 1 if self.gate is None else 2

    @property
    def outputs(self) -> int:
        """Columns of the result."""
        return self.columns // self.halves if self.columns else self.inputs

    def block(self, most: int) -> int:
        """Returns the number of result columns in a block of at most `most` numbers; it is at least `LANES`."""
        # All blocks have the same width, so that one buffer and one loop serve them.
        tiles = self.outputs // LANES
        count = max(1, most // (self.halves * self.inputs * LANES))
        return LANES * max(size for size in range(1, tiles + 1) if tiles % size == 0 and size <= count)


@dataclass(frozen=True)
class _Kernel:
    """One kernel: its sizes and the call.

    Attributes:
        rows, tokens: `B` and `T`.
        width: `E`.
        dtype: as in `multiply`.
        separate: whether the first input is not the state.
        most: most bytes of a block.
        wide: whether a result that is neither gated, rotated nor added is float32.
        near: whether the matrices are in VMEM; otherwise the kernel copies their blocks.
        steps: the links.
    """

    rows: int
    tokens: int
    width: int
    dtype: str
    separate: bool
    most: int
    wide: bool
    near: bool
    steps: tuple[_Step, ...]

    @property
    def adds(self) -> bool:
        """Whether the state changes."""
        return any(step.adds for step in self.steps)

    @property
    def products(self) -> list[_Step]:
        """The links with a matrix."""
        return [step for step in self.steps if step.columns]

    @property
    def padded(self) -> int:
        """Rows of the activations: `R`."""
        return -(-self.rows * self.tokens // 8) * 8

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return jnp.dtype(self.dtype).itemsize

    def block(self, step: _Step) -> int:
        """Returns the number of result columns in a block of a link's matrix."""
        return step.block(self.most // self.itemsize)

    def blocks(self, step: _Step) -> int:
        """Returns the number of blocks of a matrix."""
        return step.outputs // self.block(step)

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The outputs: the state, if it changes, and the last result, if it is not the state."""
        shape, last = (self.rows, self.tokens), self.steps[-1]
        shapes = [jax.ShapeDtypeStruct((*shape, self.width), jnp.dtype(self.dtype))] if self.adds else []
        if not last.adds:
            wide = self.wide and last.gate is None and last.rotation is None
            kind: Any = jnp.float32 if wide else jnp.dtype(self.dtype)
            shapes.append(jax.ShapeDtypeStruct((*shape, last.outputs), kind))
        return shapes

    def call(self, layer: Array, near: list[Array], scales: list[Array], matrices: list[Array]) -> list[Array]:
        """Runs the kernel; returns the outputs that `shapes` describes.

        Args:
            layer: int32 `[1]`, the index of the layer in stacks.
            near: the input, the state if it is another array, and rotations.
            scales: tiles of the norms' scales, in the order of their use.
            matrices: those of the links.
        """
        whole, anywhere = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
        # XLA chooses when it copies near matrices; far ones must stay where the kernel reads parts of them.
        matrices = matrices if self.near else list(map(in_hbm, matrices))
        results: list[Array] = pl.pallas_call(
            partial(_run, self),
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.SMEM),
                *[whole] * (len(near) + len(scales)),
                *[whole if self.near else anywhere] * len(matrices),
            ],
            out_specs=[whole] * len(self.shapes),
            scratch_shapes=self._scratch(),
            out_shape=self.shapes,
            cost_estimate=self._costs(),
            # With a lower limit, XLA would use the rest of VMEM for a copy of the whole table of embeddings, only to
            # look up one row.
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=platforms.vmem_bytes()),
            interpret=platforms.interpreter(),
            name="product_chain",
        )(layer, *near, *scales, *matrices)
        return results

    @property
    def _buffers(self) -> list[tuple[int, int, int]]:
        """Shapes of the buffers into which the kernel copies each matrix, block by block."""
        steps = [] if self.near else self.products
        return [(min(DEPTH, self.blocks(step)), step.inputs, step.halves * self.block(step)) for step in steps]

    @property
    def _rows(self) -> list[tuple[int, int]]:
        """Shapes of the state and of the results."""
        # A rotation needs twice the columns: it puts the other coordinate of each pair next to the results.
        columns = [max(step.inputs, step.outputs * (1 if step.rotation is None else 2)) for step in self.steps]
        return [(self.padded, self.width), (self.padded, max(columns))]

    def _scratch(self) -> list[Any]:
        dtype: Any = jnp.dtype(self.dtype)
        inputs = max((step.inputs for step in self.products), default=LANES)
        return [
            *(pltpu.VMEM(size, jnp.float32) for size in self._rows),
            pltpu.VMEM((self.padded, inputs), dtype),
            *(pltpu.VMEM(size, dtype) for size in self._buffers),
            *(pltpu.SemaphoreType.DMA((count, 2)) for count, *_ in self._buffers),
        ]

    def _costs(self) -> pl.CostEstimate:
        """Returns the costs of a call: every matrix is read once. XLA keeps activations of a few rows in VMEM."""
        weights, rows = sum(step.inputs * step.columns for step in self.steps), self.rows * self.tokens
        units = sum(step.outputs for step in self.steps if step.gate is not None)
        moved = self.itemsize * weights
        return pl.CostEstimate(flops=2 * rows * weights, transcendentals=rows * units, bytes_accessed=moved)


def in_hbm(x: Array) -> Array:
    """Keeps an array in HBM, from which the kernel copies parts; XLA might move the whole array to VMEM before."""
    placed: Array = x if platforms.interpreter() else pltpu.with_memory_space_constraint(x, pltpu.HBM)
    return placed


class _Refs(NamedTuple):
    """The kernel's arrays: operands, outputs, and scratch.

    `state` and `results` are float32, `operand` is the rounded input of a product, and `near` holds blocks of a matrix.
    """

    layer: Any
    inputs: list[Any]
    rotations: list[Any]
    scales: list[Any]
    matrices: list[Any]
    outputs: list[Any]
    state: Any
    results: Any
    operand: Any
    near: list[Any]
    copies: list[Any]

    @classmethod
    def of(cls, kernel: _Kernel, *refs: Any) -> _Refs:
        """Returns the arrays by name."""
        rest, count = iter(refs), len(kernel.products)
        norms = sum(norm is not None for step in kernel.steps for norm in (step.norm, step.post))
        turned = 2 * sum(step.rotation is not None for step in kernel.steps)
        sizes = (1, 1 + kernel.separate, turned, norms, count, len(kernel.shapes))
        layer, *lists = (list(islice(rest, size)) for size in sizes)
        scratch: list[Any] = [*islice(rest, 3), list(islice(rest, 0 if kernel.near else count)), list(rest)]
        return cls(layer[0], *lists, *scratch)


def _run(kernel: _Kernel, *refs: Any) -> None:
    """Runs the kernel's body, which computes the chain."""
    r = _Refs.of(kernel, *refs)
    # The copies of all matrices' first blocks start at once, in the order in which the blocks are used.
    for number, step in enumerate([] if kernel.near else kernel.products):
        for block in range(min(DEPTH - 1, kernel.blocks(step))):
            _start(kernel, r, number, block)
    if any(step.adds or step.norm is not None for step in kernel.steps):
        _load(kernel, r.inputs[-1], r.state)
    # The input of a first link with a norm is the state itself.
    if kernel.steps[0].norm is None:
        _load(kernel, r.inputs[0], r.results)
    scales, rotations, numbers = iter(r.scales), iter(r.rotations), iter(range(len(kernel.products)))
    for step in kernel.steps:
        if step.columns:
            source = r.results if step.norm is None else r.state
            x = source[:, 0 : step.inputs]
            x = x if step.norm is None else _normed(x, next(scales), r.layer, *step.norm)
            r.operand[:, 0 : step.inputs] = x.astype(kernel.dtype)
            _multiply(kernel, r, next(numbers), step)
        if step.rotation is not None:
            _rotate(kernel, r, step, next(rotations), next(rotations))
        if step.adds:
            # the product is rounded before the sum, as a layer's result is
            y = _rounded(kernel, r.results[:, 0 : kernel.width])
            y = y if step.post is None else _rounded(kernel, _normed(y, next(scales), r.layer, *step.post))
            r.state[...] = _rounded(kernel, r.state[...] + y)
    _store(kernel, r)


def _load(kernel: _Kernel, source: Any, target: Any) -> None:
    """Copies rows of tokens into whole registers."""
    width, count = source.shape[-1], kernel.rows * kernel.tokens
    # Rows that only fill registers are multiplied too, and must not be NaN.
    if count < kernel.padded:
        target[:, 0:width] = jnp.zeros((kernel.padded, width), jnp.float32)
    for row in range(kernel.rows):
        target[_tokens(kernel, row), 0:width] = source[row].astype(jnp.float32)


def _tokens(kernel: _Kernel, row: int) -> slice:
    return slice(row * kernel.tokens, (row + 1) * kernel.tokens)


def _store(kernel: _Kernel, r: _Refs) -> None:
    """Copies the state and the last result to the outputs."""
    # The rows that only fill registers are left out.
    sources = [r.state] * kernel.adds + [r.results] * (not kernel.steps[-1].adds)
    for source, target in zip(sources, r.outputs, strict=True):
        for row in range(kernel.rows):
            target[row] = source[_tokens(kernel, row), 0 : target.shape[-1]].astype(target.dtype)


def _normed(x: Array, scale: Any, layer: Any, epsilon: float, offset: float) -> Array:
    """Returns the root mean square norm of float32 rows, as `RMSNorm` computes it; the scale is in tiles."""
    scale = scale[layer[0]] if len(scale.shape) == 3 else scale[...]
    factor = jnp.concatenate([scale[tile : tile + 1] for tile in range(scale.shape[0])], -1).astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + epsilon) * (factor + offset)


def _copies(kernel: _Kernel, r: _Refs, number: int, block: Any) -> list[Any]:
    """Returns the copies of a block of columns to VMEM: one, or one for each half of gated units."""
    step, near, count = kernel.products[number], r.near[number], r.near[number].shape[0]
    width, slot = kernel.block(step), jax.lax.rem(block, count)
    matrix = r.matrices[number].at[r.layer[0]] if step.stacked else r.matrices[number]
    # A buffer holds the columns of the first half, and then those of the second.
    copies = []
    for half in range(step.halves):
        columns = pl.ds(pl.multiple_of(half * step.outputs + block * width, LANES), width)
        target = near.at[slot, :, half * width : (half + 1) * width]
        copies.append(pltpu.make_async_copy(matrix.at[:, columns], target, r.copies[number].at[slot, half]))
    return copies


def _start(kernel: _Kernel, r: _Refs, number: int, block: Any) -> None:
    for copy in _copies(kernel, r, number, jnp.asarray(block, jnp.int32)):
        copy.start()


def _multiply(kernel: _Kernel, r: _Refs, number: int, step: _Step) -> None:
    """Multiplies the operand by a matrix, and puts the result into `results`."""
    width = kernel.block(step)

    # The loop is not unrolled, because the kernel's code would then grow with the number of blocks.
    def multiply(block: Any, _: None) -> None:
        parts = (_near_parts if kernel.near else _far_parts)(kernel, r, number, block)
        y, *second = (dot(r.operand[:, 0 : step.inputs], part) for part in parts)
        if step.gate is not None:
            # XLA's path rounds the product of both halves, and then each factor.
            y = _rounded(kernel, step.gate(_rounded(kernel, y))) * _rounded(kernel, second[0])
        r.results[:, pl.ds(pl.multiple_of(block * width, LANES), width)] = y

    jax.lax.fori_loop(0, kernel.blocks(step), multiply, None)


def _near_parts(kernel: _Kernel, r: _Refs, number: int, block: Any) -> list[Any]:
    """Returns a block of columns of a matrix in VMEM, or one of each half."""
    step, width = kernel.products[number], kernel.block(kernel.products[number])
    first = [pl.multiple_of(half * step.outputs + block * width, LANES) for half in range(step.halves)]
    return [r.matrices[number][:, pl.ds(column, width)] for column in first]


def _far_parts(kernel: _Kernel, r: _Refs, number: int, block: Any) -> list[Any]:
    """Returns a block of columns of a matrix in HBM, after it has arrived, and starts the copy of a later block."""
    step, near = kernel.products[number], r.near[number]
    for copy in _copies(kernel, r, number, block):
        copy.wait()
    # The buffer of the block before is free now.
    pl.when(block + DEPTH - 1 < kernel.blocks(step))(lambda: _start(kernel, r, number, block + DEPTH - 1))
    slot, width = jax.lax.rem(block, near.shape[0]), kernel.block(step)
    return [near[slot, :, half * width : (half + 1) * width] for half in range(step.halves)]


def _rotate(kernel: _Kernel, r: _Refs, step: _Step, cosine: Any, sine: Any) -> None:
    """Scales the queries among the results, and rotates all heads, as `decoder_stack.rotate_columns` does."""
    assert step.rotation is not None
    (size, scale, queries), half = step.rotation, step.rotation[0] // 2
    column = jax.lax.broadcasted_iota(jnp.int32, (1, step.columns), 1)
    x = _rounded(kernel, r.results[:, 0 : step.columns])
    x = _rounded(kernel, x * jnp.where(column < queries, float(np.asarray(scale, jnp.dtype(kernel.dtype))), 1.0))
    ahead, behind = (pltpu.roll(x, shift, 1) for shift in (step.columns - half, half))
    # The other coordinate of a pair is half a head away, in the direction that stays inside the head.
    columns, others = slice(0, step.columns), slice(step.columns, 2 * step.columns)
    r.results[:, columns] = x
    r.results[:, others] = jnp.where(jax.lax.rem(column, size) < half, ahead, behind)
    for row in range(kernel.rows):
        tokens, angle = _tokens(kernel, row), min(row, cosine.shape[0] - 1)
        turned = r.results[tokens, others] * sine[angle]
        r.results[tokens, columns] = r.results[tokens, columns] * cosine[angle] + turned


def _rounded(kernel: _Kernel, x: Array) -> Array:
    return x.astype(kernel.dtype).astype(jnp.float32)
