"""Hashes of everything that a model's outputs depend on. Stored results and heads name their model by them."""

import hashlib
from typing import Any

import jax
import numpy as np

from speccascade_jax.core.types import BoundModel, is_packed
from speccascade_jax.models.sharding import fused_widths, replicate, split_fused
from speccascade_jax.runtime.mesh import MODEL


def of_model(bound: BoundModel) -> str:
    """Returns the hash of a model and the values of its weights, 32 hex digits; bfloat16 and float32 weights differ.

    Weights in 8 bits count as the float32 values that products are made with. So what belongs to a model (a head, a
    policy) also belongs to the same model loaded in the 8 bits that it is stored in.
    """
    digest = begin()
    add(digest, bound, as_stored=False)
    return digest.hexdigest()


def in_eight_bits(bound: BoundModel) -> bool:
    """Returns whether a model holds matrices in 8 bits."""
    leaves = jax.tree.leaves(bound.params, is_leaf=is_packed)
    return any(is_packed(leaf) and leaf.scales is not None for leaf in leaves)


def begin() -> hashlib.blake2b:
    """Returns an empty hash."""
    return hashlib.blake2b(digest_size=16)


def _regrouped(bound: BoundModel, path: Any, array: np.ndarray) -> np.ndarray:
    """Returns a fused kernel in its layout on one device, whatever mesh it was interleaved for."""
    # The same model must have the same fingerprint on every mesh, or stored results would not be found again.
    mesh = getattr(bound.model, "mesh", None)
    if mesh is None:
        return array
    widths = fused_widths("/".join(str(key.key) for key in path), array.shape[-1], bound.model.config)
    return array if widths is None else np.concatenate(split_fused(array, widths, mesh.shape[MODEL]), axis=-1)


def add(digest: hashlib.blake2b, bound: BoundModel, as_stored: bool = True) -> None:
    """Adds a model and its weights to a hash, in the dtype that they are held in or as the values of 8 bits."""
    digest.update(repr(bound.model).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(bound.params, is_leaf=is_packed):
        # The layout of a packed matrix depends on the processor, so the hash reads the plain matrix.
        if is_packed(leaf):
            array = leaf.dense() if as_stored else np.asarray(leaf)
        else:
            array = _regrouped(bound, path, np.asarray(replicate(leaf)))
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        # For 8 bits `dense` returns the stored integers without their scales, which therefore follow below.
        digest.update(np.ascontiguousarray(array).tobytes())
        if as_stored and is_packed(leaf) and leaf.scales is not None:
            digest.update(np.asarray(leaf.scales)[: leaf.columns].tobytes())
