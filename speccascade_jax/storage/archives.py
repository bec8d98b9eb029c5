"""Arrays and a key in one file, as NumPy's archives: read back only if every byte is the one that was written."""

import io
import math
import zipfile
from pathlib import Path

import numpy as np

from speccascade_jax.storage.files import write_atomically
from speccascade_jax.storage.readers import check_unpacked

KEY = "key"


def write(path: Path, key: str, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays and the key of what they belong to, whole or not at all; equal arrays give equal bytes."""
    content = io.BytesIO()
    np.savez_compressed(content, **{KEY: np.asarray(key)}, **arrays)  # type: ignore[arg-type]
    write_atomically(path, content.getvalue())


def read(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """The key and the arrays.

    Raises:
        Exception: of any kind, where the file is damaged: zipfile raises whatever a flipped bit makes it meet.
    """
    content = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        check_unpacked(sum(entry.file_size for entry in archive.infolist()), len(content))
        # whole members: `np.load` stops before their checksums are compared
        members = {name: archive.read(name) for name in archive.namelist()}
    arrays = {name.removesuffix(".npy"): _array(member) for name, member in members.items()}
    return str(arrays.pop(KEY)), arrays


def _array(member: bytes) -> np.ndarray:
    """The array of a `.npy` file, whose header is compared with what follows before anything is allocated."""
    file = io.BytesIO(member)
    version = np.lib.format.read_magic(file)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = header(file)
    if math.prod(shape) * dtype.itemsize != len(member) - file.tell():
        raise ValueError(f"an array of shape {shape} and dtype {dtype} has {len(member) - file.tell():,} bytes")
    return np.load(io.BytesIO(member))
