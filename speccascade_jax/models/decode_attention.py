"""Attention of a block of tokens to the cache: one TPU kernel, which also writes the block's keys and values.

On GPUs, the kernel of `triton_attention` is used instead.

Without the kernel, XLA runs about eleven operations per layer, and for batches of several rows it copies the cache into
another layout. The kernel reads every slot once, and writes only the tiles (128 slots each) that hold new entries. It
works on one row at a time, in chunks of slots whose results it combines as Flash-Decoding does (Dao et al., 2023).

Shape letters: those of `core/types.py`, and here `N` is the number of query heads, `n` of key-value heads, `g = N / n`
and `K` is head_dim. On a mesh, `N` and `n` count the heads on one device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from speccascade_jax.core.types import Array
from speccascade_jax.models import triton_attention
from speccascade_jax.runtime import platforms

LANES = 128
"""Columns of a tile of a TPU's registers and memory."""
MOST_TOKENS = 16
"""Largest number of tokens in a block. XLA computes longer blocks, which have enough rows for efficient products."""
MOST_TILES = 5
"""Largest number of tiles (`LANES` slots each) in a chunk of slots."""
LARGEST_CHUNK = 2**21
"""Largest size of a chunk's keys, in bytes. VMEM holds two chunks of keys and of values: the next one is being copied
while the current one is computed."""
VMEM = 15 * 2**20
"""Largest total size of a kernel's arrays in VMEM, in bytes.

The compiler's limit is 16 MiB for TPU v4, v5e and v5p, and 32 MiB for v6e.
"""
_OUTSIDE = -2e10
"""Logit of a column beyond the cache's last slot. It is below the logit of a masked slot (`layers.MASKED`)."""


