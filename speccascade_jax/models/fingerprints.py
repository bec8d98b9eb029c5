"""Fingerprints of models: hashes of architecture and weights that identify the model of a stored result or head."""

import hashlib
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from speccascade_jax.core.types import BoundModel, is_packed
from speccascade_jax.models.sharding import fused_widths, replicate, split_fused
from speccascade_jax.models.stacks import has_stacks, in_stack, layer_path
from speccascade_jax.runtime.mesh import MODEL


def of_model(bound: BoundModel) -> str:
    """Returns the hash of a model's configuration and weights, 32 hex digits.

    The same weights in bfloat16 and float32 have different hashes. Weights in 8 bits are hashed as the float32 values
    that they encode. If a checkpoint stores 8-bit weights, its hash is therefore the same whether it is loaded in 8
    bits or in float32, and a head or policy that was trained for one of these also fits the other.
    """
    digest = begin()
    add(digest, bound, as_stored=False)
    return digest.hexdigest()


def in_eight_bits(bound: BoundModel) -> bool:
    """Returns whether any of a model's matrices is held in 8 bits."""
    leaves = jax.tree.leaves(bound.params, is_leaf=is_packed)
    return any(is_packed(leaf) and leaf.scales is not None for leaf in leaves)


def begin() -> hashlib.blake2b:
    """Returns a new hash object, to which `add` adds models."""
    return hashlib.blake2b(digest_size=16)


def _regrouped(bound: BoundModel, path: Any, array: np.ndarray) -> np.ndarray:
    """Returns a parameter in its layout on one device; only fused kernels have another layout on a mesh."""
    # A model must have the same fingerprint on every mesh, or results stored for one mesh would be lost on another.
    mesh = getattr(bound.model, "mesh", None)
    if mesh is None:
        return array
    widths = fused_widths("/".join(str(key.key) for key in path), array.shape[-1], bound.model.config)
    return array if widths is None else np.concatenate(split_fused(array, widths, mesh.shape[MODEL]), axis=-1)


class _Part:
    """One layer's part of a stacked parameter, which is sliced only when it is read."""

    def __init__(self, stack: Any, layer: int):
        self.stack, self.layer = stack, layer


def _separate(params: Any) -> Any:
    """Returns the parameters with separate entries for each layer, in the order of a model without a scan."""
    if not has_stacks(params):
        return params
    # Weights have the same hash whether the layers run in a scan or not. Parts are cut off one at a time, to save
    # memory.
    out: dict[str, Any] = {}
    for name, leaf in flatten_dict(params, sep="/").items():
        out |= {layer_path(name, i): _Part(leaf, i) for i in range(len(leaf))} if in_stack(name) else {name: leaf}
    return unflatten_dict(out, sep="/")


def add(digest: hashlib.blake2b, bound: BoundModel, as_stored: bool = True) -> None:
    """Adds a model's configuration and weights to a hash.

    Args:
        digest: the hash.
        bound: the model and its parameters.
        as_stored: whether 8-bit weights are hashed as integers and scales; otherwise as the float32 values that they
            encode. All other weights are hashed in their own dtype.
    """
    digest.update(repr(bound.model).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(_separate(bound.params), is_leaf=is_packed):
        # The layout of a packed matrix depends on the processor, so the plain matrix is hashed instead.
        if is_packed(leaf):
            array = leaf.dense() if as_stored else np.asarray(leaf)
        else:
            leaf = leaf.stack[leaf.layer] if isinstance(leaf, _Part) else leaf
            array = _regrouped(bound, path, np.asarray(replicate(leaf)))
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        # `dense` returns 8-bit weights as integers without their scales, so the scales are added below.
        digest.update(np.ascontiguousarray(array).tobytes())
        if as_stored and is_packed(leaf) and leaf.scales is not None:
            digest.update(np.asarray(leaf.scales)[: leaf.columns].tobytes())
