"""Drafting of a whole block by a small T5 decoder, as one kernel for TPUs that reads the decoder's weights once.

XLA reads a draft model's weights from HBM at every draft step, and a step of T5 small is 180 operations. The kernel
copies all matrices to VMEM, where they stay for the whole block: it feeds a missed token, then feeds and draws one
token after another. Caches stay in HBM, because those of many rows do not fit; the kernel reads those of the next row
while it computes. It rounds where XLA's path rounds.

Shape letters: those of `core/types.py`, and here `E` is d_model, `F` is d_ff, `H` is the number of heads, `K` is
head_dim, `N` is the number of encoder tokens, `M` is the number of rows of the embedding, and `R` is `B` in whole
registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from speccascade_jax.core.types import Array
from speccascade_jax.models.cache import Layers
from speccascade_jax.models.decode_attention import LANES
from speccascade_jax.runtime import platforms

_START, _MISSED, _MISSED_TOKEN, _PENDING, _FIRST, _SAMPLED, _LATE = range(7)
"""Rows of the numbers that `Kernel.__call__` gives to the kernel."""
_QKV, _SELF_OUT, _QUERY, _CROSS_OUT, _WI, _WO = range(6)
"""Places of a layer's matrices in `Weights.layers`."""
SUBLANES = 16
"""Rows of a register of bfloat16, and a multiple of those of float32."""


class Weights(NamedTuple):
    """A decoder's weights, in the dtype of its activations; each layer's matrices are in the order of their use.

    Attributes:
        table: the embedding, `[M, E]`.
        layers: per layer `qkv` `[E, 3 H K]`, the output's `[H K, E]`, the cross-attention's queries `[E, H K]` and
            output `[H K, E]`, both gated halves `[E, 2 F]`, and `[F, E]`.
        head: the output layer, `[E, M]`.
        scales: `[E]` each, scales of the norms in the order of their use: three per layer, and the last.
    """

    table: Array
    layers: tuple[tuple[Array, ...], ...]
    head: Array
    scales: tuple[Array, ...]


class Caches(NamedTuple):
    """Per layer, keys `[B * H, K, S]` and values `[B * H, S, K]`, and those of the encoder's `N` tokens."""

    keys: Layers
    values: Layers
    cross_keys: Layers
    cross_values: Layers


class Feed(NamedTuple):
    """Tokens and numbers with which the kernel feeds and draws.

    Attributes:
        start: int32 `[B]`, the slot of the first token that is fed.
        missed: bool `[B]`, whether a row is fed its missed token before its pending one.
        tokens: int32 `[B, 2]`, the missed token and the pending one.
        uniforms: float32 `[B, G]`, random numbers in [0, 1) of the draws.
        temperature: float32 `[B]`; 0 is greedy.
        bias: float32 `[B, H, T, S]`, the mask and relative bias of `T` consecutive slots' queries.
        first: int32 `[B]`, the slot of the first query of `bias`.
        cross_bias: float32 `[B, 1, 1, N]`.
    """

    start: Array
    missed: Array
    tokens: Array
    uniforms: Array
    temperature: Array
    bias: Array
    first: Array
    cross_bias: Array


