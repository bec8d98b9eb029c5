"""Tests of the optimiser against the paper's tables, enumeration and a linear programme."""

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from speccascade_jax import hierarchy
from speccascade_jax.hierarchy import rounds
from speccascade_jax.hierarchy.solve import BLOCKS, Blocks, _keep
from tests.hierarchy import brute_force

LAST = [0, 0, 0, 0.75, 0.55], [0, 0, 0, 0, 0.8]
TABLE_6 = [[0.75, 0.5, 0.25, 0.0, 0.0], [0, 0.75, 0.5, 0.25, 0.05], [0, 0, 0.75, 0.5, 0.3], *LAST]
TABLE_7 = [[0.525, 0.125, 0.0, 0.0, 0.0], [0, 0.6, 0.275, 0.025, 0.0], [0, 0, 0.675, 0.425, 0.225], *LAST]
COSTS_6, COSTS_7 = (0.00001, 0.003, 0.01, 0.25, 4, 33), (0.00005, 0.0002, 0.05, 2.0, 8.0, 33.0)


def matrix(rows):
    full = np.zeros((6, 6))
    full[:5, 1:] = rows
    return full


def instance(rng, count):
    """Returns increasing costs, and the acceptance between random distributions over a few tokens.

    The triangle inequality holds for these.
    """
    costs = np.sort(rng.lognormal(0, 1.5, count))
    laws = rng.dirichlet(np.full(6, 0.5), count)
    near = np.linspace(0, 1, count)[:, None]
    laws = near * laws[-1] + (1 - near) * laws
    return costs.tolist(), (1 - 0.5 * np.abs(laws[:, None] - laws[None]).sum(-1)).tolist()


@pytest.mark.parametrize(
    ("costs", "rows", "latency", "speedup"), [(COSTS_6, TABLE_6, 14.37, 2.2971), (COSTS_7, TABLE_7, 19.31, 1.709)]
)
def test_two_models_match_the_papers_tables_to_the_last_digit(costs, rows, latency, speedup):
    best = hierarchy.solve(costs[4:], matrix(rows)[4:, 4:])
    assert (round(best.latency, 2), best.models) == (latency, (0, 1))
    assert best.speedup == pytest.approx(speedup, abs=6e-5)


@pytest.mark.parametrize(("costs", "rows"), [(COSTS_6, TABLE_6), (COSTS_7, TABLE_7)])
@pytest.mark.parametrize("objective", ["paper", "overshoot"])
def test_more_candidate_models_never_give_a_slower_optimum(costs, rows, objective):
    acceptance = matrix(rows)
    stacks = [hierarchy.solve(costs[n:], acceptance[n:, n:], objective=objective) for n in range(5, -1, -1)]
    latencies = [stack.latency for stack in stacks]
    assert latencies[0] == 33.0 and latencies == sorted(latencies, reverse=True)


def test_the_solution_agrees_with_enumeration():
    rng = np.random.default_rng(0)
    for _ in range(200):
        costs, acceptance = instance(rng, int(rng.integers(1, 6)))
        most = int(rng.integers(1, 7))
        solution = hierarchy.solve(costs, acceptance, max_budget=most)
        best = min(brute_force.paper(costs, acceptance, most))
        assert solution.latency == pytest.approx(best[0], rel=1e-12)
        assert hierarchy.latency(costs, acceptance, solution.models, solution.budgets) == solution.latency
        assert solution.speedup == costs[-1] / solution.latency


def least_latency(costs, acceptance, most):
    """Returns the smallest expected latency per token by Corollary 3.1, the target alone included (HiGHS).

    This is the paper's own method, a generalised flow on the graph of its section 3.3: slower than `hierarchy.solve` by
    orders of magnitude, and independent of it. The edges' constraint `ℓ ≤ j` is left out.
    """
    edges, vertices = graph(np.asarray(costs), np.asarray(acceptance), most)
    start, end, multiplier, cost = map(np.array, zip(*edges, strict=True))
    numbers = np.arange(len(edges))
    rows, columns = np.concatenate([start, end]), np.concatenate([numbers, numbers])
    flow = csr_matrix((np.concatenate([np.ones(len(edges)), -multiplier]), (rows, columns)), (vertices, len(edges)))
    optimum = linprog(cost, A_eq=flow, b_eq=np.eye(vertices)[0], method="highs")
    assert optimum.success, optimum.message
    return optimum.fun


