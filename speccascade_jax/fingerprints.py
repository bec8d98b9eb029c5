"""Hashes of everything that a model's, or a pair's, outputs depend on: what stored results and heads belong to."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import jax
import numpy as np

from speccascade_jax.models.base import BoundModel

if TYPE_CHECKING:
    from speccascade_jax.pair import Pair


def of_pair(pair: Pair) -> str:
    """Both models, all weights, the vocabulary: 32 hex digits. Part of every record's key: it never changes."""
    digest = hashlib.blake2b(digest_size=16)
    for bound in (pair.target, pair.draft):
        _add(digest, bound)
    if pair.vocabulary is not None:
        digest.update(pair.vocabulary.fingerprint.encode())
    return digest.hexdigest()


def of_model(bound: BoundModel) -> str:
    """One model and its weights, as loaded (in bfloat16 it is another than in float32): 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, bound)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, bound: BoundModel) -> None:
    digest.update(repr(bound.model).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(bound.params):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
