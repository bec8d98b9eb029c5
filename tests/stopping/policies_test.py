"""Tests of stop policies: their decisions, and that none of them changes the distribution."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.protocols import Decision, DraftStep
from speccascade_jax.core.types import Prompt
from speccascade_jax.engine.generate import compilations, generate
from speccascade_jax.methods.build import assemble
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import (
    AcceptanceHead,
    Capped,
    Confidence,
    CumulativeConfidence,
    Entropy,
    Fixed,
    Oracle,
)
from tests.support import conformance, engines, reference
from tests.support.acceptance_heads import head_for


def ask(policy, laws, slot, threshold=0.0, state=None, params=None, hidden=None, position=None, drawn=0.5):
    """Returns `(draw, proceed, state)` of the policy for rows of `laws`."""
    laws = jnp.asarray(laws, jnp.float32)
    controls = make_controls(len(laws), stop_threshold=threshold)
    position = jnp.full(len(laws), slot + 1) if position is None else jnp.asarray(position)
    step = DraftStep(laws, laws.max(-1), hidden, jnp.int32(slot), position, jnp.full(len(laws), drawn))
    decision, state = policy(params, policy.init(len(laws)) if state is None else state, step, controls)
    return np.asarray(decision.draw).tolist(), np.asarray(decision.proceed).tolist(), state


EVEN, SURE, FLAT = [[0.5, 0.5]], [[0.75, 0.25], [0.5, 0.5]], [[0.75, 0.25, 0.0], [1 / 3, 1 / 3, 1 / 3]]
STOPS_BEFORE = jnp.asarray([[False, False, True, False], [True, True, True, True]])


@pytest.mark.parametrize(("policy", "laws", "slot", "more", "draw", "proceed"), [
    (Fixed(2), EVEN, 0, {}, [True], [True]),  # a block ends after its last token
    (Fixed(2), EVEN, 1, {}, [True], [False]),
    # a block ends before a token of which the draft is unsure
    (Confidence(3), SURE, 0, {"threshold": 0.25}, [True, False], [True, False]),
    (Confidence(3), SURE, 2, {"threshold": 0.25}, [True, False], [False, False]),
    (Confidence(3), SURE, 0, {"threshold": np.array([0.2, 0.5])}, [False, True], [False, True]),
    (Entropy(3), FLAT, 0, {"threshold": 0.6}, [True, False], [True, False]),
    (Entropy(3), FLAT, 2, {"threshold": 1.2}, [True, True], [False, False]),
    (Oracle(9), EVEN * 2, 0, {"params": STOPS_BEFORE, "position": [0, 0]}, [True, False], [True, False]),
    (Oracle(9), EVEN * 2, 1, {"params": STOPS_BEFORE, "position": [1, 3]}, [True, False], [False, False]),
    (Oracle(9), EVEN * 2, 1, {"params": STOPS_BEFORE, "position": [3, 9]}, [True, False], [False, False]),
    # at the threshold itself drafting goes on (Huang et al., 2024 (SpecDec++), Algorithm 2)
    (CumulativeConfidence(9), [[0.75, 0.25]], 0, {"threshold": 0.25}, [True], [True]),
    (Entropy(9), [[1.0, 0.0]], 0, {"threshold": 0.0}, [True], [True]),
])  # fmt: skip
def test_each_policy_ends_a_block_at_its_threshold(policy, laws, slot, more, draw, proceed):
    assert ask(policy, laws, slot, **more)[:2] == (draw, proceed)


def test_cumulative_confidence_multiplies_over_a_block_and_restarts():
    policy, laws = CumulativeConfidence(9), [[0.75, 0.25], [0.5, 0.5]]
    draw, _, state = ask(policy, laws, 0, threshold=0.5)
    assert draw == [True, True]
    draw, proceed, state = ask(policy, laws, 1, threshold=0.5, state=state)
    assert (draw, proceed) == ([True, False], [True, False])  # the products are 0.5625 and 0.25
    draw, _, state = ask(policy, laws, 2, threshold=0.5, state=state)
    assert draw == [False, False]  # the product is 0.421875
    assert ask(policy, laws, 0, threshold=0.5, state=state)[0] == [True, True]


LINEAR = {"out": {"kernel": jnp.ones(1), "bias": jnp.zeros(())}}


def _round(policy, kept, threshold, state):
    """Returns `(length, passes)` of a block, and the policy's state.

    The head predicts `kept[i]` for the token drawn at slot `i`.
    """
    logits = [100.0, *(np.log(p / (1 - p)) for p in kept)]  # slot 0 follows a committed token, which does not count
    for slot, logit in enumerate(logits):
        hidden = jnp.full((1, 1), -100.0 if slot == 0 else logit)
        (draw,), (proceed,), state = ask(policy, [[0.5, 0.5]], slot, threshold, state, LINEAR, hidden)
        if not (draw and proceed):
            return (slot + draw, slot + 1), state
    raise AssertionError("the policy never stopped")


FALLING, HOPELESS = ([0.9, 0.8, 0.7, 0.5, 0.5, 0.5, 0.5], 0.4), ([0.01] * 5, 0.1)


@pytest.mark.parametrize(("predicted", "options", "expected"), [
    # 1 − Π P_i over i < k is 0, .1, .28, .496, .748: it exceeds 0.4 before y_4 is drawn
    (FALLING, {"least": 1, "lag": 1}, (4, 4)),
    (FALLING, {"least": 1, "lag": 0}, (3, 4)),  # … and after y_3, with one more pass that reads it
    (FALLING, {"least": 6, "lag": 1}, (6, 6)),
    (FALLING, {"least": 6, "lag": 0}, (6, 7)),
    (FALLING, {"least": 1, "lag": 1, "block": 2}, (2, 2)),
    (FALLING, {"least": 1, "lag": 0, "block": 2}, (2, 2)),
    (HOPELESS, {}, (2, 2)),  # in the authors' code, blocks have at least two tokens
    (HOPELESS, {"lag": 0}, (2, 3)),
])  # fmt: skip
def test_specdecpp_stops_when_a_rejection_has_become_likely(predicted, options, expected):
    """The result is the same in a second round, which carries the policy's state on."""
    policy = AcceptanceHead(**options)
    first, state = _round(policy, *predicted, policy.init(1))
    assert first == expected == _round(policy, *predicted, state)[0]


