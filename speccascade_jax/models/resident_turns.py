"""Body of the kernel that drafts blocks (`resident_draft`). Each turn feeds one token of every row, and draws the next.

Shape letters: those of `resident_draft`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from speccascade_jax.core.types import Array
from speccascade_jax.models.decode_attention import LANES, dot
from speccascade_jax.models.resident_sizes import SUBLANES, Sizes

_START, _MISSED, _MISSED_TOKEN, _PENDING, _FIRST, _SAMPLED, _LATE = range(7)
"""Indices of the rows of `_Refs.numbers`."""
_QKV, _SELF_OUT, _QUERY, _CROSS_OUT, _WI, _WO = range(6)
"""Indices of a layer's matrices in `resident_draft.Weights.layers`."""


class _Refs(NamedTuple):
    """The kernel's arrays, in the order of its operands, outputs and scratch.

    `numbers` `[7, B]` is the array of scalars that `Kernel.__call__` builds. `kept` and `head` hold the weights in
    VMEM. `stay` holds the keys and values `[layers, 2, B H, K, S]` of the layers whose caches stay in VMEM. `near`
    `[2, 2, rows H, K, S]` holds those of the current group of rows and of the next group. `stay` and `near` have one
    array for self-attention and one for cross-attention.
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
    stay: list[Any]
    near: list[Any]
    embedded: Any
    state: Any
    columns: Any
    mixed: Any
    masses: Any
    current: Any
    weight_copies: Any
    stay_copies: Any
    slot_copies: Any
    write_copies: Any
    row_copies: Any

    @classmethod
    def of(cls, sizes: Sizes, refs: Iterator[Any]) -> _Refs:
        """Returns the arrays by name."""

        def take(count: int) -> list[Any]:
            return list(islice(refs, count))

        depth = sizes.layers
        inputs = [*take(5), take(3 * depth + 1), *take(2), take(6 * depth), [take(depth), take(depth)]]
        take(2 * depth)  # the caches before the call are the same memory as those after it
        outputs = [*take(2), [take(depth), take(depth)]]
        kept, (head, *caches) = take(len(sizes.shapes)), take(5)
        scratch: list[Any] = [kept, head, caches[::2], caches[1::2], *refs]
        return cls(*inputs, *outputs, *scratch)


def run(sizes: Sizes, *refs: Any) -> None:
    """Runs one turn: feeds each row's current token, and draws the next."""
    r, turn = _Refs.of(sizes, iter(refs)), pl.program_id(0)
    first = 1 - r.numbers[_LATE, 0]  # If no row missed a token, turn 0 feeds nothing.

    # The copies of all matrices start at once, in the order of their use, so that the first layers are computed while
    # the matrices of later layers are being copied.
    @pl.when(turn == 0)
    def begin() -> None:
        for layer in range(sizes.layers):
            _start_layer(sizes, r, layer)
        _weight_copy(sizes, r, len(r.far_matrices)).start()
        # Padding rows are multiplied too, so they must not be NaN.
        r.state[...], r.mixed[...] = jnp.zeros_like(r.state), jnp.zeros_like(r.mixed)

    @pl.when(turn >= first)
    def forward() -> None:
        pl.when(turn == first)(partial(_read_first, sizes, r, turn))
        _embed(sizes, r, turn)
        for layer in range(sizes.layers):
            _layer(sizes, r, turn, layer, turn == first)

    @pl.when(turn == 0)
    def rest() -> None:
        r.logits[...] = jnp.zeros_like(r.logits)  # turn 1 overwrites it

    @pl.when(turn > 0)
    def draw() -> None:
        pl.when(turn == 1)(lambda: _weight_copy(sizes, r, len(r.far_matrices)).wait())
        _draw(sizes, r, turn - 1)

    @pl.when(turn == sizes.turns)
    def end() -> None:
        # The next round reads these tiles, and the kernel must not end while a copy is in flight.
        for layer in range(sizes.kept(crossed=False)):
            _for_written_tiles(sizes, r, layer, lambda copy: copy.wait())


