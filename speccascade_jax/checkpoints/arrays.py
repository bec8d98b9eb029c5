"""Stored arrays that are known but not yet read, and those of tensorstore among them.

Orbax reads the same zarr arrays, but it stops at the first failure, can't leave the optimiser's metadata unread
and does not tell which arrays are lost; so reading goes to tensorstore directly, and writing to Orbax.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, UnreadableError, unreadable
from speccascade_jax.storage.readers import PLAUSIBLE, check_unpacked

Shapes = dict[str, tuple[int, ...]]
Arrays = dict[str, np.ndarray]
Spec = dict[str, Any]

# JAX on CPU adopts a NumPy array at such an address, and copies any other.
_ALIGNMENT = 64
# Nodes of the OCDBT tree are kept between arrays; a larger pool would keep the arrays' own chunks too.
_CACHE_BYTES = 1_000_000
# Values looked at together, so that a check needs no second copy of its array.
_CHUNK = 1 << 16


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


def _result(future: Any) -> Any:
    try:
        return future.result()
    except (ValueError, OSError, NotImplementedError) as error:
        reason = str(error).split(" [tensorstore_spec", 1)[0].splitlines()[0]  # the specification is appended
        raise UnreadableError(reason, missing=reason.startswith("NOT_FOUND")) from error


def open_arrays(path: Path, specs: Mapping[str, Spec]) -> Tensors:
    """Open every array of a checkpoint without reading its data.

    Args:
        path: the checkpoint, for messages.
        specs: tensorstore specifications by array name.

    Raises:
        CheckpointError: arrays without metadata (incomplete) or with unreadable metadata (damaged).
    """
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    futures = {name: ts.open(spec, open=True, read=True, context=context) for name, spec in specs.items()}
    tensors: Tensors = {}
    failures, size = {}, 0
    for name, future in futures.items():
        try:
            array = _result(future)
            tensors[name] = _tensor(path, array)
            # a chunk is decoded whole, also where it is larger than the array
            chunk = math.prod(array.chunk_layout.read_chunk.shape) * array.dtype.numpy_dtype.itemsize
            size += max(tensors[name].nbytes, chunk)
        except UnreadableError as error:
            failures[name] = error
    if failures:
        raise unreadable(path, failures, len(specs))
    _check_size(path, size)
    return tensors


def _check_size(path: Path, size: int) -> None:
    """Compressed arrays are believed to hold as much as weights do in files of that size."""
    if size <= PLAUSIBLE:
        return
    folder = path if path.is_dir() else path.parent
    try:
        check_unpacked(size, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}, as its arrays' shapes say); {COPY_AGAIN}") from error


def _tensor(path: Path, array: ts.TensorStore) -> Tensor:
    def read() -> np.ndarray:
        out = empty(tuple(array.shape), array.dtype.numpy_dtype)
        _result(ts.array(out).write(array))  # chunks are decoded into place, without a copy of the whole
        return as_bfloat16(out)

    dtype = "bfloat16" if array.dtype.name == "uint16" else array.dtype.name
    return Tensor(tuple(array.shape), dtype, path, read)


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
