"""Layout of a model on a mesh of devices: parameters by name, caches by row and head, and device-local functions.

Axis names and rules are T5X's. A cache's rows and heads share one axis (`models/cache.py`), which is split in the order
of the devices: each device holds its heads of its rows, and attention never leaves the device. Functions that tell rows
from heads therefore run on each device's part (`local`); without a mesh they run on the whole. If XLA partitioned them,
it would take the axis for all rows and then all heads, and every step would gather every cache.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh as Mesh
from jax.sharding import NamedSharding, PartitionSpec

from speccascade_jax.core.types import Array, Params
from speccascade_jax.runtime import hosts
from speccascade_jax.runtime.mesh import DATA, MODEL

Tree = TypeVar("Tree")
Result = TypeVar("Result")
P = PartitionSpec
ROWS = P(DATA)
"""Layout of arrays with one entry per row: lengths, tokens, controls."""
HEADS = P((DATA, MODEL))
"""Layout of an axis of rows times heads: keys, values and queries."""
COLUMNS = P(DATA, None, MODEL)
"""Layout of a product's result: `[B, T, heads · K]`, `[B, T, F]`, `[B, T, V]`."""
BIAS = P(DATA, MODEL)

LOGICAL_AXES = (
    (r"token_embedder/embedding", ("vocab", "embed")),
    (r".*/(query|key|value|qkv)/kernel", ("embed", "joined_kv")),
    (r".*/(query|key|value|qkv)/bias", ("joined_kv",)),
    (r".*/out/kernel", ("joined_kv", "embed")),
    (r".*/(wi|wi_0|wi_1|wi_01)/kernel", ("embed", "mlp")),
    (r".*/wo/kernel", ("mlp", "embed")),
    (r".*/logits_dense/kernel", ("embed", "vocab")),
    (r".*/rel_embedding", ("heads", "relpos_buckets")),
    (r".*/scale", ("embed",)),
)
"""Pattern of a parameter's path -> its logical axes."""

RULES = {"vocab": MODEL, "joined_kv": MODEL, "mlp": MODEL, "heads": MODEL, "embed": None, "relpos_buckets": None}
"""Logical axis -> mesh axis, or `None` to replicate it (T5X's standard rules, with parameters along `model`)."""

SPREAD = ("num_heads", "num_kv_heads", "d_ff", "num_embeddings")
"""Sizes that must be divisible by the `model` axis."""

_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


@contextmanager
def under(mesh: Mesh | None) -> Iterator[None]:
    """Sets the mesh that the functions of this module use while a model is traced."""
    # A context variable, because linen modules are built from the configuration alone and have no field for a mesh.
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def shards() -> int:
    """Returns the number of parts that heads, units and the vocabulary are split into."""
    mesh = _MESH.get()
    return 1 if mesh is None else mesh.shape[MODEL]


def local(function: Callable[..., Result], inputs: tuple[P, ...], outputs: Any) -> Callable[..., Result]:
    """Makes `function` run on each device's part of its arguments; without a mesh, returns it unchanged."""
    mesh = _MESH.get()
    if mesh is None:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def constrain(x: Array, spec: P) -> Array:
    """Constrains the layout of `x` on the mesh; returns `x` unchanged without a mesh."""
    mesh = _MESH.get()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def spec_of(path: str) -> P:
    """Returns the layout of a parameter.

    Raises:
        ValueError: no pattern of `LOGICAL_AXES` matches the path.
    """
    for pattern, axes in LOGICAL_AXES:
        if re.fullmatch(pattern, path):
            return P(*(RULES[axis] for axis in axes))
    raise ValueError(f"no row of sharding.LOGICAL_AXES says how to shard the parameter {path!r}: add one")


def interleave_fused(arrays: Sequence[np.ndarray], shards: int) -> np.ndarray:
    """Joins kernels of the same input so that each of `shards` parts holds its share of every kernel, in order."""
    # Plain concatenation would give the first device nothing but queries; interleaved, each has its share of all.
    parts = zip(*(np.split(array, shards, axis=-1) for array in arrays), strict=True)
    return np.concatenate([share for part in parts for share in part], axis=-1)


