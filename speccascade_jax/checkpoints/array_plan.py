"""Stored arrays that are not yet read, plans that map them to parameters, and the reader that follows a plan.

Every checkpoint format describes its parameters by a plan, so one reader serves all formats. The reader never holds two
copies of a model in memory. `fused` converts a plan to the layout that decoding uses (`models.layers.fuse`).
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from speccascade_jax.checkpoints.byte_ranges import Part, empty, read_bytes
from speccascade_jax.checkpoints.infer import MOST_LAYERS, check_count
from speccascade_jax.models.families import Config
from speccascade_jax.models.layers import fused_names
from speccascade_jax.models.stacks import in_stack, layer_path
from speccascade_jax.storage import errors
from speccascade_jax.storage.checksums import array_digest
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, UnreadableError

Arrays = dict[str, np.ndarray]

# Number of values that are checked at once, so that the check of a large array needs little memory.
_CHUNK = 1 << 16
FLOATS = ("float64", "float32", "float16", "bfloat16")
# Number of rows and columns of the blocks in which a matrix is copied. Block by block, copying a transposed matrix
# takes a third of the time.
_BLOCK = 256
_LAYER = re.compile(r"(?<=/layers_)\d+")


@dataclass(frozen=True)
class Tensor:
    """One stored array of a checkpoint, which can be read without the checkpoint's other arrays.

    Attributes:
        shape, dtype: stored shape and dtype.
        file: the file or folder that holds the array, for messages.
        read: function that returns the array's values, or raises an `UnreadableError`.
        read_part: function that returns the values of a part of the array, or raises the error; `None`: the array can
            only be read as a whole.
        chunks: shape of the chunks that are always read in full, even if a part needs only some of their values;
            `None`: a part is read alone.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path
    read: Callable[[], np.ndarray]
    read_part: Callable[[Part], np.ndarray] | None = None
    chunks: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes of the array's values."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def mapped(self, function: Callable[[np.ndarray], np.ndarray], dtype: str) -> "Tensor":
        """Returns the array with an elementwise function applied to the values that are read; results have `dtype`."""
        read, read_part = self.read, self.read_part
        part = None if read_part is None else lambda part: function(read_part(part))
        return replace(self, dtype=dtype, read=lambda: function(read()), read_part=part)

    def checked(self, digest: object, reason: str) -> "Tensor":
        """Returns the same array with a `read` that raises an error with `reason` if the bytes' digest differs.

        Parts are read without this check, because the digest is that of all bytes.
        """

        def read() -> np.ndarray:
            array = self.read()
            if array_digest(array) != digest:
                raise UnreadableError(reason)
            return array

        return replace(self, read=read)


Tensors = dict[str, Tensor]


def stored_at(file: Path, offset: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Returns the `Tensor` of an array whose bytes start at `offset` of a file."""
    read = functools.partial(read_bytes, file, offset, shape, jnp.dtype(dtype))
    return Tensor(shape, dtype, file, read, read)


def as_bfloat16(array: np.ndarray) -> np.ndarray:
    """Returns a uint16 array, as T5X's version 2 stores bfloat16 values, in bfloat16; other arrays unchanged."""
    return array.view(jnp.bfloat16) if array.dtype == np.uint16 else array


def inline(path: Path, value: Any) -> Tensor:
    """Returns the `Tensor` of an array that is already in memory."""
    array = as_bfloat16(np.asarray(value))
    return Tensor(array.shape, array.dtype.name, path, lambda: array, lambda part: array[part])


def describe_not_finite(array: np.ndarray) -> str | None:
    """Returns a message with the number of NaN or infinite values, or `None` if all values are finite."""
    flat = array.reshape(-1)
    chunks = (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))
    count = sum(chunk.size - int(np.count_nonzero(np.isfinite(chunk))) for chunk in chunks)
    return f"{count:,} of {array.size:,} values are NaN or infinite" if count else None