def test_a_head_can_read_the_distribution_of_the_previous_token():
    """It reads `log max q` of the previous slot, not of this one, and `log q̃` of the token drawn there."""
    params = {"out": {"kernel": jnp.asarray([0.0, 1.0, 10.0]), "bias": jnp.zeros(())}}
    hidden, policy = jnp.zeros((1, 1)), AcceptanceHead(least=0, lag=0)
    *_, state = ask(policy, [[0.8, 0.2]], 0, 0.5, None, params, hidden, drawn=0.01)
    *_, (product, max_q) = ask(policy, [[0.6, 0.4]], 1, 0.5, state, params, hidden, drawn=0.9)
    odds = 0.8 * 0.9**10
    np.testing.assert_allclose(product, odds / (1 + odds), rtol=1e-5)
    np.testing.assert_allclose(max_q, 0.6, rtol=1e-6)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_threshold_of_zero_does_not_stop_a_certain_draft(lag):
    # the sigmoid of this logit is 1 in float32
    sure, policy = jnp.full((1, 1), 100.0), AcceptanceHead(9, least=0, lag=lag)
    assert ask(policy, EVEN, 1, 0.0, None, LINEAR, sure)[:2] == ([True], [True])


@dataclass(frozen=True)
class Noting(Capped):
    """A policy that draws whole blocks; its state is the `drawn` and `max_q` that it saw at each slot."""

    block: int = 3

    def init(self, batch_size):
        return jnp.zeros((batch_size, self.block, 2))

    def __call__(self, params, state, step, controls):
        seen = jnp.stack([step.drawn, step.max_q], axis=-1)
        yes = jnp.ones(len(seen), bool)
        return Decision(draw=yes, proceed=yes & self.below_cap(step)), state.at[:, step.slot].set(seen)