@dataclass(frozen=True)
class Kernel:
    """One kernel: its sizes and the call. Turn 0 of its grid feeds missed tokens, and each later turn drafts a token.

    Attributes:
        rows, turns: `B`, and the number of tokens that are fed after the missed one.
        layers, heads, size: `L`, `H` and `K`.
        width, hidden: `E` and `F`.
        entries, vocab: `M`, and how many entries of it are tokens.
        slots, fixed: `S` and `N`.
        dtype: dtype of weights and caches.
        epsilon: that of the norms.
        gate: function of the first half of the gated units.
    """

    rows: int
    turns: int
    layers: int
    heads: int
    size: int
    width: int
    hidden: int
    entries: int
    vocab: int
    slots: int
    fixed: int
    dtype: str
    epsilon: float
    gate: Callable[[Array], Array]

    @property
    def inner(self) -> int:
        """Columns of queries, `H K`."""
        return self.heads * self.size

    @property
    def padded(self) -> int:
        """Rows of the state: `R`."""
        return -(-self.rows // 8) * 8

    @property
    def group(self) -> int:
        """Rows whose attention is computed at the same time."""
        # One row's products and sums wait for each other; with four rows, the core has others to issue meanwhile.
        return max(size for size in (4, 2, 1) if self.rows % size == 0)

    @property
    def padded_heads(self) -> int:
        """Rows of one row's attention logits: the heads in whole registers."""
        # Rows beyond the heads have queries of zeros. Their results are finite, and no column keeps them.
        return -(-self.heads // 8) * 8

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Shapes of a layer's matrices."""
        e, a, f = self.width, self.inner, self.hidden
        return (e, 3 * a), (a, e), (e, a), (a, e), (e, 2 * f), (f, e)

    @property
    def fits(self) -> bool:
        """Returns whether all sizes are whole tiles, and the weights and buffers fit into VMEM."""
        columns = [size for shape in self.shapes for size in shape]
        whole = all(size % LANES == 0 for size in (*columns, self.entries, self.slots))
        whole = whole and self.size % SUBLANES == 0 and self.entries % SUBLANES == 0
        return whole and self.held_bytes <= platforms.vmem_bytes()

    @property
    def held_bytes(self) -> int:
        """Bytes in VMEM: weights, caches of two rows, biases, and float32 logits, also as output and as weights."""
        width = jnp.dtype(self.dtype).itemsize
        weights = self.layers * sum(rows * columns for rows, columns in self.shapes) + self.width * self.entries
        # Two halves of keys and of values; a row of slots fills whole tiles.
        slots = 2 * 2 * self.group * self.inner * (self.slots + -(-self.fixed // LANES) * LANES)
        bias = 4 * self.rows * (self.turns + 2) * self.padded_heads * self.slots
        return width * (weights + slots) + bias + 4 * 4 * self.padded * self.entries

    def __call__(self, weights: Weights, caches: Caches, feed: Feed) -> tuple[Array, Array, Caches]:
        """Returns logits float32 `[B, turns, M]`, the drawn tokens int32 `[B, turns]`, and the caches.

        Entries of the logits that are no tokens are -inf.
        """
        # What no row needs, such as turn 0 or a draw, is told by scalars. The kernel's branches cannot depend on
        # vectors, which would have to be reduced first.
        sampled = jnp.broadcast_to(jnp.any(feed.temperature > 0), feed.start.shape)
        late = jnp.broadcast_to(jnp.any(feed.missed), feed.start.shape)
        numbers = (feed.start, feed.missed, feed.tokens[:, 0], feed.tokens[:, 1], feed.first, sampled, late)
        # The slots of values are the last axis too, because a tile has 128 columns, and heads have fewer.
        values, cross_values = (tuple(jnp.swapaxes(x, -1, -2) for x in part) for part in (caches[1], caches[3]))
        outputs = self._call(
            jnp.stack([number.astype(jnp.int32) for number in numbers]),
            *self._whole(weights, feed),
            weights.table, weights.head, *(matrix for layer in weights.layers for matrix in layer),
            *caches.cross_keys, *cross_values, *caches.keys, *values,
        )  # fmt: skip
        logits, tokens, *written = outputs
        keys, values = written[: self.layers], tuple(jnp.swapaxes(x, -1, -2) for x in written[self.layers :])
        return logits.swapaxes(0, 1), tokens.swapaxes(0, 1), caches._replace(keys=tuple(keys), values=values)

    def _whole(self, weights: Weights, feed: Feed) -> tuple[Array, ...]:
        """Returns the operands that are in VMEM as a whole, with rows in whole registers."""
        rows, heads = self.padded - self.rows, self.padded_heads - self.heads
        missing = self.turns - feed.uniforms.shape[1]  # the bonus position draws nothing
        uniforms = jnp.pad(feed.uniforms.T, ((0, missing), (0, rows)))[..., None]
        bias = jnp.pad(feed.bias, ((0, 0), (0, heads), (0, 0), (0, 0))).swapaxes(1, 2)
        scales = [scale[None] for scale in weights.scales]
        return jnp.pad(feed.temperature, (0, rows))[:, None], uniforms, bias, feed.cross_bias[:, 0], *scales

    def _call(self, *operands: Array) -> list[Array]:
        caches = operands[-2 * self.layers :]
        first, outputs, whole = len(operands) - len(caches), 2, 4 + 3 * self.layers + 1
        # The kernel copies these arrays itself. Pallas would copy a whole operand before the first turn, and twice.
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        # Turns 0 and 1 have the same block, which turn 1 fills.
        logits = pl.BlockSpec((1, self.rows, self.entries), lambda turn, _: (jnp.maximum(turn - 1, 0), 0, 0))
        results: list[Array] = pl.pallas_call(
            partial(_run, self),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(self.turns + 1,),
                in_specs=[*[pl.BlockSpec(memory_space=pltpu.VMEM)] * whole, *[anywhere] * (len(operands) - whole - 1)],
                out_specs=[logits, pl.BlockSpec(memory_space=pltpu.SMEM), *[anywhere] * len(caches)],
                scratch_shapes=self._scratch(),
            ),
            out_shape=[
                jax.ShapeDtypeStruct((self.turns, self.rows, self.entries), jnp.float32),
                jax.ShapeDtypeStruct((self.turns, self.rows), jnp.int32),
                *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches),
            ],
            # The caches are updated in place: a turn writes the tiles that hold its tokens.
            input_output_aliases={first + number: outputs + number for number in range(len(caches))},
            cost_estimate=self._costs(),
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=platforms.vmem_bytes()),
            interpret=platforms.interpreter(),
            name="resident_draft",
        )(*operands)
        return results

    def _scratch(self) -> list[Any]:
        dtype: Any = jnp.dtype(self.dtype)
        state, slots = (self.padded, self.width), (2, 2, self.group * self.heads, self.size)
        return [
            *(pltpu.VMEM((self.layers, *shape), dtype) for shape in self.shapes),
            pltpu.VMEM((self.width, self.entries), dtype),
            # Two halves: the kernel computes the rows of one while the rows of the other arrive.
            pltpu.VMEM((*slots, self.slots), dtype),
            pltpu.VMEM((*slots, self.fixed), dtype),
            pltpu.VMEM((self.rows, SUBLANES, self.width), dtype),
            pltpu.VMEM(state, jnp.float32),
            pltpu.VMEM((self.padded, 3 * self.inner), jnp.float32),
            pltpu.VMEM((self.padded, self.inner), jnp.float32),
            pltpu.VMEM((self.padded, self.entries), jnp.float32),
            pltpu.SMEM((self.rows,), jnp.int32),
            pltpu.SemaphoreType.DMA((self.layers * len(self.shapes) + 1,)),
            pltpu.SemaphoreType.DMA((2, 2, 2)),
            pltpu.SemaphoreType.DMA((self.group, 2)),
            pltpu.SemaphoreType.DMA((self.rows,)),
        ]

    def _costs(self) -> pl.CostEstimate:
        """Returns the costs of a call: weights are read once, caches in each turn, and logits are written."""
        # Turn 0 is left out: it runs only in rounds after a block that was kept whole.
        width = jnp.dtype(self.dtype).itemsize
        weights = self.layers * sum(rows * columns for rows, columns in self.shapes) + self.width * self.entries
        slots = self.rows * self.layers * 2 * self.inner
        moved = width * (weights + self.turns * slots * (self.slots + LANES + self.fixed))
        logits = self.turns * self.rows * self.entries
        return pl.CostEstimate(
            flops=2 * self.turns * self.rows * weights, transcendentals=logits, bytes_accessed=moved + 4 * logits
        )


class _Refs(NamedTuple):
    """The kernel's arrays, in the order of its operands, outputs and scratch.

    `numbers` `[7, B]` are those of `Kernel.__call__`. `kept` and `head` hold the weights, `near` and `near_fixed` the
    keys and values `[2, 2, rows H, K, S]` of the group of rows that is computed and of the next.
    """

    numbers: Any
    temperature: Any
    uniforms: Any
    bias: Any
    cross_bias: Any
    scales: list[Any]
    table: Any
    far_head: Any
    far_matrices: list[Any]
    cross: list[list[Any]]
    logits: Any
    tokens: Any
    caches: list[list[Any]]
    kept: list[Any]
    head: Any
    near: Any
    near_fixed: Any
    embedded: Any
    state: Any
    columns: Any
    mixed: Any
    masses: Any
    current: Any
    weight_copies: Any
    slot_copies: Any
    write_copies: Any
    row_copies: Any

    @classmethod
    def of(cls, kernel: Kernel, refs: Iterator[Any]) -> _Refs:
        """Returns the arrays by name."""

        def take(count: int) -> list[Any]:
            return list(islice(refs, count))

        depth = kernel.layers
        inputs = [*take(5), take(3 * depth + 1), *take(2), take(6 * depth), [take(depth), take(depth)]]
        take(2 * depth)  # the caches before the call are the same memory as those after it
        outputs = [*take(2), [take(depth), take(depth)]]
        scratch: list[Any] = [take(len(kernel.shapes)), *refs]
        return cls(*inputs, *outputs, *scratch)


def _run(kernel: Kernel, *refs: Any) -> None:
    """Runs one turn: feeds each row's current token, and draws the next."""
    r, turn = _Refs.of(kernel, iter(refs)), pl.program_id(0)
    first = 1 - r.numbers[_LATE, 0]  # if no row missed a token, turn 0 feeds nothing

    # All matrices set out at once, in the order of their use, so that the first layers compute while the last arrive.
    @pl.when(turn == 0)
    def begin() -> None:
        for number in range(len(r.far_matrices) + 1):
            _weight_copy(kernel, r, number).start()
        # rows that only fill registers are multiplied too, and must not be NaN
        r.state[...], r.mixed[...] = jnp.zeros_like(r.state), jnp.zeros_like(r.mixed)

    @pl.when(turn >= first)
    def forward() -> None:
        pl.when(turn == first)(partial(_reads(kernel, r, 0, crossed=False), 0))
        _embed(kernel, r, turn)
        for layer in range(kernel.layers):
            _layer(kernel, r, turn, layer, turn == first)

    @pl.when(turn == 0)
    def rest() -> None:
        r.logits[...] = jnp.zeros_like(r.logits)  # turn 1 overwrites it

    @pl.when(turn > 0)
    def draw() -> None:
        pl.when(turn == 1)(lambda: _weight_copy(kernel, r, len(r.far_matrices)).wait())
        _draw(kernel, r, turn - 1)


def _weight_copy(kernel: Kernel, r: _Refs, number: int) -> Any:
    """Returns the copy of a matrix to VMEM; matrices are numbered in the order of their use."""
    layer, place = divmod(number, len(kernel.shapes))
    is_head = number == len(r.far_matrices)
    source, target = (r.far_head, r.head) if is_head else (r.far_matrices[number], r.kept[place].at[layer])
    return pltpu.make_async_copy(source, target, r.weight_copies.at[number])


def _position(r: _Refs, turn: Any, row: Any) -> Any:
    """Returns the slot of a row's current token. A row that missed none feeds its pending token in turn 0 and in 1."""
    return r.numbers[_START, row] + jnp.maximum(turn - 1 + r.numbers[_MISSED, row], 0)


def _embed(kernel: Kernel, r: _Refs, turn: Any) -> None:
    """Puts the embeddings of the current tokens into the state."""

    def current(row: Any) -> Any:
        missed = (turn == 0) & (r.numbers[_MISSED, row] > 0)
        fed = jnp.where(missed, r.numbers[_MISSED_TOKEN, row], r.numbers[_PENDING, row])
        return jnp.where(turn <= 1, fed, r.current[row])

    def copy(row: Any) -> Any:
        # A copy takes whole tiles, so the tokens around this one come along.
        begin = pl.multiple_of(jax.lax.div(current(row), SUBLANES) * SUBLANES, SUBLANES)
        return pltpu.make_async_copy(r.table.at[pl.ds(begin, SUBLANES)], r.embedded.at[row], r.row_copies.at[row])

    # All copies begin before the first is awaited, because each takes longer to arrive than a row takes to be summed.
    def start(row: Any, _: None) -> None:
        copy(row).start()

    def put(row: Any, _: None) -> None:
        copy(row).wait()
        token = jax.lax.rem(current(row), SUBLANES)
        chosen = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, kernel.width), 0) == token
        near = r.embedded[row].astype(jnp.float32)
        r.state[pl.ds(row, 1), :] = jnp.sum(jnp.where(chosen, near, 0.0), axis=0, keepdims=True)

    jax.lax.fori_loop(0, kernel.rows, start, None)
    jax.lax.fori_loop(0, kernel.rows, put, None)


