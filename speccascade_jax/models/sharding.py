"""Layout of a model's parameters and caches on a mesh of devices, and functions that run on each device's part.

A mesh has the axes `data`, which splits rows, and `model`, which splits heads, feed-forward units and the vocabulary.
The names of parameter axes and their rules are T5X's.

A cache's rows and heads share one axis (`models/cache.py`). This axis is split so that each device holds its share of
the heads of its share of the rows. Attention then needs no communication. Functions that separate rows from heads must
run on each device's part (`local`). If XLA partitioned them, it would assume another order of this axis, and every step
would gather every cache.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
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
"""Layout of arrays with one entry per row, such as lengths, tokens and the controls of a generation."""
HEADS = P((DATA, MODEL))
"""Layout of arrays whose first axis is rows times heads: keys, values and queries."""
STACKED_HEADS = P(None, (DATA, MODEL))
"""Layout of a stack of arrays with the layout `HEADS`, one for each layer."""
COLUMNS = P(DATA, None, MODEL)
"""Layout of the result of a matrix product: `[B, T, heads · K]`, `[B, T, F]` or `[B, T, V]`."""
BIAS = P(DATA, MODEL)

LOGICAL_AXES = (
    (r"((encoder/)?token_embedder|layer_inputs/embedder)/embedding", ("vocab", "embed")),
    (r".*/(projection|layer_input_gate|layer_input_out)/kernel", ("embed", "embed")),
    (r".*/(query|key|value|qkv)/kernel", ("embed", "joined_kv")),
    (r".*/(query|key|value|qkv)/bias", ("joined_kv",)),
    (r".*/out/kernel", ("joined_kv", "embed")),
    (r".*/experts/(wi_0|wi_1|wi_01)/kernel", ("experts", "embed", "mlp")),
    (r".*/experts/wo/kernel", ("experts", "mlp", "embed")),
    (r".*/router/weight", ("embed", "experts")),
    (r".*/(wi|wi_0|wi_1|wi_01)/kernel", ("embed", "mlp")),
    (r".*/wo/kernel", ("mlp", "embed")),
    (r".*/logits_dense/kernel", ("embed", "vocab")),
    (r".*/fc/kernel", ("embed", "embed")),
    (r".*/(pre_projection|post_projection|centroids)/kernel", ("embed", "embed")),
    (r".*/clusters/ids", ("embed",)),
    (r".*/rel_embedding", ("heads", "relpos_buckets")),
    (r".*/scale", ("embed",)),
)
"""Pairs of a pattern and axis names: a parameter whose path matches the pattern has axes with these names."""

RULES = {"vocab": MODEL, "joined_kv": MODEL, "mlp": MODEL, "heads": MODEL, "embed": None, "relpos_buckets": None}
RULES |= {"experts": None}
"""The mesh axis that splits each named axis of a parameter (`None`: it is not split); T5X's standard rules."""

SPREAD = (
    "num_heads", "num_kv_heads", "global_kv_heads", "d_ff", "shared_d_ff", "expert_d_ff", "num_embeddings",
    "draft_vocab_size",
)  # fmt: skip
"""Sizes of a configuration that the length of the mesh's `model` axis must divide."""

_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)
_GATHERS: ContextVar[bool] = ContextVar("gathers", default=False)


@contextmanager
def under(mesh: Mesh | None, gathers: bool = False) -> Iterator[None]:
    """Sets the mesh that this module's functions use inside the `with` block, in which a model is traced.

    Args:
        mesh: the devices; `None`: a single one.
        gathers: whether parameters are split along `data` too, as in training; each layer then gathers its parameters
            before it multiplies (`gathered`).
    """
    # The mesh is a context variable, because Flax modules are built from a configuration, which knows no mesh.
    tokens = _MESH.set(mesh), _GATHERS.set(gathers)
    try:
        yield
    finally:
        _MESH.reset(tokens[0])
        _GATHERS.reset(tokens[1])


def whole_mesh() -> Mesh | None:
    """Returns the mesh that `under` set; `None` for a single device."""
    return _MESH.get()


def shards() -> int:
    """Returns how many parts the mesh splits heads, feed-forward units and the vocabulary into; 1 without a mesh."""
    mesh = _MESH.get()
    return 1 if mesh is None else mesh.shape[MODEL]


def local(function: Callable[..., Result], inputs: tuple[P, ...], outputs: Any) -> Callable[..., Result]:
    """Returns `function` so that it runs on each device's part of its arguments; unchanged without a mesh.

    Args:
        function: function of arrays.
        inputs: the layout of each argument.
        outputs: the layouts of the results.
    """
    mesh = _MESH.get()
    if mesh is None:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def summed(x: Array) -> Array:
    """Returns the sum of `x` over the mesh's `model` axis, in a function that runs on each device's part (`local`)."""
    return x if _MESH.get() is None else cast(Array, jax.lax.psum(x, MODEL))


