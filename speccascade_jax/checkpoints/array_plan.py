"""Stored arrays that are known but not yet read, and plans: which of them make each parameter.

A plan is data, so one reader serves every format: it holds the parameters that are done and the arrays of one, never
two copies of a model. `fused` turns a plan into one for the layout that decoding uses (`models.layers.fuse`).
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from speccascade_jax.models.families import Config
from speccascade_jax.models.layers import fused_names
from speccascade_jax.storage import errors
from speccascade_jax.storage.checksums import array_digest
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, UnreadableError

Arrays = dict[str, np.ndarray]

# JAX on CPU adopts a NumPy array at such an address, and copies any other.
_ALIGNMENT = 64
# Values looked at together, so that a check needs no second copy of its array.
_CHUNK = 1 << 16
FLOATS = ("float64", "float32", "float16", "bfloat16")
# Rows copied together: a transposition by blocks takes a third of the time.
_BLOCK = 256
_LAYER = re.compile(r"(?<=/layers_)\d+")


@dataclass(frozen=True)
class Tensor:
    """One stored array, to be read alone.

    Attributes:
        shape, dtype: as stored.
        file: the file or folder that holds it, for messages.
        read: its values; raises `UnreadableError`.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def checked(self, digest: object, reason: str) -> "Tensor":
        """Returns the same array, refused with `reason` when it is read and its bytes have another digest."""

        def read() -> np.ndarray:
            array = self.read()
            if array_digest(array) != digest:
                raise UnreadableError(reason)
            return array

        return replace(self, read=read)


Tensors = dict[str, Tensor]


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that JAX on CPU adopts without copying it."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def read_bytes(file: Path, offset: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array whose bytes lie in a file from `offset` on, little-endian, C order.

    Read and not mapped: pages of a mapped file count as the process's own memory.

    Raises:
        UnreadableError: the file ends before the array does, or can't be read.
    """
    array = empty(shape, dtype)
    buffer = array.reshape(-1).view(np.uint8).data
    done = 0
    try:
        with open(file, "rb", buffering=0) as opened:
            opened.seek(offset)
            while done < len(buffer) and (count := opened.readinto(buffer[done:])):
                done += count
    except OSError as error:
        raise UnreadableError(f"{file.name}: {error.strerror or error}") from error
    if done < len(buffer):
        raise UnreadableError(f"{file.name} ends {len(buffer) - done:,} bytes before it does")
    return array


def stored_at(file: Path, offset: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Returns the array whose bytes lie in a file from `offset` on, to be read by `read_bytes`."""
    return Tensor(shape, dtype, file, functools.partial(read_bytes, file, offset, shape, jnp.dtype(dtype)))


def as_bfloat16(array: np.ndarray) -> np.ndarray:
    """uint16 read as the bfloat16 it holds (T5X's version 2); any other dtype as it is."""
    return array.view(jnp.bfloat16) if array.dtype == np.uint16 else array


def inline(path: Path, value: Any) -> Tensor:
    """An array that is in memory already."""
    array = as_bfloat16(np.asarray(value))
    return Tensor(array.shape, array.dtype.name, path, lambda: array)


def describe_not_finite(array: np.ndarray) -> str | None:
    """How many values are NaN or infinite; `None` where all are finite."""
    flat = array.reshape(-1)
    chunks = (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))
    count = sum(chunk.size - int(np.count_nonzero(np.isfinite(chunk))) for chunk in chunks)
    return f"{count:,} of {array.size:,} values are NaN or infinite" if count else None


class Piece(NamedTuple):
    """A parameter, or its part of a fused one, as it lies in a stored array.

    Attributes:
        source: the array's name.
        stored: the array's shape.
        shape: of the parameter.
        order: the stored axes in the parameter's order; `None` leaves them.
        take: (axis, index) of a stack, applied first.
    """

    source: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    take: tuple[int, int] | None = None

    def view(self, array: np.ndarray) -> np.ndarray:
        """The parameter's values, its last axes perhaps still apart."""
        if self.take is not None:
            axis, index = self.take
            array = array[(slice(None),) * axis + (index,)]
        return array if self.order is None else array.transpose(self.order)


Pieces = tuple[Piece, ...]
Plan = dict[str, Pieces]
"""Parameter name -> its pieces, side by side on the last axis."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint that is known but not yet read.

    Attributes:
        path: the file or directory that was opened.
        format: what it is, for people.
        tensors: its arrays by stored name.
        config: the model's configuration, stored or inferred.
        plan: how the arrays make the model's parameters.
        fingerprint: of all parameters, where the format stores one.
    """

    path: Path
    format: str
    tensors: Tensors
    config: Config
    plan: Plan
    fingerprint: str | None = None

    @property
    def dtypes(self) -> frozenset[str]:
        """The stored dtypes of all arrays that the model needs."""
        return frozenset(self.tensors[piece.source].dtype for pieces in self.plan.values() for piece in pieces)