def _layer(kernel: Kernel, r: _Refs, turn: Any, layer: int, is_first: Any) -> None:
    """Applies one layer to the state."""

    # A layer waits for its own matrices only.
    @pl.when(is_first)
    def wait() -> None:
        count = len(kernel.shapes)
        for number in range(layer * count, (layer + 1) * count):
            _weight_copy(kernel, r, number).wait()

    # Each matrix is read where it is used: an array that is read earlier would be stored to VMEM once more.
    product = partial(_product, kernel, r, layer)
    r.columns[...] = product(_normed(kernel, r, 3 * layer), _QKV)
    _attend(kernel, r, turn, layer, crossed=False)
    _add(kernel, r, product(r.mixed[...], _SELF_OUT))
    r.columns[:, 0 : kernel.inner] = product(_normed(kernel, r, 3 * layer + 1), _QUERY)
    _attend(kernel, r, turn, layer, crossed=True)
    _add(kernel, r, product(r.mixed[...], _CROSS_OUT))
    units = _rounded(kernel, product(_normed(kernel, r, 3 * layer + 2), _WI))
    first, second = units[:, 0 : kernel.hidden], units[:, kernel.hidden :]
    _add(kernel, r, product(_rounded(kernel, kernel.gate(first)) * second, _WO))


def _product(kernel: Kernel, r: _Refs, layer: int, x: Array, number: int) -> Array:
    """Multiplies by one of a layer's matrices; returns float32."""
    return _dot(x.astype(kernel.dtype), r.kept[number][layer])


