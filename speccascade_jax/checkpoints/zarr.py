"""Reader of zarr arrays, in folders of their own (T5X) or in Orbax trees.

Orbax can read these arrays too, but it stops at the first failure, does not name the lost arrays, and always reads the
optimizer's metadata. This module therefore reads arrays with tensorstore.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from speccascade_jax.checkpoints.array_plan import Tensor, Tensors, as_bfloat16
from speccascade_jax.checkpoints.byte_ranges import Part, all_of, empty, shape_of_part
from speccascade_jax.storage.buckets import BucketPath, kvstore
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError, UnreadableError, unreadable
from speccascade_jax.storage.readers import PLAUSIBLE, check_unpacked, json_object

Spec = dict[str, Any]
METADATA = "_METADATA"
# Enough memory to cache the nodes of an OCDBT tree between the reads of two arrays, but too little for arrays' chunks.
_CACHE_BYTES = 1_000_000


def open_arrays(path: Path, specs: Mapping[str, Spec]) -> Tensors:
    """Opens every array of a checkpoint without reading its data.

    Args:
        path: the checkpoint, for messages.
        specs: array name -> tensorstore's specification of the array.

    Raises:
        CheckpointError: the metadata of an array is missing or unreadable, or arrays are implausibly large.
    """
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    futures = {name: ts.open(spec, open=True, read=True, context=context) for name, spec in specs.items()}
    tensors: Tensors = {}
    failures, size = {}, 0
    for name, future in futures.items():
        try:
            array = _result(future)
            tensors[name] = _tensor(path, array)
            # The size of a chunk counts too, because a chunk is decoded as a whole even if it exceeds the array.
            chunk = math.prod(array.chunk_layout.read_chunk.shape) * array.dtype.numpy_dtype.itemsize
            size += max(tensors[name].nbytes, chunk)
        except UnreadableError as error:
            failures[name] = error
    if failures:
        raise unreadable(path, failures, len(specs))
    _check_size(path, size)
    return tensors


def _result(future: Any) -> Any:
    try:
        return future.result()
    except (ValueError, OSError, NotImplementedError) as error:
        # tensorstore appends the array's whole specification to its messages, which is removed here.
        reason = str(error).split(" [tensorstore_spec", 1)[0].splitlines()[0]
        raise UnreadableError(reason, missing=reason.startswith("NOT_FOUND")) from error


def _check_size(path: Path, size: int) -> None:
    """Raises a `CheckpointError` if arrays claim far more bytes than compressed weights in these files can have."""
    if size <= PLAUSIBLE or isinstance(path, BucketPath):  # A bucket does not list the sizes of its objects.
        return
    folder = path if path.is_dir() else path.parent
    try:
        check_unpacked(size, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}, according to its arrays' shapes); {COPY_AGAIN}") from error


def _tensor(path: Path, array: ts.TensorStore) -> Tensor:
    shape = tuple(array.shape)

    def read(part: Part) -> np.ndarray:
        out = empty(shape_of_part(part), array.dtype.numpy_dtype)
        # Chunks are decoded directly into `out`, without a second copy.
        _result(ts.array(out).write(array[part].translate_to[0] if part else array))
        return as_bfloat16(out)

    dtype = "bfloat16" if array.dtype.name == "uint16" else array.dtype.name
    chunks = tuple(
        chunk or size for chunk, size in zip(array.chunk_layout.read_chunk.shape or shape, shape, strict=True)
    )
    return Tensor(shape, dtype, path, lambda: read(all_of(shape)), read, chunks)


def tree_specs(directory: Path, prefix: tuple[str, ...] = ()) -> dict[str, Spec]:
    """Returns tensorstore's specifications of the arrays in an Orbax tree.

    Args:
        directory: a directory that Orbax's PyTree handler wrote, with a file `_METADATA`.
        prefix: keys of the wanted subtree; all other arrays, such as optimizer state, are ignored.

    Returns:
        Name of an array below `prefix`, with slashes between keys -> its specification.

    Raises:
        CheckpointError: `_METADATA` is missing or damaged.
    """
    file = directory / METADATA
    try:
        metadata = json_object(file, COPY_AGAIN, CheckpointError)
        entries = metadata["tree_metadata"].values()
        arrays = [e for e in entries if e["value_metadata"]["value_type"] in ("jax.Array", "np.ndarray")]
        keys = [tuple(str(k["key"]) for k in e["key_metadata"]) for e in arrays]
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is incomplete: its {METADATA} file is missing; {COPY_AGAIN}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged (no {error}); {COPY_AGAIN}") from error
    wanted = [k for k in keys if k[: len(prefix)] == prefix]
    return {"/".join(k[len(prefix) :]): _spec(directory, metadata, ".".join(k)) for k in wanted}


def _spec(directory: Path, metadata: dict[str, Any], name: str) -> Spec:
    base: Spec = kvstore(directory)
    if metadata.get("use_ocdbt", True):
        store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
        store = kvstore(directory / name)
    return {
        "driver": "zarr3" if metadata.get("use_zarr3") else "zarr",
        "kvstore": store,
        # If the writer stores chunks of zeros too, an absent chunk means lost data; it must not be read as zeros.
        "fill_missing_data_reads": not metadata.get("store_array_data_equal_to_fill_value", False),
    }