def translate(name: str, table: Mapping[str, str]) -> str:
    """Returns the name that a format has for the parameter `name`, with the parameter's own layer number.

    Args:
        table: our names -> the format's; `{i}` stands for a layer's number.

    Raises:
        KeyError: the format has no such parameter.
    """
    layer = _LAYER.search(name)
    theirs = table[_LAYER.sub("{i}", name)]
    return theirs.replace("{i}", layer[0]) if layer else theirs


def whole(source: str, shape: tuple[int, ...], transposed: bool = False) -> Pieces:
    """Returns the pieces of a parameter of `shape` that is stored in an array of its own, as it is or transposed."""
    return (Piece(source, shape[::-1], shape, order=(1, 0)) if transposed else Piece(source, shape, shape),)


def shape_of(pieces: Pieces) -> tuple[int, ...]:
    """The parameter's shape."""
    return (*pieces[0].shape[:-1], sum(piece.shape[-1] for piece in pieces)) if len(pieces) > 1 else pieces[0].shape


def fused(plan: Plan) -> Plan:
    """The plan of the parameters that `models.layers.fuse` gives, without making the others first."""
    out = dict(plan)
    for name, parts in fused_names(plan).items():
        out[name] = tuple(piece for part in parts for piece in out.pop(part))
    return out


def check_tensors(path: Path, plan: Plan, tensors: Tensors, harmless: Callable[[str], bool]) -> None:
    """Every array of the plan is there, a float, with its shape; and none besides but harmless ones.

    Raises:
        CheckpointError: naming missing arrays, arrays without a place, of a wrong shape or quantised, and their files.
    """
    needed = {piece.source: piece for pieces in plan.values() for piece in pieces}
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
        if tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"{tensor.file}: {name} holds {tensor.dtype}, and parameters are {', '.join(FLOATS)}: quantised "
                "checkpoints are not supported; choose one that isn't"
            )


def stream(stored: Stored, plan: Plan, dtype: str | None) -> Iterator[tuple[str, np.ndarray]]:
    """Read a checkpoint's parameters, one at a time.

    Above what the caller keeps, memory holds one parameter and one stored array; an array that several parameters
    share (a stack of layers) stays until the last of them. After a failure reading goes on, without yielding, to name
    all that is lost.

    Args:
        plan: `stored.plan`, or `fused` of it.
        dtype: of the parameters; `None` keeps the stored one, of several the widest.

    Raises:
        CheckpointError: arrays that are missing, damaged, not finite, or too large for `dtype`.
    """
    reader = _Reader(stored, plan, dtype)
    place = {name: number for number, name in enumerate(stored.tensors)}
    # as their first arrays lie, so that parameters sharing an array follow each other
    for name in sorted(plan, key=lambda name: place[plan[name][0].source]):
        array = reader.parameter(name)
        if array is not None and not reader.failures and not reader.infinite:
            yield name, array
        del array  # the caller's alone now
    if reader.failures:
        raise errors.unreadable(stored.path, reader.failures, len(stored.tensors))
    if reader.infinite:
        raise errors.not_finite(stored.path, reader.infinite)


class _Reader:
    """Stored arrays, each read once and dropped after its last use, and what went wrong."""

    def __init__(self, stored: Stored, plan: Plan, dtype: str | None):
        self.failures: dict[str, UnreadableError] = {}
        self.infinite: dict[str, str] = {}
        self._tensors, self._plan, self._dtype = stored.tensors, plan, dtype
        self._uses = Counter(piece.source for pieces in plan.values() for piece in pieces)
        self._held: dict[str, np.ndarray] = {}

    def parameter(self, name: str) -> np.ndarray | None:
        """A parameter; `None` where one of its arrays can't be read."""
        pieces = self._plan[name]
        kinds = [jnp.dtype(self._tensors[piece.source].dtype) for piece in pieces]
        dtype = jnp.dtype(self._dtype) if self._dtype else jnp.result_type(*kinds)
        out = None
        for number, piece in enumerate(pieces):
            array = self._array(piece.source)
            if array is None:
                continue
            if len(pieces) == 1 and piece.take is None and piece.order is None and array.dtype == dtype:
                return np.ascontiguousarray(array).reshape(piece.shape)
            if out is None:
                out = empty(shape_of(pieces), dtype)
            start = sum(other.shape[-1] for other in pieces[:number])
            _copy(piece.view(array), out[..., start : start + piece.shape[-1]] if len(pieces) > 1 else out)
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


def _copy(view: np.ndarray, out: np.ndarray) -> None:
    """Cast and copy `view` into `out`, whose last axis may be several of the view's."""
    out = out.reshape(view.shape)
    if view.ndim != 2:
        out[...] = view
        return
    for row in range(0, view.shape[0], _BLOCK):
        for column in range(0, view.shape[1], _BLOCK):
            block = slice(row, row + _BLOCK), slice(column, column + _BLOCK)
            with np.errstate(over="ignore"):  # infinite values are reported by name
                out[block] = view[block]
