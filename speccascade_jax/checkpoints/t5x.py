"""T5X checkpoints: native (msgpack and zarr arrays, or one msgpack file) and through Orbax."""

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import flax.serialization

from speccascade_jax.checkpoints.array_plan import Stored
from speccascade_jax.checkpoints.arrays import Spec, Tensors, inline, open_arrays
from speccascade_jax.checkpoints.infer import stored_t5
from speccascade_jax.checkpoints.orbax_tree import tree_specs
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError

MSGPACK = "checkpoint"
STATE = "state"


def open_native(path: Path) -> Stored:
    """Open a native checkpoint; the optimiser's state stays unread.

    Args:
        path: a `checkpoint_<step>` directory, or a msgpack file (its arrays inline or in folders beside it).

    Raises:
        CheckpointError: not T5X's msgpack, arrays missing, or metadata damaged.
    """
    file = path / MSGPACK if path.is_dir() else path
    contents = _contents(file)
    leaves = dict(_leaves(_target(file, contents)))
    pointers = {name: leaf for name, leaf in leaves.items() if _is_spec(leaf)}
    outside = open_arrays(path, {name: _zarr(file.parent, name, leaf) for name, leaf in pointers.items()})
    _check_pointers(path, pointers, outside)
    inside = {name: inline(file, leaf) for name, leaf in leaves.items() if name not in pointers}
    where = "msgpack and zarr" if pointers else "one msgpack file"
    return stored_t5(path, f"T5X native, version {contents.get('version', 0)} ({where})", inside | outside)


def open_orbax(path: Path) -> Stored:
    """Open what T5X writes through Orbax; only `target` is read.

    Args:
        path: a `checkpoint_<step>` directory with `state/`, or that `state` directory.

    Raises:
        CheckpointError: metadata missing or damaged, or arrays missing.
    """
    state = path / STATE if (path / STATE).is_dir() else path
    specs = tree_specs(state, ("target",))
    if not specs:
        raise CheckpointError(f"{state} holds no arrays under target: it is not a T5X training state")
    return stored_t5(path, "T5X through Orbax", open_arrays(path, specs))


def _contents(file: Path) -> dict[str, Any]:
    try:
        contents = flax.serialization.msgpack_restore(file.read_bytes())
    except Exception as error:  # msgpack raises many kinds on bytes that are not its own
        raise CheckpointError(
            f"{file} is not a readable msgpack file ({type(error).__name__}: {error}): it is damaged or not a "
            f"T5X checkpoint; {COPY_AGAIN}"
        ) from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{file} is not a T5X checkpoint: its msgpack holds a {type(contents).__name__}")
    return contents


def _target(file: Path, contents: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters: below `optimizer` since version 1, at the top before."""
    holder = contents.get("optimizer", contents)
    target = holder.get("target") if isinstance(holder, Mapping) else None
    if not isinstance(target, Mapping) or not target:
        raise CheckpointError(
            f"{file} is not a T5X checkpoint: no parameters under optimizer/target (found {sorted(contents)})"
        )
    return target


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, Mapping) and isinstance(leaf.get("driver"), str)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and not _is_spec(value):
            yield from _leaves(value, f"{prefix}{key}/")
        elif value is not None:
            yield prefix + key, value


def _zarr(directory: Path, name: str, pointer: Mapping[str, Any]) -> Spec:
    """Only the place is taken from the pointer: the folder's own metadata says the rest."""
    pointer = pointer.get("base", pointer)
    store = pointer.get("kvstore", {})
    path = store if isinstance(store, str) else store.get("path") or pointer.get("path")
    # the last component of a path that may be absolute where it was written
    folder = PurePosixPath(path or "target." + name.replace("/", ".")).name
    base = {"driver": "file", "path": f"{(directory / folder).absolute()}/"}
    # T5X writes every chunk, so an absent one is a loss and not a zero.
    return {"driver": "zarr", "kvstore": base, "fill_missing_data_reads": False}


def _check_pointers(path: Path, pointers: Mapping[str, Any], outside: Tensors) -> None:
    """An array's folder must hold what the msgpack file announces."""
    for name, pointer in pointers.items():
        shape = pointer.get("base", pointer).get("metadata", {}).get("shape")
        announced = tuple(shape.values() if isinstance(shape, Mapping) else shape or ())
        if shape is not None and announced != outside[name].shape:
            raise CheckpointError(
                f"{path}: array {name} has shape {list(outside[name].shape)} but the msgpack file announces "
                f"{list(announced)}: files of two checkpoints are mixed; {COPY_AGAIN}"
            )
