"""The identities of METHODS section 3, and the two that do not hold, as counter-examples."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq

from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES
from tests.support import conformance, reference

VOCAB = 11
DELTA = ["chow", "chow_log", "diff", "diff_log", "opt", "opt_log", "bild_star"]
TOKEN = ["token_v1", "token_v2", "token_v3"]
ANY = [0.0, 0.5, 1.0]
law = conformance.target_law


def scaled(logits, temperature, top_p=1.0):
    return np.stack([reference.scale(row, temperature, top_p) for row in logits])


# --- the lemmas


def root_b(qt, pt, alpha):
    """`b = 1/β` of `lossy_tuned` by Brent's method; 0 where nothing is cut off."""
    excess = np.maximum(qt - pt / (1 - alpha), 0).sum()
    if excess <= 0:
        return 0.0
    # at α = 0 the root is the upper end itself, up to what float32 rounds off the laws
    return brentq(lambda b: np.maximum(b * pt - qt, 0).sum() - excess, 0, 1 / (1 - alpha) + 1e-6, xtol=1e-14)


@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.5])
def test_tuned_lossy_solves_its_equation(top_p):
    """Lemma 2; also where the root lies beyond the paper's search range, `β > 10` (errata of METHODS, 3)."""
    q, p = conformance.logit_pairs(4, count=200)
    large = 0
    for alpha in (0.0, 0.3, 0.9, 0.97):
        found = law("lossy_tuned", q, p, alpha, 1.0, top_p).astype(float)
        for row, qt, pt in zip(found, scaled(q, 1.0, top_p), scaled(p, 1.0, top_p), strict=True):
            np.testing.assert_allclose(row.sum(), 1.0, atol=1e-5)
            b = root_b(qt, pt, float(np.float32(alpha)))
            assert 0 <= b <= 1 / (1 - alpha) + 1e-5
            large += 0 < b < 0.1
            expected = np.maximum(np.minimum(qt, pt / (1 - np.float32(alpha))), b * pt)
            if np.abs(np.cumsum(np.sort(qt)) - top_p).min() > 1e-5 or top_p == 1:
                np.testing.assert_allclose(row, expected, atol=1e-5)
    assert top_p != 0.8 or large > 0


@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_lemma_3_rejections_are_deferral_times_distance(name, temperature):
    q, p = conformance.logit_pairs(5)
    for alpha in conformance.alphas(RULES[name], VOCAB):
        pair = conformance.law_pair(q, p, temperature)
        kept = np.asarray(conformance.evaluate(Speculative(RULES[name]), pair, alpha)[0], float)
        delta = np.asarray(RULES[name].deferral(pair, jnp.full((len(q), 1), alpha, jnp.float32)), float)[:, 0]
        distance = 0.5 * np.abs(np.asarray(pair.p_tilde, float) - np.asarray(pair.q_tilde, float)).sum(-1)
        np.testing.assert_allclose(1 - kept.sum(-1), delta * distance, atol=1e-5)


def test_lemma_7_token_v3_at_temperature_zero_is_lossy_greedy():
    q, p = conformance.logit_pairs(7)
    seen = set()
    for alpha in (0.0, 0.1, 0.5, 0.9, 1.0):
        found = law("lossy_greedy", q, p, alpha, 0.0)
        np.testing.assert_array_equal(found, law("token_v3", q, p, alpha, 0.0))
        draft, target = scaled(q, 0.0), scaled(p, 0.0)
        seen |= {bool(same) for same in (found == target).all(-1)} | {bool((found != draft).any())}
    assert seen == {True, False}


def test_lemma_10_opt_and_diff_at_temperature_zero_have_one_law_but_not_one_deferral_rate():
    q, p = conformance.logit_pairs(8)
    pair = conformance.law_pair(q, p, 0.0)
    rates = []
    for alpha in (0.05, 0.2, 0.5):
        np.testing.assert_array_equal(law("opt", q, p, alpha, 0.0), law("diff", q, p, alpha, 0.0))
        column = jnp.full((len(q), 1), alpha, jnp.float32)
        rates.append([float(RULES[name].deferral(pair, column).mean()) for name in ("opt", "diff")])
    # where both argmaxes agree the distance is 0: opt may defer there, diff not, and nothing changes
    assert all(opt >= diff for opt, diff in rates) and any(opt > diff for opt, diff in rates)


# --- where a rule is lossless, and where it never defers