def _normed(kernel: Kernel, r: _Refs, number: int) -> Array:
    """Returns the state after the norm of this number, in the dtype of the weights."""
    x = r.state[...]
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + kernel.epsilon)
    scaled: Array = (x * r.scales[number][...].astype(jnp.float32)).astype(kernel.dtype)
    return scaled


def _rounded(kernel: Kernel, x: Array) -> Array:
    return x.astype(kernel.dtype).astype(jnp.float32)


def _add(kernel: Kernel, r: _Refs, x: Array) -> None:
    """Adds a product to the state."""
    r.state[...] = _rounded(kernel, r.state[...] + _rounded(kernel, x))


def _dot(left: Array, right: Array, contracted: tuple[int, int] = (1, 0)) -> Array:
    axes = ((contracted[:1], contracted[1:]), ((), ()))
    precision = jax.lax.Precision.HIGHEST if right.dtype == jnp.float32 else None
    return jax.lax.dot_general(left, right, axes, precision=precision, preferred_element_type=jnp.float32)


# --- attention


def _copies(kernel: Kernel, r: _Refs, layer: int, crossed: bool, group: Any) -> list[Any]:
    """Returns the copies of a group's keys and values to VMEM."""
    near, far = (r.near_fixed, r.cross) if crossed else (r.near, r.caches)
    half, count = jax.lax.rem(group, 2), kernel.group * kernel.heads
    heads = pl.ds(group * count, count)
    return [
        pltpu.make_async_copy(
            far[part][layer].at[heads], near.at[half, part], r.slot_copies.at[int(crossed), half, part]
        )
        for part in range(2)
    ]


