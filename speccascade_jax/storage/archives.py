"""NumPy archives with arrays and a key; a file with any changed byte is refused."""

import io
import math
import zipfile
from pathlib import Path

import numpy as np

from speccascade_jax.storage.files import write_atomically
from speccascade_jax.storage.readers import check_unpacked

KEY = "key"


def write(path: Path, key: str, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays and a key that names their owner, atomically; equal arrays give equal bytes."""
    content = io.BytesIO()
    np.savez_compressed(content, **{KEY: np.asarray(key)}, **arrays)  # type: ignore[arg-type]
    write_atomically(path, content.getvalue())


def read(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """Reads the key and the arrays.

    Raises:
        Exception: of any kind, if the file is damaged: after a flipped bit, zipfile can raise many kinds of errors.
    """
    content = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        check_unpacked(sum(entry.file_size for entry in archive.infolist()), len(content))
        # Members are read whole, because `np.load` stops reading before zipfile compares their checksums.
        members = {name: archive.read(name) for name in archive.namelist()}
    arrays = {name.removesuffix(".npy"): _array(member) for name, member in members.items()}
    return str(arrays.pop(KEY)), arrays


def _array(member: bytes) -> np.ndarray:
    """Returns the array of a `.npy` file; compares its header with the file's size before memory is allocated."""
    file = io.BytesIO(member)
    version = np.lib.format.read_magic(file)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = header(file)
    if math.prod(shape) * dtype.itemsize != len(member) - file.tell():
        raise ValueError(f"an array of shape {shape} and dtype {dtype} cannot have {len(member) - file.tell():,} bytes")
    return np.load(io.BytesIO(member))
