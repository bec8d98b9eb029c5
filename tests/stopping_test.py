"""Stop policies: what they decide, and that none of them can change the law."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.api import assemble, make_controls
from speccascade_jax.generation import generate
from speccascade_jax.models.base import Prompt
from speccascade_jax.rules import RULES
from speccascade_jax.stopping import STOP_POLICIES, Confidence, Decision, DraftStep, Entropy, Fixed
from tests import conformance, reference


def ask(policy, laws, slot, threshold=0.0):
    """The policy's decision on rows of `laws`."""
    controls = make_controls(len(laws), stop_threshold=threshold)
    step = DraftStep(q=jnp.asarray(laws, jnp.float32), hidden=None, slot=jnp.int32(slot))
    decision, _ = policy(None, policy.init(len(laws)), step, controls)
    return np.asarray(decision.draw).tolist(), np.asarray(decision.proceed).tolist()


def test_fixed_ends_after_the_last_token():
    assert ask(Fixed(2), [[0.5, 0.5]], 0) == ([True], [True])
    assert ask(Fixed(2), [[0.5, 0.5]], 1) == ([True], [False])


def test_confidence_ends_before_the_unsure_token():
    laws = [[0.75, 0.25], [0.5, 0.5]]
    assert ask(Confidence(3), laws, 0, threshold=0.25) == ([True, False], [True, False])
    assert ask(Confidence(3), laws, 2, threshold=0.25) == ([True, False], [False, False])
    # one threshold per row
    assert ask(Confidence(3), laws, 0, threshold=np.array([0.2, 0.5])) == ([False, True], [False, True])


def test_entropy_ends_before_the_unsure_token():
    laws = [[0.75, 0.25, 0.0], [1 / 3, 1 / 3, 1 / 3]]
    assert ask(Entropy(3), laws, 0, threshold=0.6) == ([True, False], [True, False])
    assert ask(Entropy(3), laws, 2, threshold=1.2) == ([True, True], [False, False])


@dataclass(frozen=True)
class Erratic:
    """Stops by the parity of everything it has seen so far: adaptive, with memory across rounds."""

    block: int = 4

    def init(self, batch_size):
        return jnp.zeros((batch_size,), jnp.int32)

    def __call__(self, params, state, step, controls):
        state = state + (step.q[:, 0] > step.q[:, 1]) + 1
        draw = state % 3 != 0
        return Decision(draw=draw, proceed=draw & (state % 5 != 1) & (step.slot + 1 < self.block)), state


@pytest.mark.parametrize("rule", ["spec_decode", "opt"])
@pytest.mark.parametrize("policy", [Confidence(4), Erratic()])
def test_no_policy_changes_the_law(rule, policy):
    q_table, p_table = conformance.tables(3, seed=31)
    alpha = conformance.telling_alpha(RULES[rule], q_table, p_table)
    engine, params = assemble(conformance.tabular_pair(q_table, p_table), rule=rule, stop_policy=policy)
    tokens = conformance.run_rows(engine, params, 30_000, alpha, [(1.0, 1.0)], length=6, stop_threshold=0.4)
    law = reference.transitions(rule, q_table, p_table, alpha, 1.0)
    assert conformance.sequence_p_value(tokens[0], law) > 1e-3


def test_blocks_of_length_zero_leave_every_token_to_the_target():
    q_table, p_table = conformance.tables(5, seed=32)
    engine, params = assemble(conformance.tabular_pair(q_table, p_table), stop_policy=Confidence(4))
    prompt = Prompt(jnp.zeros((3, 1), jnp.int32), jnp.ones((3,), jnp.int32))
    out = generate(engine, params, prompt, controls=make_controls(3, stop_threshold=-1.0), max_new_tokens=7)
    assert np.asarray(out.stats.drafted).sum() == 0
    assert np.asarray(out.stats.target_calls).tolist() == [7, 7, 7]
    expected, last = [], 0
    for _ in range(7):
        last = int(np.argmax(p_table[last]))
        expected.append(last)
    assert np.asarray(out.tokens).tolist() == [expected] * 3


def test_the_table_names_the_policies():
    assert {"fixed": Fixed, "confidence": Confidence, "entropy": Entropy} == STOP_POLICIES
