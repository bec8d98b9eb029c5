"""Reader of the parts of parameters that the devices of one process hold, without the rest of the checkpoint.

A part of a parameter is mapped to a part of each stored array that the parameter comes from. The mapping accounts for
fused kernels, stacked layers, and transposed and merged axes. Each stored part is read once, however many devices hold
it.

An array is read as a whole if its parts cannot be read alone: relative biases that T5X stores for each layer, and
arrays inside a msgpack file. Compressed arrays are read in whole chunks.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from speccascade_jax.checkpoints.array_plan import (
    Piece,
    Pieces,
    Plan,
    Reader,
    Stored,
    copy_cast,
    describe_not_finite,
    in_stored_order,
    shape_of,
)  # fmt: skip
from speccascade_jax.checkpoints.byte_ranges import Part, all_of, empty, shape_of_part
from speccascade_jax.storage.errors import UnreadableError

Bounds = tuple[tuple[int, int], ...]
"""Start and stop of a part along each axis, which can be a key of a dict."""
Blocks = dict[Bounds, np.ndarray]
Layout = Callable[[str, tuple[int, ...]], tuple[Sequence[Part], int]]
"""Function of a parameter's name and shape; returns the devices' parts of it, and the number of shards into which a
fused parameter's kernels are interleaved (`models.sharding.interleave_fused`)."""


def bounds(part: Sequence[slice], shape: Sequence[int]) -> Bounds:
    """Returns the bounds of a part of an array of `shape`; a slice without start or stop is the whole axis."""
    return tuple(axis.indices(size)[:2] for axis, size in zip(part, shape, strict=True))


def stream_parts(stored: Stored, plan: Plan, dtype: str | None, layout: Layout) -> Iterator[tuple[str, Blocks]]:
    """Reads the parts of a checkpoint's parameters that this process's devices hold, one parameter at a time.

    Besides what the caller keeps, memory holds the parts of one parameter and of one stored array. A stored array whose
    chunks extend over several parameters is held until the last of them is read.

    Args:
        stored: the checkpoint.
        plan: `stored.plan` or `fused(stored.plan)`.
        dtype: dtype of the parameters, as in `array_plan.stream`.
        layout: the devices' parts of each parameter.

    Yields:
        The name of a parameter, and the values of each distinct part by its bounds.

    Raises:
        CheckpointError: arrays are missing or damaged, or values that are read are not finite or too large for `dtype`.
    """
    reader = _PartReader(stored, plan, dtype)
    for name in in_stored_order(stored, plan):
        blocks = reader.blocks(name, *layout(name, shape_of(plan[name])))
        if not reader.failures and not reader.infinite:
            yield name, blocks
        del blocks  # Only the caller keeps the values in memory from here on.
    reader.raise_failures()


class _PartReader(Reader):
    """Reader that reads each stored part once, and frees it after its last use."""

    def __init__(self, stored: Stored, plan: Plan, dtype: str | None):
        super().__init__(stored, plan, dtype)
        self._held: dict[str, list[tuple[Part, np.ndarray]]] = {}

    def blocks(self, name: str, parts: Sequence[Part], shards: int) -> Blocks:
        """Returns the values of a parameter's parts by their bounds; values are missing after a failure."""
        pieces = self._plan[name]
        shape = shape_of(pieces)
        dtype, kinds = self._dtypes(pieces)
        by_bounds = {key: tuple(slice(*axis) for axis in key) for key in (bounds(part, shape) for part in parts)}
        out = {key: empty(shape_of_part(part), dtype) for key, part in by_bounds.items()}
        for number, piece in enumerate(pieces):
            places = [
                (out[key][..., columns], (*part[:-1], of_piece))
                for key, part in by_bounds.items()
                for columns, of_piece in columns_of(pieces, number, part, shards)
            ]
            self._copy(piece, places)
        if dtype not in kinds and (reason := self._not_finite(out)):
            self.infinite.setdefault(name, f"as {dtype}, {reason}")
        return out

    def _not_finite(self, blocks: Blocks) -> str | None:
        return next(filter(None, map(describe_not_finite, blocks.values())), None)

    def _copy(self, piece: Piece, places: Sequence[tuple[np.ndarray, Part]]) -> None:
        """Fills each array with the values of a part of the piece."""
        located = [locate(piece, part) for _, part in places]
        self._uses[piece.source] -= 1
        if self._read(piece.source, [stored_part for stored_part, _ in located]):
            for (block, _), (stored_part, cut) in zip(places, located, strict=True):
                view = _within(piece, self._value(piece.source, stored_part))
                copy_cast(view.reshape(cut.covered)[cut.part], block)
        self._release(piece)

    def _read(self, source: str, parts: Sequence[Part]) -> bool:
        """Reads the parts that are not yet held; returns whether all could be read."""
        if source in self.failures:
            return False
        tensor, held = self._tensors[source], self._held.setdefault(source, [])
        chunks = tensor.shape if tensor.read_part is None else tensor.chunks
        missing = [part for part in parts if not any(_contains(box, part) for box, _ in held)]
        for box in joined([aligned(part, chunks, tensor.shape) for part in missing]):
            try:
                array = tensor.read() if tensor.read_part is None else tensor.read_part(box)
            except UnreadableError as error:
                self.failures[source] = error
                return False
            if reason := describe_not_finite(array):
                self.infinite[source] = reason
            held.append((box, array))
        return True

    def _value(self, source: str, part: Part) -> np.ndarray:
        """Returns the values of a stored part that is held."""
        box, array = next((box, array) for box, array in self._held[source] if _contains(box, part))
        return array[tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, box, strict=True))]

    def _release(self, piece: Piece) -> None:
        """Frees what no other parameter needs: all after the last use, and parts that hold only this layer."""
        held = self._held.pop(piece.source, [])
        if self._uses[piece.source] and piece.take is not None:
            axis = piece.take[0]
            held = [(box, array) for box, array in held if box[axis].stop - box[axis].start > 1]
        if self._uses[piece.source]:
            self._held[piece.source] = held