def _start_layer(sizes: Sizes, r: _Refs, layer: int) -> None:
    """Starts the copies of a layer's matrices, and of its caches that stay."""
    count = len(sizes.shapes)
    for number in range(layer * count, (layer + 1) * count):
        _weight_copy(sizes, r, number).start()
    # The caches follow their layer's matrices, so that they arrive when the layer begins, not after the last layer's.
    for crossed in (False, True):
        for copy in _stay_copies(sizes, r, layer, crossed):
            copy.start()


def _weight_copy(sizes: Sizes, r: _Refs, number: int) -> Any:
    """Returns the copy of a matrix to VMEM; matrices are numbered in the order of their use."""
    layer, place = divmod(number, len(sizes.shapes))
    is_head = number == len(r.far_matrices)
    source, target = (r.far_head, r.head) if is_head else (r.far_matrices[number], r.kept[place].at[layer])
    return pltpu.make_async_copy(source, target, r.weight_copies.at[number])


def _position(r: _Refs, turn: Any, row: Any) -> Any:
    """Returns the slot of a row's current token.

    A row without a missed token feeds its pending token in turn 0, and again in turn 1.
    """
    return r.numbers[_START, row] + jnp.maximum(turn - 1 + r.numbers[_MISSED, row], 0)


def _embed(sizes: Sizes, r: _Refs, turn: Any) -> None:
    """Sets the hidden state to the embeddings of the current tokens."""

    def current(row: Any) -> Any:
        missed = (turn == 0) & (r.numbers[_MISSED, row] > 0)
        fed = jnp.where(missed, r.numbers[_MISSED_TOKEN, row], r.numbers[_PENDING, row])
        return jnp.where(turn <= 1, fed, r.current[row])

    def copy(row: Any) -> Any:
        # Only whole tiles can be copied, so the embeddings of the neighbouring ids are copied too.
        begin = pl.multiple_of(jax.lax.div(current(row), SUBLANES) * SUBLANES, SUBLANES)
        return pltpu.make_async_copy(r.table.at[pl.ds(begin, SUBLANES)], r.embedded.at[row], r.row_copies.at[row])

    # All copies start before the kernel waits for the first, because a copy takes longer than the sum over its tile.
    def start(row: Any, _: None) -> None:
        copy(row).start()

    def put(row: Any, _: None) -> None:
        copy(row).wait()
        token = jax.lax.rem(current(row), SUBLANES)
        chosen = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, sizes.width), 0) == token
        near = r.embedded[row].astype(jnp.float32)
        r.state[pl.ds(row, 1), :] = jnp.sum(jnp.where(chosen, near, 0.0), axis=0, keepdims=True)

    jax.lax.fori_loop(0, sizes.rows, start, None)
    jax.lax.fori_loop(0, sizes.rows, put, None)


def _layer(sizes: Sizes, r: _Refs, turn: Any, layer: int, is_first: Any) -> None:
    """Applies one layer to the state."""

    # A layer waits only for its own matrices, so that it can begin while later ones are being copied.
    @pl.when(is_first)
    def wait() -> None:
        count = len(sizes.shapes)
        for number in range(layer * count, (layer + 1) * count):
            _weight_copy(sizes, r, number).wait()

    # Each matrix is loaded where it is used. If it were loaded earlier, the compiler would store it to VMEM again.
    product = partial(_product, sizes, r, layer)
    r.columns[...] = product(_normed(sizes, r, 3 * layer), _QKV)
    _attend(sizes, r, turn, layer, crossed=False, is_first=is_first)
    _add(sizes, r, product(r.mixed[...], _SELF_OUT))
    r.columns[:, 0 : sizes.inner] = product(_normed(sizes, r, 3 * layer + 1), _QUERY)
    _attend(sizes, r, turn, layer, crossed=True, is_first=is_first)
    _add(sizes, r, product(r.mixed[...], _CROSS_OUT))
    units = _rounded(sizes, product(_normed(sizes, r, 3 * layer + 2), _WI))
    first, second = units[:, 0 : sizes.hidden], units[:, sizes.hidden :]
    _add(sizes, r, product(_rounded(sizes, sizes.gate(first)) * second, _WO))