def split_fused(array: np.ndarray, widths: Sequence[int], shards: int) -> list[np.ndarray]:
    """Splits an array that `interleave_fused` joined into its kernels, which have `widths` columns."""
    bounds = np.cumsum([width // shards for width in widths])[:-1]
    parts = [np.split(part, bounds, axis=-1) for part in np.split(array, shards, axis=-1)]
    return [np.concatenate(shares, axis=-1) for shares in zip(*parts, strict=True)]


def fused_widths(path: str, columns: int, config: Any) -> tuple[int, ...] | None:
    """Returns the columns of each kernel within a fused parameter of `columns` columns; `None` if it is not fused."""
    if re.fullmatch(r".*/qkv/(kernel|bias)", path):
        width = getattr(config, "num_kv_heads", config.num_heads) * config.head_dim
        return columns - 2 * width, width, width
    return (columns // 2,) * 2 if re.fullmatch(r".*/wi_01/(kernel|bias)", path) else None


def parts(path: str, shape: Sequence[int]) -> int:
    """Returns the number of parts that a parameter is split into on a mesh of `shape` (data, model)."""
    return shape[1] if MODEL in spec_of(path) else 1


def check(config: Any, shape: Sequence[int], owner: str) -> None:
    """Checks that the `model` axis of a mesh of `shape` (data, model) divides the model's sizes.

    Raises:
        ValueError: it does not; the message names the size.
    """
    parts = shape[1]
    # Not every family has all of these sizes: a T5 has no `num_kv_heads`.
    sizes = {name: getattr(config, name) for name in SPREAD if hasattr(config, name)}
    for name, size in sizes.items():
        if size % parts:
            raise ValueError(
                f"{name}={size} of {owner} is not divisible by the {parts} parts of mesh={tuple(shape)}: "
                f"choose a divisor of {math.gcd(*sizes.values())}, or keep a draft whole (draft_whole=True)"
            )


def put(path: str, leaf: Any, mesh: Mesh) -> Any:
    """Returns a parameter split over the devices; a host with only some of the devices holds only their parts."""
    return _spread(leaf, mesh, spec_of(path))


def whole(leaf: Any, mesh: Mesh) -> Any:
    """Returns an array replicated on every device of a mesh."""
    return _spread(leaf, mesh, P())


def _spread(leaf: Any, mesh: Mesh, spec: P) -> Any:
    """Returns an array laid out on the mesh; every host has the whole array and sends its devices their parts."""
    # The callback runs for a host's own devices only, so the same code serves one host and several.
    return jax.make_array_from_callback(leaf.shape, NamedSharding(mesh, spec), lambda part: leaf[part])


def place(params: Params, mesh: Mesh) -> Params:
    """Returns the parameters split over the devices of a mesh; fused kernels must be interleaved for it already."""
    flat = flatten_dict(params, sep="/")
    return unflatten_dict({path: put(path, np.asarray(leaf), mesh) for path, leaf in flat.items()}, sep="/")


def by_rows(tree: Tree, mesh: Mesh | None) -> Tree:
    """Splits the rows of arrays `[B, …]` along the mesh's `data` axis; without a mesh, returns them unchanged.

    Raises:
        ValueError: the `data` axis does not divide the rows.
    """
    if mesh is None:
        return tree
    rows, parts = len(jax.tree.leaves(tree)[0]), mesh.shape[DATA]
    if rows % parts:
        raise ValueError(
            f"a batch of {rows} is not divisible by the {parts} parts that mesh={tuple(mesh.shape.values())} spreads "
            f"rows over: give a multiple of {parts}, or a mesh of (1, {mesh.size})"
        )
    if hosts.many():
        return cast(Tree, jax.tree.map(lambda x: _spread(np.asarray(x), mesh, ROWS), tree))
    return cast(Tree, jax.device_put(tree, NamedSharding(mesh, ROWS)))


def on_devices(tree: Tree, mesh: Mesh | None) -> Tree:
    """Puts arrays on the devices, split as by `by_rows`; without a mesh, on the default device."""
    return jax.device_put(tree) if mesh is None else by_rows(tree, mesh)


def rest(params: Params, mesh: Mesh | None) -> Params:
    """Returns the parameters with every array on the mesh; arrays that are not there yet are replicated."""
    if mesh is None:
        return params

    def on_mesh(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        return leaf if getattr(sharding, "mesh", None) == mesh else whole(np.asarray(leaf), mesh)

    return jax.tree.map(on_mesh, params)


def replicate(tree: Tree) -> Tree:
    """Replicates results so that every host can read them; in a single process, returns them unchanged."""
    if not hosts.many():
        return tree

    def gathered(x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
            return x
        return jax.jit(_same, out_shardings=NamedSharding(sharding.mesh, P()))(x)

    return cast(Tree, jax.tree.map(gathered, tree))


def _same(x: Array) -> Array:
    return x
