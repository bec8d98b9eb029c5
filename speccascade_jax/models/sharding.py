"""How a model lies on a mesh: parameters by name, caches by row and head, and what runs on each device's own part.

Names of axes and their rules are T5X's. A cache's rows and heads are one axis (`models/cache.py`), which is split in
the order of the devices: each holds the heads of its rows side by side, and nothing that is done with them leaves it.
What tells rows from heads therefore runs on each device's own part (`local`), where without a mesh it runs on the
whole. Left to XLA, which takes the axis for rows and then heads, every step would gather every cache whole.
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
"""One entry a row: lengths, tokens, controls."""
HEADS = P((DATA, MODEL))
"""Rows times heads: keys and values, queries."""
COLUMNS = P(DATA, None, MODEL)
"""What a product gives: `[B, T, heads · K]`, `[B, T, F]`, `[B, T, V]`."""
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
"""A parameter's path -> its logical axes."""

RULES = {"vocab": MODEL, "joined_kv": MODEL, "mlp": MODEL, "heads": MODEL, "embed": None, "relpos_buckets": None}
"""A logical axis -> the mesh's, or `None`: whole on every device (T5X's standard rules, parameters along `model`)."""

SPREAD = ("num_heads", "num_kv_heads", "d_ff", "num_embeddings")
"""Sizes that must divide by the `model` axis."""

_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


@contextmanager
def under(mesh: Mesh | None) -> Iterator[None]:
    """While a model of this mesh is traced."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def shards() -> int:
    """How many parts heads, units and the vocabulary are in."""
    mesh = _MESH.get()
    return 1 if mesh is None else mesh.shape[MODEL]


def local(function: Callable[..., Result], inputs: tuple[P, ...], outputs: Any) -> Callable[..., Result]:
    """`function` on each device's own part of its arguments; without a mesh the function itself."""
    mesh = _MESH.get()
    if mesh is None:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def constrain(x: Array, spec: P) -> Array:
    """`x`, and where it lies."""
    mesh = _MESH.get()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def spec_of(path: str) -> P:
    """Where a parameter lies.

    Raises:
        ValueError: the table knows no such parameter.
    """
    for pattern, axes in LOGICAL_AXES:
        if re.fullmatch(pattern, path):
            return P(*(RULES[axis] for axis in axes))
    raise ValueError(f"no rule says how the parameter {path!r} lies on a mesh: add a row to sharding.LOGICAL_AXES")


def interleave_fused(arrays: Sequence[np.ndarray], shards: int) -> np.ndarray:
    """Kernels of one input as one: part `s` of `shards` has its columns of the first, of the second and so on."""
    parts = zip(*(np.split(array, shards, axis=-1) for array in arrays), strict=True)
    return np.concatenate([one for part in parts for one in part], axis=-1)


def split_fused(array: np.ndarray, widths: Sequence[int], shards: int) -> list[np.ndarray]:
    """Splits what `interleave_fused` joined, kernels of `widths` columns each."""
    at = np.cumsum([width // shards for width in widths])[:-1]
    parts = [np.split(part, at, axis=-1) for part in np.split(array, shards, axis=-1)]
    return [np.concatenate(own, axis=-1) for own in zip(*parts, strict=True)]


def fused_widths(path: str, columns: int, config: Any) -> tuple[int, ...] | None:
    """How many columns each kernel has that stands in a fused one of so many; `None`: it is no fused one."""
    if re.fullmatch(r".*/qkv/(kernel|bias)", path):
        own = getattr(config, "num_kv_heads", config.num_heads) * config.head_dim
        return columns - 2 * own, own, own
    return (columns // 2,) * 2 if re.fullmatch(r".*/wi_01/(kernel|bias)", path) else None


def parts(path: str, shape: Sequence[int]) -> int:
    """Into how many parts a parameter is split on a mesh of `shape` (data, model)."""
    return shape[1] if MODEL in spec_of(path) else 1


def check(config: Any, shape: Sequence[int], whose: str) -> None:
    """Refuse a model that does not divide by the `model` axis of a mesh of `shape` (data, model).

    Raises:
        ValueError: says which size.
    """
    parts = shape[1]
    sizes = {name: getattr(config, name) for name in SPREAD if hasattr(config, name)}
    for name, size in sizes.items():
        if size % parts:
            raise ValueError(
                f"{name}={size} of {whose} does not divide by the {parts} parts of mesh={tuple(shape)}: "
                f"choose a divisor of {math.gcd(*sizes.values())}, or keep a draft whole (draft_whole=True)"
            )


def put(path: str, leaf: Any, mesh: Mesh) -> Any:
    """A parameter in its parts on the devices; a host that sees not all of them holds its own parts alone."""
    return _spread(leaf, mesh, spec_of(path))


def whole(leaf: Any, mesh: Mesh) -> Any:
    """An array on every device of a mesh."""
    return _spread(leaf, mesh, P())


def _spread(leaf: Any, mesh: Mesh, spec: P) -> Any:
    """An array that every host has whole, of which each sends its devices their part."""
    return jax.make_array_from_callback(leaf.shape, NamedSharding(mesh, spec), lambda part: leaf[part])


def place(params: Params, mesh: Mesh) -> Params:
    """Parameters on the devices of a mesh, each holding its part; fused kernels are side by side for it already."""
    flat = flatten_dict(params, sep="/")
    return unflatten_dict({path: put(path, np.asarray(leaf), mesh) for path, leaf in flat.items()}, sep="/")


def by_rows(tree: Tree, mesh: Mesh | None) -> Tree:
    """Arrays `[B, …]` with the rows spread along `data`; without a mesh as they are.

    Raises:
        ValueError: the rows do not divide.
    """
    if mesh is None:
        return tree
    rows, parts = len(jax.tree.leaves(tree)[0]), mesh.shape[DATA]
    if rows % parts:
        raise ValueError(
            f"a batch of {rows} does not divide by the {parts} parts that mesh={tuple(mesh.shape.values())} spreads "
            f"rows over: give a multiple of {parts}, or a mesh of (1, {mesh.size})"
        )
    if hosts.many():
        return cast(Tree, jax.tree.map(lambda x: _spread(np.asarray(x), mesh, ROWS), tree))
    return cast(Tree, jax.device_put(tree, NamedSharding(mesh, ROWS)))


def on_devices(tree: Tree, mesh: Mesh | None) -> Tree:
    """As `by_rows`; without a mesh on the one device."""
    return jax.device_put(tree) if mesh is None else by_rows(tree, mesh)


def rest(params: Params, mesh: Mesh | None) -> Params:
    """Parameters of which some are on the mesh already, the others whole on every device of it."""
    if mesh is None:
        return params

    def on_mesh(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        return leaf if getattr(sharding, "mesh", None) == mesh else whole(np.asarray(leaf), mesh)

    return jax.tree.map(on_mesh, params)


def replicate(tree: Tree) -> Tree:
    """Results as every host can read them; in one process as they are."""
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