def vocabulary_ids(name: str, tensor: Tensor, entries: int) -> Tensor:
    """Returns a tensor that lists the ids of a vocabulary of `entries` tokens, as int32.

    Raises:
        CheckpointError: it cannot be read, or does not hold each id once.
    """
    try:
        ids = tensor.read()
    except UnreadableError as error:
        raise errors.damaged(tensor.file.parent, {name: str(error)}) from error
    if "int" not in tensor.dtype or not np.array_equal(np.sort(ids.reshape(-1)), np.arange(entries)):
        raise CheckpointError(
            f"{tensor.file}: {name} is {tensor.dtype} {list(tensor.shape)}, but must hold each of the {entries} ids "
            f"of the vocabulary once: {COPY_AGAIN}"
        )
    return tensor.mapped(lambda part: part.astype(np.int32), "int32")


class Piece(NamedTuple):
    """Location of a parameter in a stored array. A fused parameter has one piece for each parameter that it joins.

    Attributes:
        source: name of the stored array.
        stored: shape of the stored array.
        shape: shape of the parameter.
        order: the stored array's axes in the parameter's order; `None` if the order is the same.
        take: (axis, index) of the parameter in an array that stacks several parameters; it is selected before axes are
            reordered. `None` if the array holds one parameter.
    """

    source: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    take: tuple[int, int] | None = None

    def view(self, array: np.ndarray) -> np.ndarray:
        """Returns the parameter as a view of the stored array; the view may have several axes for one of its axes."""
        if self.take is not None:
            axis, index = self.take
            array = array[(slice(None),) * axis + (index,)]
        return array if self.order is None else array.transpose(self.order)


Pieces = tuple[Piece, ...]
Plan = dict[str, Pieces]
"""Parameter name -> the pieces that form the parameter when they are concatenated along the last axis."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint that is opened but whose arrays are not yet read.

    Attributes:
        path: the file or directory that was opened.
        format: description of the format, for people.
        tensors: the checkpoint's arrays by stored name.
        config: the model's configuration, stored in the checkpoint or inferred from its arrays.
        plan: mapping from the arrays to the model's parameters.
        fingerprint: digest of all parameters, if the format stores one; otherwise `None`.
        eight_bits: whether matrices are stored in 8 bits; `tensors` then read them as float32.
    """

    path: Path
    format: str
    tensors: Tensors
    config: Config
    plan: Plan
    fingerprint: str | None = None
    eight_bits: bool = False

    @property
    def dtypes(self) -> frozenset[str]:
        """The dtypes in which the arrays that the model needs are stored."""
        return frozenset(self.tensors[piece.source].dtype for pieces in self.plan.values() for piece in pieces)


def translate(name: str, table: Mapping[str, str]) -> str:
    """Returns the name that a checkpoint format gives to a parameter.

    Args:
        name: this package's name of the parameter.
        table: this package's names -> the format's names, with `{i}` in place of a layer's number.

    Raises:
        KeyError: the format has no such parameter.
    """
    layer = _LAYER.search(name)
    stored_name = table[_LAYER.sub("{i}", name)]
    return stored_name.replace("{i}", layer[0]) if layer else stored_name


def whole(source: str, shape: tuple[int, ...], transposed: bool = False) -> Pieces:
    """Returns the pieces of a parameter of `shape` that takes up a whole stored array.

    If `transposed` is true, the last two axes of the stored array are swapped.
    """
    if not transposed:
        return (Piece(source, shape, shape),)
    *stack, rows, columns = shape
    order = (*range(len(stack)), len(stack) + 1, len(stack))
    return (Piece(source, (*stack, columns, rows), shape, order=order),)


