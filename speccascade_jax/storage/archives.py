"""NumPy archives (`.npz`) that hold arrays and a key; reading a file with a changed byte raises an error."""

import io
import math
import zipfile
from pathlib import Path

import numpy as np

from speccascade_jax.storage.files import write_atomically
from speccascade_jax.storage.readers import check_unpacked

KEY = "key"


def write(path: Path, key: str, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays and a key, which says what the arrays belong to, as one file, atomically.

    Equal keys and arrays give equal bytes.
    """
    content = io.BytesIO()
    np.savez_compressed(content, **{KEY: np.asarray(key)}, **arrays)  # type: ignore[arg-type]
    write_atomically(path, content.getvalue())


def read(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """Returns the key and the arrays of a file that `write` wrote.

    Raises:
        Exception: the file is damaged. The error can have any type, because zipfile raises many types after a flipped
            bit.
    """
    content = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        check_unpacked(sum(entry.file_size for entry in archive.infolist()), len(content))
        # Members are read to the end here, because zipfile compares checksums only then and `np.load` may stop earlier.
        members = {name: archive.read(name) for name in archive.namelist()}
    arrays = {name.removesuffix(".npy"): _array(member) for name, member in members.items()}
    return str(arrays.pop(KEY)), arrays


def _array(member: bytes) -> np.ndarray:
    """Returns the array in the bytes of a `.npy` file, after checking that it has the size that its header claims.

    A damaged header could otherwise make NumPy allocate far too much memory.
    """
    file = io.BytesIO(member)
    version = np.lib.format.read_magic(file)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = header(file)
    if math.prod(shape) * dtype.itemsize != len(member) - file.tell():
        raise ValueError(f"an array of shape {shape} and dtype {dtype} cannot have {len(member) - file.tell():,} bytes")
    return np.load(io.BytesIO(member))
