"""Layers that run in a scan: a loop over stacked parameters `layers/…` `[L, …]`, one layer per iteration.

A compiled program then holds one layer instead of `L`, so its size and compile time do not grow with depth. Layers of
several kinds that take turns, such as Gemma 2's local and global ones, are scanned in groups: `place` is a layer's
position in its group. The layers, their parameters' names below `layers`, and their results are those of an unrolled
model, whose parameters are `layers_0/…` to `layers_{L - 1}/…`.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from speccascade_jax.core.types import Array, Params, is_packed
from speccascade_jax.models.sharding import kept_for_gradients, under

SCAN_FROM = 24
"""The least depth at which layers run in a scan, unless `scan_layers` is set (docs/results/scans.md)."""
STACK = "layers"
"""Name of the stacked parameters of an encoder or decoder, `decoder/layers/mlp/wo/kernel` `[L, F, E]`."""

Carry = TypeVar("Carry")
Body = Callable[[Any, Params, int, Any], tuple[Any, Any]]
"""Function that applies one layer in a scan: from the carry, the layer's parameters, its place in its group (static)
and its index, it returns the new carry and an output."""
_LAYER = re.compile(r"/layers_(\d+)/")


class InStack(NamedTuple):
    """One layer's part of an array `[L, …]`, for code that reads this part in place; a slice would copy it."""

    stack: Any
    layer: Any


def is_scanned(scan_layers: bool | None, depth: int) -> bool:
    """Returns whether `depth` layers run in a scan, given a configuration's option `scan_layers`."""
    return depth >= SCAN_FROM if scan_layers is None else scan_layers


def stack_path(path: str) -> tuple[str, int] | None:
    """Returns the path of the stacked parameter that contains a layer's parameter, and the index of the layer.

    "decoder/layers_3/mlp/wo/kernel" is layer 3 of "decoder/layers/mlp/wo/kernel". The result is `None` if the parameter
    does not belong to a layer.
    """
    layer = _LAYER.search(path)
    return None if layer is None else (_LAYER.sub(f"/{STACK}/", path), int(layer[1]))


def layer_path(path: str, layer: int) -> str:
    """Returns the name of a layer's part of the stacked parameter with this path (`in_stack`)."""
    return path.replace(f"/{STACK}/", f"/{STACK}_{layer}/")


def in_stack(path: str) -> bool:
    """Returns whether a parameter stacks all layers along its first axis."""
    return f"/{STACK}/" in path


def has_stacks(params: Any) -> bool:
    """Returns whether a model's nested parameters have stacked layers."""
    stacks = params.values() if isinstance(params, Mapping) else ()
    return any(isinstance(part, Mapping) and STACK in part for part in stacks)


def stacked_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of stacked parameters by name, computed from the shapes of separate layers' parameters."""
    out: dict[str, tuple[int, ...]] = {}
    for path, shape in shapes.items():
        place = stack_path(path)
        if place is None:
            out[path] = shape
        else:
            name, layer = place
            out[name] = (max(layer + 1, out.get(name, (0,))[0]), *shape)
    return out


def separate_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of separate layers' parameters by name, computed from the shapes of any stacked parameters."""
    out: dict[str, tuple[int, ...]] = {}
    for path, shape in shapes.items():
        parts = {layer_path(path, number): shape[1:] for number in range(shape[0])} if in_stack(path) else {path: shape}
        out |= parts
    return out


def put_layer(stack: Array | None, leaf: Array, layer: int, layers: int) -> Array:
    """Writes one layer's parameter into a stack of `layers` layers, in place; creates the stack if it is `None`.

    The stack has the layout of `leaf` on the mesh. The devices never hold a second copy of the stack.
    """
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    if stack is None:
        stack = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)((layers, *leaf.shape), leaf.dtype)
    written: Array = _write(stack, leaf, layer)
    return written


# The result takes the memory of the donated stack. Otherwise each write would need a second copy of it.
@partial(jax.jit, donate_argnums=0)
def _write(stack: Array, leaf: Array, layer: Array) -> Array:
    written: Array = jax.lax.dynamic_update_index_in_dim(stack, leaf, layer, 0)
    return written


def stack_params(params: Params) -> Params:
    """Returns nested parameters with the parameters of separate layers stacked; the arrays are copied.

    Raises:
        ValueError: matrices are packed for the CPU code, which supports separate layers only.
    """
    flat = flatten_dict(params, sep="/", is_leaf=lambda _, leaf: is_packed(leaf))
    layers: dict[str, dict[int, Any]] = {}
    out: dict[str, Any] = {}
    for path, leaf in flat.items():
        if (place := stack_path(path)) is None:
            out[path] = leaf
            continue
        if is_packed(leaf):
            raise ValueError(f"{path} is packed, and packed matrices are not stacked: load with scan_layers=False")
        layers.setdefault(place[0], {})[place[1]] = leaf
    for path, parts in layers.items():
        # The numbers give the order, because by name `layers_10` comes before `layers_2`.
        ordered = [parts[number] for number in range(len(parts))]
        out[path] = np.stack(ordered) if isinstance(ordered[0], np.ndarray) else jnp.stack(ordered)
    return unflatten_dict(out, sep="/")


