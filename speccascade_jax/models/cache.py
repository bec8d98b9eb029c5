"""Attention caches of keys and values: array layouts, writes of new entries, and attention masks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core.arrays import write_slots
from speccascade_jax.core.types import Array
from speccascade_jax.models.sharding import HEADS, STACKED_HEADS, constrain

Layers = tuple[Array, ...]
Held = TypeVar("Held", bound=Any)
"""The cache class of a model family: a dataclass with a field `length`."""


@flax.struct.dataclass
class KVCache:
    """Immutable attention cache of a decoder, with one length per row.

    Attributes:
        keys: per layer `[B * heads, head_dim, S]`; values: per layer `[B * heads, S, head_dim]`. With these layouts
            a block of tokens costs little more than one token on a CPU. Rows and heads share one axis. With two batch
            axes, XLA:CPU would reshape the slots just written and copy the whole cache at every step. If the layers run
            in a scan, both hold one array for all layers, `[L, B * heads, …]`.
        length: int32 `[B]`, the number of tokens that each row has consumed. Slots at or beyond this index hold
            meaningless values, which attention masks.
        static: arrays that prefill computes once and decoding never changes (`t5.T5Static`).
    """

    keys: Layers
    values: Layers
    length: Array
    static: Any = None


class LengthCached(Generic[Held]):
    """Base class of models whose cache has a field `length` `[B]`, the number of tokens that each row has consumed."""

    def rollback(self, cache: Held, length: Array) -> Held:
        """Returns the cache as if each row `b` had consumed only its first `length[b]` tokens.

        `length[b]` may be at most `max_rollback` (see `prefill`) below the current length.
        """
        # Dropped slots need no clearing: masks hide slots beyond the length, and the next write overwrites them.
        return replace(cache, length=jnp.asarray(length, jnp.int32))

    def consumed(self, cache: Held) -> Array:
        """Returns how many tokens each row has consumed, int32 `[B]`."""
        length: Array = cache.length
        return length


def empty_slots(
    heads: int, head_dim: int, sizes: Sequence[int], dtype: str, counts: Sequence[int] | None = None
) -> tuple[Layers, Layers]:
    """Returns zeros for each layer's keys `[heads, head_dim, S]` and values `[heads, S, head_dim]`.

    Args:
        heads: number of key-value heads of all rows together.
        head_dim: width of a head.
        sizes: number of slots `S` of each layer, or of each stack of layers.
        dtype: dtype of the arrays.
        counts: number of layers in each stack, the first axis of its arrays; `None`: the layers are separate.
    """
    stacks = [()] * len(sizes) if counts is None else [(count,) for count in counts]
    layout = HEADS if counts is None else STACKED_HEADS

    def zeros(*shape: int) -> Array:
        return constrain(jnp.zeros(shape, dtype), layout)

    keys = tuple(zeros(*stack, heads, head_dim, size) for stack, size in zip(stacks, sizes, strict=True))
    return keys, tuple(zeros(*stack, heads, size, head_dim) for stack, size in zip(stacks, sizes, strict=True))


def write_ring(buffer: Array, update: Array, start: Array, axis: int) -> Array:
    """Writes a block of entries into a ring buffer of `S` slots, which holds position `p` in slot `p mod S`.

    Args:
        buffer: `[B * n, ...]`, with `S` slots along `axis`; the `n` heads of a row are consecutive.
        update: the block, with at most `S` entries along `axis`; its other axes are those of `buffer`.
        start: int32 `[B]`, the position of the block's first entry.
        axis: the axis of `buffer` along which the slots lie.
    """
    rows, size, new = start.shape[0], buffer.shape[axis], update.shape[axis]
    update, begin = update.astype(buffer.dtype), start % size
    # A single entry never wraps around the end of the ring, so one write is enough.
    if new == 1:
        return write_slots(buffer, update, begin, axis)

    def one(row: Array, block: Array, begin: Array) -> Array:
        # Every block is written twice: once up to the last slot and once from the first slot on. The number of entries
        # that wrap around differs by row, but array shapes must be the same for all rows.
        first = jnp.minimum(begin, size - new)
        row = _overwrite(row, block, first, first - begin, axis)
        return _overwrite(row, block, jnp.zeros_like(begin), size - begin, axis)

    def by_row(x: Array) -> Array:
        return x.reshape(rows, -1, *x.shape[1:])

    return jax.vmap(one)(by_row(buffer), by_row(update), begin).reshape(buffer.shape)


def write_layer(stack: Array, update: Array, start: Array, layer: Array, axis: int, ring: bool) -> Array:
    """Writes a block of entries into one layer of a stack of caches; the other layers keep their contents.

    A loop over layers that carries the stack then updates it in place. If the loop sliced out a layer, wrote to it and
    put it back, it would copy the whole layer.

    Args:
        stack: `[L, B * n, ...]`, the caches of `L` layers; the `n` heads of a row are consecutive.
        update: the block's entries for this layer, `[B * n, ...]`.
        start: int32 `[B]`, the slot (in a ring buffer: the position) of the block's first entry.
        layer: the layer's index.
        axis: the axis of `update` along which the entries lie; in `stack` it is the axis `axis + 1`.
        ring: whether the slots form ring buffers (`write_ring`).
    """
    rows, size, new = start.shape[0], stack.shape[axis + 1], update.shape[axis]
    begin = start % size if ring else start
    wraps = ring and new > 1

    def one(row: Array, block: Array, begin: Array) -> Array:
        if not wraps:
            return jax.lax.dynamic_update_slice(row, block, _corner(row, axis + 1, begin, layer))
        first = jnp.minimum(begin, size - new)
        row = _overwrite(row, block, first, first - begin, axis + 1, layer)
        return _overwrite(row, block, jnp.zeros_like(begin), size - begin, axis + 1, layer)

    update = update.astype(stack.dtype)[None]
    # A single row is written without vmap, because vmap would turn the update into a slower scatter.
    if rows == 1:
        return one(stack, update, begin[0])

    def by_row(x: Array) -> Array:
        return x.reshape(x.shape[0], rows, -1, *x.shape[2:])

    return jax.vmap(one, (1, 1, 0), 1)(by_row(stack), by_row(update), begin).reshape(stack.shape)


def _corner(array: Array, axis: int, slot: Array, layer: Array | None) -> list[Array]:
    """Returns the indices of a slice that starts at `slot` along `axis`, in `layer` if the first axis holds layers."""
    corner = [jnp.zeros((), jnp.int32)] * array.ndim
    corner[axis] = slot
    if layer is not None:
        corner[0] = jnp.asarray(layer, jnp.int32)
    return corner


def _overwrite(
    row: Array, block: Array, first_slot: Array, shift: Array, axis: int, layer: Array | None = None
) -> Array:
    """Writes the block's entry `shift + i` into slot `first_slot + i`, for every `i` below the block's length.

    If the block has no entry `shift + i`, slot `first_slot + i` keeps its contents. With a `layer`, `row` is a stack of
    layers, and the block is written into this layer.
    """
    new = block.shape[axis]
    index = jnp.arange(new) + shift
    in_block = ((index >= 0) & (index < new)).reshape([-1 if a == axis else 1 for a in range(block.ndim)])
    moved = jnp.take(block, jnp.clip(index, 0, new - 1), axis=axis)
    # `dynamic_update_slice` would shift a slice that overruns the buffer. The callers choose `first_slot` so that the
    # whole block fits.
    corner = _corner(row, axis, first_slot, layer)
    old = jax.lax.dynamic_slice(row, corner, block.shape)
    return jax.lax.dynamic_update_slice(row, jnp.where(in_block, moved, old), corner)


def move_slots(buffer: Array, start: Array, entries: Array, axis: int) -> Array:
    """Copies slot `start + entries[:, j]` of each row into slot `start + j`, for every `j`.

    Args:
        buffer: `[B * n, ...]`; the `n` heads of a row are consecutive.
        start: int32 `[B]`, the first slot that is written.
        entries: int32 `[B, W]`, the slots that are read, relative to `start`.
        axis: the axis of `buffer` along which the slots lie.
    """
    rows = start.shape[0]

    def one(row: Array, first_slot: Array, row_entries: Array) -> Array:
        # The gather reads all sources before the write, so that source and destination slots may overlap.
        taken = jnp.take(row, jnp.clip(first_slot + row_entries, 0, row.shape[axis] - 1), axis=axis)
        return jax.lax.dynamic_update_slice_in_dim(row, taken, first_slot, axis)

    return jax.vmap(one)(buffer.reshape(rows, -1, *buffer.shape[1:]), start, entries).reshape(buffer.shape)


def put_branch(seen: Array, branch_values: Array, start: Array) -> Array:
    """Writes the mask or bias of a draft tree's `W` entries into `seen` `[B, ..., S]`, from slot `start` `[B]` on.

    `branch_values` is `[B or 1, ..., W]`.
    """
    branch_values = jnp.broadcast_to(branch_values, (*seen.shape[:-1], branch_values.shape[-1])).astype(seen.dtype)

    def one(row: Array, block: Array, first_slot: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, block, first_slot, axis=-1)

    return jax.vmap(one)(seen, branch_values, start)


def causal_slots_mask(length: Array, new: int, slots: int) -> Array:
    """Returns the causal mask, bool `[B, new, S]`: token `t` of a block fed at length `n` sees slots `0` to `n + t`."""
    positions = length[:, None] + jnp.arange(new)[None]
    return jnp.arange(slots)[None, None] <= positions[:, :, None]
