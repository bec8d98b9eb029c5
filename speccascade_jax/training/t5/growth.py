"""A larger model that starts as the function a smaller one has learnt: training goes on where it was.

What is added adds nothing at first, since what it writes to the residual stream is zero: units of the feed-forward
layers by rows of zeros in `wo`, layers by `out` and `wo` of zeros (zero-initialised residual branches: Bachlechner et
al., 2021, section 3; growing as such: Chen et al., 2016). What the additions read with is not zero, so they learn from
the first step on. The optimiser's `min_scale` says how fast an array of zeros leaves zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from speccascade_jax.core.types import Array, Params
from speccascade_jax.models.t5 import T5Config

GROWING = ("d_ff", "num_encoder_layers", "num_decoder_layers")
FREE = ("dropout_rate", "dtype")
"""Settings that are no part of a checkpoint's arrays."""
WRITING = ("out", "wo")
"""Kernels that end a residual branch."""


def grow(params: Params, found: T5Config, wanted: T5Config, fresh: Params) -> Params:
    """The parameters of a `wanted` model with the logits of the `found` one.

    Layer `i` of a stack of `n` that grew from `m` is layer `i m // n`: the first with one origin is the origin itself,
    the others read as it does and write nothing yet.

    Args:
        params: the smaller model's, as T5X names them.
        fresh: initial parameters of the larger one; added units of feed-forward layers read with theirs.

    Raises:
        ValueError: the models differ by more than units and layers, or the wanted one is smaller.
    """
    _check(found, wanted)
    grown = dict(params)
    for stack in ("encoder", "decoder"):
        old, new = (int(getattr(config, f"num_{stack}_layers")) for config in (found, wanted))
        layers = {}
        for i in range(new):
            layer = _widened(params[stack][f"layers_{i * old // new}"], fresh[stack][f"layers_{i}"])
            layers[f"layers_{i}"] = layer if _is_origin(i, old, new) else _silent(layer)
        rest = {name: tree for name, tree in params[stack].items() if not name.startswith("layers_")}
        grown[stack] = {**rest, **layers}
    return grown


def _is_origin(i: int, old: int, new: int) -> bool:
    return i == 0 or i * old // new != (i - 1) * old // new


def _widened(layer: Params, fresh: Params) -> Params:
    """The layer with as many feed-forward units as `fresh` has."""
    mlp = {
        name: {"kernel": _units(name, leaf["kernel"], fresh["mlp"][name]["kernel"])}
        for name, leaf in layer["mlp"].items()
    }
    return {**layer, "mlp": mlp}


def _units(name: str, kernel: Array, fresh: Array) -> Array:
    """`[E, F]` with further columns of `fresh`, or, of `wo`, `[F, E]` with further rows of zeros."""
    if name in WRITING:
        return jnp.concatenate([kernel, jnp.zeros_like(fresh[len(kernel) :])])
    return jnp.concatenate([kernel, fresh[:, kernel.shape[1] :]], axis=1)


def _silent(tree: Any, name: str = "") -> Any:
    """The layer with zeros where its branches write."""
    if isinstance(tree, Mapping):
        return {key: _silent(value, name if key == "kernel" else key) for key, value in tree.items()}
    # a copy: training gives the buffers of its state away, and no two arrays may share one
    return jnp.zeros_like(tree) if name in WRITING else jnp.array(tree)


def _check(found: T5Config, wanted: T5Config) -> None:
    free = {name: getattr(wanted, name) for name in (*FREE, *GROWING)}
    smaller = [name for name in GROWING if getattr(wanted, name) < getattr(found, name)]
    if dataclasses.replace(found, **free) != wanted or smaller:
        raise ValueError(
            f"the checkpoint holds {found}, from which {wanted} cannot grow: only {', '.join(GROWING)} may differ, "
            f"and only be larger; name another init_from, or train afresh"
        )
