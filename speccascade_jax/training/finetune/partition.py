"""Layout of a training state on a mesh: parameters and optimiser state are spread along both axes of the mesh.

Along `model`, parameters are split as for decoding (`models.sharding`). Along `data`, each device also keeps only a
part of every array, as in fully sharded data parallelism (ZeRO 3: Rajbhandari et al., 2020, section 5; T5X's "2D"
partition of parameters). Each layer gathers its parameters before it uses them, and XLA sums and scatters the
gradients.
"""

from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speccascade_jax.core.types import Params
from speccascade_jax.models import sharding
from speccascade_jax.runtime import hosts
from speccascade_jax.runtime.mesh import DATA
from speccascade_jax.training.finetune.batches import Batch
from speccascade_jax.training.finetune.optimizers import Optimizer, state_specs
from speccascade_jax.training.runs import TrainState


def param_specs(params: Params, mesh: Mesh) -> Any:
    """Returns the layout of every parameter of a tree of arrays or shapes."""
    flat = flatten_dict(params, sep="/")
    parts = mesh.shape[DATA]
    return unflatten_dict({path: sharding.spread(path, leaf.shape, parts) for path, leaf in flat.items()}, sep="/")


def state_layout(params: Params, optimizer: Optimizer, mesh: Mesh | None) -> TrainState:
    """Returns a training state of `jax.ShapeDtypeStruct`, with the layout on the mesh if there is one.

    Args:
        params: arrays or shapes of the parameters, float32.
        optimizer: the optimiser.
        mesh: the devices; `None`: one.
    """
    transformation = optimizer.transformation()
    shapes = jax.eval_shape(lambda params: TrainState.fresh(params, transformation), params)
    if mesh is None:
        return shapes
    specs = param_specs(params, mesh)
    layout = TrainState(specs, state_specs(transformation, params, specs), PartitionSpec())  # type: ignore[arg-type]

    def laid_out(shape: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(laid_out, shapes, layout)


def shardings(layout: Any) -> Any:
    """Returns the shardings of a tree of shapes; `None` for a single device."""
    leaves = jax.tree.leaves(layout)
    return None if leaves[0].sharding is None else jax.tree.map(lambda leaf: leaf.sharding, layout)


def fresh_state(params: Params, optimizer: Optimizer, mesh: Mesh | None) -> TrainState:
    """Returns the state at step 0, spread over the mesh; each host passes all parameters as arrays of NumPy or JAX."""
    layout = state_layout(params, optimizer, mesh)

    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)
    placed = jax.device_put(params) if mesh is None else spread(params, mesh)
    transformation = optimizer.transformation()
    start = jax.jit(lambda params: TrainState.fresh(params, transformation), out_shardings=shardings(layout))
    return start(placed)


def host_rows(rows: int, mesh: Mesh | None) -> slice:
    """Returns the rows of a global batch that this process's devices hold, which are consecutive."""
    if mesh is None:
        return slice(0, rows)
    layout = NamedSharding(mesh, sharding.ROWS)
    parts = [index[0] for index in layout.addressable_devices_indices_map((rows,)).values() if index]
    begin = min(part.start or 0 for part in parts)
    return slice(begin, max(rows if part.stop is None else part.stop for part in parts))


def on_mesh(batch: Batch, rows: int, mesh: Mesh | None) -> Batch:
    """Places a global batch of `rows` rows on the mesh; `batch` holds only this process's rows (`host_rows`)."""
    if mesh is None:
        return batch
    layout = NamedSharding(mesh, sharding.ROWS)

    def place(leaf: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(layout, leaf, (rows, *leaf.shape[1:]))

    return jax.tree.map(place, batch)


def for_decoding(params: Params, mesh: Mesh | None) -> Params:
    """Returns the parameters in the layout for decoding: gathered along `data`, and split along `model` only."""
    if mesh is None:
        return params
    flat = flatten_dict(params, sep="/")
    layout = {path: NamedSharding(mesh, sharding.spec_of(path)) for path in flat}
    return sharding.laid_out(params, unflatten_dict(layout, sep="/"))


def spread(params: Params, mesh: Mesh) -> Params:
    """Spreads parameters over the mesh in the layout of training; each host passes all parameters, unsplit."""

    def place(leaf: Any, spec: PartitionSpec) -> jax.Array:
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda part: host[part])

    return jax.tree.map(place, params, param_specs(params, mesh))


def on_host(params: Params) -> Params:
    """Gathers all parameters as NumPy arrays in the first process; in the others, returns `None` for each array.

    All processes must call this function.
    """

    def gathered(leaf: Any) -> np.ndarray | None:
        # waits for each array before the next, because devices may have no room for all of them
        whole = jax.block_until_ready(sharding.replicate(leaf))
        return np.asarray(whole) if hosts.first() else None

    return jax.tree.map(gathered, params)