def _product(sizes: Sizes, r: _Refs, layer: int, x: Array, number: int) -> Array:
    """Multiplies by one of a layer's matrices; returns float32."""
    return dot(x.astype(sizes.dtype), r.kept[number][layer])


def _normed(sizes: Sizes, r: _Refs, number: int) -> Array:
    """Returns the state after the norm of this number, in the dtype of the weights."""
    x = r.state[...]
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + sizes.epsilon)
    scaled: Array = (x * r.scales[number][...].astype(jnp.float32)).astype(sizes.dtype)
    return scaled


def _rounded(sizes: Sizes, x: Array) -> Array:
    return x.astype(sizes.dtype).astype(jnp.float32)


def _add(sizes: Sizes, r: _Refs, x: Array) -> None:
    """Adds a product to the state."""
    r.state[...] = _rounded(sizes, r.state[...] + _rounded(sizes, x))


# --- attention


def _stay_copies(sizes: Sizes, r: _Refs, layer: int, crossed: bool) -> list[Any]:
    """Returns the copies of a layer's keys and values of all rows to VMEM; none if they do not stay there."""
    if layer >= sizes.kept(crossed):
        return []
    far, near, done = (r.caches, r.cross)[crossed], r.stay[crossed], r.stay_copies.at[int(crossed), layer]
    return [pltpu.make_async_copy(far[part][layer], near.at[layer, part], done.at[part]) for part in range(2)]


def _read_anew(sizes: Sizes) -> list[tuple[int, bool]]:
    """Returns the pairs (layer, `crossed`) of attentions whose caches do not stay in VMEM, in the order of a turn."""
    # In each layer, self-attention precedes cross-attention. Caches are read ahead in this order.
    every = [(layer, crossed) for layer in range(sizes.layers) for crossed in (False, True)]
    return [(layer, crossed) for layer, crossed in every if layer >= sizes.kept(crossed)]


def _half(sizes: Sizes, turn: Any, layer: int, crossed: bool, group: Any) -> Any:
    """Returns which half of the buffers a group uses: successive groups alternate, also from one layer to the next."""
    # The first group of a layer is read while the last group of the layer before is computed, so it needs the other
    # half.
    kept = sizes.kept(crossed)
    number = turn * (sizes.layers - kept) + layer - kept
    return jax.lax.rem(number * sizes.groups + group, 2)


def _group_copies(sizes: Sizes, r: _Refs, turn: Any, layer: int, crossed: bool, group: Any) -> list[Any]:
    """Returns the copies of the keys and values of a group of rows to VMEM."""
    far, near, done = (r.caches, r.cross)[crossed], r.near[crossed], r.slot_copies.at[int(crossed)]
    half, count = _half(sizes, turn, layer, crossed, group), sizes.group * sizes.heads
    heads = pl.ds(group * count, count)
    return [
        pltpu.make_async_copy(far[part][layer].at[heads], near.at[half, part], done.at[half, part]) for part in range(2)
    ]


def _start_group(sizes: Sizes, r: _Refs, turn: Any, layer: int, crossed: bool, group: Any) -> None:
    for copy in _group_copies(sizes, r, turn, layer, crossed, jnp.asarray(group, jnp.int32)):
        copy.start()


def _read_first(sizes: Sizes, r: _Refs, turn: Any) -> None:
    """Starts the copies of the first group of rows that a turn reads from HBM, if it reads any."""
    for layer, crossed in _read_anew(sizes)[:1]:
        _start_group(sizes, r, turn, layer, crossed, 0)


def _read_next(sizes: Sizes, r: _Refs, turn: Any, layer: int, crossed: bool, group: Any) -> None:
    """Starts the copies of the next group of rows, and waits for those of this group.

    After an attention's last group, the next one is the first of the next attention, or of the next turn.
    """
    attentions = _read_anew(sizes)
    following = attentions.index((layer, crossed)) + 1
    is_last = group + 1 == sizes.groups

    @pl.when(~is_last)
    def next_group() -> None:
        _start_group(sizes, r, turn, layer, crossed, group + 1)

    @pl.when(is_last)
    def next_attention() -> None:
        if following < len(attentions):
            _start_group(sizes, r, turn, *attentions[following], 0)
        else:
            pl.when(turn < sizes.turns)(lambda: _read_first(sizes, r, turn + 1))

    for copy in _group_copies(sizes, r, turn, layer, crossed, group):
        copy.wait()