def graph(costs, acceptance, most):
    """Returns the edges of the paper's graph (Table 2) and its number of vertices.

    Vertex 0 is the target, then (model, budget), then the sinks, one for each model. An edge is its two vertices, the
    flow's multiplier and the cost. The target has its own sink for decoding without a draft, which the paper leaves
    out.
    """
    target, budgets = len(costs) - 1, range(1, most + 1)
    per_token = rounds.calls_per_token(acceptance[:-1, -1], most)
    calls = rounds.expected_rounds(acceptance, most)

    def vertex(model, budget):
        return 1 + model * most + budget - 1

    def sink(model):
        return 1 + target * most + model

    edges = [(0, sink(target), 1.0, costs[-1])]
    for i in range(target):
        for j in budgets:
            share = per_token[i, j - 1]
            edges += [(0, vertex(i, j), share, share * costs[-1]), (vertex(i, j), sink(i), 1.0, j * costs[i])]
            for k in range(i):
                times = calls[k, i, :, j - 1]
                edges += [(vertex(i, j), vertex(k, b), times[b - 1], times[b - 1] * costs[i]) for b in budgets]
    edges += [(sink(i), sink(i), 0.5, 0.0) for i in range(target + 1)]
    return edges, 1 + target * most + target + 1


def test_the_solution_agrees_with_the_linear_programme():
    rng = np.random.default_rng(1)
    for _ in range(50):
        costs, acceptance = instance(rng, int(rng.integers(1, 6)))
        most = int(rng.integers(1, 7))
        expected = least_latency(costs, acceptance, most)
        assert hierarchy.solve(costs, acceptance, most).latency == pytest.approx(expected, rel=1e-7)


def test_the_other_objective_agrees_with_enumeration_and_has_another_optimum():
    rng, lost = np.random.default_rng(2), []
    for _ in range(20):
        costs, acceptance = instance(rng, 5)
        solution = hierarchy.solve(costs, acceptance, max_budget=4, objective="overshoot")
        assert solution.latency == pytest.approx(min(brute_force.overshoot(costs, acceptance, 4))[0], rel=1e-12)
        paper = hierarchy.solve(costs, acceptance, max_budget=4)
        lost.append(hierarchy.latency(costs, acceptance, paper.models, paper.budgets, "overshoot") / solution.latency)
    assert min(lost) >= 1 and max(lost) > 1.001


def test_the_search_finds_the_enumerated_optimum_for_arbitrary_matrices():
    """Acceptance without the triangle inequality makes the search harder: once, (4, 1, 1) hid the first one's optimum.

    A search of fewer levels misses two of the random ones.
    """
    first = [0.028, 0.05, 0.067, 1], [[0, 1, 0.5, 0.5], [0, 0, 1, 0.5], [0, 0, 0, 1], [0, 0, 0, 0]]
    best = hierarchy.solve(*first, max_budget=4, objective="overshoot")
    assert (best.budgets, best.latency) == ((2, 4, 1), pytest.approx(0.159875, abs=5e-7))
    rng = np.random.default_rng(5)
    for _ in range(40):
        costs = np.sort(rng.lognormal(0, 1.5, 5)).tolist()
        acceptance = np.triu(rng.choice([0, 0.25, 0.5, 0.75, 1.0], size=(5, 5)), 1).tolist()
        solution = hierarchy.solve(costs, acceptance, max_budget=3, objective="overshoot")
        assert solution.latency == pytest.approx(min(brute_force.overshoot(costs, acceptance, 3))[0], rel=1e-12)


@pytest.mark.sample(1)
@pytest.mark.laws
@pytest.mark.parametrize(("blocks", "missed", "worst"), [(BLOCKS, 0, 1.0), (1, 5, 1.122)])
def test_the_search_misses_as_few_optima_as_documented(blocks, missed, worst, monkeypatch):
    """Enumerates 1,000 instances; with one block each, the search is as thin as that of tens of models."""
    monkeypatch.setitem(_keep.__globals__, "BLOCKS", blocks)
    rng, ratios = np.random.default_rng(6), []
    for n in range(1000):
        costs = np.sort(rng.lognormal(0, 1.5, 5)).tolist()
        rates = [0, 0.25, 0.5, 0.75, 1.0] if n % 2 else rng.random(25).tolist()
        acceptance = np.triu(rng.choice(rates, size=(5, 5)), 1).tolist()
        least = min(brute_force.overshoot(costs, acceptance, 4))[0]
        ratios.append(hierarchy.solve(costs, acceptance, max_budget=4, objective="overshoot").latency / least)
    assert sum(ratio > 1 + 1e-9 for ratio in ratios) == missed
    assert max(ratios) == pytest.approx(worst, abs=1e-3)


