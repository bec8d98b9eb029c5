"""Caches of keys and values: their layouts, writes into them, and masks over them."""

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
"""The cache type of a model family: a dataclass with a `length`."""


@flax.struct.dataclass
class KVCache:
    """Immutable attention cache of a decoder, with one length per row.

    Attributes:
        keys: per layer `[B * heads, head_dim, S]`; values: per layer `[B * heads, S, head_dim]`. With these layouts
            a block of tokens costs little more than one token on a CPU. Rows and heads share one axis, because a
            product over two batch axes reshapes the slots just written, and XLA:CPU then copies the whole cache at
            every step.
        length: int32 `[B]`. Slots at or beyond it hold junk and are masked by position.
        static: the arrays that prefill computes once (cross-attention keys and values, the encoder's mask).
    """

    keys: Layers
    values: Layers
    length: Array
    static: Any = None


class LengthCached(Generic[Held]):
    """The base of models whose cache is a dataclass with a field `length` `[B]`, the number of consumed tokens."""

    def rollback(self, cache: Held, length: Array) -> Held:
        """Returns the cache as if row `b` had consumed `length[b]` tokens, at most `max_rollback` fewer than it has."""
        # The slots keep their contents: masks depend on the length, and the next write overwrites the dropped slots.
        return replace(cache, length=jnp.asarray(length, jnp.int32))

    def consumed(self, cache: Held) -> Array:
        """Returns how many tokens each row has consumed, int32 `[B]`."""
        length: Array = cache.length
        return length


def empty_slots(heads: int, head_dim: int, sizes: Sequence[int], dtype: str) -> tuple[Layers, Layers]:
    """Returns zeroed keys `[heads, head_dim, S]` and values `[heads, S, head_dim]` for each layer's `S` in `sizes`."""
    keys = tuple(constrain(jnp.zeros((heads, head_dim, size), dtype), HEADS) for size in sizes)
    return keys, tuple(constrain(jnp.zeros((heads, size, head_dim), dtype), HEADS) for size in sizes)


def write_ring(buffer: Array, update: Array, start: Array, axis: int) -> Array:
    """Writes a block into a ring of `S` slots, with position `p` in slot `p mod S`.

    Args:
        buffer: `[B * n, ...]`, as in `write_slots`, with `S` slots.
        update: the block, with at most `S` entries along `axis`; otherwise the same shape as `buffer`.
        start: int32 `[B]`, the position of the block's first entry.
        axis: the axis of the slots, counted with the batch axis.
    """
    rows, size, new = start.shape[0], buffer.shape[axis], update.shape[axis]
    update, begin = update.astype(buffer.dtype), start % size
    # A single entry never wraps around the end of the ring.
    if new == 1:
        return write_slots(buffer, update, begin, axis)

    def one(row: Array, block: Array, begin: Array) -> Array:
        # Two writes for every block, wrapped or not: up to the last slot, then from the first slot on. The number of
        # wrapped entries differs by row, and shapes must not.
        first = jnp.minimum(begin, size - new)
        row = _overwrite(row, block, first, first - begin, axis)
        return _overwrite(row, block, jnp.zeros_like(begin), size - begin, axis)

    def by_row(x: Array) -> Array:
        return x.reshape(rows, -1, *x.shape[1:])

    return jax.vmap(one)(by_row(buffer), by_row(update), begin).reshape(buffer.shape)


def _overwrite(row: Array, block: Array, first_slot: Array, shift: Array, axis: int) -> Array:
    """Writes the block's entry `shift + i` into slot `first_slot + i`, for each slot `i` of the block's length.

    A slot for which the block has no such entry keeps its contents.
    """
    new = block.shape[axis]
    index = jnp.arange(new) + shift
    in_block = ((index >= 0) & (index < new)).reshape([-1 if a == axis else 1 for a in range(block.ndim)])
    moved = jnp.take(block, jnp.clip(index, 0, new - 1), axis=axis)
    # `dynamic_update_slice` moves a slice that overruns the buffer; `first_slot` leaves room for the whole block.
    old = jax.lax.dynamic_slice_in_dim(row, first_slot, new, axis)
    return jax.lax.dynamic_update_slice_in_dim(row, jnp.where(in_block, moved, old), first_slot, axis)


def move_slots(buffer: Array, start: Array, entries: Array, axis: int) -> Array:
    """Copies slot `start + entries[:, j]` of each row into slot `start + j`.

    Args:
        buffer: `[B * n, ...]`, `n` consecutive entries per row.
        start: int32 `[B]`, the first slot that is written.
        entries: int32 `[B, W]`, the slots that are read, relative to `start`.
        axis: the axis of the slots in one entry of `buffer`'s row, `[n, ...]`.
    """
    rows = start.shape[0]

    def one(row: Array, first_slot: Array, row_entries: Array) -> Array:
        # The gather reads all sources before the write, so that source and destination slots may overlap.
        taken = jnp.take(row, jnp.clip(first_slot + row_entries, 0, row.shape[axis] - 1), axis=axis)
        return jax.lax.dynamic_update_slice_in_dim(row, taken, first_slot, axis)

    return jax.vmap(one)(buffer.reshape(rows, -1, *buffer.shape[1:]), start, entries).reshape(buffer.shape)


def put_branch(seen: Array, branch_values: Array, start: Array) -> Array:
    """Writes a tree's mask or bias `[B or 1, ..., W]` into `seen` `[B, ..., S]`, from slot `start` `[B]` on."""
    branch_values = jnp.broadcast_to(branch_values, (*seen.shape[:-1], branch_values.shape[-1])).astype(seen.dtype)

    def one(row: Array, block: Array, first_slot: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, block, first_slot, axis=-1)

    return jax.vmap(one)(seen, branch_values, start)


def causal_slots_mask(length: Array, new: int, slots: int) -> Array:
    """Returns bool `[B, new, S]`: token `t` fed at row length `n` sees slots `0 … n + t`."""
    positions = length[:, None] + jnp.arange(new)[None]
    return jnp.arange(slots)[None, None] <= positions[:, :, None]
