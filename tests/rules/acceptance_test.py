"""The identity of METHODS section 2 for every rule and every acceptance that fits it, and the edge cases."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from speccascade_jax.rules.acceptance import Deferral, Speculative
from speccascade_jax.rules.deferral import RULES, lossy
from tests.support import conformance

ALL = conformance.REPRESENTATIVE
CASES = [(name, type(a).__name__) for name, rule in ALL.items() for a in conformance.accept_fns(rule)]
ACCEPT = {"Speculative": Speculative, "Deferral": Deferral}


@pytest.mark.parametrize(("name", "how"), CASES)
def test_identity_on_random_and_adversarial_pairs(name, how):
    rule = ALL[name]
    q, p = conformance.logit_pairs()
    for temperature in (0.0,) if rule.greedy_only else (0.0, 0.5, 1.0):
        for top_p in (1.0, 0.8):
            pair = conformance.law_pair(q, p, temperature, top_p)
            for alpha in conformance.alphas(rule, q.shape[-1]):
                conformance.check_identity(ACCEPT[how](rule), pair, alpha)


logits = hnp.arrays(np.float32, (2, 6), elements=st.floats(-8, 8, width=32))


@pytest.mark.laws
@pytest.mark.parametrize("name", [n for n, r in ALL.items() if not r.greedy_only])
@settings(max_examples=25, deadline=None)
@given(pair=logits, fraction=st.floats(0, 1), temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]))
def test_identity_holds_for_any_logits(name, pair, fraction, temperature):
    rule = ALL[name]
    low, high = (0.0, 0.0) if rule.alpha is None else (-1.0, 1.0)
    if rule.alpha is not None and np.isfinite(rule.alpha.domain[0]):
        low, high = rule.alpha.domain[0], rule.alpha.domain[1] - 0.01
    laws = conformance.law_pair(pair[:1], pair[1:], temperature)
    for accept in conformance.accept_fns(rule):
        conformance.check_identity(accept, laws, low + (high - low) * fraction)


@pytest.mark.parametrize("beta", [0.6, 1.0, 1.5, 3.0])
def test_lossy_with_another_beta(beta):
    rule = lossy(beta)
    pair = conformance.law_pair(*conformance.logit_pairs(), 1.0)
    conformance.check_identity(Speculative(rule), pair, 0.5)


def test_lossy_replaces_from_the_target_where_nothing_is_left():
    # β so large that p̃/β never exceeds q̃: a rejection is possible and its residual empty
    q = np.log(np.array([[0.5, 0.5]], np.float32))
    p = np.log(np.array([[0.9, 0.1]], np.float32))
    pair = conformance.law_pair(q, p, 1.0)
    law = lossy(2.0).target_law(pair, jnp.full((1, 1), 0.1))
    kept = np.minimum([0.5, 0.5], np.array([0.9, 0.1]) / 0.9)
    np.testing.assert_allclose(law[0], kept + (1 - kept.sum()) * np.array([0.9, 0.1]), atol=1e-6)


def test_rejection_cannot_happen_where_the_laws_agree():
    q, _ = conformance.logit_pairs()
    pair = conformance.law_pair(q, q, 1.0)
    acceptance = Speculative(RULES["spec_decode"])(pair, jnp.zeros((len(q), 1)))
    np.testing.assert_allclose(acceptance.kept, pair.q_tilde)
    np.testing.assert_allclose(acceptance.replacement, pair.p_tilde, atol=1e-6)


def test_speculative_accepts_at_least_as_much_as_deferral():
    q, p = conformance.logit_pairs()
    pair = conformance.law_pair(q, p, 1.0)
    for name, rule in ALL.items():
        if rule.deferral is None or rule.greedy_only:
            continue
        for alpha in conformance.alphas(rule, q.shape[-1]):
            more = np.asarray(conformance.evaluate(Speculative(rule), pair, alpha)[0]).sum(-1)
            less = np.asarray(conformance.evaluate(Deferral(rule), pair, alpha)[0]).sum(-1)
            assert (more >= less - 1e-5).all(), name


def test_deferral_refuses_a_law_that_is_none():
    with pytest.raises(ValueError, match="'lossy' is no deferral rule"):
        Deferral(RULES["lossy"])


def test_implied_law_by_hand():
    acceptance = type("A", (), {"kept": jnp.array([0.2, 0.1]), "replacement": jnp.array([0.5, 0.5])})
    np.testing.assert_allclose(conformance.implied_law(acceptance), [0.2 + 0.35, 0.1 + 0.35], rtol=1e-6)