def tiled(slots: int) -> int:
    """Returns the number of slots of a cache that needs `slots`, rounded up to whole chunks if TPU kernels are used."""
    if not platforms.uses_kernels():
        return slots
    tiles = -(-slots // LANES)
    # The chunk size with the fewest unused tiles is chosen. Two tiles are one option, so at most one tile is unused.
    return LANES * min(-(-tiles // size) * size for size in range(min(2, tiles), MOST_TILES + 1))


def fits(new: int, heads: int, size: int, slots: int, dtype: Any, written: bool = True, groups: int = 1) -> bool:
    """Returns whether the kernel computes the attention of a block; otherwise XLA does.

    Args:
        new: number of tokens of the block.
        heads: number of key-value heads on a device.
        size: width of a head.
        slots: number of slots of the cache.
        dtype: dtype of the cache.
        written: whether the block's keys and values are written into the cache.
        groups: number of query heads per key-value head.
    """
    if platforms.uses_gpu_kernels():
        return triton_attention.fits(new, size, slots, dtype)
    whole = size % LANES == 0 or (LANES % size == 0 and heads % (LANES // size) == 0)
    # The kernel fits if its arrays fit into VMEM with the smallest chunk, one tile. With as many heads as the 128 of
    # T5 11B, they do not.
    smallest = _Kernel(
        rows=1, new=new, heads=heads, groups=groups, size=size, slots=slots, chunk=LANES, bias_heads=heads * groups,
        cap=None, ring=False, writes=written, width=jnp.dtype(dtype).itemsize,
    )  # fmt: skip
    return (
        platforms.uses_kernels()
        and new <= MOST_TOKENS
        and whole
        and smallest.is_small
        and (slots % LANES == 0 or not written)
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
    """Writes a block's keys and values into a cache, and computes the block's attention to the cache.

    Args:
        columns: the block's projections: queries `[B, T, N * K]`, keys and values `[B, T, n * K]`; or one array of all
            three side by side; or the queries alone, if nothing is to be written. They are rounded to the cache's
            dtype.
        keys: `[B * n, K, S]`, or a stack of layers `[L, B * n, K, S]`.
        values: `[B * n, S, K]`, or a stack.
        start: int32 `[B]`, the slot (in a ring buffer: the position) of the block's first entry.
        bias: float32 `[B or 1, N or 1, T or 1, S]`, which is added to the logits, and masks slots.
        layer: index of the layer, if keys and values are stacks.
        query_heads: `N`.
        size: `K`.
        cap: soft cap of the logits, before the bias is added.
        ring: whether the slots form a ring buffer, which holds position `p` in slot `p mod S`.

    Returns:
        The attention's output `[B, T, N * K]`, and the cache's keys and values, which now include the block's.
    """
    if platforms.uses_gpu_kernels():
        sizes: dict[str, Any] = {"query_heads": query_heads, "size": size, "cap": cap, "ring": ring}
        return triton_attention.attend(columns, keys, values, start, bias, layer, **sizes)
    rows, new, width = columns[0].shape
    # The kernel needs the slots as the last axis of both arrays: a tile has 128 columns, and an axis with fewer entries
    # would be padded. XLA chooses the cache's memory layout so that swapping the axes moves no data.
    values = jnp.swapaxes(values, -1, -2)
    flat_keys, flat_values = (x.reshape(-1, *x.shape[-2:]) for x in (keys, values))
    heads, slots = keys.shape[-3] // rows, keys.shape[-1]
    writes = len(columns) > 1 or width > query_heads * size
    kernel = _Kernel(
        rows=rows, new=new, heads=heads, groups=query_heads // heads, size=size, slots=slots, chunk=LANES,
        bias_heads=bias.shape[1], cap=cap, ring=ring, writes=writes, width=keys.dtype.itemsize,
    ).with_largest_chunk()  # fmt: skip
    # The two stay separate arguments, because the program would join them into one array again for each layer.
    scalars = start.astype(jnp.int32), jnp.asarray(layer, jnp.int32)[None]
    mixed, *written = kernel.call(scalars, columns, kernel.padded_bias(bias), flat_keys, flat_values)
    flat_keys, flat_values = written or (flat_keys, flat_values)
    return mixed, flat_keys.reshape(keys.shape), jnp.swapaxes(flat_values.reshape(values.shape), -1, -2)


@dataclass(frozen=True)
class _Kernel:
    """The sizes of one kernel, and its call. The kernel's body is `_run`, once for each row and chunk of slots.

    Query rows are ordered by key-value head, then by query head within the group, then by token. The tokens of each
    query head are padded to `padded` rows, which fill whole registers. Heads that are narrower than a tile are handled
    in *units* of `pair` key-value heads, which together are as wide as a tile.

    Attributes:
        rows, new: `B` and `T`.
        heads, groups, size, slots: `n`, `g`, `K` and `S`.
        chunk: number of slots that are read at once.
        bias_heads: number of heads of the bias, `N` or 1.
        cap, ring: as in `attend`.
        writes: whether the block's keys and values are written into the cache.
        width: bytes per number in the cache.
    """

    rows: int
    new: int
    heads: int
    groups: int
    size: int
    slots: int
    chunk: int
    bias_heads: int
    cap: float | None
    ring: bool
    writes: bool
    width: int

    def with_largest_chunk(self) -> _Kernel:
        """Returns the kernel with the largest chunk that fits into VMEM: whole tiles, or all slots of a short cache."""
        sizes = [replace(self, chunk=count * LANES) for count in range(1, MOST_TILES + 1)]
        sizes = [kernel for kernel in sizes if kernel.is_small] or sizes[:1]
        if self.slots % LANES or not self.writes:  # a cache that is only read may end inside a chunk
            return replace(self, chunk=min(sizes[-1].chunk, self.slots))
        return [kernel for kernel in sizes if self.slots % kernel.chunk == 0][-1]

    @property
    def is_small(self) -> bool:
        """Whether a chunk of keys is small enough, and the kernel's arrays fit into VMEM."""
        return self.heads * self.size * self.width * self.chunk <= LARGEST_CHUNK and self._vmem <= VMEM

    @property
    def _vmem(self) -> int:
        """Bytes in VMEM: two buffers per input and output, the scratch arrays, and a unit's intermediate values."""
        keys, rows = self.heads * self.size, self.heads * self.groups * self.padded
        tokens = self.padded * (2 * self._query_width + 2 * keys * self.writes)
        blocks = self.width * (tokens + 2 * keys * self.chunk) + 4 * self.bias_heads * self.padded * self.chunk
        scratch = rows * (self.chunk + 2 * LANES + self.wide) + tokens - self.padded * self._query_width
        # The compiler keeps a unit's queries, logits, biases and weighted values in VMEM if they exceed the registers.
        return 2 * blocks + 4 * (scratch + 2 * self.unit_rows * (self.chunk + self.wide))

    @property
    def padded(self) -> int:
        """Number of rows of a query head: the block's tokens, and padding whose results are not used."""
        return 8 if self.new <= 8 else 16

    @property
    def pair(self) -> int:
        """Number of key-value heads in a unit."""
        return max(1, LANES // self.size)

    @property
    def wide(self) -> int:
        """Width of a unit's keys, a multiple of `LANES`."""
        return self.pair * self.size

    @property
    def unit_rows(self) -> int:
        """Number of query rows in a unit."""
        return self.pair * self.groups * self.padded

    @property
    def units(self) -> range:
        """The indices of the units."""
        return range(self.heads // self.pair)

    @property
    def most_tiles(self) -> int:
        """Largest number of tiles that new entries are in: one for one token, two for a block of up to 16 tokens."""
        return 2 if self.new > 1 and self.slots > LANES else 1

    def padded_bias(self, bias: Array) -> Array:
        """Returns the bias with its axis of tokens, unless that is 1, padded to `padded` rows."""
        # All layers pad the same array, so XLA does it once.
        missing = self.padded - bias.shape[2] if bias.shape[2] > 1 else 0
        return jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, 0), (0, missing), (0, 0)))

    def last_chunk(self, start: Any) -> Any:
        """Returns the index of the last chunk that any token of the block sees; later chunks are skipped."""
        if self.ring or not self.writes:
            return (self.slots - 1) // self.chunk
        return jax.lax.div(jnp.minimum(start + self.new - 1, self.slots - 1), self.chunk)

    def call(
        self, scalars: tuple[Array, Array], columns: tuple[Array, ...], bias: Array, keys: Array, values: Array
    ) -> list[Array]:
        """Returns the attention's output and, if the block has keys and values, the caches `[L * B * n, K, S]`.

        Args:
            scalars: `start` of `attend`, int32 `[B]`; and the index of the layer, int32 `[1]`.
            columns: as in `attend`.
            bias: as in `attend`, padded.
            keys: the cache of all layers, `[L * B * n, K, S]`.
            values: the same for values.
        """
        output = jax.ShapeDtypeStruct((self.rows, self.new, self._query_width), keys.dtype)
        caches: list[Any] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values)] if self.writes else []
        if len(keys) > self.rows * self.heads and not platforms.interpreter():
            # Without the constraint, XLA would copy the whole stack of layers to VMEM and back for each layer's call.
            keys, values = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (keys, values))
            caches = [pltpu.HBM(x.shape, x.dtype) for x in caches]
        # An array that holds queries, keys and values is passed three times, each time with another block of columns.
        inputs = columns * 3 if self.writes and len(columns) == 1 else columns
        number = len(scalars) + len(inputs) + 1
        results: list[Array] = pl.pallas_call(
            partial(_run, self),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(self.rows, -(-self.slots // self.chunk)),
                in_specs=[*self._column_specs(len(columns) == 1), self._bias_spec(bias), *[self._cache_spec] * 2],
                out_specs=[self._token_spec(self._query_width), *[pl.BlockSpec(memory_space=pl.ANY)] * len(caches)],
                scratch_shapes=self._scratch(),
            ),
            out_shape=[output, *caches],
            # The caches are updated in place: only the tiles with new entries are written.
            input_output_aliases={number: 1, number + 1: 2} if self.writes else {},
            cost_estimate=self._costs(bias, keys.dtype.itemsize),
            interpret=platforms.interpreter(),
            name="decode_attention",
        )(*scalars, *inputs, bias, keys, values)
        return results

    def _costs(self, bias: Array, width: int) -> pl.CostEstimate:
        """Returns the costs of a call: all slots are read, and the tiles that a block may touch are written."""
        slot = self.rows * 2 * self.heads * self.size * width
        tiles = min(self.most_tiles, self.slots // LANES) * self.writes
        tokens = self.rows * self.new * (2 * self._query_width + 2 * self.heads * self.size * self.writes)
        logits = self.rows * self.new * self.heads * self.groups * self.slots
        moved = slot * (self.slots + tiles * LANES) + 4 * (tokens + bias.size)
        return pl.CostEstimate(flops=4 * logits * self.size, transcendentals=logits, bytes_accessed=moved)

    @property
    def _query_width(self) -> int:
        return self.heads * self.groups * self.size

    def _token_spec(self, width: int, block: int = 0) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.new, width), lambda row, chunk, starts, layer: (row, 0, block))

    def _column_specs(self, fused: bool) -> list[pl.BlockSpec]:
        """Returns the block specs of queries, keys and values; if `fused`, they are side by side in one array."""
        keys = self.heads * self.size
        blocks = (self.groups, self.groups + 1) if fused else (0, 0)
        return [self._token_spec(self._query_width), *[self._token_spec(keys, b) for b in blocks if self.writes]]

    def _bias_spec(self, bias: Array) -> pl.BlockSpec:
        def place(row: Any, chunk: Any, starts: Any, layer: Any) -> tuple[Any, ...]:
            return row if bias.shape[0] > 1 else 0, 0, 0, jnp.minimum(chunk, self.last_chunk(starts[row]))

        return pl.BlockSpec((1, *bias.shape[1:3], self.chunk), place)

    @property
    def _cache_spec(self) -> pl.BlockSpec:
        # Every chunk after the last visible one is replaced by the last visible one, which is in VMEM already. So
        # nothing is copied for skipped chunks.
        def place(row: Any, chunk: Any, starts: Any, layer: Any) -> tuple[Any, ...]:
            chunk = jnp.minimum(chunk, self.last_chunk(starts[row]))
            return layer[0] * self.rows + row, 0, chunk

        return pl.BlockSpec((self.heads, self.size, self.chunk), place)

    def _scratch(self) -> list[Any]:
        rows, keys = self.heads * self.groups * self.padded, self.heads * self.size
        tokens = [(self.padded, self._query_width), *[(self.padded, keys)] * (2 * self.writes)]
        sizes = [(rows, self.chunk), (rows, LANES), (rows, LANES), (rows, self.wide), *tokens]
        copies = [pltpu.SemaphoreType.DMA((2,))] if self.writes else []
        return [*(pltpu.VMEM(size, jnp.float32) for size in sizes), *copies]


def _run(kernel: _Kernel, starts: Any, layer: Any, *refs: Any) -> None:
    """Runs the kernel for one row and one chunk of slots.

    `refs` are the inputs, the outputs and the scratch arrays of `_Kernel.call`, in this order.
    """
    parts = iter(refs)
    columns = list(islice(parts, 1 + 2 * kernel.writes))
    bias, keys, values, output = islice(parts, 4)
    caches = list(islice(parts, 2 * kernel.writes))
    logits, largest, total, mixed = islice(parts, 4)
    tokens, copies = list(islice(parts, len(columns))), list(parts)
    row, chunk = pl.program_id(0), pl.program_id(1)
    start = jax.lax.rem(starts[row], kernel.slots) if kernel.ring else starts[row]

    @pl.when(chunk == 0)
    def begin() -> None:
        for ref, column in zip(tokens, columns, strict=True):
            _load(kernel, ref, column)
        largest[...] = jnp.full_like(largest, -jnp.inf)
        total[...], mixed[...] = jnp.zeros_like(total), jnp.zeros_like(mixed)

    @pl.when(chunk <= kernel.last_chunk(start))
    def add() -> None:
        if kernel.writes:
            first_head = (layer[0] * kernel.rows + row) * kernel.heads
            _write(kernel, start, chunk, first_head, tokens[1:], (keys, values), caches, copies[0])
        for unit in kernel.units:
            logits[_rows(kernel, unit)] = _logits(kernel, unit, chunk, tokens[0], keys, bias)
        scale = _softmax(logits, largest, total)
        for unit in kernel.units:
            _mix(kernel, unit, chunk, scale, logits, values, mixed)

    @pl.when(chunk == pl.num_programs(1) - 1)
    def finish() -> None:
        for unit in kernel.units:
            _store(kernel, unit, mixed, total, output)


def _rows(kernel: _Kernel, unit: int) -> slice:
    return slice(unit * kernel.unit_rows, (unit + 1) * kernel.unit_rows)


def _load(kernel: _Kernel, ref: Any, column: Any) -> None:
    """Copies a block's queries, keys or values to a float32 buffer whose rows are padded to whole registers."""
    if kernel.new < kernel.padded:
        ref[...] = jnp.zeros_like(ref)
    ref[0 : kernel.new] = column[0].astype(jnp.float32)


def _precision(dtype: Any) -> Any:
    # A product with zeros and ones moves new entries to their slots. This precision keeps float32 entries unchanged.
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def dot(left: Array, right: Array, contracted: tuple[int, int] = (1, 0)) -> Array:
    """Returns the float32 product of two matrices over the `contracted` axes; float32 operands keep full precision."""
    axes = ((contracted[:1], contracted[1:]), ((), ()))
    precision = _precision(right.dtype)
    return jax.lax.dot_general(left, right, axes, precision=precision, preferred_element_type=jnp.float32)


def _columns(kernel: _Kernel, count: int, first: Any) -> Array:
    """Returns the slot indices of `count` columns from slot `first` on, int32 `[1, count]`."""
    columns: Array = jax.lax.broadcasted_iota(jnp.int32, (1, count), 1) + first
    return columns


def _write(
    kernel: _Kernel, start: Any, chunk: Any, first_head: Any, tokens: Any, cached: Any, caches: Any, copies: Any
) -> None:
    """Puts the new entries into the chunk that is in VMEM, and copies the tiles that hold them to the cache."""
    first, last = start, start + kernel.new - 1
    if kernel.ring:
        last = jnp.where(last >= kernel.slots, last - kernel.slots, last)
    tiles = jax.lax.div(first, LANES), jax.lax.div(last, LANES)

    def put(number: Any, _: None) -> None:
        tile = jnp.where(number == 0, *tiles)
        inside = (tile * LANES >= chunk * kernel.chunk) & (tile * LANES < (chunk + 1) * kernel.chunk)

        @pl.when(inside & ((number == 0) | (tiles[0] != tiles[1])))
        def move() -> None:
            place = pl.ds(pl.multiple_of(tile * LANES - chunk * kernel.chunk, LANES), LANES)
            for ref, new in zip(cached, tokens, strict=True):
                _put(kernel, start, tile, place, ref, new)
            slots = pl.ds(pl.multiple_of(tile * LANES, LANES), LANES)
            heads = pl.ds(first_head, kernel.heads)
            transfers = [
                pltpu.make_async_copy(ref.at[:, :, place], cache.at[heads, :, slots], copies.at[number])
                for number, (ref, cache) in enumerate(zip(cached, caches, strict=True))
            ]
            for transfer in transfers:
                transfer.start()
            for transfer in transfers:
                transfer.wait()

    jax.lax.fori_loop(0, kernel.most_tiles, put, None)


def _put(kernel: _Kernel, start: Any, tile: Any, place: Any, ref: Any, new: Any) -> None:
    """Puts new entries, `[padded, n * K]`, into a tile of a chunk of keys or values, `[n, K, chunk]`."""
    offset = _columns(kernel, LANES, tile * LANES) - start
    if kernel.ring:
        offset = jnp.where(offset < 0, offset + kernel.slots, offset)
    is_new = (offset >= 0) & (offset < kernel.new)
    token = jax.lax.broadcasted_iota(jnp.int32, (kernel.padded, LANES), 0)
    chosen = ((offset == token) & is_new).astype(ref.dtype)
    for unit in kernel.units:
        heads = pl.ds(unit * kernel.pair, kernel.pair)
        old = ref[heads, :, place].reshape(kernel.wide, LANES)
        entries = new[:, unit * kernel.wide : (unit + 1) * kernel.wide].astype(ref.dtype)
        # A product with zeros and ones moves each token's entries to its column.
        moved = dot(entries, chosen, (0, 0)).astype(ref.dtype)
        ref[heads, :, place] = jnp.where(is_new, moved, old).reshape(kernel.pair, kernel.size, LANES)


def _unit(kernel: _Kernel, unit: int, chunk: Any, ref: Any) -> Array:
    """Returns a unit's keys or values, `[pair * K, chunk]`."""
    x: Array = ref[unit * kernel.pair : (unit + 1) * kernel.pair].reshape(kernel.wide, kernel.chunk)
    if kernel.slots % kernel.chunk == 0:
        return x
    # The last chunk reads beyond the array. The values there may be NaN, which stays NaN even with a weight of zero.
    return jnp.where(_columns(kernel, kernel.chunk, chunk * kernel.chunk) < kernel.slots, x, jnp.zeros_like(x))


def _logits(kernel: _Kernel, unit: int, chunk: Any, queries: Any, keys: Any, bias: Any) -> Array:
    """Returns the logits of a unit's queries, `[unit_rows, chunk]`."""
    heads = [(p, i) for p in range(kernel.pair) for i in range(kernel.groups)]
    numbers = [(unit * kernel.pair + p) * kernel.groups + i for p, i in heads]
    placed = [_query(kernel, number, p, queries) for number, (p, _) in zip(numbers, heads, strict=True)]
    x = dot(jnp.concatenate(placed, 0).astype(keys.dtype), _unit(kernel, unit, chunk, keys), (1, 0))
    if kernel.cap is not None:
        x = kernel.cap * jnp.tanh(x / kernel.cap)
    shape = (kernel.padded, kernel.chunk)
    added = [jnp.broadcast_to(bias[0, n if kernel.bias_heads > 1 else 0], shape) for n in numbers]
    x += jnp.concatenate(added, 0)
    if kernel.slots % kernel.chunk:
        x = jnp.where(_columns(kernel, kernel.chunk, chunk * kernel.chunk) < kernel.slots, x, _OUTSIDE)
    return x


def _query(kernel: _Kernel, head: int, place: int, queries: Any) -> Array:
    """Returns a query head, `[padded, pair * K]`, at the columns of its key-value head; other columns are zero."""
    if kernel.pair == 1:
        query: Array = queries[:, head * kernel.size : (head + 1) * kernel.size]
        return query
    if kernel.groups == 1:  # query heads lie in the same order as key-value heads, so each is already in its columns
        first = head - place
        x = queries[:, first * kernel.size : first * kernel.size + kernel.wide]
    else:
        x = jnp.concatenate([queries[:, head * kernel.size : (head + 1) * kernel.size]] * kernel.pair, -1)
    return jnp.where(_head_of(kernel) == place, x, 0.0)


def _head_of(kernel: _Kernel) -> Array:
    """Returns, for each column of a unit, the index of its key-value head in the unit, int32 `[padded, pair * K]`."""
    return jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, (kernel.padded, kernel.wide), 1), kernel.size)


