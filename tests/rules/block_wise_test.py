"""Exact tests of block verification: published numbers, the distribution by enumeration, and no loss of tokens."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import speccascade_jax as sc
from speccascade_jax.core import rngs
from speccascade_jax.rules.block_wise import BlockWise
from speccascade_jax.rules.deferral import RULES
from tests.support import blocks, conformance

ALL = {name: rule for name, rule in conformance.REPRESENTATIVE.items() if not rule.greedy_only}
P, Q = (Fraction(1, 3), Fraction(2, 3)), (Fraction(2, 3), Fraction(1, 3))
GOLDEN = {1: ("2/3", "2/3"), 2: ("10/9", "11/9"), 3: ("38/27", "5/3"), 4: ("130/81", "166/81"), 5: ("422/243", "64/27")}
"""Block size -> `E[kept]`, token-wise and block-wise, in the paper's two-token example (METHODS section 10)."""


@pytest.mark.parametrize("block", GOLDEN)
def test_two_tokens_match_the_papers_example(block):
    token_wise, block_wise = map(Fraction, GOLDEN[block])
    assert blocks.kept_tokens(P, Q, block, jointly=False) == token_wise
    assert blocks.kept_tokens(P, Q, block, jointly=True) == block_wise
    logits = [np.log(np.array([[float(x) for x in law]] * 2, np.float32)) for law in (Q, P)]
    outcome = blocks.outcomes(BlockWise(RULES["spec_decode"]), *logits, block, 0.0)
    assert outcome.kept == pytest.approx(float(block_wise), abs=1e-5)


QUICK = ("spec_decode", "token_v3", "lossy_tuned", "opt_log")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.laws) for n in ALL])
def test_the_next_tokens_have_the_rules_distribution(name):
    """Sums over all possible blocks of 3 tokens, at temperatures 0.5 and 1, with and without top-p."""
    tables, rule = conformance.tables(3, seed=5), ALL[name]
    alpha = conformance.telling_alpha(rule, *tables)
    for sampling in conformance.SAMPLINGS:
        chain = conformance.law_by_rule(rule, *tables, alpha, *sampling)
        outcome = blocks.outcomes(BlockWise(rule), *tables, 3, alpha, *sampling)
        np.testing.assert_allclose(outcome.law(chain), blocks.chain_law(chain, 4), atol=2e-6)
        np.testing.assert_allclose(outcome.ends.sum(-1)[outcome.chance > 0], 1.0, atol=1e-5)


@pytest.mark.parametrize("bug", blocks.BUGS)
def test_planted_bugs_change_the_distribution(bug):
    tables = conformance.tables(3, seed=5)
    chain = conformance.law_by_rule(RULES["token_v3"], *tables, 0.4, 1.0, 1.0)
    outcome = blocks.outcomes(blocks.BUGS[bug](RULES["token_v3"]), *tables, 3, 0.4)
    assert np.abs(outcome.law(chain) - blocks.chain_law(chain, 4)).max() > 1e-3


logits = hnp.arrays(np.float32, (3, 3), elements=st.floats(-4, 4, width=32))


@settings(max_examples=60, deadline=None)
@given(q=logits, p=logits, block=st.integers(1, 3), name=st.sampled_from(["spec_decode", "token_v3", "lossy"]))
def test_block_verification_accepts_no_fewer_tokens_than_token_wise(q, p, block, name):
    rule, alpha = RULES[name], 0.3
    outcome = blocks.outcomes(BlockWise(rule), q, p, block, alpha)
    chain = conformance.law_by_rule(rule, q, p, alpha, 1.0, 1.0)
    drawn = np.exp(q.astype(np.float64)) / np.exp(q.astype(np.float64)).sum(-1, keepdims=True)
    token_wise, state_probs = 0.0, np.array([1.0, 0.0, 0.0])
    for _ in range(block):
        state_probs = state_probs @ np.minimum(drawn, chain)
        token_wise += state_probs.sum()
    assert outcome.kept >= token_wise - 1e-4
    if block == 1:
        assert outcome.kept == pytest.approx(token_wise, abs=1e-4)


def test_a_greedy_draft_gains_nothing():
    """Expects that `i` tokens of a greedy draft are kept with the probability of these tokens under `π`."""
    tables, rule = conformance.tables(4, seed=2), RULES["spec_decode"]
    outcome = blocks.outcomes(BlockWise(rule), *tables, 4, 0.0, draft_temperature=0.0)
    chain = conformance.law_by_rule(rule, *tables, 0.0, 1.0, 1.0)
    (only,) = np.flatnonzero(outcome.chance)
    row = outcome.tokens[only]
    reached = np.cumprod([chain[a, b] for a, b in zip([0, *row[:-1]], row, strict=True)])
    np.testing.assert_allclose(outcome.ends[only][::-1].cumsum()[::-1][1:], reached, atol=1e-6)