def _attend(sizes: Sizes, r: _Refs, turn: Any, layer: int, crossed: bool, is_first: Any) -> None:
    """Writes the attention of each row's query to `mixed`; self-attention first writes the row's key and value."""
    stays = layer < sizes.kept(crossed)
    turned = [] if crossed else [_turned(sizes, r, number) for number in (1, 2)]

    @pl.when(is_first)
    def wait() -> None:
        for copy in _stay_copies(sizes, r, layer, crossed):
            copy.wait()

    def attend(group: Any, _: None) -> None:
        if not stays:
            _read_next(sizes, r, turn, layer, crossed, group)
        near = partial(_near, sizes, r, turn, layer, crossed, group)
        rows = [_Row(group * sizes.group + i, near(i)) for i in range(sizes.group)]
        if not crossed:
            _write(sizes, r, turn, turned, rows)
        writes = [] if crossed or stays else _tile_copies(sizes, r, turn, layer, rows)
        # The compiler moves nothing across the start of a copy, so all copies start here, after `_write`'s products.
        for copy in writes:
            copy.start()
        # The rows of a group are computed together: a single row would spend most of the time waiting for its products.
        mixed = [_row_mixed(sizes, r, turn, crossed, row) for row in rows]
        for row, x in zip(rows, mixed, strict=True):
            r.mixed[pl.ds(row.number, 1), :] = x
        for copy in writes:
            copy.wait()

    jax.lax.fori_loop(0, sizes.groups, attend, None)
    # In the last turn, nothing changes the layer's cache any more, so its new tiles are copied to HBM while the next
    # layers are computed.
    if stays and not crossed:
        pl.when(turn == sizes.turns)(lambda: _for_written_tiles(sizes, r, layer, lambda copy: copy.start()))


class _Row(NamedTuple):
    """A row's index, and its keys and values in VMEM, `[H, K, S]` each."""

    number: Any
    near: list[Any]


def _near(sizes: Sizes, r: _Refs, turn: Any, layer: int, crossed: bool, group: Any, i: int) -> list[Any]:
    """Returns the keys and the values in VMEM of a group's `i`-th row."""
    if layer < sizes.kept(crossed):
        return _stayed(sizes, r, layer, crossed, group * sizes.group + i)
    half = _half(sizes, turn, layer, crossed, group)
    return [r.near[crossed].at[half, part, i * sizes.heads : (i + 1) * sizes.heads] for part in range(2)]


def _stayed(sizes: Sizes, r: _Refs, layer: int, crossed: bool, row: Any) -> list[Any]:
    return [r.stay[crossed].at[layer, part, pl.ds(row * sizes.heads, sizes.heads)] for part in range(2)]


def _turned(sizes: Sizes, r: _Refs, number: int) -> Array:
    """Returns all rows' new keys (`number` 1) or values (2), transposed to `[H K, R]` as in a cache."""
    columns: Array = r.columns[:, number * sizes.inner : (number + 1) * sizes.inner]
    return columns.T.astype(sizes.dtype)


def _row_mixed(sizes: Sizes, r: _Refs, turn: Any, crossed: bool, row: _Row) -> Array:
    """Returns the attention of a row's query, `[1, H K]`."""
    keys, values = (near[...].reshape(sizes.inner, -1) for near in row.near)
    place = _position(r, turn, row.number) - r.numbers[_FIRST, row.number]
    bias = r.cross_bias[row.number] if crossed else r.bias[row.number, place]
    return _mixed(sizes, r.columns[pl.ds(row.number, 1), 0 : sizes.inner], keys, values, bias)


