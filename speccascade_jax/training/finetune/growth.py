"""Growth of a model: a larger model that starts with the function of a smaller trained model, to be trained further.

New parts first write zero to the residual stream, so they do not change the function. New feed-forward units and
attention heads have rows of zeros in the output kernels `wo` and `out`, and in new layers these kernels are entirely
zero (zero-initialised residual branches: Bachlechner et al., 2021, section 3; growth in general: Chen et al., 2016).
New dimensions of the residual stream are zero in every array that writes to them, the embedding included. The input
kernels of new parts are not zero, so that the parts learn from the first step on. The optimiser's `min_scale` sets how
fast an array of zeros grows.
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
"""Settings that do not affect the arrays of a checkpoint."""
ENDING = ("out", "wo")
"""Kernels that write the result of a branch to the residual stream."""


def grow(params: Params, stored: T5Config, wanted: T5Config, fresh: Params) -> Params:
    """Returns the parameters of a `wanted` model that has the same logits as the `stored` model.

    Layer `i` of the `n` layers of the new model is made from layer `i m // n` of the `m` old layers. The first layer
    that is made from an old layer is a copy of it. Any further layer is a copy with zeros in the kernels that write to
    the residual stream.

    Added dimensions are zero and lower the root mean square by which a norm divides; smaller scales of the norms
    compensate for this.

    Args:
        params: parameters of the smaller model, as T5X names them.
        stored: configuration of the smaller model.
        wanted: configuration of the larger model.
        fresh: random parameters of the larger model, which the new parts use in their input kernels.

    Raises:
        ValueError: the models differ in more than `GROWING`, or the wanted model is smaller.
    """
    check(stored, wanted)
    grown = {}
    for part, tree in params.items():
        layers = {} if part == "token_embedder" else _stack(part, tree, fresh[part], stored, wanted)
        rest = {name: array for name, array in tree.items() if not name.startswith("layers_")}
        grown[part] = {**_larger(rest, fresh[part]), **layers}
    # tied logits have a factor d_model^-0.5, which already compensates the last norm, so its scale must not shrink
    if wanted.tied:
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
    """Enlarges arrays to the shapes of `fresh`.

    New entries are zero in arrays that write to the residual stream, the mean of the old entries in the scales of
    norms, and the entries of `fresh` in all other arrays.
    """
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
    """Returns a copy of a layer with zeros in the kernels that write to the residual stream."""
    if isinstance(tree, Mapping):
        return {key: _silent(value, name if key == "kernel" else key) for key, value in tree.items()}
    # copies, because training donates the buffers of the state, and no two arrays may share a buffer
    return jnp.zeros_like(tree) if name in ENDING else jnp.array(tree)


def check(stored: T5Config, wanted: T5Config) -> None:
    """Raises ValueError if no `wanted` model can be grown from a `stored` one."""
    free = {name: getattr(wanted, name) for name in (*FREE, *GROWING)}
    smaller = [name for name in GROWING if getattr(wanted, name) < getattr(stored, name)]
    # Every new layer is made from an old one, so an encoder or decoder without layers cannot get any.
    rootless = stored.num_decoder_layers == 0 < wanted.num_decoder_layers
    if dataclasses.replace(stored, **free) != wanted or smaller or rootless:
        allowed = (
            f"only {', '.join(GROWING)} may differ, they may only be larger, and a stack needs a layer to grow from"
        )
        remedy = "name another init_from, or train from scratch"
        raise ValueError(f"the checkpoint holds {stored}, which cannot grow to {wanted}: {allowed}; {remedy}")
