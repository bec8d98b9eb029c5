"""The optimiser against the paper's tables, enumeration and a linear programme."""

import numpy as np
import pytest

from speccascade_jax import hierarchy
from tests.hierarchy import brute_force, linear_programme

TABLE_6 = [
    [0.75, 0.5, 0.25, 0.0, 0.0],
    [0, 0.75, 0.5, 0.25, 0.05],
    [0, 0, 0.75, 0.5, 0.3],
    [0, 0, 0, 0.75, 0.55],
    [0, 0, 0, 0, 0.8],
]
TABLE_7 = [
    [0.525, 0.125, 0.0, 0.0, 0.0],
    [0, 0.6, 0.275, 0.025, 0.0],
    [0, 0, 0.675, 0.425, 0.225],
    [0, 0, 0, 0.75, 0.55],
    [0, 0, 0, 0, 0.8],
]
COSTS_6, COSTS_7 = (0.00001, 0.003, 0.01, 0.25, 4, 33), (0.00005, 0.0002, 0.05, 2.0, 8.0, 33.0)


def matrix(rows):
    found = np.zeros((6, 6))
    found[:5, 1:] = rows
    return found


def instance(rng, count):
    """Costs in order and acceptance as laws of a few tokens have it, so that the triangle inequality holds."""
    costs = np.sort(rng.lognormal(0, 1.5, count))
    laws = rng.dirichlet(np.full(6, 0.5), count)
    near = np.linspace(0, 1, count)[:, None]
    laws = near * laws[-1] + (1 - near) * laws
    return costs.tolist(), (1 - 0.5 * np.abs(laws[:, None] - laws[None]).sum(-1)).tolist()


@pytest.mark.parametrize(
    ("costs", "rows", "latency", "speedup"), [(COSTS_6, TABLE_6, 14.37, 2.2971), (COSTS_7, TABLE_7, 19.31, 1.709)]
)
def test_two_models_are_the_papers_tables_to_the_last_digit(costs, rows, latency, speedup):
    found = hierarchy.solve(costs[4:], matrix(rows)[4:, 4:])
    assert (round(found.latency, 2), found.models) == (latency, (0, 1))
    assert found.speedup == pytest.approx(speedup, abs=6e-5)


@pytest.mark.parametrize(("costs", "rows"), [(COSTS_6, TABLE_6), (COSTS_7, TABLE_7)])
@pytest.mark.parametrize("objective", ["paper", "overshoot"])
def test_more_models_are_never_worse(costs, rows, objective):
    found = [
        hierarchy.solve(costs[6 - n :], matrix(rows)[6 - n :, 6 - n :], objective=objective).latency
        for n in range(1, 7)
    ]
    assert found[0] == 33.0 and found == sorted(found, reverse=True)


def test_enumeration_agrees():
    rng = np.random.default_rng(0)
    for _ in range(200):
        costs, acceptance = instance(rng, int(rng.integers(1, 6)))
        most = int(rng.integers(1, 7))
        found = hierarchy.solve(costs, acceptance, max_budget=most)
        best = min(brute_force.paper(costs, acceptance, most))
        assert found.latency == pytest.approx(best[0], rel=1e-12)
        assert hierarchy.latency(costs, acceptance, found.models, found.budgets) == found.latency
        assert found.speedup == costs[-1] / found.latency


def test_the_linear_programme_agrees():
    rng = np.random.default_rng(1)
    for _ in range(50):
        costs, acceptance = instance(rng, int(rng.integers(1, 6)))
        most = int(rng.integers(1, 7))
        expected = linear_programme.least_latency(costs, acceptance, most)
        assert hierarchy.solve(costs, acceptance, most).latency == pytest.approx(expected, rel=1e-7)


def test_the_other_objective_agrees_with_enumeration_and_has_another_optimum():
    rng, lost = np.random.default_rng(2), []
    for _ in range(20):
        costs, acceptance = instance(rng, 5)
        found = hierarchy.solve(costs, acceptance, max_budget=4, objective="overshoot")
        assert found.latency == pytest.approx(min(brute_force.overshoot(costs, acceptance, 4))[0], rel=1e-12)
        paper = hierarchy.solve(costs, acceptance, max_budget=4)
        lost.append(hierarchy.latency(costs, acceptance, paper.models, paper.budgets, "overshoot") / found.latency)
    assert min(lost) >= 1 and max(lost) > 1.001


def test_a_draft_that_never_pays_is_left_out():
    found = hierarchy.solve([1.0, 1.0], [[1, 0.3], [0, 1]])
    assert (found.models, found.budgets, found.latency, found.speedup) == ((1,), (), 1.0, 1.0)


@pytest.mark.parametrize("objective", ["paper", "overshoot"])
def test_a_perfect_draft_holds_all_that_it_may(objective):
    found = hierarchy.solve([0.1, 1.0], [[1, 1], [0, 1]], max_budget=9, objective=objective)
    assert (found.budgets, found.latency) == ((9,), pytest.approx(1.9 / 10))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"costs": [1.0, -2.0]}, "costs must be positive numbers"),
        ({"costs": []}, "costs must be positive numbers"),
        ({"acceptance": [[1.0]]}, r"has the shape \(1, 1\); 2 costs need \(2, 2\)"),
        ({"acceptance": [[1, 1.2], [0, 1]]}, r"acceptance\[0, 1\] is 1.2: a probability"),
        ({"acceptance": [[1, np.nan], [0, 1]]}, r"acceptance\[0, 1\] is nan: a probability"),
        ({"acceptance": [[-3, 0.5], [0, 1]]}, r"acceptance\[0, 0\] is -3.0: a probability"),
        ({"acceptance": [[1, 0.5], [7, 1]]}, r"acceptance\[1, 0\] is 7.0: a probability"),
        (
            {"acceptance": [[1, 0], [0.5, 1]]},
            r"acceptance\[1, 0\] is 0.5 and acceptance\[0, 1\] 0.0: how often 1 keeps",
        ),
        ({"acceptance": [[1, 0.5], [0.4, 1]]}, r"acceptance\[1, 0\] is 0.4 and acceptance\[0, 1\] 0.5"),
        ({"costs": [2.0, 1.0]}, r"costs\[1\] is 1, below costs\[0\], 2: order the models by cost, the target last"),
        ({"max_budget": 2.5}, "max_budget=2.5 is not a whole number"),
        ({"max_budget": 0}, "max_budget"),
        ({"objective": "papers"}, "no objective 'papers': did you mean paper"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes, message):
    given = {"costs": [1.0, 2.0], "acceptance": [[1, 0.5], [0, 1]]} | changes
    with pytest.raises(ValueError, match=message):
        hierarchy.solve(**given)


def test_what_rounding_leaves_is_taken():
    """A symmetric matrix in float32, an entry a rounding above 1, a budget that is a float."""
    rounded = np.array([[1, 1.0000001, 0.3], [1, 1, 0.3], [0.3000001, 0.3, 1]], np.float32)
    exact = [[1, 1, 0.3], [1, 1, 0.3], [0.3, 0.3, 1]]
    found = hierarchy.solve([1.0, 1.5, 9.0], rounded, 15.0)
    wanted = hierarchy.solve([1.0, 1.5, 9.0], exact, 15)
    assert (found.models, found.budgets) == (wanted.models, wanted.budgets)
    assert found.latency == pytest.approx(wanted.latency, rel=1e-6)