def _reads(kernel: Kernel, r: _Refs, layer: int, crossed: bool) -> Callable[[Any], None]:
    """Returns a function that starts the copies of a group's keys and values."""

    def start(group: Any) -> None:
        for copy in _copies(kernel, r, layer, crossed, jnp.asarray(group, jnp.int32)):
            copy.start()

    return start


def _attend(kernel: Kernel, r: _Refs, turn: Any, layer: int, crossed: bool) -> None:
    """Puts the attention of each row's query into `mixed`; self-attention first writes the row's key and value."""
    # while a group of rows is computed, the next one's caches are read, or those of the next attention's first group
    following = layer + 1 if crossed else layer
    last, groups = following == kernel.layers, kernel.rows // kernel.group
    start_next = _reads(kernel, r, 0 if last else following, not crossed)
    more = turn < kernel.turns if last else True
    turned = [] if crossed else [_turned(kernel, r, number) for number in (1, 2)]

    def attend(group: Any, _: None) -> None:
        pl.when(group + 1 < groups)(lambda: _reads(kernel, r, layer, crossed)(group + 1))
        pl.when((group + 1 == groups) & more)(lambda: start_next(0))
        for copy in _copies(kernel, r, layer, crossed, group):
            copy.wait()
        places = [(group * kernel.group + i, jax.lax.rem(group, 2), i) for i in range(kernel.group)]
        writes = [] if crossed else _write(kernel, r, turn, layer, turned, places)
        # the rows of a group are computed together, because each waits for its own products most of the time
        mixed = [_row_mixed(kernel, r, turn, crossed, *place) for place in places]
        for place, x in zip(places, mixed, strict=True):
            r.mixed[pl.ds(place[0], 1), :] = x
        for copy in writes:
            copy.wait()

    jax.lax.fori_loop(0, groups, attend, None)


