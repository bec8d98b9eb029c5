"""`checksums.json`: digests of a model's tensors, for formats that store none.

A flipped bit changes a weight and nothing else, so a loader without digests can't see it. The file lies in the model's
directory: `{"format": 1, "algorithm": "blake2b-128", "bytes": {file: digest}, "files": {file: {tensor: {"shape",
"dtype", "blake2b"}}}}`; "bytes" are those of whole small files (`storage.checksums`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints.arrays import Tensor, Tensors
from speccascade_jax.storage import checksums
from speccascade_jax.storage.checksums import CHECKSUMS, array_digest
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, UnreadableError, unreadable

_COMPANIONS = (".json", ".model")
_WRITE_AGAIN = f"copy the file again, or write {CHECKSUMS} again if the file was changed on purpose"


def companions(directory: Path) -> list[str]:
    """Returns the names of the configurations and vocabularies in a directory."""
    files = directory.iterdir() if directory.is_dir() else ()
    return sorted(file.name for file in files if file.suffix in _COMPANIONS and file.name != CHECKSUMS)


def write(directory: Path, tensors: Tensors, advance: Callable[[int, int], None] | None = None) -> Path:
    """Writes `checksums.json` for the tensors of a directory and its `companions`; returns the file.

    Args:
        advance: called with the bytes of each tensor once it is read, and those of all.

    Raises:
        CheckpointError: tensors that can't be read.
    """
    files: dict[str, dict[str, Any]] = {}
    failures = {}
    total = sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        row = {"shape": list(tensor.shape), "dtype": tensor.dtype}
        try:
            row["blake2b"] = array_digest(tensor.read())
        except UnreadableError as error:
            failures[name] = error
        files.setdefault(tensor.file.name, {})[name] = row
        if advance:
            advance(tensor.nbytes, total)
    if failures:
        raise unreadable(directory, failures, len(tensors))
    return checksums.write(directory, companions(directory), files=files)


def verified(directory: Path, tensors: Tensors) -> Tensors:
    """Returns the tensors, each compared with `checksums.json`, where there is one, as it is read.

    Raises:
        CheckpointError: `checksums.json` is damaged or of another format, or disagrees with a tensor's shape or dtype.
    """
    file = directory / CHECKSUMS
    if not file.is_file():
        return tensors
    files = checksums.record(directory, CheckpointError).get("files")
    if not isinstance(files, dict) or not all(isinstance(rows, dict) for rows in files.values()):
        raise CheckpointError(f"{file} is damaged (files is {files!r:.80}): write it again, or {COPY_AGAIN}")
    return {name: _verified(file, name, tensor, files) for name, tensor in tensors.items()}


def _verified(file: Path, name: str, tensor: Tensor, files: dict[str, Any]) -> Tensor:
    row = files.get(tensor.file.name, {}).get(name)
    if not isinstance(row, dict):
        raise CheckpointError(f"{file} does not list tensor {name} of {tensor.file.name}: {_WRITE_AGAIN}")
    if (row.get("shape"), row.get("dtype")) != (list(tensor.shape), tensor.dtype):
        raise CheckpointError(
            f"{tensor.file}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, but {file.name} says "
            f"{row.get('dtype')} {row.get('shape')}: {_WRITE_AGAIN}"
        )
    return tensor.checked(row.get("blake2b"), f"{tensor.file.name}: its bytes are not those of {CHECKSUMS}")
