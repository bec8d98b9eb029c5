"""Attention of a block of tokens to the cache: one GPU kernel, which also writes the block's keys and values.

XLA starts five to seven kernels for this in each layer: it splits the projections, writes keys and values, and computes
logits, weights and the weighted values. Here, a single Triton kernel runs one program for each query head of each row.
The program reads the cached slots in chunks, whose results it combines as Flash-Decoding does (Dao et al., 2023). It
takes the block's own keys and values from the projections, so no program reads a slot that another one writes.

Shape letters: those of `decode_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from speccascade_jax.core.types import Array
from speccascade_jax.runtime import platforms

TILE = 16
"""Largest number of tokens in a block, and the smallest operand of a Triton product. XLA computes longer blocks."""
MOST_BYTES = 2**19
"""Largest size of a head's keys and values, in bytes. One program reads all of them. Beyond this size, XLA uses the GPU
better, because it is not limited to one program per head."""
CHUNK = 64
"""Number of slots that a program reads at once."""
_OUTSIDE = -2e10
"""Logit of a column that is not a cached slot. It is below that of a masked slot."""


def fits(new: int, size: int, slots: int, dtype: Any) -> bool:
    """Returns whether the kernel computes the attention of a block; otherwise XLA does.

    Args:
        new: number of tokens of the block.
        size: width of a head.
        slots: number of slots of the cache.
        dtype: dtype of the cache.
    """
    # Triton needs blocks whose sizes are powers of two.
    width = jnp.dtype(dtype).itemsize
    return (
        new <= TILE
        and size in (16, 32, 64, 128, 256)
        and 2 * slots * size * width <= MOST_BYTES
        and jnp.dtype(dtype).name in ("bfloat16", "float32")
    )


def attend(
    columns: tuple[Array, ...],
    keys: Array,
    values: Array,
    start: Array,
    bias: Array,
    layer: Array | int = 0,
    *,
    query_heads: int,
    size: int,
    cap: float | None = None,
    ring: bool = False,
) -> tuple[Array, Array, Array]:
    """Writes a block's keys and values into a cache, and computes its attention, as `decode_attention.attend` does."""
    rows, new, width = columns[0].shape
    heads, slots = keys.shape[-3] // rows, keys.shape[-1]
    kernel = _Kernel(
        rows=rows, new=new, heads=heads, groups=query_heads // heads, size=size, slots=slots, bias=bias.shape[:3],
        cap=cap, ring=ring, writes=len(columns) > 1 or width > query_heads * size,
    )  # fmt: skip
    # In a ring buffer, positions continue with slot 0 after the last slot.
    begin = (start % slots if ring else start).astype(jnp.int32)
    flat_keys, flat_values = (x.reshape(-1, *x.shape[-2:]) for x in (keys, values))
    layer = jnp.asarray(layer, jnp.int32)[None]
    mixed, *written = kernel.call(begin, layer, columns, bias.astype(jnp.float32), flat_keys, flat_values)
    flat_keys, flat_values = written or (flat_keys, flat_values)
    return mixed, flat_keys.reshape(keys.shape), flat_values.reshape(values.shape)


@dataclass(frozen=True)
class _Kernel:
    """The sizes of one kernel, and its call. The kernel's body is `_run`, once for each row and query head.

    Attributes:
        rows, new: `B` and `T`.
        heads, groups, size, slots: `n`, `g`, `K` and `S`.
        bias: the bias's numbers of rows, heads and tokens, each of which may be 1.
        cap, ring: as in `attend`.
        writes: whether the block's keys and values are written into the cache.
    """

    rows: int
    new: int
    heads: int
    groups: int
    size: int
    slots: int
    bias: tuple[int, ...]
    cap: float | None
    ring: bool
    writes: bool

    @property
    def query_heads(self) -> int:
        """Number of query heads, `N`."""
        return self.heads * self.groups

    def call(
        self, begin: Array, layer: Array, columns: tuple[Array, ...], bias: Array, keys: Array, values: Array
    ) -> list[Array]:
        """Returns the attention's output and, if the block's keys and values are written, the caches.

        Args:
            begin: int32 `[B]`, the slot of the block's first token in each row.
            layer: int32 `[1]`, the index of the layer in the cache.
            columns: as in `attend`.
            bias: as in `attend`.
            keys: the cache of all layers, `[L * B * n, K, S]`.
            values: the same for values, `[L * B * n, S, K]`.
        """
        width = self.query_heads * self.size
        output = jax.ShapeDtypeStruct((self.rows, self.new, width), keys.dtype)
        caches = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values)] if self.writes else []
        arguments = (begin, layer, bias, *columns, keys, values)
        number = len(arguments) - 2
        results: list[Array] = pl.pallas_call(
            partial(_run, self),
            grid=(self.rows * self.query_heads,),
            out_shape=[output, *caches],
            # The caches are updated in place: only the slots of new entries are written.
            input_output_aliases={number: 1, number + 1: 2} if self.writes else {},
            compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
            interpret=bool(platforms.interpreter()),
            name="decode_attention",
        )(*arguments)
        return results


