"""Tests of METHODS section 2's identity for every rule and fitting acceptance, and of a verdict's distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from speccascade_jax.rules.acceptance import Deferral, Speculative
from speccascade_jax.rules.block_wise import BlockWise
from speccascade_jax.rules.deferral import RULES, lossy
from tests.support import blocks, conformance, reference

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
def test_the_identity_holds_for_lossy_with_another_beta(beta):
    """Includes `β > 1`, where the residual may be empty although a rejection is possible."""
    pair = conformance.law_pair(*conformance.logit_pairs(), 1.0)
    conformance.check_identity(Speculative(lossy(beta)), pair, 0.5)
    law = lossy(beta).target_law(pair, jnp.full((len(pair.q), 1), 0.5))
    laws = (np.asarray(x, np.float64) for x in (pair.q_tilde, pair.p_tilde))
    for row, q, p in zip(law, *laws, strict=True):
        np.testing.assert_allclose(row, reference.lossy(q, p, 0.5, beta), atol=2e-5)


# --- the distribution of each committed token of a block


ROWS, BLOCK, ALPHA = 40, 3, 0.4
BONUSES = ("rule", "target", "none")
LAWLESS = np.arange(ROWS) % 2 == 1


@pytest.mark.parametrize(
    ("accept", "bonus", "targets"),
    [(accept, bonus, bonus == "target") for accept in (Speculative, Deferral, BlockWise) for bonus in BONUSES]
    + [(Speculative, "rule", LAWLESS)],
)
def test_the_distribution_after_a_block_depends_on_the_bonus(accept, bonus, targets):
    """Expects `π` at every position of a block, and `p̃` after the block if the bonus comes from the target.

    `p̃` is also expected there if the draft has no distribution at the bonus position. Blocks have 0 to 3 tokens.
    """
    rule, pair = RULES["token_v3"], blocks.positions(ROWS, BLOCK, 11)
    tokens, length = np.argmax(pair.q_tilde[:, :BLOCK], -1), np.arange(ROWS) % (BLOCK + 1)
    draft = blocks.draft_of(pair, tokens, length, jnp.asarray(~LAWLESS) if targets is LAWLESS else None)
    verify = jax.jit(accept(rule).verify, static_argnames="bonus")
    verdict = verify(pair, draft, blocks.round_keys(ROWS), jnp.full((ROWS,), ALPHA), bonus=bonus)
    law = np.asarray(rule.target_law(pair, jnp.full((ROWS, BLOCK + 1, 1), ALPHA)))
    bonus_place = np.arange(BLOCK + 1)[None] == length[:, None]
    assert np.abs(law - pair.p_tilde)[bonus_place].max() > 0.1
    expected = np.where((bonus_place & np.reshape(targets, (-1, 1)))[..., None], pair.p_tilde, law)
    np.testing.assert_allclose(verdict.law, expected, rtol=1e-6)