@pytest.mark.parametrize("name", ["token_v3", "lossy", "lossy_tuned"])
def test_the_accepted_length_is_the_largest_one_whose_uniform_lies_below_its_chance(name):
    """Compares the loop, which goes from the block's end to its beginning, with an enumeration of all `i`.

    The batch contains blocks of every length. For rules with bounds, `π` is computed only where `P_i` depends on it.
    """
    rows, block, verifier = 400, 4, BlockWise(RULES[name])
    pair, draws = blocks.positions(rows, block, 11), np.random.default_rng(1)
    laws = np.asarray(pair.q_tilde, float)
    tokens = np.array([[draws.choice(11, p=law / law.sum()) for law in row] for row in laws])[:, :block]
    draft, keys = blocks.draft_of(pair, tokens, np.arange(rows) % (block + 1)), blocks.round_keys(rows)
    alpha = jnp.full((rows,), 0.3)
    verdict = jax.jit(verifier.verify, static_argnames="bonus")(pair, draft, keys, alpha, bonus="rule")
    reached, chances, _ = (np.asarray(part) for part in blocks._parts(verifier, pair, draft, alpha))
    uniforms = np.asarray(keys.uniform(jnp.broadcast_to(jnp.arange(block), (rows, block)), rngs.ACCEPT))
    expected = []
    for row, length in enumerate(np.asarray(draft.length)):
        stays = [reached[row, i] if i == length else chances[row, i] for i in range(length + 1)]
        expected.append(max([i for i in range(1, length + 1) if uniforms[row, i - 1] < stays[i]], default=0))
    np.testing.assert_array_equal(verdict.num_kept, expected)
    np.testing.assert_array_equal(verdict.rejected, np.array(expected) < np.asarray(draft.length))
    assert len(set(expected)) == block + 1 and set(np.asarray(draft.length - verdict.num_kept)) >= {0, 1, 2, 3}


@pytest.mark.parametrize("rule", ["spec_decode", pytest.param("lossy_tuned", marks=pytest.mark.laws)])
@pytest.mark.parametrize("failing", ["target", "draft"])
def test_nan_logits_are_found_at_their_position(failing, rule):
    """Gives NaN logits after token 3.

    If the target has them, no token may follow a 3. If the draft has them, a 3 may be followed by other tokens, because
    the draft is not always called there.
    """
    q, p = conformance.tables(5, seed=4)
    broken = {"target": p.copy(), "draft": q.copy()}
    broken[failing][3] = np.nan
    pair = conformance.tabular_pair(broken["draft"], broken["target"])
    prompts = [[n % 3] for n in range(300)]
    with pytest.warns(UserWarning, match="rows failed"):
        out = sc.decode(pair, prompts, rule=rule, alpha=0.4, verify="block", temperature=1.0, max_new_tokens=12)
    assert len(out.failed) > 20 and {failure.model for failure in out.failed} == {failing}
    if failing == "target":
        assert not any((row[: length - 1] == 3).any() for row, length in zip(out.tokens, out.lengths, strict=True))


# all rules but one are deterministic at T = 0
DETERMINISTIC = [name for name in conformance.REPRESENTATIVE if name != "random_accept"]


@pytest.mark.parametrize(
    "name", [case if case == "token_v3" else pytest.param(case, marks=pytest.mark.laws) for case in DETERMINISTIC]
)
def test_at_temperature_0_tokens_and_rounds_equal_token_wise_ones(name):
    pair, rule = conformance.tabular_pair(*conformance.tables(12, seed=6)), conformance.REPRESENTATIVE[name]
    alpha = None if rule.alpha is None else conformance.alphas(rule, 12)[1]
    settings_ = {"rule": rule, "alpha": alpha, "max_new_tokens": 20, "block_size": 4}
    outputs = [sc.decode(pair, [[n] for n in range(12)], verify=way, **settings_) for way in ("token", "block")]
    np.testing.assert_array_equal(outputs[0].tokens, outputs[1].tokens)
    for counted in ("rounds", "kept", "drafted"):
        assert outputs[0].stats[counted] == outputs[1].stats[counted], counted


def test_acceptances_that_block_verification_excludes_are_refused():
    pair = conformance.tabular_pair(*conformance.tables(4, seed=3))
    with pytest.raises(ValueError, match=r"accept='deferral' accepts less: choose accept='speculative'"):
        sc.decode(pair, [[0]], method="fuzzy", alpha=0.3, verify="block")
    with pytest.raises(ValueError, match=r"unknown verify='blok': choose one of token, block"):
        sc.decode(pair, [[0]], verify="blok")
    for alone in ("autoregressive", "seq_cascade"):
        with pytest.raises(ValueError, match=f"{alone!r} has no verify, got 'block'"):
            sc.decode(pair, [[0]], method=alone, alpha=-1.0, verify="block")


@pytest.mark.laws
def test_an_arm_that_drafts_nothing_has_empty_blocks_under_bounded_rules_too():
    q, p = conformance.tables(5, seed=4)
    settings_ = {"rule": "lossy", "alpha": 0.3, "temperature": 1.0, "max_new_tokens": 6, "lossy_arms": True}
    settings_ |= {"drafters": ("autoregressive", "draft"), "choose": "autoregressive"}
    ways = [
        sc.decode(conformance.tabular_pair(q, p), [[0], [1]], verify=way, **settings_) for way in ("token", "block")
    ]
    np.testing.assert_array_equal(ways[0].tokens, ways[1].tokens)
