"""The least latency by the paper's own way: a generalised flow on the graph of its section 3.3, as a linear programme.

Slower than `hierarchy.solve` by orders of magnitude, and independent of it. The edges' `ℓ ≤ j` is not imposed.
"""

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from speccascade_jax.hierarchy import rounds


def least_latency(costs, acceptance, most):
    """The least expected latency per token by Corollary 3.1, the target alone included (HiGHS)."""
    edges, vertices = _graph(np.asarray(costs), np.asarray(acceptance), most)
    start, end, multiplier, cost = map(np.array, zip(*edges, strict=True))
    numbers = np.arange(len(edges))
    rows, columns = np.concatenate([start, end]), np.concatenate([numbers, numbers])
    flow = csr_matrix((np.concatenate([np.ones(len(edges)), -multiplier]), (rows, columns)), (vertices, len(edges)))
    optimum = linprog(cost, A_eq=flow, b_eq=np.eye(vertices)[0], method="highs")
    assert optimum.success, optimum.message
    return optimum.fun


def _graph(costs, acceptance, most):
    """Table 2 of the paper: vertex 0 is the target, then (model, budget), then the sinks, one for each model.

    An edge is a vertex, another, the flow's multiplier, the cost. A sink of the target's own stands for decoding
    without a draft, which the paper leaves out.
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
