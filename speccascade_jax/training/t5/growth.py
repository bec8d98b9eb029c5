"""A larger model that starts as the function a smaller one has learnt: training goes on where it was.

What is added adds nothing at first, since what it writes to the residual stream is zero: units and heads by rows of
zeros in `wo` and `out`, layers by `out` and `wo` of zeros (zero-initialised residual branches: Bachlechner et al.,
2021, section 3; growing as such: Chen et al., 2016), further residual dimensions by zeros in all that writes to them,
the embedding included. What the additions read with is not zero, so they learn from the first step on. The optimiser's
`min_scale` says how fast an array of zeros leaves zero.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.types import Params
from speccascade_jax.models.t5 import T5Config

GROWING = ("d_model", "num_heads", "d_ff", "num_encoder_layers", "num_decoder_layers")
FREE = ("dropout_rate", "layer_dropout", "dtype")
"""Settings that are no part of a checkpoint's arrays."""
ENDING = ("out", "wo")
"""Kernels that end a residual branch."""


def grow(params: Params, found: T5Config, wanted: T5Config, fresh: Params) -> Params:
    """The parameters of a `wanted` model with the logits of the `found` one.

    Layer `i` of a stack of `n` that grew from `m` is layer `i m // n`: the first with one origin is the origin itself,
    the others read as it does and write nothing yet.

    A root mean square over more dimensions, the new ones at zero, is smaller; the scales of the norms make up for it.

    Args:
        params: the smaller model's, as T5X names them.
        fresh: initial parameters of the larger one; what is added reads with theirs.

    Raises:
        ValueError: the models differ by more than `GROWING`, or the wanted one is smaller.
    """
    _check(found, wanted)
    grown = {}
    for part, tree in params.items():
        layers = {} if part == "token_embedder" else _stack(part, tree, fresh[part], found, wanted)
        rest = {name: each for name, each in tree.items() if not name.startswith("layers_")}
        grown[part] = {**_larger(rest, fresh[part]), **layers}
    if wanted.tied:  # the logits' own factor, d_model^-0.5, makes up for the last norm
        scale = grown["decoder"]["decoder_norm"]["scale"] * (wanted.d_model / found.d_model) ** 0.5
        grown["decoder"]["decoder_norm"] = {"scale": scale}
    return grown


def _stack(part: str, tree: Params, fresh: Params, found: T5Config, wanted: T5Config) -> Params:
    """The layers of the encoder or the decoder."""
    old, new = (int(getattr(config, f"num_{part}_layers")) for config in (found, wanted))
    layers = {}
    for i in range(new):
        layer = _larger(tree[f"layers_{i * old // new}"], fresh[f"layers_{i}"])
        is_origin = i == 0 or i * old // new != (i - 1) * old // new
        layers[f"layers_{i}"] = layer if is_origin else _silent(layer)
    return layers


def _larger(tree: Any, fresh: Any, name: str = "") -> Any:
    """The arrays of `tree` in the shapes of `fresh`: what is added is zero where `name` writes, else `fresh`'s."""
    if isinstance(tree, Mapping):
        return {key: _larger(value, fresh[key], name if key == "kernel" else key) for key, value in tree.items()}
    if tree.shape == fresh.shape:
        return tree
    # in numpy, which compiles nothing for each shape
    new, old = np.array(fresh), np.asarray(tree)
    if name == "scale":
        new[:] = old.mean()
    elif name in (*ENDING, "embedding"):
        new[:] = 0.0
    new[tuple(slice(size) for size in old.shape)] = old
    return jnp.asarray(new * np.float32((len(old) / len(new)) ** 0.5) if name == "scale" else new)


def _silent(tree: Any, name: str = "") -> Any:
    """The layer with zeros where its branches write."""
    if isinstance(tree, Mapping):
        return {key: _silent(value, name if key == "kernel" else key) for key, value in tree.items()}
    # a copy: training gives the buffers of its state away, and no two arrays may share one
    return jnp.zeros_like(tree) if name in ENDING else jnp.array(tree)


def _check(found: T5Config, wanted: T5Config) -> None:
    free = {name: getattr(wanted, name) for name in (*FREE, *GROWING)}
    smaller = [name for name in GROWING if getattr(wanted, name) < getattr(found, name)]
    # a layer grows from one below it, and there is none
    rootless = found.num_decoder_layers == 0 < wanted.num_decoder_layers
    if dataclasses.replace(found, **free) != wanted or smaller or rootless:
        allowed = f"only {', '.join(GROWING)} may differ, and only be larger, layers from one at least"
        remedy = "name another init_from, or train afresh"
        raise ValueError(f"the checkpoint holds {found}, from which {wanted} cannot grow: {allowed}; {remedy}")
