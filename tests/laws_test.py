"""The law, by sampling: every rule's output is distributed as `π`, and planted bugs are found (METHODS section 2)."""

import pytest

from speccascade_jax.methods.build import assemble
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES
from tests.support import conformance, mixed_rules, mutants, reference

many_rows = pytest.mark.usefixtures("optimised")  # running costs more there than compiling

ALL = conformance.REPRESENTATIVE
SAMPLED = [rule for rule in ALL.values() if not rule.greedy_only]


# `opt`: a deferral rule that decides for a whole position is traced as such when it is alone
QUICK = ("spec_decode",)
OTHERS = ["opt", *(rule.name for rule in SAMPLED if rule.deferral is None and rule.name not in QUICK)]


@many_rows
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.laws) for name in OTHERS)])
def test_whole_sequences(name):
    conformance.check_sequence_law(ALL[name], 3)


@many_rows
@pytest.mark.laws
def test_whole_sequences_of_deferral_rules():
    mixed_rules.check_sequence_laws([rule for rule in SAMPLED if rule.deferral is not None], 3, rows=7_000)


@pytest.mark.laws
def test_one_percent_less_chance_to_keep_is_found(monkeypatch):
    """What whole sequences lose in their cells, and an identity that needs no sampling does not see in the engine."""
    kept_at = Speculative.kept_at
    monkeypatch.setattr(Speculative, "kept_at", lambda *given: 0.99 * kept_at(*given))
    with pytest.raises(AssertionError, match="all transitions: p = .*e-"):
        conformance.check_sequence_law(ALL["lossy_tuned"], 3, length=8)  # a program of its own


@pytest.mark.laws
@pytest.mark.parametrize("name", ["token_v3"])
def test_whole_sequences_in_blocks_of_one(name):
    conformance.check_sequence_law(ALL[name], 1)


@many_rows
@pytest.mark.laws
@pytest.mark.parametrize("name", ["spec_decode", "token_v3"])
def test_transitions_at_every_position(name):
    conformance.check_transition_law(ALL[name])


@pytest.mark.laws
@pytest.mark.parametrize("name", ["token_v3", "lossy"])
def test_without_bonus(name):
    conformance.check_sequence_law(ALL[name], 2, bonus="none", seed=4)


@pytest.mark.laws
@pytest.mark.parametrize("name", ["token_v3", "bild_star"])
def test_deferral_acceptance_has_the_same_law(name):
    conformance.check_sequence_law(ALL[name], 2, accept="deferral", seed=5)


@pytest.mark.laws
def test_greedy_draft_under_a_sampled_target():
    """Fuzzy decoding's setting: what a greedy draft was drawn from is a one-hot, and the law is exact."""
    q_table, p_table = conformance.tables(3, seed=7)
    for name in ("spec_decode", "token_v3", "bild_star"):
        rule = RULES[name]
        alpha = conformance.telling_alpha(rule, q_table, p_table)
        engine, params = assemble(conformance.tabular_pair(q_table, p_table), rule=rule, block_size=3)
        tokens = conformance.run_rows(engine, params, 10_000, alpha, [(1.0, 1.0)], length=6, draft_temperature=0.0)
        law = reference.transitions(name, q_table, p_table, alpha, 1.0, draft_temperature=0.0)
        assert conformance.sequence_p_value(tokens[0], law) > 1e-3, name


@pytest.mark.laws
@pytest.mark.parametrize("name", list(mutants.MUTANTS))
def test_mutants_are_found(name):
    """Negative controls: each planted bug gives p < 1e-6, and the same run without it does not."""
    trial = mutants.MUTANTS[name]
    assert trial(mutated=False) > 1e-3
    assert trial(mutated=True) < 1e-6
