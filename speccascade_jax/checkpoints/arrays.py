"""Stored arrays that are known but not yet read."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from speccascade_jax.storage.checksums import array_digest
from speccascade_jax.storage.errors import UnreadableError

Arrays = dict[str, np.ndarray]

# JAX on CPU adopts a NumPy array at such an address, and copies any other.
_ALIGNMENT = 64
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
