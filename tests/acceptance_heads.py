"""Acceptance heads of tiny pairs."""

import jax

from speccascade_jax import fingerprints
from speccascade_jax.heads import acceptance


def head_for(pair, depth=0, seed=0, law=False):
    """An untrained head of the pair's draft: it predicts something, and says that it is the draft's."""
    features = acceptance.features(pair.draft)
    params = acceptance.initial(jax.random.key(seed), features, depth, law)
    for n in range(depth):
        key, shape = jax.random.key(seed + n + 1), params[f"block_{n}"]["kernel"].shape
        params[f"block_{n}"]["kernel"] = jax.random.normal(key, shape) / features**0.5
    card = acceptance.Card(
        depth=depth,
        features=features,
        law=law,
        w_rej=1.0,
        rule="spec_decode",
        alpha=None,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        draft_temperature=None,
        pair=pair.name,
        pair_fingerprint=fingerprints.of_pair(pair),
        draft_fingerprint=fingerprints.of_model(pair.draft),
    )
    return acceptance.Head(params, card)
