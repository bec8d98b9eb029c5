"""The paper's own way to the least latency: a generalised flow on the graph of its section 3.3, as a linear programme.

Slower than `solve` by orders of magnitude, and independent of it: this is its check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from speccascade_jax.core.checks import whole
from speccascade_jax.hierarchy import rounds
from speccascade_jax.hierarchy.latency import checked

Edge = tuple[int, int, float, float]
"""From vertex, to vertex, flow multiplier, cost."""


def least_latency(costs: Sequence[float], acceptance: Any, max_budget: int = 15) -> float:
    """The least expected latency per token by Corollary 3.1, the target alone included (HiGHS).

    Arguments and errors are those of `solve`. The edges' `ℓ ≤ j` is not imposed.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    max_budget = whole("max_budget", max_budget, 1)
    values, matrix = checked(costs, acceptance)
    edges, vertices = _graph(values, matrix, max_budget)
    start, end, multiplier, cost = map(np.array, zip(*edges, strict=True))
    numbers = np.arange(len(edges))
    rows, columns = np.concatenate([start, end]), np.concatenate([numbers, numbers])
    flow = csr_matrix((np.concatenate([np.ones(len(edges)), -multiplier]), (rows, columns)), (vertices, len(edges)))
    found = linprog(cost, A_eq=flow, b_eq=np.eye(vertices)[0], method="highs")
    if not found.success:
        raise RuntimeError(f"the linear programme was not solved: {found.message}")
    return float(found.fun)


def _graph(costs: np.ndarray, acceptance: np.ndarray, most: int) -> tuple[list[Edge], int]:
    """Table 2 of the paper: vertex 0 is the target, then (model, budget), then the sinks, one for each model.

    A sink of the target's own stands for decoding without a draft, which the paper leaves out.
    """
    target = len(costs) - 1
    per_token = rounds.calls_per_token(acceptance[:-1, -1], most)
    calls = rounds.expected_rounds(acceptance, most)

    def at(model: int, budget: int) -> int:
        return 1 + model * most + budget - 1

    edges: list[Edge] = []
    budgets = range(1, most + 1)
    for i in range(target):
        for j in budgets:
            share = float(per_token[i, j - 1])
            edges += [(0, at(i, j), share, share * costs[-1]), (at(i, j), _sink(i, target, most), 1.0, j * costs[i])]
            for k in range(i):
                again = [(at(k, below), float(calls[k, i, below - 1, j - 1])) for below in budgets]
                edges += [(at(i, j), vertex, times, times * costs[i]) for vertex, times in again]
    edges.append((0, _sink(target, target, most), 1.0, costs[-1]))
    edges += [(_sink(i, target, most), _sink(i, target, most), 0.5, 0.0) for i in range(target + 1)]
    return edges, 1 + target * most + target + 1


def _sink(model: int, target: int, most: int) -> int:
    return 1 + target * most + model
