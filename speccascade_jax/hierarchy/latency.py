"""Expected latency per token of a hierarchy of models, by the formula of Globerson et al. (2025) or with overshoot.

Overshoot means that a level passes more tokens to the level above than its budget, because its last round may yield
more tokens than were missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from speccascade_jax.core.checks import whole
from speccascade_jax.core.names import unknown
from speccascade_jax.hierarchy import rounds

OBJECTIVES = ("paper", "overshoot")
TOLERANCE = 1e-6
"""The largest rounding error of a float32 probability."""
Costs = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Hierarchy:
    """A stack of models from the lowest draft to the target, with a token budget for every model except the target.

    Attributes:
        models: indices of the models, from the lowest draft to the target.
        budgets: one budget for each model except the target; the target alone has none.
        latency: expected latency per token, in the unit of the costs.
        speedup: latency of the target alone divided by `latency`.
        objective: the definition of `latency`: "paper" (Corollary 3.1) or "overshoot".
    """

    models: tuple[int, ...]
    budgets: tuple[int, ...]
    latency: float
    speedup: float
    objective: str


def latency(
    costs: Costs, acceptance: Any, models: Sequence[int], budgets: Sequence[int], objective: str = "paper"
) -> float:
    """Returns the expected latency per token of one hierarchy.

    `"paper"` is Corollary 3.1 of Globerson et al. (2025): level `k` needs `γ(α, T_{k−1}, T_k)` calls for its block, as
    if the level below always passed exactly `T_{k−1}` tokens to it. `"overshoot"` is exact if every token is accepted
    independently. It computes the distribution of block lengths. Renewal theory gives the number of calls for a budget,
    and Wald's identity gives their cost.

    Args:
        costs: `[N]`, cost of one call of each model, the cheapest model first.
        acceptance: `[N, N]`; `α[i, j]` for i < j is the rate at which model `j` accepts a token of model `i`. Entries
            below the diagonal are either all 0 or equal to those above, because 1 − TV is symmetric.
        models: indices of the models, increasing, from the lowest draft to the target.
        budgets: one for each model except the last, at least 1.
        objective: "paper" or "overshoot".

    Raises:
        ValueError: costs, acceptance, models or budgets are invalid.
    """
    check_objective(objective)
    values, matrix = checked(costs, acceptance)
    chain, levels = _chain(models, budgets, len(values))
    if not levels:
        return float(values[chain[0]])
    return (_paper if objective == "paper" else _overshoot)(values, matrix, chain, levels)


def _paper(costs: np.ndarray, acceptance: np.ndarray, models: tuple[int, ...], budgets: tuple[int, ...]) -> float:
    most = max(budgets)
    block = budgets[0] * costs[models[0]]
    for level in range(1, len(budgets)):
        below, here = models[level - 1], models[level]
        calls = rounds.expected_rounds(acceptance[below, here], most)[budgets[level - 1] - 1, budgets[level] - 1]
        block = calls * (costs[here] + block)
    last, target = models[-2:]
    return float(rounds.calls_per_token(acceptance[last, target], most)[budgets[-1] - 1] * (costs[target] + block))


def _overshoot(costs: np.ndarray, acceptance: np.ndarray, models: tuple[int, ...], budgets: tuple[int, ...]) -> float:
    block, lengths = budgets[0] * costs[models[0]], exactly(budgets[0])
    for level in range(1, len(budgets)):
        below, here, budget = models[level - 1], models[level], budgets[level]
        yielded = rounds.yields(lengths, acceptance[below, here])
        visited = rounds.visits(yielded, budget)
        block = visited.sum() * (costs[here] + block)
        lengths = rounds.handed_up(yielded, visited, budget)
    last, target = models[-2:]
    return float((costs[target] + block) / mean(rounds.yields(lengths, acceptance[last, target])))


def exactly(length: int) -> np.ndarray:
    """Returns the distribution of a block length that is always `length`."""
    return np.eye(length + 1)[length]


def mean(probabilities: np.ndarray) -> Any:
    """Returns the mean of a distribution over 0, 1, …, along the last axis."""
    return probabilities @ np.arange(probabilities.shape[-1])


def check_objective(objective: str) -> None:
    """Checks an objective's name; raises a ValueError for an unknown one."""
    if objective not in OBJECTIVES:
        raise ValueError(f"there is no objective {objective!r}: {unknown(objective, OBJECTIVES)}")


def checked(costs: Costs, acceptance: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns costs and acceptance as float64 arrays; acceptance is 0 on and below the diagonal.

    Raises:
        ValueError: the costs are not positive or not in increasing order; the matrix has another size; an entry is not
            a probability; the entries below the diagonal are neither all 0 nor equal to those above.
    """
    values, matrix = np.asarray(costs, np.float64), np.asarray(acceptance, np.float64)
    if values.ndim != 1 or not values.size or not np.all(np.isfinite(values)) or np.any(values <= 0):
        raise ValueError(f"costs must be positive numbers, one for each model, got {costs}")
    if len(falls := np.flatnonzero(values[1:] < values[:-1])):
        i = int(falls[0])
        remedy = "order the models by cost, the target last, and leave out models that cost more than it"
        raise ValueError(f"costs[{i + 1}] is {values[i + 1]:g}, below costs[{i}], {values[i]:g}: {remedy}")
    if matrix.shape != (len(values), len(values)):
        raise ValueError(f"acceptance has the shape {matrix.shape}; {len(values)} costs need {(len(values),) * 2}")
    return values, _upper(matrix)


def _upper(matrix: np.ndarray) -> np.ndarray:
    if len(wrong := np.argwhere(~((matrix >= -TOLERANCE) & (matrix <= 1 + TOLERANCE)))):
        i, j = wrong[0].tolist()
        remedy = f"give the probability that model {j} accepts a token of model {i}"
        raise ValueError(f"acceptance[{i}, {j}] is {matrix[i, j]}, which is not a probability: {remedy}")
    below = np.tril(matrix, -1)
    if below.any() and len(wrong := np.argwhere(np.abs(below - np.triu(matrix, 1).T) > TOLERANCE)):
        i, j = wrong[0].tolist()
        entries = f"acceptance[{i}, {j}] is {matrix[i, j]}, but acceptance[{j}, {i}] is {matrix[j, i]}"
        raise ValueError(f"{entries}: below the diagonal, repeat the values above it, or give 0 everywhere")
    return np.clip(np.triu(matrix, 1), 0.0, 1.0)


def _chain(models: Sequence[int], budgets: Sequence[int], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    chain = tuple(whole("an index of models", model, 0) for model in models)
    token_budgets = tuple(whole("a budget", budget, 1) for budget in budgets)
    if not chain or list(chain) != sorted(set(chain)) or chain[-1] >= count:
        raise ValueError(f"models must be increasing indices below {count}, from the lowest draft up, got {chain}")
    if len(token_budgets) != len(chain) - 1:
        raise ValueError(f"{len(chain)} models need {len(chain) - 1} budgets, got {token_budgets}")
    return chain, token_budgets