def test_a_policy_receives_the_probabilities_of_the_previous_token():
    """Runs in the engine, at a temperature, in a second round."""
    engine, params, q_table, _ = _adaptive(Noting(), 36, vocab_size=12)
    prompt = engines.prompts(*[[n] for n in range(8)])
    controls = make_controls(8, temperature=0.6)
    state = engine.init(params, prompt, jax.random.key(0), jnp.arange(8), 12)
    step = jax.jit(engine.step)
    for _ in range(2):
        before, (state, turn) = state, step(params, state, controls)
    pending = np.take_along_axis(np.asarray(before.tokens), np.asarray(before.length)[:, None] - 1, axis=1)
    context = np.concatenate([pending, turn.draft.tokens], axis=1)[:, :3]
    raw, scaled = (np.stack([reference.scale(row, t) for row in q_table]) for t in (1.0, 0.6))
    seen = np.asarray(state.drafter.policy)
    np.testing.assert_allclose(seen[..., 1], raw[context].max(-1), rtol=1e-5)
    drawn = scaled[context[:, :2], context[:, 1:]]
    np.testing.assert_allclose(seen[:, 1:, 0], drawn, rtol=1e-5)


@dataclass(frozen=True)
class Erratic(Capped):
    """A policy that stops by the parity of everything it has seen: adaptive, with memory across rounds."""

    block: int = 4

    def init(self, batch_size):
        return jnp.zeros((batch_size,), jnp.int32)

    def __call__(self, params, state, step, controls):
        state = state + (step.q[:, 0] > step.q[:, 1]) + 1
        draw = state % 3 != 0
        return Decision(draw=draw, proceed=draw & (state % 5 != 1) & self.below_cap(step)), state


# thresholds at which blocks of one to five tokens occur
SAMPLED = [
    (Confidence(5), 0.4),
    (CumulativeConfidence(5), 0.7),
    (Entropy(5), 1.0),
    (AcceptanceHead(5), 0.5),
    (AcceptanceHead(5, least=0, lag=0), 0.6),  # this head also reads the distribution, see `_adaptive`
    (Erratic(), 0.0),
]


def _adaptive(policy, seed, vocab_size=3, rule="spec_decode"):
    """Returns engine, parameters and tables of a tabular pair, with an untrained head."""
    q_table, p_table = conformance.tables(vocab_size, seed=seed)
    pair = conformance.tabular_pair(q_table, p_table)
    head = head_for(pair, depth=1, law=policy.lag == 0) if isinstance(policy, AcceptanceHead) else None
    return *assemble(pair, rule=rule, stop=lambda _: policy, head=head), q_table, p_table


def _tokens(rule, policy, thresholds, seed=0):
    """Returns tokens `[2, 20,000, 6]` of a pair over V = 3 at temperature 1 and 0, and the rule's distribution."""
    q_table, p_table = conformance.tables(3, seed=31)
    alpha = conformance.telling_alpha(RULES[rule], q_table, p_table)
    engine, params, *_ = _adaptive(policy, 31, rule=rule)
    tokens = conformance.run_rows(
        engine, params, 20_000, alpha, [(1.0, 1.0), (0.0, 1.0)], length=6, seed=seed, conclusive=True,
        stop_threshold=thresholds,
    )  # fmt: skip
    return tokens, reference.transitions(rule, q_table, p_table, alpha, 1.0), p_table


@pytest.mark.sample(3)
@pytest.mark.laws
@pytest.mark.parametrize(("policy", "threshold"), SAMPLED)
def test_no_policy_changes_the_targets_distribution(policy, threshold):
    """Samples six tokens over several blocks in 40,000 rows that stop separately, half of them greedy.

    All thresholds share one program.
    """
    compiled = None
    for seed, greedy in enumerate([np.full(20_000, threshold), np.linspace(-0.5, 1.5, 20_000)]):
        thresholds = np.concatenate([np.full(20_000, threshold), greedy])
        tokens, law, p_table = _tokens("spec_decode", policy, thresholds, seed)
        assert conformance.sequence_p_value(tokens[0], law) > 1e-3
        np.testing.assert_array_equal(tokens[1][:, 1:], p_table.argmax(-1)[tokens[1][:, :-1]])
        assert (tokens[1][:, 0] == p_table[0].argmax()).all()
        compiled = compiled or compilations()
    assert compilations() == compiled