def layers_of(path: Path, tensors: Tensors) -> Plan:
    """Returns the plan of arrays with this package's names; stacked layers (`models.stacks`) become separate ones.

    Raises:
        CheckpointError: an array stacks an implausible number of layers.
    """
    plan: Plan = {}
    for name, tensor in tensors.items():
        if not in_stack(name) or not tensor.shape:
            plan[name] = whole(name, tensor.shape)
            continue
        check_count(path, tensor.shape[0], MOST_LAYERS)
        for layer in range(tensor.shape[0]):
            plan[layer_path(name, layer)] = (Piece(name, tensor.shape, tensor.shape[1:], take=(0, layer)),)
    return plan


def shape_of(pieces: Pieces) -> tuple[int, ...]:
    """Returns the shape of the parameter that `pieces` form."""
    return (*pieces[0].shape[:-1], sum(piece.shape[-1] for piece in pieces)) if len(pieces) > 1 else pieces[0].shape


def fused(plan: Plan) -> Plan:
    """Returns the plan of the fused parameters that `models.layers.fuse` makes from the parameters of `plan`."""
    out = dict(plan)
    for name, parts in fused_names(plan).items():
        out[name] = tuple(piece for part in parts for piece in out.pop(part))
    return out


def check_tensors(path: Path, plan: Plan, tensors: Tensors, harmless: Callable[[str], bool]) -> None:
    """Checks that all arrays of the plan exist with the right shape and a float dtype, and that no others are needed.

    Args:
        path: the checkpoint, for errors.
        plan: the plan of the model's parameters.
        tensors: the stored arrays by name.
        harmless: function that returns whether an array outside the plan may be ignored, from its name.

    Raises:
        CheckpointError: arrays are missing, unknown, of a wrong shape or quantised; names the arrays and their files.
    """
    needed = {piece.source: piece for pieces in plan.values() for piece in pieces}
    ids = {piece.source for name, pieces in plan.items() if name.endswith("/ids") for piece in pieces}
    if missing := needed.keys() - tensors.keys():
        raise errors.incomplete(path, missing, len(needed))
    if unknown := [name for name in tensors if name not in needed and not harmless(name)]:
        raise CheckpointError(
            f"{path}: the configuration has no place for {errors.counted(unknown)} ({errors.listing(unknown)}), in "
            f"{errors.listing({tensors[name].file.name for name in unknown})}: they belong to another model or an "
            "option that is not supported; correct the configuration or choose another checkpoint"
        )
    for name, piece in needed.items():
        tensor = tensors[name]
        if tensor.shape != piece.stored:
            raise CheckpointError(
                f"{tensor.file}: {name} has shape {list(tensor.shape)}, but the configuration needs "
                f"{list(piece.stored)}: correct the configuration or {COPY_AGAIN}"
            )
        if tensor.dtype not in FLOATS and name not in ids:
            raise CheckpointError(
                f"{tensor.file}: {name} has dtype {tensor.dtype}, but parameters must be {', '.join(FLOATS)}: "
                "quantised checkpoints are not supported; choose one that isn't"
            )


def in_stored_order(stored: Stored, plan: Plan) -> list[str]:
    """Returns the parameters' names in the stored order of their arrays; those that share an array are neighbours."""
    place = {name: number for number, name in enumerate(stored.tensors)}
    return sorted(plan, key=lambda name: place[plan[name][0].source])


