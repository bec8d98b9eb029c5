"""Reader of safetensors files: 8 bytes with the header's length, a JSON header, and raw little-endian arrays.

The library `safetensors` is not used for two reasons. It maps whole files, whose pages then count as memory of the
process, and its error for a truncated file names neither the file nor the lost tensors. This reader takes shapes and
offsets from the header, and reads each tensor alone.

Source: the format's description, https://github.com/huggingface/safetensors#format.
"""

import io
import math
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp

from speccascade_jax.checkpoints.array_plan import Tensors, stored_at
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.errors import COPY_AGAIN, POINTER, PULL, CheckpointError, listing
from speccascade_jax.storage.readers import parsed

# The limit of the library `safetensors`, too: a file whose header claims more bytes is damaged.
_LONGEST_HEADER = 100_000_000


def open_file(file: Path) -> Tensors:
    """Returns the tensors of a file in the order of their bytes, not yet read.

    Raises:
        CheckpointError: the header is damaged (names the tensor if a tensor's entry is invalid), or the file is
            truncated (names the lost tensors).
    """
    if isinstance(file, BucketPath):
        file = file.pinned()  # Tensors of a file that is replaced later do not fit this header.
    size = file.stat().st_size
    with file.open("rb", buffering=0) as raw, io.BufferedReader(cast(io.RawIOBase, raw)) as opened:
        if opened.read(len(POINTER)) == POINTER:
            raise CheckpointError(f"{file} {PULL}")
        opened.seek(0)
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise _damaged(file, f"its header would have {length:,} bytes, but the file has {size:,}")
        header = parsed(opened.read(length), f"the header of {file}", COPY_AGAIN, CheckpointError)
        header.pop("__metadata__", None)
    spans = {name: _span(file, name, entry) for name, entry in header.items()}
    names = sorted(spans, key=lambda name: spans[name])
    _check_layout(file, names, spans, size - 8 - length)
    return {
        name: stored_at(file, 8 + length + spans[name][0], tuple(header[name]["shape"]), DTYPES[header[name]["dtype"]])
        for name in names
    }


def _damaged(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged or not a safetensors file: {reason}; {COPY_AGAIN}")


def _span(file: Path, name: str, entry: Any) -> tuple[int, int]:
    """Returns a tensor's first byte and the byte after its last; raises an error if its entry is invalid."""
    try:
        kind, shape, (begin, end) = entry["dtype"], list(entry["shape"]), entry["data_offsets"]
        if not all(type(size) is int for size in (*shape, begin, end)):
            raise TypeError("sizes are whole numbers")
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(file, f"the header's entry for tensor {name} is invalid: {entry!r:.80}") from error
    if not isinstance(kind, str) or kind not in DTYPES:
        raise CheckpointError(
            f"{file}: tensor {name} has dtype {kind!r}, but only {', '.join(DTYPES)} are known: its header is damaged, "
            "or the checkpoint is quantised; choose one that isn't"
        )
    if min(shape, default=0) < 0 or end - begin != math.prod(shape) * jnp.dtype(DTYPES[kind]).itemsize:
        raise _damaged(
            file, f"tensor {name} of shape {shape} and dtype {kind} does not fit into bytes {begin} to {end}"
        )
    return begin, end


def _check_layout(file: Path, names: list[str], spans: dict[str, tuple[int, int]], size: int) -> None:
    """Checks that each tensor begins where the previous one ends, and that the file ends with the last tensor."""
    end = 0
    for name in names:
        if spans[name][0] != end:
            raise _damaged(file, f"tensor {name} begins at byte {spans[name][0]:,} of the data, not at {end:,}")
        end = spans[name][1]
    if size < end:
        lost = [name for name in names if spans[name][1] > size]
        raise CheckpointError(
            f"{file} is truncated: {end - size:,} of {end:,} bytes of data are missing, and with them {len(lost)} of "
            f"{len(names)} tensors ({listing(lost)}); {COPY_AGAIN}"
        )
    if size > end:
        raise _damaged(file, f"{size - end:,} bytes follow its last tensor")


DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""Name of a dtype in safetensors files -> its name in NumPy (with ml_dtypes)."""
