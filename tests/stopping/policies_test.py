"""Stop policies: what they decide, and that none of them can change the law."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.protocols import Decision, DraftStep
from speccascade_jax.core.types import Prompt
from speccascade_jax.engine.generate import compilations, generate
from speccascade_jax.methods.build import assemble
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import (
    STOPS,
    AcceptanceHead,
    Confidence,
    CumulativeConfidence,
    Entropy,
    Fixed,
    Oracle,
)
from tests.support import conformance, reference
from tests.support.acceptance_heads import head_for


def ask(policy, laws, slot, threshold=0.0, state=None, params=None, hidden=None, position=None, drawn=0.5):
    """`(draw, proceed, state)` of the policy on rows of `laws`."""
    laws = jnp.asarray(laws, jnp.float32)
    controls = make_controls(len(laws), stop_threshold=threshold)
    position = jnp.full(len(laws), slot + 1) if position is None else jnp.asarray(position)
    step = DraftStep(laws, laws.max(-1), hidden, jnp.int32(slot), position, jnp.full(len(laws), drawn))
    decision, state = policy(params, policy.init(len(laws)) if state is None else state, step, controls)
    return np.asarray(decision.draw).tolist(), np.asarray(decision.proceed).tolist(), state


def test_fixed_ends_after_the_last_token():
    assert ask(Fixed(2), [[0.5, 0.5]], 0)[:2] == ([True], [True])
    assert ask(Fixed(2), [[0.5, 0.5]], 1)[:2] == ([True], [False])


def test_confidence_ends_before_the_unsure_token():
    laws = [[0.75, 0.25], [0.5, 0.5]]
    assert ask(Confidence(3), laws, 0, threshold=0.25)[:2] == ([True, False], [True, False])
    assert ask(Confidence(3), laws, 2, threshold=0.25)[:2] == ([True, False], [False, False])
    # one threshold per row
    assert ask(Confidence(3), laws, 0, threshold=np.array([0.2, 0.5]))[:2] == ([False, True], [False, True])


def test_entropy_ends_before_the_unsure_token():
    laws = [[0.75, 0.25, 0.0], [1 / 3, 1 / 3, 1 / 3]]
    assert ask(Entropy(3), laws, 0, threshold=0.6)[:2] == ([True, False], [True, False])
    assert ask(Entropy(3), laws, 2, threshold=1.2)[:2] == ([True, True], [False, False])


def test_cumulative_confidence_multiplies_over_the_block_and_starts_anew_with_the_next():
    policy, laws = CumulativeConfidence(9), [[0.75, 0.25], [0.5, 0.5]]
    draw, _, state = ask(policy, laws, 0, threshold=0.5)
    assert draw == [True, True]
    draw, proceed, state = ask(policy, laws, 1, threshold=0.5, state=state)
    assert (draw, proceed) == ([True, False], [True, False])  # 0.5625 and 0.25
    draw, _, state = ask(policy, laws, 2, threshold=0.5, state=state)
    assert draw == [False, False]  # 0.421875
    assert ask(policy, laws, 0, threshold=0.5, state=state)[0] == [True, True]


def _walk(policy, kept, threshold):
    """The block's length when the head predicts `kept[i]` for the token drawn at slot `i`, and the passes made.

    The same again in a next round, which carries the policy's state on.
    """
    first, state = _round(policy, kept, threshold, policy.init(1))
    assert _round(policy, kept, threshold, state)[0] == first
    return first


def _round(policy, kept, threshold, state):
    params = {"out": {"kernel": jnp.ones(1), "bias": jnp.zeros(())}}
    logits = [100.0, *(np.log(p / (1 - p)) for p in kept)]  # behind slot 0 stands a committed token: not to be counted
    for slot, logit in enumerate(logits):
        hidden = jnp.full((1, 1), -100.0 if slot == 0 else logit)
        (draw,), (proceed,), state = ask(policy, [[0.5, 0.5]], slot, threshold, state, params, hidden)
        if not (draw and proceed):
            return (slot + draw, slot + 1), state
    raise AssertionError("the policy never stopped")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 1 − Π P_i over i < k is 0, .1, .28, .496, .748: it exceeds 0.4 before y_4 is drawn
        ({"lag": 1}, (4, 4)),
        ({"lag": 0}, (3, 4)),  # … and after y_3, but for a pass that reads it
        ({"lag": 1, "least": 6}, (6, 6)),
        ({"lag": 0, "least": 6}, (6, 7)),
        ({"lag": 1, "block": 2}, (2, 2)),
        ({"lag": 0, "block": 2}, (2, 2)),
    ],
)
def test_specdecpp_stops_when_a_rejection_has_become_likely(options, expected):
    policy = AcceptanceHead(**{"block": 20, "least": 1} | options)
    assert _walk(policy, [0.9, 0.8, 0.7, 0.5, 0.5, 0.5, 0.5], threshold=0.4) == expected


def test_the_authors_blocks_have_at_least_two_tokens():
    assert _walk(AcceptanceHead(), [0.01] * 5, threshold=0.1) == (2, 2)
    assert _walk(AcceptanceHead(lag=0), [0.01] * 5, threshold=0.1) == (2, 3)


def test_a_head_may_read_the_law_that_the_token_before_was_drawn_from():
    """`log max q` of the slot before, not of this one, and `log q̃` of the token drawn there."""
    params = {"out": {"kernel": jnp.asarray([0.0, 1.0, 10.0]), "bias": jnp.zeros(())}}
    hidden, policy = jnp.zeros((1, 1)), AcceptanceHead(least=0, lag=0)
    *_, state = ask(policy, [[0.8, 0.2]], 0, 0.5, None, params, hidden, drawn=0.01)
    *_, (product, max_q) = ask(policy, [[0.6, 0.4]], 1, 0.5, state, params, hidden, drawn=0.9)
    odds = 0.8 * 0.9**10
    np.testing.assert_allclose(product, odds / (1 + odds), rtol=1e-5)
    np.testing.assert_allclose(max_q, 0.6, rtol=1e-6)


def test_at_the_threshold_itself_drafting_goes_on():
    """Paper 3, Algorithm 2: stop where it is *exceeded*; h = 0 does not stop a draft that is sure of everything."""
    assert ask(CumulativeConfidence(9), [[0.75, 0.25]], 0, threshold=0.25)[0] == [True]
    assert ask(Entropy(9), [[1.0, 0.0]], 0, threshold=0.0)[0] == [True]
    params = {"out": {"kernel": jnp.ones(1), "bias": jnp.zeros(())}}
    sure = jnp.full((1, 1), 100.0)  # its sigmoid is 1 in float32
    for lag in (0, 1):
        policy = AcceptanceHead(9, least=0, lag=lag)
        assert ask(policy, [[0.5, 0.5]], 1, 0.0, None, params, sure)[:2] == ([True], [True])


@dataclass(frozen=True)
class Noting:
    """Draws whole blocks; its state is the `drawn` and `max_q` that it saw at each slot."""

    block: int = 3
    adaptive: ClassVar[bool] = True
    threshold: ClassVar[str] = ""

    def init(self, batch_size):
        return jnp.zeros((batch_size, self.block, 2))

    def __call__(self, params, state, step, controls):
        seen = jnp.stack([step.drawn, step.max_q], axis=-1)
        yes = jnp.ones(len(seen), bool)
        return Decision(draw=yes, proceed=yes & (step.slot + 1 < self.block)), state.at[:, step.slot].set(seen)


def test_a_policy_is_told_what_the_token_before_was_drawn_with():
    """In the engine, at a temperature, in a second round."""
    engine, params, q_table, _ = _adaptive(Noting(), 36, vocab_size=12)
    prompt = Prompt(jnp.arange(8, dtype=jnp.int32)[:, None], jnp.ones((8,), jnp.int32))
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


def test_a_lag_of_two_has_no_meaning():
    with pytest.raises(ValueError, match="lag=2 is not 0 or 1"):
        AcceptanceHead(lag=2)


def test_the_oracle_draws_up_to_the_next_stop():
    stops = jnp.asarray([[False, False, True, False], [True, True, True, True]])
    laws = [[0.5, 0.5]] * 2
    assert ask(Oracle(9), laws, 0, params=stops, position=[0, 0])[:2] == ([True, False], [True, False])
    assert ask(Oracle(9), laws, 1, params=stops, position=[1, 3])[:2] == ([True, False], [False, False])
    assert ask(Oracle(9), laws, 1, params=stops, position=[3, 9])[:2] == ([True, False], [False, False])


@dataclass(frozen=True)
class Erratic:
    """Stops by the parity of everything it has seen so far: adaptive, with memory across rounds."""

    block: int = 4
    adaptive: ClassVar[bool] = True
    threshold: ClassVar[str] = ""

    def init(self, batch_size):
        return jnp.zeros((batch_size,), jnp.int32)

    def __call__(self, params, state, step, controls):
        state = state + (step.q[:, 0] > step.q[:, 1]) + 1
        draw = state % 3 != 0
        return Decision(draw=draw, proceed=draw & (state % 5 != 1) & (step.slot + 1 < self.block)), state


# thresholds at which blocks of one to five tokens occur
SAMPLED = [
    (Confidence(5), 0.4),
    (CumulativeConfidence(5), 0.7),
    (Entropy(5), 1.0),
    (AcceptanceHead(5), 0.5),
    (AcceptanceHead(5, least=0, lag=0), 0.6),  # with the law among its inputs, see `_adaptive`
    (Erratic(), 0.0),
]


def _adaptive(policy, seed, vocab_size=3, rule="spec_decode"):
    """Engine, parameters and tables of a tabular pair, with an untrained head of no use."""
    q_table, p_table = conformance.tables(vocab_size, seed=seed)
    pair = conformance.tabular_pair(q_table, p_table)
    head = head_for(pair, depth=1, law=policy.lag == 0) if isinstance(policy, AcceptanceHead) else None
    return *assemble(pair, rule=rule, stop=lambda _: policy, head=head), q_table, p_table


def _tokens(rule, policy, thresholds, seed=0):
    """Tokens `[2, 20,000, 6]` of a pair over V = 3 at temperature 1 and 0, and the rule's law."""
    q_table, p_table = conformance.tables(3, seed=31)
    alpha = conformance.telling_alpha(RULES[rule], q_table, p_table)
    engine, params, *_ = _adaptive(policy, 31, rule=rule)
    tokens = conformance.run_rows(
        engine, params, 20_000, alpha, [(1.0, 1.0), (0.0, 1.0)], length=6, seed=seed, conclusive=True,
        stop_threshold=thresholds,
    )  # fmt: skip
    return tokens, reference.transitions(rule, q_table, p_table, alpha, 1.0), p_table


