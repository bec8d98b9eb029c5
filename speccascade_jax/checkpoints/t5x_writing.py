"""Writer of T5X's native format: parameters in zarr folders, and a msgpack file that points to them.

With `scan_layers`, the layout is that of T5X's scalable T5: `decoder/decoder/…` stacks all layers along axis 1, and
relative biases are repeated for each layer. Optimizer state is not written.
"""

import os
import uuid
from pathlib import Path
from typing import Any

import flax.serialization
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

from speccascade_jax.checkpoints.array_plan import Arrays, describe_not_finite
from speccascade_jax.checkpoints.infer import check_shapes
from speccascade_jax.checkpoints.native_arrays import chunks_of
from speccascade_jax.checkpoints.t5x import MSGPACK
from speccascade_jax.core.types import Params
from speccascade_jax.models.stacks import STACK, in_stack, separate_shapes, stack_params, unstack_params
from speccascade_jax.models.t5 import T5
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.errors import not_finite
from speccascade_jax.storage.files import expanded, make_folder, naming

_VERSION = 3
_BIAS = "/relpos_bias/rel_embedding"


def save_t5x(
    path: str | os.PathLike[str], model: T5, params: Params, *, step: int = 0, scan_layers: bool = False
) -> Path:
    """Writes a T5's parameters to a new directory `checkpoint_<step>` of T5X below `path`; returns the directory.

    Args:
        path: the folder of the run.
        model: the model; other families have no T5X format.
        params: nested parameters with separate or stacked layers; not packed and not fused.
        step: number in the directory's name.
        scan_layers: whether layers are stacked, for T5X models with `scan_layers = True`.

    Raises:
        FileExistsError: the directory exists.
        CheckpointError: parameters are not finite, or do not belong to `model`.
        ValueError: `model` is not a T5, or `path` is in a bucket.
    """
    if not isinstance(model, T5) or model.config.layer_biases:
        name = "a model with biases by layer (UMT5)" if isinstance(model, T5) else type(model).__name__
        raise ValueError(f"{name} has no T5X format here: use checkpoints.save")
    target = expanded(path).absolute() / f"checkpoint_{step}"
    if isinstance(target, BucketPath):
        raise ValueError(
            f"{path}: T5X's format is written to local folders only; give a local folder, and copy it to the bucket"
        )
    if target.exists():
        raise FileExistsError(f"{target} exists: choose another path or step")
    arrays = _arrays(target, model, params, scan_layers)
    make_folder(target.parent)
    # The name of the temporary folder is one that T5X's readers and this package's ignore, because T5X uses such names.
    temporary = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex[:8]}")
    with naming(target):
        temporary.mkdir()
        pointers = {name: _write(temporary, name, array) for name, array in arrays.items()}
        optimizer = {"target": unflatten_dict(pointers, sep="/"), "state": {"step": step, "param_states": {}}}
        contents = {"version": _VERSION, "optimizer": optimizer}
        (temporary / MSGPACK).write_bytes(flax.serialization.msgpack_serialize(contents))
        temporary.rename(target)
    return target


def _arrays(target: Path, model: T5, params: Params, scan_layers: bool) -> Arrays:
    """Returns T5X's arrays by name."""
    tree = unfreeze(params)
    flat = flatten_dict(stack_params(unstack_params(tree)) if scan_layers else unstack_params(tree), sep="/")
    arrays = {name: np.asarray(value) for name, value in flat.items()}
    check_shapes(target, separate_shapes({name: array.shape for name, array in arrays.items()}), model.config)
    if reasons := {name: reason for name, array in arrays.items() if (reason := describe_not_finite(array))}:
        raise not_finite(target, reasons)
    return _scanned(arrays, model) if scan_layers else arrays


def _scanned(arrays: Arrays, model: T5) -> Arrays:
    """Returns stacked parameters with the names and the axis of layers of T5X's scalable T5."""
    depths = {"encoder": model.config.num_encoder_layers, "decoder": model.config.num_decoder_layers}
    out: Arrays = {}
    for name, array in arrays.items():
        stack = name.split("/")[0]
        if in_stack(name):
            out[name.replace(f"{stack}/{STACK}/", f"{stack}/{stack}/")] = np.moveaxis(array, 0, 1)
        elif name.endswith(_BIAS):
            # T5 shares one bias among its layers, but a scan over layers has one for each.
            out[f"{stack}/{stack}{_BIAS}"] = np.repeat(array[:, None], depths[stack], axis=1)
        else:
            out[name] = array
    return out


def _chunks(name: str, array: np.ndarray) -> tuple[int, ...]:
    """Returns the shape of an array's chunks, which split the axis that a mesh splits (`native_arrays.chunks_of`)."""
    stack, _, rest = name.partition("/")
    if not rest.startswith(f"{stack}/") or name.endswith(_BIAS):
        return chunks_of(name, array.shape, array.itemsize)
    shape = np.moveaxis(array, 1, 0).shape
    layers, first, *others = chunks_of(f"{stack}/{STACK}/{rest.partition('/')[2]}", shape, array.itemsize)
    return first, layers, *others


def _write(folder: Path, name: str, array: np.ndarray) -> dict[str, Any]:
    """Writes an array to a zarr folder of its own; returns its entry in the msgpack file."""
    kind = "bfloat16" if array.dtype == jnp.bfloat16 else array.dtype.newbyteorder("<").str
    inner = "target." + name.replace("/", ".")
    metadata = {"shape": list(array.shape), "chunks": list(_chunks(name, array)), "compressor": {"id": "gzip"}}
    store = {"driver": "file", "path": f"{folder / inner}/"}
    spec: dict[str, Any] = {
        "driver": "zarr",
        "kvstore": store,
        "metadata": metadata | {"dtype": kind, "dimension_separator": "."},
    }
    # Every chunk is written, because an absent chunk means lost data.
    spec["store_data_equal_to_fill_value"] = True
    ts.open(spec, create=True).result().write(array).result()
    dtype = {"dtype": array.dtype.name}
    return {"driver": "zarr", **dtype, "kvstore": {"driver": "file", "path": f"{inner}/"}, "metadata": metadata}
