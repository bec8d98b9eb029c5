"""Divergences against a naive computation, their ends, and what must hold between them."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from speccascade_jax.rules import deferral
from speccascade_jax.rules.divergences import DIVERGENCES, divergence
from tests.support import conformance, reference

NAMES = list(DIVERGENCES)


def laws(seed, vocab_size=11):
    """Rows of `(p, q)`, float32: random and adversarial ones."""
    q, p = conformance.logit_pairs(seed, vocab_size=vocab_size)
    return tuple(np.stack([reference.softmax(row) for row in x]).astype(np.float32) for x in (p, q))


def found(name, p, q, top_k=0):
    return np.asarray(divergence(name, jnp.asarray(p), jnp.asarray(q), top_k))[:, 0]


@pytest.mark.parametrize("top_k", [0, 1, 3, 10, 11, 50])
@pytest.mark.parametrize("name", NAMES)
def test_is_the_naive_sum(name, top_k):
    p, q = laws(3)
    expected = [reference.divergence(name, *map(np.float64, row), top_k) for row in zip(p, q, strict=True)]
    np.testing.assert_allclose(found(name, p, q, top_k), expected, atol=3e-6, rtol=1e-5)
    assert not top_k or top_k >= 10 or np.abs(found(name, p, q, top_k) - found(name, p, q))[10:].max() > 1e-3


def test_js_is_scipys():
    p, q = laws(4)
    np.testing.assert_allclose(found("js", p, q), np.nan_to_num(jensenshannon(p, q, axis=1, base=2)) ** 2, atol=1e-5)


@pytest.mark.parametrize(("name", "largest"), [("js", 1), ("tv", 1), ("kl", math.inf), ("kl_reversed", math.inf),
                                               ("js_reference", math.inf)])  # fmt: skip
def test_ends(name, largest):
    one, other = np.float32([[0.5, 0.5, 0, 0]]), np.float32([[0, 0, 0.25, 0.75]])
    assert found(name, one, one)[0] == 0.0
    np.testing.assert_allclose(found(name, one, other)[0], largest, rtol=1e-6)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), top_k=st.integers(1, 12))
def test_relations(seed, top_k):
    """Symmetry, Pinsker's inequality, JS below TV, and merging tokens into a bucket never adds divergence."""
    p, q = laws(seed)
    tv, js, kl = (found(name, p, q) for name in ("tv", "js", "kl"))
    np.testing.assert_allclose(js, found("js", q, p), atol=1e-6)
    np.testing.assert_allclose(kl, found("kl_reversed", q, p), rtol=1e-6)
    assert (2 * tv**2 <= kl + 1e-5).all() and (js <= tv + 1e-5).all() and (js <= 1 + 1e-6).all()
    for name in ("tv", "js", "kl", "kl_reversed"):
        assert (found(name, p, q, top_k) <= found(name, p, q) + 1e-5).all(), name


def test_a_position_is_kept_only_below_the_threshold():
    pair = conformance.law_pair(np.float32([[0, 0, 9]]), np.float32([[0, 1, 9]]), 1.0)
    exact = divergence("tv", pair.p, pair.q)
    rule = deferral.fuzzy("tv").deferral
    assert rule(pair, exact).all() and not rule(pair, exact * 1.0001).any()
    same = conformance.law_pair(np.float32([[0, 1, 2]]), np.float32([[0, 1, 2]]), 1.0)
    assert rule(same, jnp.zeros((1, 1))).all()  # τ = 0 leaves everything to the target


def test_scaled_reads_what_is_sampled():
    pair = conformance.law_pair(np.float32([[2, 1, 0]]), np.float32([[2, 1.5, 0]]), 0.0)
    assert not deferral.fuzzy("tv", scaled=True).deferral(pair, jnp.full((1, 1), 1e-6)).any()  # one-hots of one token
    assert deferral.fuzzy("tv").deferral(pair, jnp.full((1, 1), 1e-6)).all()


def test_one_choice_is_one_function():
    assert deferral.fuzzy("js", 50) is deferral.fuzzy("js", top_k=50, scaled=False) is deferral.RULES["fuzzy_js_top50"]
    assert len([name for name in deferral.RULES if name.startswith("fuzzy_")]) == 4 * len(DIVERGENCES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("hellinger",), "unknown divergence 'hellinger': choose one of js"), (("js", -1), "top_k=-1 is negative")],
)
def test_what_has_no_meaning_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        deferral.fuzzy(*arguments)
