"""Reader of T5X checkpoints: native ones (msgpack and zarr, or one msgpack file) and those written through Orbax."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import flax.serialization
import numpy as np
from flax.traverse_util import flatten_dict

from speccascade_jax.checkpoints.array_plan import Piece, Plan, Stored, Tensor, Tensors, inline, shape_of, whole
from speccascade_jax.checkpoints.infer import MOST_LAYERS, check_count, infer_config
from speccascade_jax.checkpoints.zarr import Spec, open_arrays, tree_specs
from speccascade_jax.storage.buckets import kvstore
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError

MSGPACK = "checkpoint"
STATE = "state"
_STACKS = ("encoder", "decoder")
_SCANNED = ("encoder", "decoder", "layers")
_BIASES = ("relpos_bias", "relative_posemb")


def open_native(path: Path) -> Stored:
    """Opens a native T5X checkpoint without reading the optimizer's state.

    Args:
        path: a `checkpoint_<step>` directory, or a msgpack file, whose arrays are in the file or in folders next to it.

    Raises:
        CheckpointError: the file is not a msgpack file of T5X, arrays are missing, or metadata is damaged.
    """
    file = path / MSGPACK if path.is_dir() else path
    contents = _contents(file)
    nested = _target(file, contents)
    leaves = flatten_dict(nested, is_leaf=lambda _, leaf: _is_spec(leaf), sep="/")
    leaves = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    pointers = {name: leaf for name, leaf in leaves.items() if _is_spec(leaf)}
    outside = open_arrays(path, {name: _zarr(file.parent, name, leaf) for name, leaf in pointers.items()})
    _check_pointers(path, pointers, outside)
    inside = {name: inline(file, leaf) for name, leaf in leaves.items() if name not in pointers}
    layout = "msgpack and zarr" if pointers else "one msgpack file"
    return _stored(path, f"T5X native, version {contents.get('version', 0)} ({layout})", inside | outside)


def open_orbax(path: Path) -> Stored:
    """Opens a checkpoint that T5X wrote through Orbax; ignores all arrays except those under `target`.

    Args:
        path: a `checkpoint_<step>` directory with a folder `state`, or that folder.

    Raises:
        CheckpointError: metadata is missing or damaged, or arrays are missing.
    """
    state = path / STATE if (path / STATE).is_dir() else path
    specs = tree_specs(state, ("target",))
    if not specs:
        raise CheckpointError(f"{state} holds no arrays under target: it is not a T5X training state")
    return _stored(path, "T5X through Orbax", open_arrays(path, specs))


def _stored(path: Path, kind: str, tensors: Tensors) -> Stored:
    """Returns the checkpoint of these arrays, with configuration and plan inferred from names and shapes.

    T5X's scalable_t5 scans over layers. An array under `encoder/encoder/…` or `encoder/layers/…` then stacks all layers
    along axis 1, and the relative biases are stored once for each layer. Raises the errors of `infer_config`.
    """
    plan: Plan = {}
    readers = dict(tensors)
    for source, tensor in tensors.items():
        parts = source.split("/")
        stack, inner = parts[0], parts[2:]
        if not (inner and stack in _STACKS and parts[1] in _SCANNED and len(tensor.shape) > 1):
            plan[source] = whole(source, tensor.shape)
        elif inner[0] in _BIASES:
            plan[f"{stack}/relpos_bias/rel_embedding"] = _layer(source, tensor, 0)
            # The biases of all layers are compared, so this small array is never read in parts.
            read = functools.partial(_shared_bias, path, source, tensor)
            readers[source] = dataclasses.replace(tensor, read=read, read_part=None)
        else:
            check_count(path, tensor.shape[1], MOST_LAYERS)
            name = "/".join(inner)
            plan |= {f"{stack}/layers_{i}/{name}": _layer(source, tensor, i) for i in range(tensor.shape[1])}
    config = infer_config(path, {name: shape_of(pieces) for name, pieces in plan.items()})
    return Stored(path, kind, readers, config, plan)


def _layer(source: str, tensor: Tensor, number: int) -> tuple[Piece]:
    return (Piece(source, tensor.shape, tensor.shape[:1] + tensor.shape[2:], take=(1, number)),)


def _shared_bias(path: Path, source: str, tensor: Tensor) -> np.ndarray:
    array = tensor.read()
    if (array != array[:, :1]).any():
        raise CheckpointError(
            f"{path}: unknown architecture: {source} holds different relative biases for each layer "
            "(as UMT5 has), but T5 shares one among its layers"
        )
    return array


def _contents(file: Path) -> dict[str, Any]:
    try:
        contents = flax.serialization.msgpack_restore(file.read_bytes())
    except Exception as error:  # msgpack raises errors of many types for bytes of other formats.
        raise CheckpointError(
            f"{file} is not a readable msgpack file ({type(error).__name__}: {error}): it is damaged or not a "
            f"T5X checkpoint; {COPY_AGAIN}"
        ) from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{file} is not a T5X checkpoint: its msgpack holds a {type(contents).__name__}")
    return contents


def _target(file: Path, contents: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the parameters in a msgpack file: the entry `target`, which since version 1 is inside `optimizer`."""
    holder = contents.get("optimizer", contents)
    target = holder.get("target") if isinstance(holder, Mapping) else None
    if not isinstance(target, Mapping) or not target:
        raise CheckpointError(
            f"{file} is not a T5X checkpoint: no parameters under optimizer/target (found {sorted(contents)}); "
            "choose another file"
        )
    return target


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, Mapping) and isinstance(leaf.get("driver"), str)


def _zarr(directory: Path, name: str, pointer: Mapping[str, Any]) -> Spec:
    """Returns tensorstore's specification of an array in a folder of its own.

    Args:
        directory: the directory that holds the arrays' folders.
        name: the array's name.
        pointer: the array's entry in the msgpack file, which names the folder.
    """
    pointer = pointer.get("base", pointer)
    store = pointer.get("kvstore", {})
    path = store if isinstance(store, str) else store.get("path") or pointer.get("path")
    # Only the last component of the path is used, because it may be an absolute path of the machine that wrote it.
    folder = PurePosixPath(path or "target." + name.replace("/", ".")).name
    base = kvstore(directory / folder)
    # T5X writes every chunk, so an absent chunk means lost data; it must not be read as zeros.
    return {"driver": "zarr", "kvstore": base, "fill_missing_data_reads": False}


def _check_pointers(path: Path, pointers: Mapping[str, Any], outside: Tensors) -> None:
    """Checks that each array in a folder has the shape that the msgpack file states."""
    for name, pointer in pointers.items():
        shape = pointer.get("base", pointer).get("metadata", {}).get("shape")
        announced = tuple(shape.values() if isinstance(shape, Mapping) else shape or ())
        if shape is not None and announced != outside[name].shape:
            raise CheckpointError(
                f"{path}: array {name} has shape {list(outside[name].shape)} but the msgpack file announces "
                f"{list(announced)}: files of two checkpoints are mixed; {COPY_AGAIN}"
            )