def _mixed(sizes: Sizes, query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """Returns the attention `[1, H K]` of one row's query to keys and values `[H K, S]`; `bias` is `[H or 1, S]`."""
    shape = (sizes.padded_heads, sizes.inner)
    head = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    is_own = jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, shape, 1), sizes.size) == head
    # Each head's query is zero at the columns of all other heads, so one product gives the logits of all heads.
    queries = jnp.where(is_own, jnp.broadcast_to(query, shape), 0.0).astype(sizes.dtype)
    logits = dot(queries, keys) + bias
    weights = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
    # Each head's weights multiply the values of all heads; only the columns of its own values are kept.
    mixed = dot(weights.astype(sizes.dtype), values, (1, 1)) / jnp.sum(weights, -1, keepdims=True)
    return jnp.sum(jnp.where(is_own, mixed, 0.0), 0, keepdims=True)


def _write(sizes: Sizes, r: _Refs, turn: Any, turned: list[Array], rows: list[_Row]) -> None:
    """Writes the new keys and values of `rows` into VMEM; `turned` holds those of all rows, `[H K, R]` each."""
    moved = [[_moved(sizes, r, turn, row.number, entries) for entries in turned] for row in rows]
    for row, entries in zip(rows, moved, strict=True):
        position = _position(r, turn, row.number)
        lane = jax.lax.rem(position, LANES)
        for near, new in zip(row.near, entries, strict=True):
            tile = near.at[:, :, _tile(jax.lax.div(position, LANES))]
            is_new = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1) == lane
            both = jnp.where(is_new, new, tile[...].reshape(sizes.inner, LANES))
            tile[...] = both.reshape(sizes.heads, sizes.size, LANES)


def _tile(number: Any) -> Any:
    """Returns the slots of a tile."""
    return pl.ds(pl.multiple_of(number * LANES, LANES), LANES)


def _tile_copies(sizes: Sizes, r: _Refs, turn: Any, layer: int, rows: list[_Row]) -> list[Any]:
    """Returns the copies, to the caches in HBM, of the tiles that hold the new entries of these rows."""
    copies = []
    for i, row in enumerate(rows):
        tile = _tile(jax.lax.div(_position(r, turn, row.number), LANES))
        copies += _to_cache(sizes, r, layer, row, tile, [r.write_copies.at[i, part] for part in range(2)])
    return copies


def _to_cache(sizes: Sizes, r: _Refs, layer: int, row: _Row, tile: Any, done: list[Any]) -> list[Any]:
    """Returns the copies of one tile of a row's keys and values to the caches in HBM."""
    heads = pl.ds(row.number * sizes.heads, sizes.heads)
    return [
        pltpu.make_async_copy(row.near[part].at[:, :, tile], r.caches[part][layer].at[heads, :, tile], done[part])
        for part in range(2)
    ]


def _for_written_tiles(sizes: Sizes, r: _Refs, layer: int, do: Callable[[Any], None]) -> None:
    """Calls `do` (start or wait) for the copies of the tiles that the block wrote, if the cache stays in VMEM."""

    # A block that crosses the border of a tile has written two tiles, other blocks one.
    def do_row(row: Any, _: None) -> None:
        near = _Row(row, _stayed(sizes, r, layer, False, row))
        first, last = (jax.lax.div(_position(r, turn, row), LANES) for turn in (0, sizes.turns))
        for number in range(sizes.tiles):
            pl.when(first + number <= last)(partial(do_tile, near, _tile(first + number)))

    def do_tile(row: _Row, tile: Any) -> None:
        # All copies have the same size, so one semaphore can count them.
        for copy in _to_cache(sizes, r, layer, row, tile, [r.write_copies.at[0, 0]] * 2):
            do(copy)

    jax.lax.fori_loop(0, sizes.rows, do_row, None)


def _moved(sizes: Sizes, r: _Refs, turn: Any, row: Any, entries: Array) -> Array:
    """Returns a tile `[H K, 128]` with a row's column of `entries` `[H K, R]` at the place of its slot."""
    shape = (sizes.padded, LANES)
    rows, lanes = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    chosen = (lanes == jax.lax.rem(_position(r, turn, row), LANES)) & (rows == row)
    # A product with a single 1 moves the column. Zero times NaN is NaN, so the other rows are set to zero before.
    is_row = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.padded), 1) == row
    entries = jnp.where(is_row, entries, jnp.zeros_like(entries))
    return dot(entries, chosen.astype(sizes.dtype)).astype(sizes.dtype)