@pytest.mark.laws
@pytest.mark.parametrize(("policy", "threshold"), [(AcceptanceHead(5), 0.5), (Erratic(), 0.0)])
def test_no_policy_changes_a_rules_distribution(policy, threshold):
    tokens, law, _ = _tokens("opt", policy, threshold)
    assert conformance.sequence_p_value(tokens[0], law) > 1e-3


def test_specdecpp_needs_a_head_of_the_pairs_own_draft():
    pair = conformance.tabular_pair(*conformance.tables(5, seed=34))
    with pytest.raises(ValueError, match="the pair 'custom' has no acceptance head"):
        sc.decode(pair, [[0]], method="specdecpp", stop_threshold=0.5)
    foreign_head = head_for(conformance.tabular_pair(*conformance.tables(5, seed=35)), depth=0)
    with pytest.raises(ValueError, match="the acceptance head belongs to the draft"):
        assemble(pair, method="specdecpp", head=foreign_head)
    with pytest.raises(ValueError, match="lag=2 is not 0 or 1"):
        AcceptanceHead(lag=2)


# --- cost per token: `N_draft + N_target = N + N_discarded` (METHODS section 6, *Figures*)

ROWS, LIMIT, STOP = 24, 9, 3


def sampled(turn):
    """Returns per row and round: drafts, drafts committed, own tokens committed, whether the row took part."""
    committed = jnp.arange(turn.tokens.shape[1])[None] < turn.num_new[:, None]
    drafts = (committed & (turn.source == 0)).sum(-1)
    return turn.draft.length, drafts, (committed & (turn.source != 0)).sum(-1), turn.active


@functools.cache
def _headed(policy):
    pair = conformance.tabular_pair(*conformance.tables(5, seed=61))
    head = head_for(pair, depth=1, law=True) if isinstance(policy, AcceptanceHead) else None
    return assemble(pair, stop=lambda _: policy, head=head, stop_ids=[STOP])


def _counted(policy, seed, **numbers):
    engine, params = _headed(policy)
    prompt = Prompt(jnp.arange(ROWS, dtype=jnp.int32)[:, None] % 5, jnp.ones((ROWS,), jnp.int32))
    controls = make_controls(ROWS, **numbers)
    return generate(engine, params, prompt, seed, controls=controls, max_new_tokens=LIMIT, record=sampled)


@pytest.mark.laws
@pytest.mark.parametrize("policy", [Fixed(3), Confidence(5), AcceptanceHead(5)])
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-0.2, 1.2), st.sampled_from([0.0, 0.7, 1.5]))
def test_every_sampled_token_is_committed_or_discarded(policy, seed, threshold, temperature):
    out = _counted(policy, seed, temperature=temperature, stop_threshold=threshold)
    drafted, kept, from_target, active = (np.asarray(x)[: int(out.num_rounds)] for x in out.record)
    stats, lengths = out.stats, np.asarray(out.lengths)

    assert (np.asarray(stats.drafted) == np.where(active, drafted, 0).sum(0)).all()
    assert (np.asarray(stats.target_calls) == active.sum(0)).all()
    # a call of the target gives one token, unless a stop id or the limit leaves no room for it
    discarded = np.where(active, drafted - kept + 1 - from_target, 0).sum(0)
    assert (np.asarray(stats.discarded) == discarded).all()
    assert (np.asarray(stats.drafted) + np.asarray(stats.target_calls) == lengths + discarded).all()
    ended = np.asarray(out.tokens)[np.arange(ROWS), lengths - 1] == STOP
    assert ((lengths == LIMIT) | ended).all()


@pytest.mark.laws
def test_the_trials_have_rows_that_end_at_stop_ids_and_at_the_limit():
    lengths = np.asarray(_counted(Fixed(3), 1, temperature=0.7).lengths)
    assert 0 < (lengths == LIMIT).sum() < ROWS