@pytest.mark.parametrize(
    ("name", "alphas", "temperatures"),
    [
        ("lossy", [0.0], ANY),
        ("lossy", [0.3, 0.8], [0.0]),  # lemma 6
        ("lossy_tuned", [0.0, 0.3, 0.8], [0.0]),
        ("diff", [-1.0], ANY),
        ("chow", [-1e-3, -1.0, -7.0], ANY),
        *[(name, [-1.0], ANY) for name in TOKEN],
    ],
)
def test_lossless_ends(name, alphas, temperatures):
    q, p = conformance.logit_pairs(9)
    for sampling in itertools.product(temperatures, (1.0, 0.8)):
        for alpha in alphas:
            lossless = law("spec_decode", q, p, 0.0, *sampling)
            np.testing.assert_allclose(law(name, q, p, alpha, *sampling), lossless, atol=1e-6)


NEVER_DEFERS = dict.fromkeys(("chow", "diff", *TOKEN), 1.0) | dict.fromkeys(("opt", "opt_log", "bild_star"), 1e9)
NEVER_DEFERS |= {"chow_log": math.log(VOCAB) + 1e-5, "diff_log": math.log(VOCAB)}


@pytest.mark.parametrize(("name", "alpha"), NEVER_DEFERS.items())
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_draft_ends(name, alpha, temperature):
    """Where a rule never defers, `π = q̃`."""
    q, p = conformance.logit_pairs(10)
    # without equal pairs (TV = 0 defeats any α) and infinite divergences
    finite = np.isfinite(q).all(-1) & np.isfinite(p).all(-1)
    finite[[0, 4]] = False
    q, p = q[finite], p[finite]
    pair = conformance.law_pair(q, p, temperature)
    deferred = np.asarray(RULES[name].deferral(pair, jnp.full((len(q), 1), alpha, jnp.float32)))
    never = ~(np.broadcast_to(deferred, q.shape) & (np.asarray(pair.q_tilde) > 0)).any(-1)
    if name not in ("opt", "opt_log"):
        assert never.all()
    assert never.any()
    np.testing.assert_array_equal(law(name, q, p, alpha, temperature)[never], np.asarray(pair.q_tilde)[never])


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_not_an_identity_token_v3_at_zero_is_not_lossless(temperature):
    """Counter-example: the target's top token is never deferred, so the draft's excess on it stays."""
    q, p = np.log([0.8, 0.1, 0.1]), np.log([0.5, 0.3, 0.2])
    found = law("token_v3", q, p, 0.0, temperature)
    target = law("spec_decode", q, p, 0.0, temperature)
    assert np.abs(found - target).max() > 0.1
    pair = conformance.law_pair(q[None], p[None], temperature)
    deferred = np.asarray(RULES["token_v3"].deferral(pair, jnp.zeros((1, 1))))[0]
    np.testing.assert_array_equal(deferred, [False, True, True])
    # at temperature 0 it is
    np.testing.assert_array_equal(law("token_v3", q, p, 0.0, 0.0), law("spec_decode", q, p, 0.0, 0.0))


def test_not_an_identity_acceptance_does_not_rise_with_alpha():
    """Counter-example: fewer tokens are deferred as α grows, and yet more of the draft is rejected."""
    rng, falls = np.random.default_rng(11), 0
    for name in TOKEN:
        q, p = rng.normal(size=(60, 5)) * 2, rng.normal(size=(60, 5)) * 2
        pair = conformance.law_pair(q, p, 1.0)
        accept = Speculative(RULES[name])
        kept = [np.asarray(conformance.evaluate(accept, pair, a)[0], float).sum(-1) for a in np.linspace(-0.5, 1, 13)]
        falls += (np.diff(np.stack(kept), axis=0) < -1e-3).sum()
    assert falls > 0


@pytest.mark.parametrize("name", [n for n in DELTA if not n.startswith("opt")] + TOKEN)
def test_the_deferred_set_shrinks_with_alpha(name):
    q, p = conformance.logit_pairs(12)
    pair = conformance.law_pair(q, p, 1.0)
    low, high = RULES[name].alpha.bounds(VOCAB)
    before = None
    for alpha in np.linspace(low - 0.5, high + 0.5, 9):
        deferred = np.asarray(RULES[name].deferral(pair, jnp.full((len(q), 1), alpha, jnp.float32)))
        assert before is None or (deferred <= before).all()
        before = deferred
