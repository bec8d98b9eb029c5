"""Hashes of everything that a model's outputs depend on. Stored results and heads name their model by them."""

import hashlib
from typing import Any

import jax
import numpy as np

from speccascade_jax.core.types import BoundModel, is_packed
from speccascade_jax.models.sharding import fused_widths, replicate, split_fused
from speccascade_jax.runtime.mesh import MODEL


def of_model(bound: BoundModel) -> str:
    """Returns the hash of a model and its weights as loaded, 32 hex digits; bfloat16 and float32 weights differ."""
    digest = begin()
    add(digest, bound)
    return digest.hexdigest()


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


def add(digest: hashlib.blake2b, bound: BoundModel) -> None:
    """Adds a model and its weights, as loaded, to a hash."""
    digest.update(repr(bound.model).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(bound.params, is_leaf=is_packed):
        # The layout of a packed matrix depends on the processor, so the hash reads the plain matrix.
        array = leaf.dense() if is_packed(leaf) else _regrouped(bound, path, np.asarray(replicate(leaf)))
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        # For 8 bits `dense` returns the stored integers without their scales, which therefore follow below.
        digest.update(np.ascontiguousarray(array).tobytes())
        if is_packed(leaf) and leaf.scales is not None:
            digest.update(np.asarray(leaf.scales)[: leaf.columns].tobytes())
