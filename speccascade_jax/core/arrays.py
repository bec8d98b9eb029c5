"""Small operations on arrays of rows that many rooms need."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.types import Array


def write_slots(buffer: Array, update: Array, start: Array, axis: int) -> Array:
    """Write `update` into `buffer` at slot `start[b]` of every row `b`.

    Args:
        buffer: `[B * n, ...]`, `n` neighbours sharing a start (heads); update: the same shape except along `axis`
            (counted with the batch axis).
        start: int32 `[B]`. The caller guarantees room: `dynamic_update_slice` clamps silently.
    """
    rows, update = start.shape[0], update.astype(buffer.dtype)
    if rows == 1:
        return jax.lax.dynamic_update_slice_in_dim(buffer, update, start[0], axis)

    def by_row(x: Array) -> Array:
        return x.reshape(rows, -1, *x.shape[1:])

    write = jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=axis))
    return write(by_row(buffer), by_row(update), start).reshape(buffer.shape)


def right_pad(rows: Sequence[Sequence[int]] | np.ndarray, width: int) -> np.ndarray:
    """int32 `[len(rows), width]`, each row followed by zeros."""
    out = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def bucket(length: int) -> int:
    """The width that a prompt of `length` tokens is padded to: 8, 12, 16, 24, 32, 48, 64, … (one compilation each).

    Powers of two and the middles between them: beyond 8, padding is less than half of the prompt.
    """
    power = max(8, 1 << max(0, length - 1).bit_length())
    middle = 3 * power // 4
    return middle if power > 8 and length <= middle else power


def is_stop(tokens: Array, stop_ids: tuple[int, ...]) -> Array:
    """bool, the shape of `tokens`: whether each is one of the stop ids."""
    hit = jnp.zeros(tokens.shape, bool)
    for stop in stop_ids:
        hit |= tokens == stop
    return hit


def full_precision(dtype: str) -> AbstractContextManager[None]:
    """Where products of `dtype` are traced: those of float32 round as float32 does, on every device.

    What JAX does by default is less on GPUs (TF32) and TPUs (passes of bfloat16): greedy tokens would be the device's,
    and a block's laws not a step's. A precision that the caller has set, "default" too, stays; 16 bits are left alone.
    """
    chosen = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return jax.default_matmul_precision("highest") if dtype == "float32" and chosen is None else nullcontext()