def _turned(kernel: Kernel, r: _Refs, number: int) -> Array:
    """Returns all rows' keys (number 1) or values (2), `[H K, R]`, with the axes that they have in a cache."""
    columns: Array = r.columns[:, number * kernel.inner : (number + 1) * kernel.inner]
    return columns.T.astype(kernel.dtype)


def _heads_of(kernel: Kernel, number: int) -> slice:
    """Returns the heads of a row in the buffers, which hold a group of rows."""
    return slice(number * kernel.heads, (number + 1) * kernel.heads)


def _row_mixed(kernel: Kernel, r: _Refs, turn: Any, crossed: bool, row: Any, half: Any, number: int) -> Array:
    """Returns the attention of a row's query, `[1, H K]`; the row is in a half of the buffers, under a number."""
    near = r.near_fixed if crossed else r.near
    keys, values = (near[half, part, _heads_of(kernel, number)].reshape(kernel.inner, -1) for part in range(2))
    place = _position(r, turn, row) - r.numbers[_FIRST, row]
    bias = r.cross_bias[row] if crossed else r.bias[row, place]
    return _mixed(kernel, r.columns[pl.ds(row, 1), 0 : kernel.inner], keys, values, bias)


def _mixed(kernel: Kernel, query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """Returns the attention `[1, H K]` of one row's query to keys and values `[H K, S]`; `bias` is `[H or 1, S]`."""
    shape = (kernel.padded_heads, kernel.inner)
    head = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    is_own = jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, shape, 1), kernel.size) == head
    # Each head's query has zeros at the columns of all others, so one product gives the logits of all heads.
    queries = jnp.where(is_own, jnp.broadcast_to(query, shape), 0.0).astype(kernel.dtype)
    logits = _dot(queries, keys) + bias
    weights = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
    # Each head's weights meet the values of all heads; only the columns of its own are kept.
    mixed = _dot(weights.astype(kernel.dtype), values, (1, 1)) / jnp.sum(weights, -1, keepdims=True)
    return jnp.sum(jnp.where(is_own, mixed, 0.0), 0, keepdims=True)


def _write(
    kernel: Kernel, r: _Refs, turn: Any, layer: int, turned: list[Array], places: list[tuple[Any, Any, int]]
) -> list[Any]:
    """Puts the new keys and values of a group's rows into VMEM, and starts the copies of their tiles to the cache.

    `turned` holds the new keys and values of all rows, `[H K, R]` each.
    """
    moved = [[_moved(kernel, r, turn, row, entries) for entries in turned] for row, _, _ in places]
    copies = []
    for (row, half, number), entries in zip(places, moved, strict=True):
        position, heads = _position(r, turn, row), pl.ds(row * kernel.heads, kernel.heads)
        tile = pl.multiple_of(jax.lax.div(position, LANES) * LANES, LANES)
        for part in range(2):
            near = r.near.at[half, part, _heads_of(kernel, number), :, pl.ds(tile, LANES)]
            is_new = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1) == position - tile
            both = jnp.where(is_new, entries[part], near[...].reshape(kernel.inner, LANES))
            near[...] = both.reshape(kernel.heads, kernel.size, LANES)
            far = r.caches[part][layer].at[heads, :, pl.ds(tile, LANES)]
            copies.append(pltpu.make_async_copy(near, far, r.write_copies.at[number, part]))
    # A copy that begins is a barrier to the schedule, so all of them begin after the last product.
    for copy in copies:
        copy.start()
    return copies