def _softmax(logits: Any, largest: Any, total: Any) -> Array:
    """Replaces logits by weights relative to the largest logit so far; returns the factor for all earlier sums."""
    x, before = logits[...], largest[...]
    now = jnp.maximum(before, jnp.max(x, axis=-1, keepdims=True))
    scale = jnp.exp(before - now)
    weights = jnp.exp(x - now[:, :1])
    total[...] = total[...] * scale + jnp.sum(weights, axis=-1, keepdims=True)
    logits[...], largest[...] = weights, now
    return scale


def _mix(kernel: _Kernel, unit: int, chunk: Any, scale: Array, weights: Any, values: Any, mixed: Any) -> None:
    """Adds a chunk's weighted values to a unit's sums, `[unit_rows, pair * K]`."""
    rows = _rows(kernel, unit)
    part = dot(weights[rows].astype(values.dtype), _unit(kernel, unit, chunk, values), (1, 1))
    mixed[rows] = mixed[rows] * scale[rows, :1] + part


def _store(kernel: _Kernel, unit: int, mixed: Any, total: Any, output: Any) -> None:
    """Divides a unit's sums by the sums of weights, and stores them at the columns of their heads."""
    rows = _rows(kernel, unit)
    x = mixed[rows] / total[rows, :1]
    parts = [x[n * kernel.padded : (n + 1) * kernel.padded] for n in range(kernel.pair * kernel.groups)]
    if kernel.groups == 1:
        joined = parts[0]
        for place in range(1, kernel.pair):
            joined = jnp.where(_head_of(kernel) == place, parts[place], joined)
        output[0, :, unit * kernel.wide : (unit + 1) * kernel.wide] = joined[: kernel.new].astype(output.dtype)
        return
    for number, part in enumerate(parts):
        head, place = unit * len(parts) + number, number // kernel.groups
        columns = part[: kernel.new, place * kernel.size : (place + 1) * kernel.size]
        output[0, :, head * kernel.size : (head + 1) * kernel.size] = columns.astype(output.dtype)
