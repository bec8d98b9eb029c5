"""Reader of arrays, and of rectangular parts of arrays, that are stored as plain bytes in a file or in a bucket."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.errors import UnreadableError

Part = tuple[slice, ...]
"""A rectangular part of an array: for each axis a slice with a start and a stop, and no step."""

# JAX on a CPU uses a NumPy array without a copy if its address is a multiple of this number of bytes.
_ALIGNMENT = 64
# Number of bytes that are read at once if ranges are read together with the bytes between them.
_BLOCK = 1 << 23
# Ranges are read together with the bytes between them if these bytes are at most this share of the part.
_SURPLUS = 0.05
# In a bucket, a request takes as long as the transfer of a megabyte. If a part has more ranges than this, they are read
# together with the bytes between them.
_MOST_REQUESTS = 2048


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an uninitialized array whose address is aligned, so that JAX on a CPU uses it without a copy."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def all_of(shape: Sequence[int]) -> Part:
    """Returns the part that covers the whole of an array of `shape`."""
    return tuple(slice(0, size) for size in shape)


def shape_of_part(part: Part) -> tuple[int, ...]:
    """Returns the shape of a part of an array."""
    return tuple(axis.stop - axis.start for axis in part)


def read_bytes(file: Path, offset: int, shape: tuple[int, ...], dtype: Any, part: Part | None = None) -> np.ndarray:
    """Reads an array whose bytes start at `offset` of a file, little-endian and in C order, or a part of it.

    If `part` is given, only its bytes are read: whole rows are one range of bytes, and a part of the columns is one
    range for each row. The bytes between the ranges are read too if they are few (5%), or if the file is in a bucket
    and there are many ranges. The file is not memory-mapped, because the pages of a mapped file count as memory of the
    process.

    Raises:
        UnreadableError: the file ends before the array does, or the file cannot be read.
    """
    part = all_of(shape) if part is None else part
    array = empty(shape_of_part(part), dtype)
    if array.size:
        starts, length = _ranges(shape, part, array.dtype.itemsize)
        rows = array.reshape(-1).view(np.uint8).reshape(len(starts), length)
        starts += offset
        try:
            if _in_blocks(file, starts, length):
                _read_blocks(file, starts, rows)
            else:
                _read(file, [int(start) for start in starts], [row.data for row in rows])
        except OSError as error:
            raise UnreadableError(f"{file.name}: {error.strerror or error}") from error
    return array


def _ranges(shape: Sequence[int], part: Part, itemsize: int) -> tuple[np.ndarray, int]:
    """Returns where a part's ranges begin, in bytes from the array's first byte, and how many bytes each range has."""
    sizes = shape_of_part(part)
    # The part spans all axes after `last` fully, so its slice of `last` is one contiguous range of bytes.
    last = max((axis for axis, size in enumerate(sizes) if size != shape[axis]), default=0)
    strides = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    starts = np.zeros((), np.int64)
    for axis, stride in list(zip(part, strides, strict=True))[:last]:
        starts = starts[..., None] + np.arange(axis.start, axis.stop, dtype=np.int64) * stride
    begin = part[last].start * strides[last] if part else 0
    length = math.prod(sizes[last:]) * itemsize
    return starts.reshape(-1) + begin, length


def _in_blocks(file: Path, starts: np.ndarray, length: int) -> bool:
    """Returns whether the ranges are read together with the bytes between them."""
    if len(starts) == 1:
        return False
    span = int(starts[-1] - starts[0]) + length
    few = span <= (1 + _SURPLUS) * len(starts) * length
    return few or (isinstance(file, BucketPath) and len(starts) > _MOST_REQUESTS)


def _read_blocks(file: Path, starts: np.ndarray, rows: np.ndarray) -> None:
    """Reads ranges into `rows` `[ranges, bytes]`, in blocks that hold several ranges and the bytes between them."""
    begin, length = 0, rows.shape[1]
    while begin < len(starts):
        end = max(begin + 1, int(np.searchsorted(starts, starts[begin] + _BLOCK - length, side="right")))
        block = np.empty(int(starts[end - 1] - starts[begin]) + length, np.uint8)
        _read(file, [int(starts[begin])], [block.data])
        for number in range(begin, end):
            place = int(starts[number] - starts[begin])
            rows[number] = block[place : place + length]
        begin = end


def _read(file: Path, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
    """Fills each buffer with the bytes of a file from its start.

    Raises:
        UnreadableError: the file ends too early.
        OSError: the file cannot be read.
    """
    if isinstance(file, BucketPath):
        missing = file.read_into(starts, buffers)
    else:
        with file.open("rb", buffering=0) as opened:
            missing = sum(_fill(opened.fileno(), *span) for span in zip(starts, buffers, strict=True))
    if missing:
        raise UnreadableError(f"{file.name} ends {missing:,} bytes before the array does")


def _fill(descriptor: int, start: int, buffer: memoryview) -> int:
    """Fills a buffer from an open file; returns the number of bytes that the file lacks."""
    done = 0
    while done < len(buffer) and (count := os.preadv(descriptor, [buffer[done:]], start + done)):
        done += count
    return len(buffer) - done
