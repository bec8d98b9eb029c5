"""Search for the hierarchy with the smallest expected latency, over all subsets of the models and all budgets.

With the paper's latency (Globerson et al., 2025), the best way for model `i` to produce `T` tokens does not depend on
the levels above it, so dynamic programming over (model, budget) is exact. The recursion follows the paper's graph
(section 3.3) without the loops at its sinks, so it has no cycle. The paper also demands that a budget be at least as
large as the budget of the level below (`ℓ ≤ j`). This constraint is left out, because with the exact γ (the expected
number of calls) the optimum satisfies it anyway.

With the overshoot objective, the length of the block that a level passes to the next level is random. Two blocks of one
model and budget can differ in cost and in length, and the levels above decide which block is better. So the search
keeps several blocks for each (model, budget): the best ones for a few possible models above, the target among them. The
search then improves the best hierarchy by single changes (another budget, one more level, one level fewer) until no
change helps. The search is exact if no block was discarded; otherwise it may miss the optimum.
`tests/hierarchy/solve_test.py` compares the search with an enumeration of all hierarchies, for 1,000 random instances
of five models. The search misses none of the optima. If it keeps a single block instead of several, as it does for tens
of models, it misses five of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from speccascade_jax.core.checks import whole
from speccascade_jax.hierarchy import rounds
from speccascade_jax.hierarchy.latency import Hierarchy, check_objective, checked, latency, mean

Chain = tuple[tuple[int, ...], tuple[int, ...]]
LEVELS = 5
"""The largest number of drafts in a hierarchy of the search; the improvements at the end may add more."""
ABOVE = 4
"""The number of possible models of the next level, for which the search evaluates a block that they would verify."""
BLOCKS = 2000
"""The number of blocks that the search keeps, but at least one for each model, budget and possible next model."""


def solve(costs: Sequence[float], acceptance: Any, max_budget: int = 15, objective: str = "paper") -> Hierarchy:
    """Returns the best hierarchy of the given models; the target alone is one of the candidates.

    `objective="paper"` is exact. With `"overshoot"` the length of a block is random, and the best block for a model and
    budget depends on the levels above. The search keeps several blocks, and the paper's optimum is one of its
    candidates.

    Args:
        costs: `[N]`, cost of one call of each model, ordered from the cheapest model to the target.
        acceptance: `[N, N]` in the same order, as for `latency`.
        max_budget: T̄, the largest budget, at least 1.
        objective: "paper" or "overshoot", as in `latency`.

    Returns:
        The hierarchy; its latency is in the unit of the costs.

    Raises:
        ValueError: costs, acceptance, budget or objective are invalid.
    """
    check_objective(objective)
    max_budget = whole("max_budget", max_budget, 1)
    values, matrix = checked(costs, acceptance)
    chain = _paper_optimum(values, matrix, max_budget)
    if objective == "overshoot":
        chain = overshoot_optimum(values, matrix, max_budget, chain)
    best = latency(values, matrix, *chain, objective)
    return Hierarchy(*chain, latency=best, speedup=float(values[-1]) / best, objective=objective)


def _paper_optimum(costs: np.ndarray, acceptance: np.ndarray, most: int) -> Chain:
    """Solves the dynamic program over (model, budget), from the cheapest model up."""
    count = len(costs)
    below = np.triu_indices(count - 1, 1)
    calls = np.ones((count, count, most, most))
    calls[below] = rounds.expected_rounds(acceptance[below], most)
    least, origin = np.empty((count - 1, most)), np.full((count - 1, most), -1)
    for i in range(count - 1):
        least[i] = np.arange(1, most + 1) * costs[i]
        if i:  # the costs `[k, l, T]` of `T` tokens if the level below is model k with a budget of l + 1
            through = (calls[:i, i] * (costs[i] + least[:i])[..., None]).reshape(i * most, most)
            by = through.argmin(0)
            cheapest = through[by, np.arange(most)]
            origin[i] = np.where(cheapest < least[i], by, -1)
            least[i] = np.minimum(cheapest, least[i])
    total = rounds.calls_per_token(acceptance[:-1, -1], most) * (costs[-1] + least)
    if not total.size or total.min() >= costs[-1]:
        return (count - 1,), ()
    return _walk(origin, int(total.argmin()), count, most)


def _walk(origin: np.ndarray, index: int, count: int, most: int) -> Chain:
    """Returns the models and budgets that `origin` leads to, from the flat `index` of the level below the target."""
    models, budgets = [count - 1], list[int]()
    while index >= 0:
        i, budget = divmod(index, most)
        models, budgets = [i, *models], [budget + 1, *budgets]
        index = int(origin[i, budget])
    return tuple(models), tuple(budgets)


@dataclass
class Blocks:
    """Several ways to draft a block with one model: costs `[n]`, length probabilities `[n, W]`, and hierarchies."""

    costs: np.ndarray
    lengths: np.ndarray
    chains: list[Chain] = field(default_factory=list)


def overshoot_optimum(costs: np.ndarray, acceptance: np.ndarray, most: int, start: Chain) -> Chain:
    """Returns the best hierarchy that the search finds; `start` is one of the candidates (see `solve`)."""
    count, width = len(costs), LEVELS * (most + 1) + 1
    kept: list[Blocks] = []
    for i in range(count - 1):
        kept.append(_keep(i, costs, acceptance, most, _all_blocks(i, costs, acceptance, most, width, kept)))
    candidates = [start, ((count - 1,), ())]
    for i, blocks in enumerate(kept):
        value = (costs[-1] + blocks.costs) / _mean_yield(blocks.lengths, acceptance[i, -1])
        models, budgets = blocks.chains[int(value.argmin())]
        candidates.append(((*models, count - 1), budgets))
    return _improved(len(costs), most, candidates, lambda chain: latency(costs, acceptance, *chain, "overshoot"))


def _mean_yield(lengths: np.ndarray, alpha: float) -> np.ndarray:
    return np.asarray(mean(rounds.yields(lengths, np.full(len(lengths), alpha))))


def _all_blocks(
    i: int, costs: np.ndarray, acceptance: np.ndarray, most: int, width: int, below: list[Blocks]
) -> list[Blocks]:
    """Returns the blocks of model `i` for each budget: its own drafts, or rounds over a kept block of a model below."""
    alone = [Blocks(np.array([t * costs[i]]), np.eye(width)[[t]], [((i,), (t,))]) for t in range(1, most + 1)]
    for k, blocks in enumerate(below):
        fit = [n for n, (models, _) in enumerate(blocks.chains) if len(models) < LEVELS]
        if not fit:
            continue
        lengths = blocks.lengths[fit]
        yielded = rounds.yields(lengths, np.full(len(fit), acceptance[k, i]))
        visited = rounds.visits(yielded, most)
        calls = np.cumsum(visited, axis=-1)
        for budget, budget_blocks in enumerate(alone, 1):
            price = calls[:, budget - 1] * (costs[i] + blocks.costs[fit])
            up = rounds.handed_up(yielded, visited, budget)[:, :width]
            budget_blocks.costs = np.concatenate([budget_blocks.costs, price])
            budget_blocks.lengths = np.concatenate([budget_blocks.lengths, up])
            budget_blocks.chains += [((*blocks.chains[n][0], i), (*blocks.chains[n][1], budget)) for n in fit]
    return alone


def _keep(i: int, costs: np.ndarray, acceptance: np.ndarray, most: int, candidates: list[Blocks]) -> Blocks:
    """Returns the best few blocks of model `i` for each budget and each of a few possible models above."""
    above = np.unique(np.linspace(len(costs) - 1, i + 1, ABOVE).round().astype(int))
    best = max(1, BLOCKS // (len(costs) * most * ABOVE))
    kept = Blocks(np.zeros(0), np.zeros((0, candidates[0].lengths.shape[-1])))
    for blocks in candidates:
        chosen = {int(blocks.costs.argmin())}
        for j in above:
            value = (costs[j] + blocks.costs) / _mean_yield(blocks.lengths, acceptance[i, j])
            chosen.update(value.argsort(kind="stable")[:best].tolist())
        chosen_list = sorted(chosen)
        kept.costs = np.concatenate([kept.costs, blocks.costs[chosen_list]])
        kept.lengths = np.concatenate([kept.lengths, blocks.lengths[chosen_list]])
        kept.chains += [blocks.chains[n] for n in chosen_list]
    return kept


def _improved(count: int, most: int, candidates: list[Chain], value: Callable[[Chain], float]) -> Chain:
    """Improves the best candidate by the best single change, again and again, until no change helps."""
    best, least = None, math.inf
    while True:
        chain = min(candidates, key=value)
        if best is not None and value(chain) >= least * (1 - 1e-12):
            return best
        best, least, candidates = chain, value(chain), _neighbours(chain, count, most)


def _neighbours(chain: Chain, count: int, most: int) -> list[Chain]:
    """Returns every hierarchy with one budget changed, or with one level removed, replaced or added."""
    models, budgets = chain
    drafts = list(zip(models[:-1], budgets, strict=True))
    changed = [
        [*drafts[:n], (model, t), *drafts[n + 1 :]] for n, (model, _) in enumerate(drafts) for t in range(1, most + 1)
    ]
    left_out = [drafts[:n] + drafts[n + 1 :] for n in range(len(drafts))]
    unused_models = [model for model in range(count - 1) if model not in models]
    put_in = [
        sorted([*levels, (model, t)])
        for levels in (drafts, *left_out)
        for model in unused_models
        for t in range(1, most + 1)
    ]
    chains = [*changed, *left_out, *put_in]
    return [((*(model for model, _ in levels), count - 1), tuple(t for _, t in levels)) for levels in chains] or [chain]