def _moved(kernel: Kernel, r: _Refs, turn: Any, row: Any, entries: Array) -> Array:
    """Returns a row's entry of `entries` `[H K, R]` at the column of its slot in a tile, `[H K, 128]`."""
    shape = (kernel.padded, LANES)
    rows, lanes = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    chosen = (lanes == jax.lax.rem(_position(r, turn, row), LANES)) & (rows == row)
    # a product with a one and zeros moves the entry
    return _dot(entries, chosen.astype(kernel.dtype)).astype(kernel.dtype)


# --- sampling


def _draw(kernel: Kernel, r: _Refs, slot: Any) -> None:
    """Writes the logits after the current tokens, and draws the next tokens."""
    logits = _dot(_normed(kernel, r, 3 * kernel.layers), r.head[...])
    entry = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    # The engine never sees entries that only fill tiles, but a draw and the maximum would.
    logits = jnp.where(entry < kernel.vocab, logits, -jnp.inf)
    r.logits[0] = logits[0 : kernel.rows]
    largest = jnp.max(logits, -1, keepdims=True)
    # Indices are float32, which holds them exactly, because TPUs compare floats across columns.
    greedy = jnp.min(jnp.where(logits == largest, entry, kernel.vocab - 1).astype(jnp.float32), -1, keepdims=True)
    _store(kernel, r, slot, greedy)

    @pl.when(r.numbers[_SAMPLED, 0] > 0)
    def sample() -> None:
        temperature = r.temperature[...]
        # Their sum is not 1, because the search divides by it once, instead of all entries.
        r.masses[...] = jnp.exp((logits - largest) / jnp.where(temperature > 0, temperature, 1.0))
        drawn = _sampled(kernel, r, r.uniforms[slot])
        _store(kernel, r, slot, jnp.where(temperature > 0, drawn, greedy))


def _sampled(kernel: Kernel, r: _Refs, uniform: Array) -> Array:
    """Returns tokens, float32 `[R, 1]`, drawn as `core.sampling.sample` draws: first a tile, then an entry."""
    tiles, none = kernel.entries // LANES, jnp.zeros((kernel.padded, 1), jnp.float32)

    def mass(tile: Any) -> Any:
        return r.masses[:, pl.ds(pl.multiple_of(tile * LANES, LANES), LANES)]

    def add(tile: Any, total: Array) -> Array:
        return total + jnp.sum(mass(tile), -1, keepdims=True)

    rest = uniform * jax.lax.fori_loop(0, tiles, add, none)

    def search(tile: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        total, before, chosen, inside = carry
        after = total + jnp.sum(mass(tile), -1, keepdims=True)
        # sums in the same order as above end at the same total, so the last tile with mass is reached at the latest
        reached = (after > rest) & (chosen < 0)
        chosen = jnp.where(reached, tile.astype(jnp.float32), chosen)
        return after, jnp.where(reached, total, before), chosen, jnp.where(reached, mass(tile), inside)

    start = (none, none, none - 1.0, jnp.zeros((kernel.padded, LANES), jnp.float32))
    _, before, chosen, inside = jax.lax.fori_loop(0, tiles, search, start)
    # A product with a triangle of ones gives the cumulative sums inside the tile.
    square = [jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1)]
    reached = _dot(inside, (square[0] <= square[1]).astype(jnp.float32)) > rest - before
    lanes = jax.lax.broadcasted_iota(jnp.int32, inside.shape, 1).astype(jnp.float32)
    last = jnp.max(jnp.where(inside > 0, lanes, 0.0), -1, keepdims=True)
    lane = jnp.min(jnp.where(reached & (inside > 0), lanes, float(LANES)), -1, keepdims=True)
    # Logits that are no numbers choose no tile. Their token is meaningless, but it must be one, because it is fed.
    token: Array = jnp.maximum(chosen, 0.0) * LANES + jnp.minimum(lane, last)
    return token


def _store(kernel: Kernel, r: _Refs, slot: Any, tokens: Array) -> None:
    """Puts drawn tokens, float32 `[R, 1]`, into the output and into `current`."""
    # The next turn's copies of embeddings need scalars, and a sum with one nonzero entry turns a vector into one.
    number = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 0)

    def store(row: Any, _: None) -> None:
        token = jnp.sum(jnp.where(number == row, tokens, 0.0)).astype(jnp.int32)
        r.tokens[slot, row], r.current[row] = token, token

    jax.lax.fori_loop(0, kernel.rows, store, None)
