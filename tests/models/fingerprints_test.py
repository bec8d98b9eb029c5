"""Fingerprints: records' keys and heads hang on them, so their values never change."""

import hashlib

import jax
import numpy as np

from speccascade_jax.models import fingerprints
from tests.support import text_pair


def test_a_pairs_fingerprint_is_the_hash_it_has_always_been(tmp_path):
    pair = text_pair.make(tmp_path)
    digest = hashlib.blake2b(digest_size=16)
    for bound in (pair.target, pair.draft):
        digest.update(repr(bound.model).encode())
        for path, leaf in jax.tree_util.tree_leaves_with_path(bound.params):
            array = np.asarray(leaf)
            digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    digest.update(pair.vocabulary.fingerprint.encode())
    assert pair.fingerprint == digest.hexdigest()


def test_models_differ_where_one_weight_does(tmp_path):
    pair = text_pair.make(tmp_path)
    prints = [fingerprints.of_model(bound) for bound in (pair.target, pair.draft)]
    assert len({*prints, pair.fingerprint}) == 3
    nudged = pair.draft.replace(params=jax.tree.map(lambda leaf: np.asarray(leaf).copy(), pair.draft.params))
    jax.tree.leaves(nudged.params)[0].flat[0] += 1
    assert fingerprints.of_model(nudged) != prints[1] == fingerprints.of_model(pair.draft)
