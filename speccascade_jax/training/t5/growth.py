"""Growth of a model: a larger model starts as the function that a smaller one has learnt, and training continues.

New parts write zero to the residual stream at first, so they do not change the function. New units and heads have rows
of zeros in `wo` and `out`, new layers have zero `out` and `wo` (zero-initialised residual branches: Bachlechner et al.,
2021, section 3; growth in general: Chen et al., 2016). New residual dimensions are zero in every array that writes to
them, the embedding included. The arrays that new parts read with are not zero, so the parts learn from the first step
on. The optimiser's `min_scale` sets how fast an array of zeros grows.
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
"""Settings that do not affect a checkpoint's arrays."""
ENDING = ("out", "wo")
"""Kernels that end a residual branch."""


def grow(params: Params, stored: T5Config, wanted: T5Config, fresh: Params) -> Params:
    """Returns the parameters of a `wanted` model that has the same logits as the `stored` one.

    Layer `i` of the `n` new layers is made from layer `i m // n` of the `m` old ones. The first layer made from an old
    layer is its copy; the others copy only the arrays that it reads with, and write zero.

    The root mean square decreases when dimensions at zero are added; the scales of the norms compensate.

    Args:
        params: the smaller model's, as T5X names them.
        stored: configuration of the smaller model.
        wanted: configuration of the larger model.
        fresh: initial parameters of the larger model; new parts read with these.

    Raises:
        ValueError: the models differ in more than `GROWING`, or the wanted one is smaller.
    """
    _check(stored, wanted)
    grown = {}
    for part, tree in params.items():
        layers = {} if part == "token_embedder" else _stack(part, tree, fresh[part], stored, wanted)
        rest = {name: array for name, array in tree.items() if not name.startswith("layers_")}
        grown[part] = {**_larger(rest, fresh[part]), **layers}
    if wanted.tied:  # tied logits have a factor d_model^-0.5 that already compensates the last norm
        scale = grown["decoder"]["decoder_norm"]["scale"] * (wanted.d_model / stored.d_model) ** 0.5
        grown["decoder"]["decoder_norm"] = {"scale": scale}
    return grown


def _stack(part: str, tree: Params, fresh: Params, stored: T5Config, wanted: T5Config) -> Params:
    """Returns the grown layers of the encoder or the decoder (`part`)."""
    old, new = (int(getattr(config, f"num_{part}_layers")) for config in (stored, wanted))
    layers = {}
    for i in range(new):
        layer = _larger(tree[f"layers_{i * old // new}"], fresh[f"layers_{i}"])
        is_origin = i == 0 or i * old // new != (i - 1) * old // new
        layers[f"layers_{i}"] = layer if is_origin else _silent(layer)
    return layers


def _larger(tree: Any, fresh: Any, name: str = "") -> Any:
    """Enlarges arrays to the shapes of `fresh`; new entries are zero in arrays that write, and `fresh`'s in others."""
    if isinstance(tree, Mapping):
        return {key: _larger(value, fresh[key], name if key == "kernel" else key) for key, value in tree.items()}
    if tree.shape == fresh.shape:
        return tree
    # numpy, because jax.numpy would compile a program for every shape
    new, old = np.array(fresh), np.asarray(tree)
    if name == "scale":
        new[:] = old.mean()
    elif name in (*ENDING, "embedding"):
        new[:] = 0.0
    new[tuple(slice(size) for size in old.shape)] = old
    return jnp.asarray(new * np.float32((len(old) / len(new)) ** 0.5) if name == "scale" else new)


def _silent(tree: Any, name: str = "") -> Any:
    """Returns the layer with zeros in the kernels that end its branches."""
    if isinstance(tree, Mapping):
        return {key: _silent(value, name if key == "kernel" else key) for key, value in tree.items()}
    # a copy, because training donates the state's buffers, and no two arrays may share one
    return jnp.zeros_like(tree) if name in ENDING else jnp.array(tree)


def _check(stored: T5Config, wanted: T5Config) -> None:
    free = {name: getattr(wanted, name) for name in (*FREE, *GROWING)}
    smaller = [name for name in GROWING if getattr(wanted, name) < getattr(stored, name)]
    # every new layer has an origin, so an empty stack cannot grow
    rootless = stored.num_decoder_layers == 0 < wanted.num_decoder_layers
    if dataclasses.replace(stored, **free) != wanted or smaller or rootless:
        allowed = (
            f"only {', '.join(GROWING)} may differ, they may only be larger, and a stack needs a layer to grow from"
        )
        remedy = "name another init_from, or train from scratch"
        raise ValueError(f"the checkpoint holds {stored}, which cannot grow to {wanted}: {allowed}; {remedy}")