@pytest.mark.laws
@pytest.mark.parametrize(("policy", "threshold"), SAMPLED)
def test_no_policy_changes_the_target_s_law(policy, threshold):
    """Sequences of six tokens over several blocks, 40,000 rows that stop separately, half of them greedy.

    One program for all thresholds.
    """
    expected = []
    compiled = None
    for seed, greedy in enumerate([np.full(20_000, threshold), np.linspace(-0.5, 1.5, 20_000)]):
        tokens, law, p_table = _tokens(
            "spec_decode", policy, np.concatenate([np.full(20_000, threshold), greedy]), seed
        )
        assert conformance.sequence_p_value(tokens[0], law) > 1e-3
        expected = expected or _greedy_chain(p_table, 0, 6)
        assert (tokens[1] == expected).all()
        compiled = compiled or compilations()
    assert compilations() == compiled


@pytest.mark.laws
@pytest.mark.parametrize(("policy", "threshold"), [(AcceptanceHead(5), 0.5), (Erratic(), 0.0)])
def test_no_policy_changes_a_rule_s_law(policy, threshold):
    tokens, law, _ = _tokens("opt", policy, threshold)
    assert conformance.sequence_p_value(tokens[0], law) > 1e-3


def _greedy_chain(table, start, length):
    tokens = []
    for _ in range(length):
        start = int(np.argmax(table[start]))
        tokens.append(start)
    return tokens


