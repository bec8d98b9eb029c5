"""Hashes of everything that a model's outputs depend on: what stored results and heads belong to."""

import hashlib
from typing import Any

import jax
import numpy as np

from speccascade_jax.core.types import BoundModel, is_packed
from speccascade_jax.models.sharding import fused_widths, replicate, split_fused
from speccascade_jax.runtime.mesh import MODEL


def of_model(bound: BoundModel) -> str:
    """One model and its weights, as loaded (in bfloat16 it is another than in float32): 32 hex digits."""
    digest = begin()
    add(digest, bound)
    return digest.hexdigest()


def begin() -> hashlib.blake2b:
    """A hash of nothing yet."""
    return hashlib.blake2b(digest_size=16)


def _regrouped(bound: BoundModel, path: Any, array: np.ndarray) -> np.ndarray:
    """A fused kernel that is side by side for the parts of a mesh, as it is on one device."""
    mesh = getattr(bound.model, "mesh", None)
    if mesh is None:
        return array
    widths = fused_widths("/".join(str(key.key) for key in path), array.shape[-1], bound.model.config)
    return array if widths is None else np.concatenate(split_fused(array, widths, mesh.shape[MODEL]), axis=-1)


def add(digest: hashlib.blake2b, bound: BoundModel) -> None:
    """Add a model and its weights, as loaded, to a hash."""
    digest.update(repr(bound.model).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(bound.params, is_leaf=is_packed):
        # a packed matrix is the matrix: how a processor likes it laid out is no property of the model
        array = leaf.dense() if is_packed(leaf) else _regrouped(bound, path, np.asarray(replicate(leaf)))
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
        if is_packed(leaf) and leaf.scales is not None:
            digest.update(np.asarray(leaf.scales)[: leaf.columns].tobytes())
