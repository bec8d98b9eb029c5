"""Hashes of everything that a model's outputs depend on: what stored results and heads belong to."""

import hashlib

import jax
import numpy as np

from speccascade_jax.core.packed import is_packed
from speccascade_jax.core.types import BoundModel


def of_model(bound: BoundModel) -> str:
    """One model and its weights, as loaded (in bfloat16 it is another than in float32): 32 hex digits."""
    digest = begin()
    add(digest, bound)
    return digest.hexdigest()


def begin() -> hashlib.blake2b:
    """A hash of nothing yet."""
    return hashlib.blake2b(digest_size=16)


def add(digest: hashlib.blake2b, bound: BoundModel) -> None:
    """Add a model and its weights, as loaded, to a hash."""
    digest.update(repr(bound.model).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(bound.params, is_leaf=is_packed):
        # a packed matrix is the matrix: how a processor likes it laid out is no property of the model
        array = leaf.dense() if is_packed(leaf) else np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
        if is_packed(leaf) and leaf.scales is not None:
            digest.update(np.asarray(leaf.scales)[: leaf.columns].tobytes())