def _run(kernel: _Kernel, begins: Any, layer: Any, bias: Any, *refs: Any) -> None:
    """Runs the kernel for one row and query head; `refs` are the other inputs of `_Kernel.call`, and the outputs."""
    outputs = 3 if kernel.writes else 1
    *columns, keys, values = refs[:-outputs]
    row, query_head = (op(pl.program_id(0), kernel.query_heads) for op in (jax.lax.div, jax.lax.rem))
    head, begin = jax.lax.div(query_head, kernel.groups), begins[row]
    place, wide = (layer[0] * kernel.rows + row) * kernel.heads + head, jnp.arange(kernel.size)
    queries = _block(kernel, columns, 0, row, query_head).astype(keys.dtype)
    seen = partial(_logits, kernel, queries, bias, row, query_head)

    def chunk(index: Any, sums: Any) -> Any:
        slots = index * CHUNK + jnp.arange(CHUNK)
        inside, cached = slots < kernel.slots, (slots < kernel.slots) & ~_is_new(kernel, slots, begin)
        old_keys = pltriton.load(keys.at[place, wide[:, None], slots[None]], mask=inside[None], other=0)
        old_values = pltriton.load(values.at[place, slots[:, None], wide[None]], mask=cached[:, None], other=0)
        return _added(sums, seen(old_keys, slots, cached), old_values)

    # The largest logit, the sum of weights, and the weighted values, so far.
    sums = (
        jnp.full((TILE,), -jnp.inf, jnp.float32),
        jnp.zeros((TILE,), jnp.float32),
        jnp.zeros((TILE, kernel.size), jnp.float32),
    )
    sums = jax.lax.fori_loop(0, _chunks(kernel, begin), chunk, sums)
    token = jnp.arange(TILE)
    # Blocks have fewer tokens than a tile has rows.
    real = token < kernel.new
    if kernel.writes:
        # Padding gets slots beyond the last one. In a short ring buffer, it would otherwise have slots of other tokens.
        slots = jnp.where(real, _wrapped(kernel, begin + token), kernel.slots + token)
        new_keys, new_values = (_block(kernel, columns, part, row, head).astype(keys.dtype) for part in (1, 2))
        sums = _added(sums, seen(new_keys.T, slots, real), new_values)
        # The query heads of a group share their keys and values, so only the first of them writes.
        written = real & (query_head == head * kernel.groups)
        pltriton.store(refs[-2].at[place, wide[:, None], slots[None]], new_keys.T, mask=written[None])
        pltriton.store(refs[-1].at[place, slots[:, None], wide[None]], new_values, mask=written[:, None])
    _, total, weighted = sums
    output, mixed = weighted / total[:, None], refs[-outputs]
    columns_of = query_head * kernel.size + wide
    pltriton.store(mixed.at[row, token[:, None], columns_of[None]], output.astype(mixed.dtype), mask=real[:, None])


def _chunks(kernel: _Kernel, begin: Any) -> Any:
    """Returns how many chunks of cached slots a row sees, counted from the first; later chunks are skipped."""
    if kernel.ring or not kernel.writes:
        return pl.cdiv(kernel.slots, CHUNK)
    return jax.lax.div(jnp.minimum(begin, kernel.slots) + CHUNK - 1, CHUNK)


def _wrapped(kernel: _Kernel, slots: Any) -> Any:
    """Returns slots with those beyond a ring buffer's end wrapped around to its beginning."""
    return jnp.where(slots >= kernel.slots, slots - kernel.slots, slots) if kernel.ring else slots


def _is_new(kernel: _Kernel, slots: Any, begin: Any) -> Any:
    """Returns which slots the block overwrites."""
    if not kernel.writes:
        return jnp.zeros(slots.shape, bool)
    # The block is contiguous, except where a ring buffer ends.
    offset = slots - begin
    if kernel.ring:
        offset = jnp.where(offset < 0, offset + kernel.slots, offset)
    return (offset >= 0) & (offset < kernel.new)


def _block(kernel: _Kernel, refs: list[Any], part: int, row: Any, head: Any) -> Any:
    """Returns a head's queries (part 0), keys (1) or values (2) of the block, `[TILE, K]`; rows of padding are zero."""
    # If there is one array, it holds the queries, keys and values side by side.
    before = 0 if part == 0 or len(refs) > 1 else kernel.query_heads + (part - 1) * kernel.heads
    token, columns = jnp.arange(TILE), (before + head) * kernel.size + jnp.arange(kernel.size)
    ref = refs[min(part, len(refs) - 1)]
    return pltriton.load(ref.at[row, token[:, None], columns[None]], mask=(token < kernel.new)[:, None], other=0)


def _logits(kernel: _Kernel, queries: Any, bias: Any, row: Any, head: Any, keys: Any, slots: Any, real: Any) -> Any:
    """Returns the logits `[TILE, C]` of keys `[K, C]` in `slots`, with their bias; `_OUTSIDE` where `real` is false."""
    x = _dot(queries, keys)
    if kernel.cap is not None:
        x = kernel.cap * jnp.tanh(x / kernel.cap)
    (rows, heads, tokens), token = kernel.bias, jnp.arange(TILE)
    # An axis of size 1 is broadcast.
    places = row * int(rows > 1), head * int(heads > 1), token[:, None] * int(tokens > 1), slots[None]
    added = pltriton.load(bias.at[places], mask=(token < kernel.new)[:, None] & real[None], other=0.0)
    return jnp.where(real[None], x + added, _OUTSIDE)


def _added(sums: Any, logits: Any, values: Any) -> Any:
    """Adds the weighted values `[C, K]` of some slots to the sums: largest logit, sum of weights, weighted values."""
    largest, total, weighted = sums
    # Earlier weights are relative to the earlier maximum, so they are rescaled to the new one.
    now = jnp.maximum(largest, logits.max(-1))
    scale, weights = jnp.exp(largest - now), jnp.exp(logits - now[:, None])
    total = total * scale + weights.sum(-1)
    return now, total, weighted * scale[:, None] + _dot(weights.astype(values.dtype), values)


def _dot(x: Any, y: Any) -> Any:
    # Without the precision, Triton would round float32 operands to TF32.
    precision = jax.lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)
