"""Optimisers as transformations of gradients to directions, and the layout of their state on a mesh.

A step subtracts `rate * direction` from the parameters; the learning rate is an argument of the step and no part of the
optimiser. If a model scans over its layers (`jax.lax.scan`), their parameters are stacked: `layers` is a part of their
path, and layers are their first axis. Every optimiser here treats each layer of a stacked parameter like the separate
parameter of an unrolled layer.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from optax.tree_utils import tree_map_params

from speccascade_jax.core.types import Params

STACKED = "layers"
"""The part of a parameter's path that marks it as stacked; an unrolled layer has `layers_0`, `layers_1`, …"""


@runtime_checkable
class Optimizer(Protocol):
    """Settings of an optimiser; gin binds `Adafactor`, `ScaledAdam` or `AdamW`."""

    def transformation(self) -> optax.GradientTransformation:
        """Returns the optax transformation of gradients to directions, without the learning rate."""
        ...


@dataclass(frozen=True)
class Adafactor:
    """Adafactor with the settings of T5 (Shazeer and Stern, 2018, algorithms 4 and 5, with a constant relative step).

    The second moments of a matrix `[m, n]` are kept as a row of `m` and a column of `n` numbers if both sides have
    `min_factored` entries. At step t = 1, 2, … the moments decay by `1 - t ** -decay_rate`, then a gradient is divided
    by the root of its moments, then clipped to a root mean square of `clipping_threshold`, then multiplied by the root
    mean square of its parameter. There is no momentum and no first-order bias.

    The updates equal those of T5X's `adafactor.Adafactor` and of `optax.adafactor`, with three differences from T5X.
    T5X factors the moments of a stacked matrix of any size, but of the same matrix unrolled only if both sides have 128
    entries; here both cases need 128. T5X may continue the step count of pre-training; here t and the moments start
    at 0. T5X subtracts `weight_decay` times the parameter; here this product is also multiplied by the learning rate,
    as in AdamW (in T5X: `weight_decay_rate_lr_exponent = 1`).

    Attributes:
        min_factored: smallest side of a matrix whose moments are factored.
        decay_rate: exponent of the decay of second moments.
        clipping_threshold: largest root mean square of an update before it is multiplied by the parameter's scale.
        multiply_by_parameter_scale: whether the update is relative to the parameter's root mean square.
        min_scale: smallest scale of a parameter; without it, a parameter that starts at zero would not grow.
        eps: number added to squared gradients.
        weight_decay: share of the parameter that is added to the direction; 0 adds none.
    """

    min_factored: int = 128
    decay_rate: float = 0.8
    clipping_threshold: float = 1.0
    multiply_by_parameter_scale: bool = True
    min_scale: float = 1e-3
    eps: float = 1e-30
    weight_decay: float = 0.0

    def transformation(self) -> optax.GradientTransformation:
        """Returns the optax transformation of gradients to directions, without the learning rate."""
        parts = [
            optax.scale_by_factored_rms(
                decay_rate=self.decay_rate, min_dim_size_to_factor=self.min_factored, epsilon=self.eps
            ),
            optax.clip_by_block_rms(self.clipping_threshold),
        ]
        if self.multiply_by_parameter_scale:
            parts.append(optax.scale_by_param_block_rms(self.min_scale))
        if self.weight_decay:
            parts.append(optax.add_decayed_weights(self.weight_decay))
        return _without_constants(per_layer(optax.chain(*parts)))


