"""`checksums.json`: digests of a model's tensors, for formats that store none.

A flipped bit changes a weight and nothing else, so a loader without digests can't see it. The file lies in the model's
directory: `{"format": 1, "algorithm": "blake2b-128", "files": {file: {tensor: {"shape", "dtype", "blake2b"}}}}`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax.checkpoints.arrays import Tensor, Tensors
from speccascade_jax.checkpoints.errors import COPY_AGAIN, CheckpointError, UnreadableError, unreadable
from speccascade_jax.core.files import write_atomically

CHECKSUMS = "checksums.json"
ALGORITHM = "blake2b-128"
_FORMAT = 1
_WRITE_AGAIN = f"copy the file again, or write {CHECKSUMS} again if the file was changed on purpose"


def digest(array: np.ndarray) -> str:
    """BLAKE2b of an array's bytes, 128 bits in hexadecimal."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


def write(directory: Path, tensors: Tensors, advance: Callable[[int, int], None] | None = None) -> Path:
    """Write `checksums.json` for the tensors of a directory; returns the file.

    Args:
        advance: called with the bytes of each tensor once it is read, and those of all.

    Raises:
        CheckpointError: tensors that can't be read.
    """
    files: dict[str, dict[str, Any]] = {}
    failures = {}
    for name, tensor in tensors.items():
        try:
            array = tensor.read()
        except UnreadableError as error:
            failures[name] = error
            continue
        row = {"shape": list(tensor.shape), "dtype": tensor.dtype, "blake2b": digest(array)}
        files.setdefault(tensor.file.name, {})[name] = row
        if advance:
            advance(array.nbytes, sum(other.nbytes for other in tensors.values()))
    if failures:
        raise unreadable(directory, failures, len(tensors))
    target = directory / CHECKSUMS
    write_atomically(target, json.dumps({"format": _FORMAT, "algorithm": ALGORITHM, "files": files}, indent=1) + "\n")
    return target


def verified(directory: Path, tensors: Tensors) -> Tensors:
    """The tensors, each compared with `checksums.json` as it is read; as they are where there is no such file.

    Raises:
        CheckpointError: `checksums.json` is damaged or of another format, or disagrees with a tensor's shape or dtype.
    """
    file = directory / CHECKSUMS
    if not file.is_file():
        return tensors
    try:
        record = json.loads(file.read_text())
        known, files = (record["format"], record["algorithm"]) == (_FORMAT, ALGORITHM), dict(record["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged ({error!r}): write it again, or {COPY_AGAIN}") from error
    if not known:
        raise CheckpointError(f"{file} has format {record['format']!r}, {record['algorithm']!r}: write it again")
    return {name: _verified(file, name, tensor, files) for name, tensor in tensors.items()}


def _verified(file: Path, name: str, tensor: Tensor, files: dict[str, Any]) -> Tensor:
    row = files.get(tensor.file.name, {}).get(name)
    if row is None:
        raise CheckpointError(f"{file} does not list tensor {name} of {tensor.file.name}: {_WRITE_AGAIN}")
    if (row.get("shape"), row.get("dtype")) != (list(tensor.shape), tensor.dtype):
        raise CheckpointError(
            f"{tensor.file}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, but {file.name} says "
            f"{row.get('dtype')} {row.get('shape')}: {_WRITE_AGAIN}"
        )
    return checked(tensor, row.get("blake2b"), f"{tensor.file.name}: its bytes are not those of {CHECKSUMS}")


def checked(tensor: Tensor, expected: object, reason: str) -> Tensor:
    """A tensor that is refused, with `reason`, where its bytes have another digest."""

    def read() -> np.ndarray:
        array = tensor.read()
        if digest(array) != expected:
            raise UnreadableError(reason)
        return array

    return dataclasses.replace(tensor, read=read)
