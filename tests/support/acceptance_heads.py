"""Acceptance heads for tiny pairs."""

import jax

from speccascade_jax.models import fingerprints, teacher_forcing
from speccascade_jax.pairs import head_files
from speccascade_jax.stopping import acceptance_head


def head_for(pair, depth=0, seed=0, law=False):
    """Returns an untrained head for the pair's draft, whose predictions are arbitrary."""
    features = teacher_forcing.features(pair.draft)
    params = acceptance_head.initial(jax.random.key(seed), features, depth, law)
    for n in range(depth):
        key, shape = jax.random.key(seed + n + 1), params[f"block_{n}"]["kernel"].shape
        params[f"block_{n}"]["kernel"] = jax.random.normal(key, shape) / features**0.5
    card = head_files.Card(
        depth=depth, features=features, law=law, w_rej=1.0, rule="spec_decode", alpha=None, temperature=1.0, top_p=1.0,
        top_k=0, draft_temperature=None, pair=pair.name, pair_fingerprint=pair.fingerprint,
        draft_fingerprint=fingerprints.of_model(pair.draft),
    )  # fmt: skip
    return head_files.Head(params, card)