# --- sampling


def _draw(sizes: Sizes, r: _Refs, slot: Any) -> None:
    """Writes the logits after the current tokens, and draws the next tokens."""
    logits = dot(_normed(sizes, r, 3 * sizes.layers), r.head[...])
    entry = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    # The engine never sees entries that only fill tiles, but a draw and the maximum would.
    logits = jnp.where(entry < sizes.vocab, logits, -jnp.inf)
    r.logits[0] = logits[0 : sizes.rows]
    largest = jnp.max(logits, -1, keepdims=True)
    # Indices are float32, which holds them exactly, because TPUs compare floats across columns.
    greedy = jnp.min(jnp.where(logits == largest, entry, sizes.vocab - 1).astype(jnp.float32), -1, keepdims=True)
    _store(sizes, r, slot, greedy)

    @pl.when(r.numbers[_SAMPLED, 0] > 0)
    def sample() -> None:
        temperature = r.temperature[...]
        # The weights are not normalized: the search scales the random number by their sum instead.
        r.masses[...] = jnp.exp((logits - largest) / jnp.where(temperature > 0, temperature, 1.0))
        drawn = _sampled(sizes, r, r.uniforms[slot])
        _store(sizes, r, slot, jnp.where(temperature > 0, drawn, greedy))


def _sampled(sizes: Sizes, r: _Refs, uniform: Array) -> Array:
    """Returns tokens, float32 `[R, 1]`, drawn as `core.sampling.sample` draws: first a tile, then an entry in it.

    `uniform` float32 `[R, 1]` holds the random numbers.
    """
    tiles, none = sizes.entries // LANES, jnp.zeros((sizes.padded, 1), jnp.float32)

    def mass(tile: Any) -> Any:
        return r.masses[:, pl.ds(pl.multiple_of(tile * LANES, LANES), LANES)]

    def add(tile: Any, total: Array) -> Array:
        return total + jnp.sum(mass(tile), -1, keepdims=True)

    rest = uniform * jax.lax.fori_loop(0, tiles, add, none)

    def search(tile: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        total, before, chosen, inside = carry
        after = total + jnp.sum(mass(tile), -1, keepdims=True)
        # These sums have the same order as those of the total, so they end at the same number, and a tile is reached.
        reached = (after > rest) & (chosen < 0)
        chosen = jnp.where(reached, tile.astype(jnp.float32), chosen)
        return after, jnp.where(reached, total, before), chosen, jnp.where(reached, mass(tile), inside)

    start = (none, none, none - 1.0, jnp.zeros((sizes.padded, LANES), jnp.float32))
    _, before, chosen, inside = jax.lax.fori_loop(0, tiles, search, start)
    # A product with a triangle of ones gives the cumulative sums inside the tile.
    square = [jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1)]
    reached = dot(inside, (square[0] <= square[1]).astype(jnp.float32)) > rest - before
    lanes = jax.lax.broadcasted_iota(jnp.int32, inside.shape, 1).astype(jnp.float32)
    last = jnp.max(jnp.where(inside > 0, lanes, 0.0), -1, keepdims=True)
    lane = jnp.min(jnp.where(reached & (inside > 0), lanes, float(LANES)), -1, keepdims=True)
    # With NaN logits, no tile is chosen. The token is then meaningless, but it must be a valid id, because it is fed.
    token: Array = jnp.maximum(chosen, 0.0) * LANES + jnp.minimum(lane, last)
    return token


def _store(sizes: Sizes, r: _Refs, slot: Any, tokens: Array) -> None:
    """Writes drawn tokens, float32 `[R, 1]`, to the output and to `current`."""
    # The next turn's copies of embeddings need scalars. A sum with one nonzero entry extracts a scalar from a vector.
    number = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 0)

    def store(row: Any, _: None) -> None:
        token = jnp.sum(jnp.where(number == row, tokens, 0.0)).astype(jnp.int32)
        r.tokens[slot, row], r.current[row] = token, token

    jax.lax.fori_loop(0, sizes.rows, store, None)