@dataclass(frozen=True)
class ScaledAdam:
    """Adam that scales the update of each array by the root mean square of the array, as Adafactor does.

    T5's initial kernels differ widely in size: the kernels of queries include the scale of the attention, and
    embeddings have unit variance. So no single absolute step size fits all arrays. The learning rate is relative: 0.01
    changes an array by about a hundredth per step (Shazeer and Stern, 2018, section 8).

    Attributes:
        b1, b2, eps: as in `optax.adam`.
        min_scale: smallest scale of an array; without it, an array that starts at zero would not grow.
        clip: largest global norm of the gradient.
    """

    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    min_scale: float = 1e-3
    clip: float = 1.0

    def transformation(self) -> optax.GradientTransformation:
        """Returns the optax transformation of gradients to directions, without the learning rate."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.scale_by_adam(self.b1, self.b2, self.eps),
            per_layer(optax.scale_by_param_block_rms(self.min_scale)),
        )


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay of matrices (Loshchilov and Hutter, 2019), as decoder-only models are tuned.

    Attributes:
        b1, b2, eps: as in `optax.adamw`.
        weight_decay: share of a matrix that is added to its direction; vectors (norms, biases) do not decay.
        clip: largest global norm of the gradient.
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0

    def transformation(self) -> optax.GradientTransformation:
        """Returns the optax transformation of gradients to directions, without the learning rate."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.scale_by_adam(self.b1, self.b2, self.eps),
            optax.add_decayed_weights(self.weight_decay, mask=_matrices),
        )


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Returns whether the parameter at `path` (keys of `jax.tree_util`) has an axis of layers, which comes first."""
    return any(getattr(key, "key", getattr(key, "name", None)) == STACKED for key in path)


def per_layer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a transformation that applies `inner` to each layer of a stacked parameter separately.

    Stacked parameters are mapped with `jax.vmap`, so the program does not grow with depth. The state has the structure
    of `inner`'s state: arrays for a stacked parameter have the axis of layers first, and step counters are shared.

    Args:
        inner: a transformation that treats every parameter independently of the others, such as an element-wise one.
    """
    # For each entry of `inner`'s state for a single array: whether it belongs to the array, or is a shared counter.
    alone = jax.eval_shape(inner.init, jnp.zeros(()))
    of_parameter = tree_map_params(inner, lambda _: True, alone, transform_non_params=lambda _: False)
    axes = jax.tree.map(lambda belongs: 0 if belongs else None, of_parameter)

    def split(state: Any, count: int) -> list[Any]:
        """Returns the state of each of `count` parameters."""
        parts = jax.tree.map(
            lambda belongs, part: tuple(jax.tree.leaves(part)) if belongs else (part,) * count, of_parameter, state
        )
        return [jax.tree.map(lambda _, part, n=number: part[n], of_parameter, parts) for number in range(count)]

    def join(states: list[Any], structure: Any) -> Any:
        """Returns the state of all parameters from the states of each."""
        return jax.tree.map(
            lambda belongs, *parts: jax.tree.unflatten(structure, parts) if belongs else parts[0], of_parameter, *states
        )

    def init(params: Params) -> Any:
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        if not leaves:  # `state_specs`: optax calls `init` on a placeholder to see where the state holds parameters
            return inner.init(params)
        mapped = jax.vmap(inner.init, out_axes=axes)
        return join([(mapped if is_stacked(path) else inner.init)(leaf) for path, leaf in leaves], structure)

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        if params is None:
            raise ValueError("the optimiser needs the parameters: call update(gradients, state, params)")
        leaves, structure = jax.tree_util.tree_flatten_with_path(updates)
        mapped = jax.vmap(inner.update, in_axes=(0, axes, 0), out_axes=(0, axes))
        results = [
            (mapped if is_stacked(path) else inner.update)(leaf, part, parameter)
            for (path, leaf), part, parameter in zip(
                leaves, split(state, len(leaves)), jax.tree.leaves(params), strict=True
            )
        ]
        directions, states = zip(*results, strict=True)
        return jax.tree.unflatten(structure, directions), join(list(states), structure)

    return optax.GradientTransformation(init, update)


def state_specs(transformation: optax.GradientTransformation, params: Params, specs: Any) -> Any:
    """Returns the partition spec of every array in an optimiser's state, in the structure of the state.

    An array with its parameter's shape gets the parameter's spec. A factored moment lacks one axis of its parameter,
    and gets the spec of the other axes. Counters and the placeholders of unused moments are replicated.

    Args:
        transformation: an optimiser's transformation.
        params: the parameters, or their shapes (`jax.ShapeDtypeStruct`).
        specs: the `PartitionSpec` of every parameter, in the structure of `params`.
    """
    placed = tree_map_params(
        transformation,
        lambda array, param, spec: _Placed(array.shape, param.shape, spec),
        jax.eval_shape(transformation.init, params),
        params,
        specs,
        transform_non_params=lambda _: _Placed((), (), P()),
    )
    return jax.tree_util.tree_map_with_path(_spec, placed)


@dataclass(frozen=True)
class _Placed:
    """Shape of an array in an optimiser's state, with the shape and the partition spec of its parameter."""

    shape: tuple[int, ...]
    of: tuple[int, ...]
    spec: P


def _spec(path: tuple[Any, ...], array: _Placed) -> P:
    """Returns the spec of one array of an optimiser's state, at `path` of the state."""
    if array.shape == array.of:
        return array.spec
    # The axis of layers is in every array for a stacked parameter, so a factored moment never lacks it.
    axes = range(int(is_stacked(path)), len(array.of))
    missing = [axis for axis in axes if array.of[:axis] + array.of[axis + 1 :] == array.shape]
    if not missing:
        return P()
    # The shape alone does not tell which side of a square matrix is missing: rows lack the last, columns the first.
    axis = missing[0] if any(getattr(key, "name", None) == "v_col" for key in path) else missing[-1]
    return P(*array.spec[:axis], *array.spec[axis + 1 :])


def _without_constants(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `inner` with zero directions for Gemma 4's output scales, which are constants.

    Without this function, weight decay would shrink them. The state is that of `inner`, so saved runs can be resumed.
    """

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        directions, after = inner.update(updates, state, params)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.zeros_like(leaf) if _is_constant(path) else leaf, directions
        ), after

    return inner._replace(update=update)


def _is_constant(path: tuple[Any, ...]) -> bool:
    """Returns whether the parameter at `path` is the constant of a `models.decoder.OutputScale`."""
    return [getattr(key, "key", None) for key in path[-2:]] == ["output", "scale"]


def _matrices(params: Params) -> Any:
    """Returns whether each parameter is a matrix, or a stack of matrices."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf.ndim - is_stacked(path) > 1, params)
