"""The hierarchy with the least expected latency, over all subsets of the models and all budgets.

By the paper's latency the best way for model `i` to hold `T` tokens does not depend on what is above it, so dynamic
programming over (model, budget) is exact. The paper's graph (section 3.3) is this recursion drawn: without the loops at
its sinks it has no cycle. Its `ℓ ≤ j`, a budget no smaller than the one below, is not imposed: it never binds with the
exact γ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from speccascade_jax.core.checks import whole
from speccascade_jax.hierarchy import rounds, search
from speccascade_jax.hierarchy.latency import Hierarchy, check_objective, checked, latency

Chain = tuple[tuple[int, ...], tuple[int, ...]]


def solve(costs: Sequence[float], acceptance: Any, max_budget: int = 15, objective: str = "paper") -> Hierarchy:
    """The best hierarchy of the given models, the target alone among the candidates.

    `objective="paper"` is exact. With `"overshoot"` the best block for (model, budget) depends on what is above,
    because its length is random; `search` says how candidates are kept, and the paper's optimum is one of them.

    Args:
        costs: `[N]`, of one call each, ordered from the cheapest model to the target.
        acceptance: `[N, N]` in the same order, as of `latency`.
        max_budget: T̄, the largest budget, at least 1.

    Returns:
        The hierarchy; its latency is in the unit of the costs.

    Raises:
        ValueError: costs, acceptance, budget or objective can't be meant.
    """
    check_objective(objective)
    max_budget = whole("max_budget", max_budget, 1)
    found, matrix = checked(costs, acceptance)
    chain = _paper_optimum(found, matrix, max_budget)
    if objective == "overshoot":
        chain = search.best(found, matrix, max_budget, chain)
    best = latency(found, matrix, *chain, objective)
    return Hierarchy(*chain, latency=best, speedup=float(found[-1]) / best, objective=objective)


def _paper_optimum(costs: np.ndarray, acceptance: np.ndarray, most: int) -> Chain:
    """Dynamic programming over (model, budget), from the cheapest model up."""
    count = len(costs)
    below = np.triu_indices(count - 1, 1)
    calls = np.ones((count, count, most, most))
    calls[below] = rounds.expected_rounds(acceptance[below], most)
    least, origin = np.empty((count - 1, most)), np.full((count - 1, most), -1)
    for i in range(count - 1):
        least[i] = np.arange(1, most + 1) * costs[i]
        if i:  # [k, l, T]: through model k with a budget of l + 1
            through = (calls[:i, i] * (costs[i] + least[:i])[..., None]).reshape(i * most, most)
            by = through.argmin(0)
            cheapest = through[by, np.arange(most)]
            origin[i] = np.where(cheapest < least[i], by, -1)
            least[i] = np.minimum(cheapest, least[i])
    total = rounds.calls_per_token(acceptance[:-1, -1], most) * (costs[-1] + least)
    if not total.size or total.min() >= costs[-1]:
        return (count - 1,), ()
    return _walk(origin, int(total.argmin()), count, most)


def _walk(origin: np.ndarray, at: int, count: int, most: int) -> Chain:
    """From the level below the target, flat index `at`, down to the lowest draft."""
    models, budgets = [count - 1], list[int]()
    while at >= 0:
        i, budget = divmod(at, most)
        models, budgets = [i, *models], [budget + 1, *budgets]
        at = int(origin[i, budget])
    return tuple(models), tuple(budgets)