def unstack_params(params: Params) -> Params:
    """Returns nested parameters with each stack split into the parameters of single layers; the arrays are copied."""
    out: dict[str, Any] = {}
    for path, leaf in flatten_dict(params, sep="/", is_leaf=lambda _, leaf: is_packed(leaf)).items():
        out |= (
            {layer_path(path, number): leaf[number] for number in range(len(leaf))} if in_stack(path) else {path: leaf}
        )
    return unflatten_dict(out, sep="/")


def stack_of(module: nn.Module, layer: nn.Module, count: int, *inputs: Any) -> Params:
    """Returns the stacked parameters of a module's layers, `[L, …]` each; creates them if they do not exist.

    Call this function in the module's `setup`.

    Args:
        module: the encoder or decoder that the parameters belong to.
        layer: a layer module without a parent, which creates the parameters.
        count: the number of layers. The stack may have more: an early exit uses only its first layers.
        inputs: arguments with which the layer can be initialized, of any sizes.
    """
    if not count:
        return {}
    if module.has_variable("params", STACK):
        stacked: Params = module.get_variable("params", STACK)
        return stacked

    def init(key: Array) -> Params:
        # Only shapes matter here. The mesh is switched off, because it could not split arrays as small as `inputs`.
        with under(None):
            return jax.vmap(lambda layer_key: layer.init(layer_key, *inputs)["params"])(jax.random.split(key, count))

    created: Params = module.param(STACK, init)
    return created


def recomputed(body: Any, remat: bool) -> Any:
    """Returns a loop body whose backward pass recomputes each layer, or only gathers its parameters again.

    Args:
        body: as in `over_layers`.
        remat: whether gradients recompute the whole layer.
    """
    options = kept_for_gradients(remat)
    # XLA cannot merge computations of different iterations of a loop, so `prevent_cse` is not needed.
    return body if options is None else jax.checkpoint(body, prevent_cse=False, static_argnums=(2,), **options)


def recomputed_layer(layer: Any, remat: bool, static_argnums: tuple[int, ...] = ()) -> Any:
    """Returns a layer class whose backward pass recomputes the layer, or only gathers its parameters again.

    Args:
        layer: the Flax class of the layer, for models without a scan.
        remat: whether gradients recompute the whole layer.
        static_argnums: indices of arguments that are not arrays, `self` included.
    """
    options = kept_for_gradients(remat)
    return layer if options is None else nn.remat(layer, static_argnums=static_argnums, **options)


def layer_at(stack: Any, number: Any) -> Any:
    """Returns one layer's part of stacked arrays `[L, …]`."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), stack)


def over_layers(
    body: Body, carry: Carry, stack: Params, layers: int, period: int = 1, *, fixed: bool = False
) -> tuple[Carry, tuple[Any, ...]]:
    """Applies `body` to each layer in turn.

    Returns the last carry and, for each position in a group of `period` layers, the stacked outputs of its layers.

    Args:
        body: function that applies one layer. It is traced `period` times, and once more for each layer that is left
            over after whole groups.
        carry: the carry that the first layer gets.
        stack: parameters of at least `layers` layers, `[L, …]`.
        layers: number of layers.
        period: number of layers in a group.
        fixed: whether no gradients of the parameters are needed. Each layer then reads its part of the stack in place.
            Otherwise the parameters of a group are sliced first, because gradients are summed over slices.
    """
    groups, rest = divmod(layers, period)

    def group(counted: tuple[Array, Carry], parts: Params) -> tuple[tuple[Array, Carry], tuple[Any, ...]]:
        number, carry = counted
        outs = []
        for place in range(period):
            index = number * period + place
            params = layer_at(stack, index) if fixed else jax.tree.map(lambda part, index=place: part[index], parts)
            carry, out = body(carry, params, place, index)
            outs.append(out)
        return (number + 1, carry), tuple(outs)

    outputs: list[Any] = []
    if groups:
        parts = None if fixed else jax.tree.map(lambda x: _grouped(x[: groups * period], period), stack)
        # The group's index has 32 bits, because accelerators compute 64-bit integers in two halves. The carry counts
        # it, because reading it from an array would be one more operation in every iteration.
        (_, carry), stacked = jax.lax.scan(group, (jnp.zeros((), jnp.int32), carry), parts, length=groups)
        outputs = list(stacked)
    # The layers after the last whole group take its first places. Their outputs are appended to those of these places,
    # where `in_order` expects them.
    for place in range(rest):
        number = groups * period + place
        carry, out = body(carry, jax.tree.map(lambda leaf, index=number: leaf[index], stack), place, number)
        out = jax.tree.map(lambda x: x[None], out)
        if groups:
            outputs[place] = jax.tree.map(lambda *pair: jnp.concatenate(pair), outputs[place], out)
        else:
            outputs.append(out)
    return carry, tuple(outputs)


def _grouped(x: Array, period: int) -> Array:
    return x.reshape(-1, period, *x.shape[1:])


def in_order(outputs: tuple[Any, ...], layers: int) -> list[Array]:
    """Returns each layer's output, from those that `over_layers` stacked for each place."""
    return [outputs[number % len(outputs)][number // len(outputs)] for number in range(layers)]