def constrain(x: Array, spec: P) -> Array:
    """Constrains the layout of `x` on the mesh to `spec`; returns `x` unchanged without a mesh."""
    mesh = _MESH.get()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def gathered(parameter: Array, dtype: str, path: Sequence[str], name: str) -> Array:
    """Returns a layer's parameter in `dtype`, with its parts along the mesh's `data` axis gathered.

    Outside of training, parameters have no such parts, and the parameter is returned as it is.

    Args:
        parameter: the parameter.
        dtype: dtype of the computation.
        path: the path of the Flax module that owns the parameter.
        name: the parameter's name in this module.
    """
    mesh = _MESH.get()
    if mesh is None or not _GATHERS.get():
        return parameter
    full = "/".join((*path, name))
    layouts = spec_of(full), spread(full, parameter.shape, mesh.shape[DATA])
    return _gather(parameter, str(dtype), *layouts)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(parameter: Array, dtype: str, gathered_spec: P, spread_spec: P) -> Array:
    return _gathered(parameter, dtype, gathered_spec, spread_spec)


def _gathered(parameter: Array, dtype: str, gathered_spec: P, spread_spec: P) -> Array:
    # The cast comes first, so that devices send 16 bits instead of 32. Without the inner constraint, which keeps the
    # parameter split, XLA may gather activations instead.
    return constrain(constrain(jnp.asarray(parameter, dtype), spread_spec), gathered_spec)


def _gather_forward(parameter: Array, dtype: str, gathered_spec: P, spread_spec: P) -> tuple[Array, None]:
    # `_gather` itself is not called, because the policy of `kept_for_gradients` recognises only the constraints.
    return _gathered(parameter, dtype, gathered_spec, spread_spec), None


def _gather_backward(dtype: str, gathered_spec: P, spread_spec: P, _: None, gradient: Array) -> tuple[Array]:
    # The gradient is summed in float32 by a reduce-scatter. By default, the constraint's transpose would be an
    # all-reduce, which sends twice as many bytes and rounds the sum to 16 bits.
    return (constrain(gradient.astype(jnp.float32), spread_spec),)


_gather.defvjp(_gather_forward, _gather_backward)


def spread(path: str, shape: Sequence[int], parts: int) -> P:
    """Returns the layout of a parameter in training: that of `spec_of`, with the largest free axis split along `data`.

    Args:
        path: the parameter's path.
        shape: the parameter's shape; an axis is free if `model` does not split it and `parts` divides it.
        parts: number of devices along `data`.
    """
    spec = [*spec_of(path)] + [None] * (len(shape) - len(spec_of(path)))
    free = [axis for axis, name in enumerate(spec) if name is None and shape[axis] % parts == 0 and shape[axis] > 1]
    if free and parts > 1:
        spec[max(free, key=lambda axis: shape[axis])] = DATA
    return P(*spec)


def kept_for_gradients(remat: bool) -> dict[str, Any] | None:
    """Returns the options of `jax.checkpoint` for a layer; `None` if its gradients recompute nothing.

    If each layer gathers its parameters, the backward pass gathers them again. Keeping the gathered parameters of all
    layers after the forward pass would use up the memory that splitting them saves.

    Args:
        remat: whether gradients recompute the whole layer.
    """
    # Without a policy, `jax.checkpoint` keeps only the layer's inputs.
    if remat:
        return {}
    if _MESH.get() is None or not _GATHERS.get():
        return None
    return {"policy": _all_but_gathered}


def _all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """Returns whether the forward pass keeps an operation's result for the gradients (`jax.checkpoint`)."""
    # A gathered parameter is the result of a constraint. Constraints on activations are repeated too, at no cost.
    return str(primitive.name) != "sharding_constraint"


def spec_of(path: str) -> P:
    """Returns the layout on a mesh of the parameter with this path, such as "decoder/layers_0/mlp/wo/kernel".

    Raises:
        ValueError: no pattern of `LOGICAL_AXES` matches the path.
    """
    # Stacked parameters of layers have an axis of layers before the axes of the pattern.
    stacked = (None,) if "/layers/" in path else ()
    for pattern, axes in LOGICAL_AXES:
        if re.fullmatch(pattern, path):
            return P(*stacked, *(RULES[axis] for axis in axes))
    raise ValueError(f"no row of sharding.LOGICAL_AXES says how to shard the parameter {path!r}: add one")


def interleave_fused(arrays: Sequence[np.ndarray], shards: int) -> np.ndarray:
    """Joins kernels along columns so that each of `shards` equal parts holds its share of every kernel, in order."""
    # With plain concatenation, the first device would hold columns of the first kernel only.
    parts = zip(*(np.split(array, shards, axis=-1) for array in arrays), strict=True)
    return np.concatenate([share for part in parts for share in part], axis=-1)