def test_the_search_keeps_the_best_of_many_blocks_for_every_level_above():
    """Covers four levels above, from one that keeps nearly all of a long block to one that keeps hardly any."""
    costs, acceptance = np.array([0.1, 1.0, 1.0, 1.0, 1.0]), np.zeros((5, 5))
    acceptance[0, 1:] = kept = 0.95, 0.8, 0.5, 0.1
    lengths = np.arange(1, 20)
    blocks = Blocks(0.1 * lengths, np.eye(20)[1:], [((0,), (t,)) for t in lengths.tolist()])
    best = {int(lengths[((1 + 0.1 * lengths) / ((1 - a ** (lengths + 1)) / (1 - a))).argmin()]) for a in kept}
    chains = _keep(0, costs, acceptance, 100, [blocks]).chains  # budgets to 100: one block for each level above
    assert len(best) == 4 and {budgets[0] for _, budgets in chains} == best


def test_a_draft_that_never_pays_is_left_out():
    best = hierarchy.solve([1.0, 1.0], [[1, 0.3], [0, 1]])
    assert (best.models, best.budgets, best.latency, best.speedup) == ((1,), (), 1.0, 1.0)


@pytest.mark.parametrize("objective", ["paper", "overshoot"])
def test_a_perfect_draft_gets_the_largest_budget(objective):
    best = hierarchy.solve([0.1, 1.0], [[1, 1], [0, 1]], max_budget=9, objective=objective)
    assert (best.budgets, best.latency) == ((9,), pytest.approx(1.9 / 10))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"costs": [1.0, -2.0]}, "costs must be positive numbers"),
        ({"costs": []}, "costs must be positive numbers"),
        ({"acceptance": [[1.0]]}, r"has the shape \(1, 1\); 2 costs need \(2, 2\)"),
        ({"acceptance": [[1, 1.2], [0, 1]]}, r"acceptance\[0, 1\] is 1.2, which is not a probability"),
        ({"acceptance": [[1, np.nan], [0, 1]]}, r"acceptance\[0, 1\] is nan, which is not a probability"),
        ({"acceptance": [[-3, 0.5], [0, 1]]}, r"acceptance\[0, 0\] is -3.0, which is not a probability"),
        ({"acceptance": [[1, 0.5], [7, 1]]}, r"acceptance\[1, 0\] is 7.0, which is not a probability"),
        ({"acceptance": [[1, 0], [0.5, 1]]}, r"acceptance\[1, 0\] is 0.5, but acceptance\[0, 1\] is 0.0: below the"),
        ({"acceptance": [[1, 0.5], [0.4, 1]]}, r"acceptance\[1, 0\] is 0.4, but acceptance\[0, 1\] is 0.5"),
        ({"costs": [2.0, 1.0]}, r"costs\[1\] is 1, below costs\[0\], 2: order the models by cost, the target last"),
        ({"max_budget": 2.5}, "max_budget=2.5 is not a whole number"),
        ({"max_budget": 0}, "max_budget"),
        ({"objective": "papers"}, "no objective 'papers': did you mean paper"),
    ],
)
def test_invalid_values_are_refused(changes, message):
    arguments = {"costs": [1.0, 2.0], "acceptance": [[1, 0.5], [0, 1]]} | changes
    with pytest.raises(ValueError, match=message):
        hierarchy.solve(**arguments)


def test_rounding_errors_are_accepted():
    """Covers a symmetric float32 matrix, an entry just above 1 by rounding, and a float budget."""
    rounded = np.array([[1, 1.0000001, 0.3], [1, 1, 0.3], [0.3000001, 0.3, 1]], np.float32)
    exact = [[1, 1, 0.3], [1, 1, 0.3], [0.3, 0.3, 1]]
    best = hierarchy.solve([1.0, 1.5, 9.0], rounded, 15.0)
    wanted = hierarchy.solve([1.0, 1.5, 9.0], exact, 15)
    assert (best.models, best.budgets) == (wanted.models, wanted.budgets)
    assert best.latency == pytest.approx(wanted.latency, rel=1e-6)
