"""Small array functions that several subpackages use: cache slots, padding, prompt lengths, stop ids, precision."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.types import Array


def write_slots(buffer: Array, update: Array, start: Array, axis: int) -> Array:
    """Writes `update` into `buffer` at slot `start[b]` of every row `b`.

    Args:
        buffer: `[B * n, ...]` for `B` rows; the `n` entries of a row (its attention heads) share one start.
        update: the same shape except along `axis`.
        start: int32 `[B]`, the first slot that is written in each row. From there the update must fit into the buffer,
            because `dynamic_update_slice` would silently write an update that is too long into other slots.
        axis: the axis of the slots in `buffer`.
    """
    rows, update = start.shape[0], update.astype(buffer.dtype)
    # A single row is written without vmap, because vmap would turn the update into a slower scatter.
    if rows == 1:
        return jax.lax.dynamic_update_slice_in_dim(buffer, update, start[0], axis)

    def by_row(x: Array) -> Array:
        # `[B * n, ...]` becomes `[B, n, ...]`, so that vmap pairs each row's start with all `n` of its entries.
        return x.reshape(rows, -1, *x.shape[1:])

    write = jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=axis))
    return write(by_row(buffer), by_row(update), start).reshape(buffer.shape)


def write_few_slots(buffer: Array, update: Array, start: Array) -> Array:
    """Does the same as `write_slots` for `buffer` `[B, S]` and a short `update` `[B, T]`, without a scatter.

    It selects new or old entries in one pass over the buffer. This is faster on a TPU, which writes the rows of a
    scatter one after the other, with eight operations for each row.
    """
    offset = jnp.arange(buffer.shape[1])[None] - start[:, None]
    for number in range(update.shape[1]):
        buffer = jnp.where(offset == number, update[:, number, None].astype(buffer.dtype), buffer)
    return buffer


def right_pad(rows: Sequence[Sequence[int]] | np.ndarray, width: int) -> np.ndarray:
    """Returns int32 `[len(rows), width]`: each row, followed by zeros."""
    out = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def bucket(length: int) -> int:
    """Returns the width that a prompt of `length` tokens is padded to: 8, 12, 16, 24, 32, 48, 64 and so on.

    Each width needs one compilation. The widths are the powers of two and the numbers halfway between them, so a prompt
    of more than 8 tokens gets fewer padding tokens than half its length.
    """
    # The smallest power of two that holds the prompt, at least 8.
    power = max(8, 1 << max(0, length - 1).bit_length())
    middle = 3 * power // 4
    return middle if power > 8 and length <= middle else power


def is_stop(tokens: Array, stop_ids: tuple[int, ...]) -> Array:
    """Returns whether each token is one of the stop ids, as a bool array of the shape of `tokens`."""
    hit = jnp.zeros(tokens.shape, bool)
    # There are few stop ids and they are static, so the comparisons compile to one fused pass without a lookup table.
    for stop in stop_ids:
        hit |= tokens == stop
    return hit


def full_precision(dtype: str) -> AbstractContextManager[None]:
    """Returns a context in which matrix products of float32 arrays have full precision on every device.

    JAX's default is less precise on GPUs (TF32) and TPUs (passes of bfloat16). Greedy tokens would then depend on the
    device, and scoring a block would give other distributions than single steps. The context changes nothing if the
    caller has set a precision, even "default", or if `dtype` is not float32.
    """
    chosen = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return jax.default_matmul_precision("highest") if dtype == "float32" and chosen is None else nullcontext()
