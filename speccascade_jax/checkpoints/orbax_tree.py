"""The directory that Orbax's PyTree handler writes: where its arrays lie, and how we write one."""

from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from speccascade_jax.checkpoints.arrays import Arrays, Spec
from speccascade_jax.storage.errors import COPY_AGAIN, CheckpointError
from speccascade_jax.storage.readers import json_object

METADATA = "_METADATA"


def _metadata(directory: Path) -> dict[str, Any]:
    file = directory / METADATA
    try:
        return json_object(file, COPY_AGAIN, CheckpointError)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is incomplete: its {METADATA} file is missing; {COPY_AGAIN}") from None


def tree_specs(directory: Path, prefix: tuple[str, ...] = ()) -> dict[str, Spec]:
    """Where the arrays of an Orbax tree lie.

    Args:
        directory: what the PyTree handler wrote (holds `_METADATA`).
        prefix: keys of the subtree wanted; the rest (optimiser state) is left alone.

    Returns:
        tensorstore specifications by name below `prefix`, slashes between levels.

    Raises:
        CheckpointError: `_METADATA` is missing or damaged.
    """
    metadata = _metadata(directory)
    try:
        entries = metadata["tree_metadata"].values()
        arrays = [e for e in entries if e["value_metadata"]["value_type"] in ("jax.Array", "np.ndarray")]
        keys = [tuple(str(k["key"]) for k in e["key_metadata"]) for e in arrays]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory / METADATA} is damaged (no {error}); {COPY_AGAIN}") from error
    wanted = [k for k in keys if k[: len(prefix)] == prefix]
    return {"/".join(k[len(prefix) :]): _spec(directory, metadata, ".".join(k)) for k in wanted}


def _spec(directory: Path, metadata: dict[str, Any], name: str) -> Spec:
    base: Spec = {"driver": "file", "path": f"{directory.absolute()}/"}
    if metadata.get("use_ocdbt", True):
        store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
        store = base | {"path": f"{directory.absolute()}/{name}/"}
    return {
        "driver": "zarr3" if metadata.get("use_zarr3") else "zarr",
        "kvstore": store,
        # Where zeros are always written, an absent chunk is a loss and not a zero.
        "fill_missing_data_reads": not metadata.get("store_array_data_equal_to_fill_value", False),
    }


def write_tree(directory: Path, arrays: Arrays) -> None:
    """Write named arrays into an existing directory with Orbax: OCDBT, compressed, a handful of files.

    The handler is used without a `Checkpointer`, which would add times and its own commit marks; NumPy
    arrays leave out sharding and device files. `PyTreeCheckpointer().restore` reads the result.
    """
    import orbax.checkpoint as ocp  # slow to load, and reading needs none of it

    tree = unflatten_dict({tuple(name.split("/")): np.asarray(value) for name, value in arrays.items()})
    handler = ocp.PyTreeCheckpointHandler()
    try:
        handler.save(directory, args=ocp.args.PyTreeSave(tree))
        handler.finalize(directory)
    finally:
        handler.close()