def columns_of(pieces: Pieces, number: int, part: Part, shards: int) -> Iterator[tuple[slice, slice]]:
    """Yields the ranges of columns that a part of a parameter takes from one of its pieces.

    Each result has the columns in the part, and the same columns in the piece. The columns of a fused parameter are
    interleaved: each of `shards` shards holds its share of every piece, in order.
    """
    if len(pieces) == 1:
        yield slice(None), part[-1]
        return
    widths = [piece.shape[-1] // shards for piece in pieces]
    before, width, columns = sum(widths[:number]), widths[number], part[-1]
    for shard in range(shards):
        # The shard's columns of this piece begin at `first` of the parameter and at `shard * width` of the piece.
        first = shard * sum(widths) + before
        start, stop = max(first, columns.start), min(first + width, columns.stop)
        if start < stop:
            shift = shard * width - first
            yield slice(start - columns.start, stop - columns.start), slice(start + shift, stop + shift)


class Cut(NamedTuple):
    """Place of a part in the values that cover it.

    Attributes:
        covered: shape of the values that are read, with the axes of the parameter.
        part: the wanted part of these values.
    """

    covered: tuple[int, ...]
    part: Part


def locate(piece: Piece, part: Part) -> tuple[Part, Cut]:
    """Returns the part of the stored array that holds a part of the piece, and the place of the part in it.

    An axis of the parameter may be several axes of the stored array, such as heads and the sizes of heads. All values
    of the heads that the part touches are then read, and cut to the part.
    """
    axes = [axis for axis in range(len(piece.stored)) if piece.take is None or axis != piece.take[0]]
    order = axes if piece.order is None else [axes[axis] for axis in piece.order]
    stored_part, covered, cut = list(all_of(piece.stored)), [], []
    for group, axis in zip(_groups([piece.stored[axis] for axis in order], piece.shape), part, strict=True):
        inner = math.prod(piece.stored[order[place]] for place in group[1:])
        outer = slice(axis.start // inner, -(-axis.stop // inner))
        stored_part[order[group[0]]] = outer
        covered.append((outer.stop - outer.start) * inner)
        cut.append(slice(axis.start - outer.start * inner, axis.stop - outer.start * inner))
    if piece.take is not None:
        stored_part[piece.take[0]] = slice(piece.take[1], piece.take[1] + 1)
    return tuple(stored_part), Cut(tuple(covered), tuple(cut))


def _groups(stored: Sequence[int], shape: Sequence[int]) -> list[list[int]]:
    """Returns for each axis of `shape` the axes of `stored` that it merges, the first of which is its outer axis."""
    groups, places = [], iter(range(len(stored)))
    for size in shape:
        group = [next(places)]
        while math.prod(stored[place] for place in group) < size:
            group.append(next(places))
        groups.append(group)
    if groups:
        groups[-1].extend(places)
    return groups


def _within(piece: Piece, array: np.ndarray) -> np.ndarray:
    """Returns a stored part in the parameter's order of axes, with the layer that the part holds selected."""
    take = None if piece.take is None else (piece.take[0], 0)
    return piece._replace(take=take).view(array)


def aligned(part: Part, chunks: Sequence[int] | None, shape: Sequence[int]) -> Part:
    """Returns the part extended to whole chunks of an array of `shape`."""
    if chunks is None:
        return part
    return tuple(
        slice(axis.start // chunk * chunk, min(size, -(-axis.stop // chunk) * chunk))
        for axis, chunk, size in zip(part, chunks, shape, strict=True)
    )


def joined(parts: Sequence[Part]) -> list[Part]:
    """Returns one part that contains all `parts` if it has no more values than they have; otherwise each part once."""
    distinct = {tuple((axis.start, axis.stop) for axis in part): part for part in parts}
    if len(distinct) < 2:
        return list(distinct.values())
    hull = tuple(slice(min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*distinct, strict=True))
    sizes = [math.prod(shape_of_part(part)) for part in distinct.values()]
    return [hull] if math.prod(shape_of_part(hull)) <= sum(sizes) else list(distinct.values())


def _contains(box: Part, part: Part) -> bool:
    return all(a.start <= b.start and b.stop <= a.stop for a, b in itertools.zip_longest(box, part))
