"""Caches of keys and values: their layouts, writing into them, and what may be seen of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core.arrays import write_slots
from speccascade_jax.core.types import Array
from speccascade_jax.models.sharding import HEADS, constrain

Layers = tuple[Array, ...]
Held = TypeVar("Held", bound=Any)
"""A family's cache: a dataclass with a `length`."""


@flax.struct.dataclass
class KVCache:
    """Attention cache of a decoder, functional, with one length per row.

    Attributes:
        keys: per layer `[B * heads, head_dim, S]`; values: per layer `[B * heads, S, head_dim]`: the layouts that
            make a block nearly as cheap as a step on CPU. Rows and heads are one axis, because a product over two
            batch axes reshapes the slots just written, and XLA:CPU then copies the whole cache at every step.
        length: int32 `[B]`. Slots at or beyond it are masked by position, never trusted.
        static: what prefill computed once (cross-attention keys and values, the encoder's mask).
    """

    keys: Layers
    values: Layers
    length: Array
    static: Any = None


class LengthCached(Generic[Held]):
    """A model whose cache is a dataclass with a `length` `[B]` that alone says what was consumed."""

    def rollback(self, cache: Held, length: Array) -> Held:
        """Returns the cache as if row `b` had consumed `length[b]` tokens, at most `max_rollback` fewer than it has."""
        return replace(cache, length=jnp.asarray(length, jnp.int32))

    def consumed(self, cache: Held) -> Array:
        """Returns how many tokens each row has consumed, int32 `[B]`."""
        length: Array = cache.length
        return length


def empty_slots(heads: int, head_dim: int, sizes: Sequence[int], dtype: str) -> tuple[Layers, Layers]:
    """Zeros, per layer with `S` of `sizes`: keys `[heads, head_dim, S]` and values `[heads, S, head_dim]`."""
    keys = tuple(constrain(jnp.zeros((heads, head_dim, size), dtype), HEADS) for size in sizes)
    return keys, tuple(constrain(jnp.zeros((heads, size, head_dim), dtype), HEADS) for size in sizes)


def write_ring(buffer: Array, update: Array, start: Array, axis: int) -> Array:
    """`write_slots` into a ring: position `p` lies in slot `p mod S` of its `S` slots.

    Args:
        buffer, update, axis: as in `write_slots`; `update` has at most `S` entries along `axis`.
        start: int32 `[B]`, the first one's position.
    """
    rows, size, new = start.shape[0], buffer.shape[axis], update.shape[axis]
    update, at = update.astype(buffer.dtype), start % size
    if new == 1:
        return write_slots(buffer, update, at, axis)

    def one(row: Array, block: Array, at: Array) -> Array:
        # up to the last slot, then from the first one on: two writes however the block lies
        first = jnp.minimum(at, size - new)
        row = _overwrite(row, block, first, first - at, axis)
        return _overwrite(row, block, jnp.zeros_like(at), size - at, axis)

    def by_row(x: Array) -> Array:
        return x.reshape(rows, -1, *x.shape[1:])

    return jax.vmap(one)(by_row(buffer), by_row(update), at).reshape(buffer.shape)


def _overwrite(row: Array, block: Array, at: Array, shift: Array, axis: int) -> Array:
    """A block's length of slots from `at` on, the `i`-th with the block's entry `shift + i` where there is one."""
    new = block.shape[axis]
    index = jnp.arange(new) + shift
    there = ((index >= 0) & (index < new)).reshape([-1 if a == axis else 1 for a in range(block.ndim)])
    moved = jnp.take(block, jnp.clip(index, 0, new - 1), axis=axis)
    old = jax.lax.dynamic_slice_in_dim(row, at, new, axis)
    return jax.lax.dynamic_update_slice_in_dim(row, jnp.where(there, moved, old), at, axis)


def move_slots(buffer: Array, start: Array, entries: Array, axis: int) -> Array:
    """Slot `start + j` of each row with what `start + entries[:, j]` holds.

    Args:
        buffer: `[B * n, ...]`, `n` neighbours sharing a row; start: int32 `[B]`; entries: int32 `[B, W]`.
    """
    rows = start.shape[0]

    def one(row: Array, at: Array, own: Array) -> Array:
        taken = jnp.take(row, jnp.clip(at + own, 0, row.shape[axis] - 1), axis=axis)
        return jax.lax.dynamic_update_slice_in_dim(row, taken, at, axis)

    return jax.vmap(one)(buffer.reshape(rows, -1, *buffer.shape[1:]), start, entries).reshape(buffer.shape)


def put_branch(seen: Array, own: Array, start: Array) -> Array:
    """`seen` `[B, ..., S]` with `own` `[B or 1, ..., W]` in the slots from `start` `[B]` on."""
    own = jnp.broadcast_to(own, (*seen.shape[:-1], own.shape[-1])).astype(seen.dtype)

    def one(row: Array, block: Array, at: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, block, at, axis=-1)

    return jax.vmap(one)(seen, own, start)


def causal_slots_mask(length: Array, new: int, slots: int) -> Array:
    """bool `[B, new, S]`: token `t` fed at row length `n` sees slots `0 … n + t`."""
    positions = length[:, None] + jnp.arange(new)[None]
    return jnp.arange(slots)[None, None] <= positions[:, :, None]
