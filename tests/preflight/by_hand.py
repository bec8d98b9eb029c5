"""Small programs whose bytes, iterations and cycles follow from arithmetic on their shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

BF16, F32, S32 = jnp.bfloat16, jnp.float32, jnp.int32
D = 12_288
"""Width of a square matrix of 302 MB, which no chip's VMEM holds."""
WEIGHTS = 2 * D * D
LAYERS, WIDTH = 24, 4096
HEADS = 64 * 32
BLOCK = 512 * 1024
"""Elements of a block of the kernel."""
Shape = tuple[tuple[int, ...], Any]


@dataclass(frozen=True)
class ByHand:
    """A program and its costs, computed by hand.

    Attributes:
        function: the program; shapes: the shapes of its arguments.
        hbm: bytes that are moved between HBM and the core.
        donated: numbers of the arguments that the caller donates.
        loops, branches: numbers that the compiled program does not contain, as in `execution.Assumptions`.
        ops: number of instructions that the core starts; 0 if it depends on XLA's choices.
    """

    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    hbm: float
    donated: tuple[int, ...] = ()
    loops: Mapping[str, float] = field(default_factory=dict)
    branches: Mapping[str, int] = field(default_factory=dict)
    ops: int = 0


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def until(x: jax.Array, w: jax.Array, n: jax.Array) -> jax.Array:
    return lax.while_loop(lambda state: state[0] < n, lambda state: (state[0] + 1, layer(state[1], w)), (0, x))[1]


def nested(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, x: turns(4, x, w) * 2, x)


def turns(count: int, x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.fori_loop(0, count, lambda _, x: layer(x, w), x)


def chosen(choice: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.cond(choice, lambda x, w: x @ w, lambda x, w: x * 2, x, w)


def chosen_in_loop(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 6, lambda _, x: lax.cond(x[0, 0] > 0, lambda x: layer(x, w), lambda x: x + 1, x), x)


def layers(x: jax.Array, ws: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]


def positions(cache: jax.Array, new: jax.Array, begin: jax.Array) -> tuple[jax.Array, jax.Array]:
    def step(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        cache, new = state
        return lax.dynamic_update_slice(cache, new, (0, 0, begin + i, 0)), new * 2

    return lax.fori_loop(0, 5, step, (cache, new))


def kernel(blocks: int) -> Callable[[jax.Array], jax.Array]:
    spec = pl.BlockSpec((512, 1024), lambda i: (i, 0))

    def body(x: Any, out: Any) -> None:
        out[...] = jnp.exp(x[...]) + x[...]

    def program(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, grid=(blocks,), in_specs=[spec], out_specs=spec, out_shape=shape)(x)

    return program


ROWS: Shape = ((128, D), BF16)
FEW: Shape = ((8, D), BF16)
"""Rows whose bytes are too few to matter, wherever XLA puts them."""
MATRIX: Shape = ((D, D), BF16)
TABLE: Shape = ((250_000, 1024), F32)
X = 2 * 128 * D
PROGRAMS = {
    # reads the matrix and the rows, writes the result
    "product": ByHand(lambda x, w: x @ w, (ROWS, MATRIX), X + WEIGHTS + X, ops=1),
    "turns": ByHand(partial(turns, 7), (FEW, MATRIX), 7 * WEIGHTS),
    "until": ByHand(until, (FEW, MATRIX, ((), S32)), 5 * WEIGHTS, loops={"/while": 5}),
    "nested": ByHand(nested, (FEW, MATRIX), 3 * 4 * WEIGHTS),
    "branch_1": ByHand(chosen, (((), jnp.bool_), ROWS, MATRIX), X + WEIGHTS + X, branches={"/cond:2": 1}),
    "branch_0": ByHand(chosen, (((), jnp.bool_), ROWS, MATRIX), X + X, branches={"/cond:2": 0}),
    "branch_in_loop": ByHand(chosen_in_loop, (FEW, MATRIX), 6 * WEIGHTS, branches={"/cond:2": 1}),
    # reads the matrix of every layer once
    "layers": ByHand(layers, (((128, WIDTH), BF16), ((LAYERS, WIDTH, WIDTH), BF16)), LAYERS * 2 * WIDTH**2),
    # the slice is read from one buffer and written into the other
    "update": ByHand(
        lambda buffer, new, i: lax.dynamic_update_slice(buffer, new, (i, 0)),
        (((4096, 4096), F32), ((32, 4096), F32), ((), S32)), 2 * 4 * 32 * 4096, donated=(0,), ops=1,
    ),
    # one row in a tile of 8: the tile of every head is read and written, five times
    "positions": ByHand(
        positions, (((64, 32, 2048, 128), BF16), ((64, 32, 1, 128), BF16), ((), S32)), 5 * 2 * HEADS * 2 * 8 * 128,
        donated=(0,),
    ),
    "rows": ByHand(lambda table, i: table[i], (TABLE, ((256,), S32)), 2 * 4 * 256 * 1024),
    # the rows of the table are read, added to, and written
    "added_rows": ByHand(
        lambda table, i, new: table.at[i].add(new), (TABLE, ((256,), S32), ((256, 1024), F32)), 3 * 4 * 256 * 1024,
        donated=(0,),
    ),
    "elementwise": ByHand(lambda x: jnp.exp(x) * 2 + 1, (((25_600, 1024), F32),), 2 * 4 * 25_600 * 1024, ops=1),
    "transposed": ByHand(lambda x: x.T + 0, (((5120, 10_240), BF16),), 2 * 2 * 5120 * 10_240, ops=1),
    "joined": ByHand(
        lambda x, y: jnp.concatenate([x, y], 1), (((5120, 10_240), BF16),) * 2, 2 * 2 * 2 * 5120 * 10_240, ops=1
    ),
    "two_results": ByHand(lambda x: (x.sum(0), x.max(0)), (((16_384, 4096), F32),), 4 * 16_384 * 4096, ops=1),
    # in memory, a predicate takes one byte
    "masked": ByHand(
        lambda mask, x: jnp.where(mask, x, 0), (((4096, 16_384), jnp.bool_), ((4096, 16_384), F32)),
        4096 * 16_384 * (1 + 4 + 4), ops=1,
    ),
    # XLA lays the long axis along the 128 lanes of a tile, and the short one along its 8 rows
    "padded": ByHand(lambda x: x * 2, (((200_001, 100), F32),), 2 * 4 * 200_064 * 104, ops=1),
    "one_of_50": ByHand(
        lambda x, ws, i: x @ ws[i], (((64, 16_384), BF16), ((50, 16_384, 2048), BF16), ((), S32)),
        2 * (64 * 16_384 + 16_384 * 2048 + 64 * 2048), ops=1,
    ),
    "kernel_16": ByHand(kernel(16), (((512 * 16, 1024), F32),), 2 * 4 * 16 * BLOCK, ops=1),
    "kernel_64": ByHand(kernel(64), (((512 * 64, 1024), F32),), 2 * 4 * 64 * BLOCK, ops=1),
}  # fmt: skip
"""The programs by name."""

MODELS: dict[str, dict[str, Any]] = {
    "t5_small": {"target": "t5_1_1_small", "part": "target", "batch": 8},
    "t5_large": {"target": "t5_1_1_large", "part": "target"},
    "t5_small_base": {"target": "t5_1_1_base", "draft": "t5_1_1_small", "rule": "token_v3", "alpha": 0.3},
    "gemma_4_layers": {"target": "gemma2_2b_4_layers", "part": "target", "batch": 8, "prompt_length": 128},
}
"""Models of sizes that were not used to write the readers, as arguments of `preflight.compiled`."""
