"""What the engine knows of a model: three functions over a functional cache.

Shape letters: `B` rows, `P` prompt tokens, `N` encoder tokens, `T` tokens fed, `S` cache slots,
`V` vocabulary, `D` features.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

DTYPES = ("float32", "bfloat16", "float16")
"""What parameters may be loaded in."""

Array = jax.Array
Cache = Any
Params = Any


@flax.struct.dataclass
class Prompt:
    """What a generation starts from, right-padded.

    Attributes:
        tokens: int32 `[B, P]`, the decoder's context: the prompt of a decoder-only model, the single
            start token of an encoder-decoder.
        length: int32 `[B]`, how many of `tokens` are real; at least 1.
        encoder_tokens: int32 `[B, N]`, the encoder's input, 0 where padded; `None` without an encoder.
    """

    tokens: Array
    length: Array
    encoder_tokens: Array | None = None


class LMOutput(NamedTuple):
    """`logits` `[B, T, V]` (raw, padded vocabulary masked to -inf); `hidden` `[B, T, D]` or `None`."""

    logits: Array
    hidden: Array | None = None


@runtime_checkable
class LanguageModel(Protocol):
    """A next-token model over a functional cache with one length per row.

    Implementations are frozen and hashable (they are static arguments of jit); parameters live
    outside. Invariant between rounds: *a cache has consumed exactly `length - 1` tokens; the last
    committed token is pending.*
    """

    @property
    def vocab_size(self) -> int:
        """Real vocabulary entries, padding excluded."""

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> Cache:
        """A cache of `max_len` slots that has consumed `prompt.length - 1` tokens of each row.

        `max_rollback`: how far behind what was fed the length will ever be set back (`None`: any distance). Only
        models that forget, such as those with windows, need it.
        """

    def extend(self, params: Params, cache: Cache, tokens: Array) -> tuple[LMOutput, Cache]:
        """Feed `tokens` `[B, T]` at each row's own length: `T = 1` steps, `T = G + 1` scores."""

    def rollback(self, cache: Cache, length: Array) -> Cache:
        """The cache as if each row had consumed `length` `[B]` tokens. O(1): sets the length."""

    def consumed(self, cache: Cache) -> Array:
        """int32 `[B]`: how many tokens each row of the cache has consumed."""


@flax.struct.dataclass
class BoundModel:
    """A model and its parameters: what the front door passes around."""

    params: Params
    model: Any = flax.struct.field(pytree_node=False)


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

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    length: Array
    static: Any = None


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

    def one(row: Array, new: Array, at: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, new, at, axis)

    def by_row(x: Array) -> Array:
        return x.reshape(rows, -1, *x.shape[1:])

    return jax.vmap(one)(by_row(buffer), by_row(update), start).reshape(buffer.shape)


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


def right_pad(rows: list[list[int]], width: int) -> np.ndarray:
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


def causal_slots_mask(length: Array, new: int, slots: int) -> Array:
    """bool `[B, new, S]`: token `t` fed at row length `n` sees slots `0 … n + t`."""
    positions = length[:, None] + jnp.arange(new)[None]
    return jnp.arange(slots)[None, None] <= positions[:, :, None]