def split_fused(array: np.ndarray, widths: Sequence[int], shards: int) -> list[np.ndarray]:
    """Splits an array that `interleave_fused` returned into its kernels, whose numbers of columns are `widths`."""
    bounds = np.cumsum([width // shards for width in widths])[:-1]
    parts = [np.split(part, bounds, axis=-1) for part in np.split(array, shards, axis=-1)]
    return [np.concatenate(shares, axis=-1) for shares in zip(*parts, strict=True)]


def fused_widths(path: str, columns: int, config: Any) -> tuple[int, ...] | None:
    """Returns the number of columns of each kernel in a fused parameter; `None` if the parameter is not fused.

    Args:
        path: the parameter's path.
        columns: the parameter's number of columns.
        config: the model's configuration.
    """
    # T5Gemma's encoder may have another number of heads than its decoder.
    if path.startswith("encoder/"):
        config = getattr(config, "encoder", config)
    if re.fullmatch(r".*/qkv/(kernel|bias)", path):
        number = re.search(r"/layers_(\d+)/", path)
        sizes = config.layer(int(number[1]) if number else 0) if hasattr(config, "layer") else config
        width = getattr(sizes, "kv_heads", config.num_heads) * sizes.head_dim
        return columns - 2 * width, width, width
    return (columns // 2,) * 2 if re.fullmatch(r".*/wi_01/(kernel|bias)", path) else None


def parts(path: str, shape: Sequence[int]) -> int:
    """Returns how many parts a parameter is split into on a mesh of `shape` (data, model)."""
    return shape[1] if MODEL in spec_of(path) else 1


def check(config: Any, shape: Sequence[int], owner: str) -> None:
    """Checks that a mesh of `shape` (data, model) can split a model's heads, feed-forward units and embedding rows.

    Raises:
        ValueError: the `model` axis does not divide one of these sizes; the message names the size and `owner`.
    """
    parts = shape[1]
    # Not every model has all of these sizes: a T5 has no `num_kv_heads`.
    sizes = {name: size for name in SPREAD if (size := getattr(config, name, None))}
    for name, size in sizes.items():
        if size % parts:
            raise ValueError(
                f"{name}={size} of {owner} is not divisible by the {parts} parts of mesh={tuple(shape)}: "
                f"give its second axis a divisor of {math.gcd(*sizes.values())}, or keep a draft unsplit "
                "(draft_whole=True)"
            )
    if (encoder := getattr(config, "encoder", None)) is not None:
        check(encoder, shape, f"the encoder of {owner}")


def put(path: str, leaf: Any, mesh: Mesh) -> Any:
    """Returns a parameter split over a mesh; each host then holds only the parts of its own devices."""
    return _spread(leaf, mesh, spec_of(path))


def layout_of(path: str, mesh: Mesh, whole: bool = False) -> NamedSharding:
    """Returns the layout of a parameter on a mesh: split by its path's rules, or on every device if `whole` is true."""
    return NamedSharding(mesh, P() if whole else spec_of(path))


def whole(leaf: Any, mesh: Mesh) -> Any:
    """Returns an array that every device of a mesh holds in full."""
    return _spread(leaf, mesh, P())


def _spread(leaf: Any, mesh: Mesh, spec: P) -> Any:
    """Returns an array with layout `spec` on the mesh; every host must pass the whole array as `leaf`."""
    # The callback runs for a host's own devices only, so the same code works for one host and for several.
    return jax.make_array_from_callback(leaf.shape, NamedSharding(mesh, spec), lambda part: leaf[part])


def place(params: Params, mesh: Mesh) -> Params:
    """Returns the parameters split over a mesh; fused kernels must already be interleaved for this mesh."""
    flat = flatten_dict(params, sep="/")
    return unflatten_dict({path: put(path, np.asarray(leaf), mesh) for path, leaf in flat.items()}, sep="/")


def by_rows(tree: Tree, mesh: Mesh | None) -> Tree:
    """Splits the rows of arrays `[B, …]` along the mesh's `data` axis; returns the arrays unchanged without a mesh.

    Raises:
        ValueError: the `data` axis does not divide the number of rows.
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
    """Puts arrays `[B, …]` on the devices of a mesh, split by `by_rows`; on the default device without a mesh."""
    return jax.device_put(tree) if mesh is None else by_rows(tree, mesh)


def rest(params: Params, mesh: Mesh | None) -> Params:
    """Returns parameters that are all on the mesh; arrays that were not on it are copied to every device."""
    if mesh is None:
        return params

    def on_mesh(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        return leaf if getattr(sharding, "mesh", None) == mesh else whole(np.asarray(leaf), mesh)

    return jax.tree.map(on_mesh, params)


def replicate(tree: Tree) -> Tree:
    """Replicates arrays on all devices, so that every host can read them; in a single process, returns them as is."""
    if not hosts.many():
        return tree

    def gathered(x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
            return x
        return laid_out(x, NamedSharding(sharding.mesh, P()))

    return cast(Tree, jax.tree.map(gathered, tree))


def laid_out(tree: Tree, layout: Any) -> Tree:
    """Returns arrays with other layouts on the same devices; `layout` is one sharding, or a tree of them."""
    # All calls use one function, so that the same shapes and layouts compile only once.
    return cast(Tree, jax.jit(_same, out_shardings=layout)(tree))


def _same(tree: Any) -> Any:
    return tree
