"""Tests of predicted latencies against their definitions and a simulation of Algorithm 1."""

import numpy as np
import pytest

from speccascade_jax import hierarchy
from speccascade_jax.hierarchy import rounds
from tests.hierarchy import brute_force
from tests.hierarchy.solve_test import COSTS_6, TABLE_6, instance, matrix


def test_expected_rounds_match_the_definition():
    alphas = [0.0, 0.3, 0.85, 1.0]
    gamma = rounds.expected_rounds(np.array(alphas), 7)
    for a, alpha in enumerate(alphas):
        for t in range(1, 8):
            expected = [brute_force.expected_rounds(alpha, t, needed) for needed in range(1, 8)]
            np.testing.assert_allclose(gamma[a, t - 1], expected, rtol=1e-13)
    for needed in range(2, 8):  # blocks beyond the budget need as many rounds as a block that just reaches it
        just, beyond = gamma[:, [needed - 2], needed - 1], gamma[:, needed - 1 :, needed - 1]
        np.testing.assert_allclose(beyond, just + np.zeros(8 - needed))


def test_distributions_sum_to_one_and_give_the_enumerated_lengths():
    yielded = rounds.yields(np.array([0, 0.2, 0.5, 0.3]), np.float64(0.6))
    expected = brute_force.one_round({1: 0.2, 2: 0.5, 3: 0.3}, 0.6)
    np.testing.assert_allclose(yielded, [expected.get(n, 0.0) for n in range(5)])
    calls, lengths = brute_force.until(expected, 6)
    visited = rounds.visits(yielded, 6)
    up = rounds.handed_up(yielded, visited, 6)
    assert visited.sum() == pytest.approx(calls)
    np.testing.assert_allclose(up, [lengths.get(n, 0.0) for n in range(len(up))])
    assert up.sum() == pytest.approx(1.0)


def test_both_latencies_are_equal_for_one_draft():
    """Checks equal latencies: with one draft, no level below the target overshoots."""
    for objective in ("paper", "overshoot"):
        value = hierarchy.latency([1.0, 5.0], [[1, 0.8], [0, 1]], (0, 1), (3,), objective)
        assert value == pytest.approx(8.0 * 0.2 / (1 - 0.8**4))


@pytest.mark.laws
def test_the_overshoot_latency_matches_simulation_and_the_papers_is_larger():
    """Checks that the overshoot latency is within 0.5% of the simulated one.

    The paper's formula assumes levels that end exactly at their budgets; its error is several times as large.
    """
    rng = np.random.default_rng(3)
    cases = [(list(COSTS_6[2:]), matrix(TABLE_6)[2:, 2:].tolist(), (0, 1, 2, 3), (6, 7, 8))]
    for _ in range(5):
        costs, acceptance = instance(rng, 4)
        cases.append((costs, acceptance, (0, 1, 2, 3), tuple(rng.integers(1, 9, 3).tolist())))
    errors = {"paper": [], "overshoot": []}
    for seed, (costs, acceptance, models, budgets) in enumerate(cases):
        measured = brute_force.simulated(costs, acceptance, models, budgets, 400_000, seed)
        for objective, relative_errors in errors.items():
            predicted = hierarchy.latency(costs, acceptance, models, budgets, objective)
            relative_errors.append(predicted / measured - 1)
    assert np.max(np.abs(errors["overshoot"])) < 0.005
    assert np.min(errors["paper"]) > 0.005


@pytest.mark.parametrize(
    ("models", "budgets", "message"),
    [
        ((0, 2), (3,), "indices below 2"),
        ((1, 0), (3,), "increasing"),
        ((0, 1), (), "2 models need 1 budgets"),
        ((0, 1), (0,), "a budget=0 is not a whole number >= 1"),
        ((0, 1), (2.9,), "a budget=2.9 is not a whole number"),
        ((0.5, 1), (2,), "an index of models=0.5 is not a whole number"),
        ((-1, 1), (2,), "an index of models=-1 is not a whole number >= 0"),
        ((), (), "increasing"),
    ],
)
def test_an_invalid_chain_of_models_is_refused(models, budgets, message):
    with pytest.raises(ValueError, match=message):
        hierarchy.latency([1.0, 2.0], [[1, 0.5], [0, 1]], models, budgets)