def test_blocks_of_length_zero_leave_every_token_to_the_target():
    engine, params, _, p_table = _adaptive(Confidence(5), 33, vocab_size=12)
    prompt = Prompt(jnp.arange(4, dtype=jnp.int32)[:, None], jnp.ones((4,), jnp.int32))
    out = generate(engine, params, prompt, controls=make_controls(4, stop_threshold=-1.0), max_new_tokens=11)
    assert np.asarray(out.stats.drafted).sum() == 0
    assert np.asarray(out.stats.target_calls).tolist() == [11] * 4


def test_specdecpp_needs_a_head_of_the_pair_s_own_draft():
    pair = conformance.tabular_pair(*conformance.tables(5, seed=34))
    with pytest.raises(ValueError, match="the pair 'custom' has no acceptance head"):
        sc.decode(pair, [[0]], method="specdecpp", stop_threshold=0.5)
    other = head_for(conformance.tabular_pair(*conformance.tables(5, seed=35)), depth=0)
    with pytest.raises(ValueError, match="the acceptance head belongs to the draft"):
        assemble(pair, method="specdecpp", head=other)


def test_the_table_names_the_policies():
    assert list(STOPS) == [
        "fixed", "confidence", "cumulative_confidence", "entropy", "acceptance_head",
        "acceptance_head_lag0", "oracle"
    ]  # fmt: skip