def stream(
    stored: Stored, plan: Plan, dtype: str | None, order: Sequence[str] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Reads a checkpoint's parameters one at a time, and yields the name and the values of each.

    Besides the parameters that the caller keeps, memory holds one parameter and one stored array. A stored array that
    stacks several parameters stays in memory until the last of them is read. After a failure, reading continues
    without yielding, so that the final error names all arrays that cannot be read.

    Args:
        stored: the checkpoint.
        plan: `stored.plan` or `fused(stored.plan)`.
        dtype: dtype of the parameters; `None` keeps the stored dtype. If the pieces of a parameter have several dtypes,
            it gets the widest.
        order: the parameters' names; `None`: in the order of the stored arrays.

    Raises:
        CheckpointError: arrays are missing, damaged, not finite, or too large for `dtype`.
    """
    reader = _WholeReader(stored, plan, dtype)
    for name in order or in_stored_order(stored, plan):
        array = reader.parameter(name)
        if array is not None and not reader.failures and not reader.infinite:
            yield name, array
        del array  # Only the caller keeps the array in memory from here on.
    reader.raise_failures()


class Reader:
    """Base class of readers that follow a plan. It counts the uses of each stored array, and collects failures.

    Attributes:
        failures: the errors of the stored arrays that cannot be read, by name.
        infinite: messages about values that are not finite, by the name of a stored array or of a parameter.
    """

    def __init__(self, stored: Stored, plan: Plan, dtype: str | None):
        self.failures: dict[str, UnreadableError] = {}
        self.infinite: dict[str, str] = {}
        self._stored, self._tensors, self._plan, self._dtype = stored, stored.tensors, plan, dtype
        self._uses = Counter(piece.source for pieces in plan.values() for piece in pieces)

    def raise_failures(self) -> None:
        """Raises a `CheckpointError` that names all arrays that could not be read, or else all that are not finite."""
        if self.failures:
            raise errors.unreadable(self._stored.path, self.failures, len(self._tensors))
        if self.infinite:
            raise errors.not_finite(self._stored.path, self.infinite)

    def _dtypes(self, pieces: Pieces) -> tuple[Any, list[Any]]:
        """Returns the dtype of the parameter that pieces form, and the dtypes in which they are stored."""
        kinds = [jnp.dtype(self._tensors[piece.source].dtype) for piece in pieces]
        widest = jnp.result_type(*kinds)
        # Ids keep their integer dtype, because a float of 16 bits would round them.
        return jnp.dtype(self._dtype) if self._dtype and widest.kind not in "iu" else widest, kinds


class _WholeReader(Reader):
    """Reader that reads each stored array once, and frees it after its last use."""

    def __init__(self, stored: Stored, plan: Plan, dtype: str | None):
        super().__init__(stored, plan, dtype)
        self._held: dict[str, np.ndarray] = {}

    def parameter(self, name: str) -> np.ndarray | None:
        """Returns a parameter's values, or `None` if one of its arrays cannot be read."""
        pieces = self._plan[name]
        dtype, kinds = self._dtypes(pieces)
        out = None
        for number, piece in enumerate(pieces):
            array = self._array(piece.source)
            if array is None:
                continue
            if len(pieces) == 1 and piece.take is None and piece.order is None and array.dtype == dtype:
                return np.ascontiguousarray(array).reshape(piece.shape)
            if out is None:
                out = empty(shape_of(pieces), dtype)
            start = sum(earlier.shape[-1] for earlier in pieces[:number])
            copy_cast(piece.view(array), out[..., start : start + piece.shape[-1]] if len(pieces) > 1 else out)
        if out is not None and dtype not in kinds and (reason := describe_not_finite(out)):
            self.infinite.setdefault(name, f"as {dtype}, {reason}")
        return None if self.failures else out

    def _array(self, source: str) -> np.ndarray | None:
        self._uses[source] -= 1
        if source in self.failures:
            return None
        if source not in self._held:
            try:
                self._held[source] = self._tensors[source].read()
            except UnreadableError as error:
                self.failures[source] = error
                return None
            if reason := describe_not_finite(self._held[source]):
                self.infinite[source] = reason
        return self._held[source] if self._uses[source] else self._held.pop(source)


def copy_cast(view: np.ndarray, out: np.ndarray) -> None:
    """Copies `view` into `out` and casts it; an axis of `out` may be several axes of the view."""
    out = out.reshape(view.shape)
    if view.ndim != 2:
        out[...] = view
        return
    for row in range(0, view.shape[0], _BLOCK):
        for column in range(0, view.shape[1], _BLOCK):
            block = slice(row, row + _BLOCK), slice(column, column + _BLOCK)
            with np.errstate(over="ignore"):  # `stream` raises an error that names parameters with infinite values.
                out[block] = view[block]
