"""Writer of Orbax trees: compressed OCDBT trees of a few files, which Orbax can read, written array by array.

Orbax's own writer takes all arrays at once, and its files depend on timing. This one uses tensorstore directly.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from speccascade_jax.checkpoints.array_plan import Arrays
from speccascade_jax.checkpoints.byte_ranges import Part
from speccascade_jax.checkpoints.zarr import METADATA
from speccascade_jax.storage.buckets import kvstore
from speccascade_jax.storage.files import write_atomically

# Chunks are collected up to this number of bytes and then written together: files are few, and memory is bounded.
_TOGETHER = 1 << 27
# Values of fewer bytes are stored inside the tree's nodes, as Orbax does.
_INLINE = 1024


class TreeWriter:
    """Writer of named arrays into an existing directory, or to a place in a bucket; `close` completes the tree.

    Memory holds at most 128 MB of values, and their encoded form, besides the array that is being written.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._names: list[str] = []
        self._context = ts.Context()
        self._opened: dict[str, Any] = {}
        self._chunks: dict[str, tuple[int, ...]] = {}
        self._batch, self._size = ts.Transaction(atomic=True), 0

    def add(self, name: str, array: np.ndarray, chunks: Sequence[int] | None = None) -> None:
        """Writes an array, in chunks of this shape; `None`: in one chunk."""
        self.create(name, array.shape, array.dtype, chunks)
        self.put(name, array)

    def create(self, name: str, shape: Sequence[int], dtype: Any, chunks: Sequence[int] | None = None) -> None:
        """Begins an array whose parts `put` writes."""
        dtype = jnp.dtype(dtype)
        kind = "bfloat16" if dtype == jnp.bfloat16 else dtype.newbyteorder("<").str
        self._chunks[name] = tuple(shape if chunks is None else chunks)
        metadata = {"shape": list(shape), "chunks": list(self._chunks[name]), "dtype": kind}
        metadata |= {"compressor": {"id": "zstd", "level": 1}, "dimension_separator": "."}
        base = kvstore(self._directory)
        config = {"max_inline_value_bytes": _INLINE}
        store = {"driver": "ocdbt", "base": base, "config": config, "path": f"{name.replace('/', '.')}/"}
        # Every chunk is written, because an absent chunk means lost data.
        spec = {"driver": "zarr", "kvstore": store, "metadata": metadata, "store_data_equal_to_fill_value": True}
        self._opened[name] = ts.open(spec, create=True, transaction=self._batch, context=self._context).result()
        self._names.append(name)

    def put(self, name: str, array: np.ndarray, layer: int | None = None) -> None:
        """Writes an array that `create` began or, if `layer` is given, one layer of it along its first axis."""
        opened = self._opened[name]
        chunks = self._chunks[name]
        for cell in cells(array.shape, chunks if layer is None else chunks[1:]):
            if opened.transaction != self._batch:
                opened = opened.with_transaction(self._batch)
            part = array[cell]
            (opened if layer is None else opened[layer])[cell].write(part).result()
            self._size += part.nbytes
            if self._size >= _TOGETHER:
                self._commit()

    def _commit(self) -> None:
        self._batch.commit_sync()
        self._batch, self._size = ts.Transaction(atomic=True), 0

    def close(self) -> None:
        """Writes what is left, and the metadata that completes the tree."""
        self._commit()
        write_atomically(self._directory / METADATA, json.dumps(self._metadata()))

    def _metadata(self) -> dict[str, Any]:
        value = {"value_type": "np.ndarray", "skip_deserialize": False}
        keys = {name: tuple(name.split("/")) for name in self._names}
        tree = {
            str(path): {"key_metadata": [{"key": key, "key_type": 2} for key in path], "value_metadata": value}
            for path in keys.values()
        }
        options = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
        return {"tree_metadata": tree, **options, "custom_metadata": None}


def cells(shape: Sequence[int], chunks: Sequence[int]) -> Iterator[Part]:
    """Yields the parts of an array that its chunks hold, in C order."""
    axes = [
        [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]
        for size, chunk in zip(shape, chunks, strict=True)
    ]
    return itertools.product(*axes)


def write_tree(directory: Path, arrays: Arrays) -> None:
    """Writes named arrays into an existing directory; Orbax's `PyTreeCheckpointer().restore` can read the result."""
    writer = TreeWriter(directory)
    for name, array in arrays.items():
        writer.add(name, np.asarray(array))
    writer.close()
