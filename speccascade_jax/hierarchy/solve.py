"""The hierarchy with the least expected latency, over all subsets of the models and all budgets.

By the paper's latency the best way for model `i` to hold `T` tokens does not depend on what is above it, so dynamic
programming over (model, budget) is exact. The paper's graph (section 3.3) is this recursion drawn: without the loops at
its sinks it has no cycle. Its `ℓ ≤ j`, a budget no smaller than the one below, is not imposed: it never binds with the
exact γ.

By the overshoot objective the length that a level hands up is random, so the best block is not one number. Two blocks
of one model and budget differ in cost and in length, and which one is better depends on what is above. So several are
kept for each (model, budget): the best as judged from a few levels that might stand above it, the target among them.
The winner is then improved by single changes (a budget, a level more, a level less) until none helps. The search is
exact wherever the blocks kept are all there are; how often it is elsewhere is tested against enumeration.
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
"""The most drafts in one hierarchy that the search considers; the improvements may add more."""
ABOVE = 4
"""Levels that blocks are judged from."""


def solve(costs: Sequence[float], acceptance: Any, max_budget: int = 15, objective: str = "paper") -> Hierarchy:
    """The best hierarchy of the given models, the target alone among the candidates.

    `objective="paper"` is exact. With `"overshoot"` the best block for (model, budget) depends on what is above,
    because its length is random: the search keeps several, and the paper's optimum is among its candidates.

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
        chain = overshoot_optimum(found, matrix, max_budget, chain)
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


@dataclass
class Blocks:
    """Ways of one model to hold tokens: `[n]` costs, `[n, W]` probabilities of their lengths, and what they are."""

    costs: np.ndarray
    lengths: np.ndarray
    chains: list[Chain] = field(default_factory=list)


def overshoot_optimum(costs: np.ndarray, acceptance: np.ndarray, most: int, start: Chain) -> Chain:
    """The best chain found, `start` among the candidates (see `solve`)."""
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
    """For each budget the blocks of model `i`: drafted by itself, or over any block kept of a model below."""
    alone = [Blocks(np.array([t * costs[i]]), np.eye(width)[[t]], [((i,), (t,))]) for t in range(1, most + 1)]
    for k, blocks in enumerate(below):
        fit = [n for n, (models, _) in enumerate(blocks.chains) if len(models) < LEVELS]
        if not fit:
            continue
        lengths = blocks.lengths[fit]
        yielded = rounds.yields(lengths, np.full(len(fit), acceptance[k, i]))
        visited = rounds.visits(yielded, most)
        calls = np.cumsum(visited, axis=-1)
        for budget, held in enumerate(alone, 1):
            price = calls[:, budget - 1] * (costs[i] + blocks.costs[fit])
            up = rounds.handed_up(yielded, visited, budget)[:, :width]
            held.costs = np.concatenate([held.costs, price])
            held.lengths = np.concatenate([held.lengths, up])
            held.chains += [((*blocks.chains[n][0], i), (*blocks.chains[n][1], budget)) for n in fit]
    return alone


def _keep(i: int, costs: np.ndarray, acceptance: np.ndarray, most: int, found: list[Blocks]) -> Blocks:
    """Of each budget's blocks those that are best from somewhere above."""
    above = np.unique(np.linspace(len(costs) - 1, i + 1, ABOVE).round().astype(int))
    kept = Blocks(np.zeros(0), np.zeros((0, found[0].lengths.shape[-1])))
    for blocks in found:
        chosen = {int(blocks.costs.argmin())}
        for j in above:
            value = (costs[j] + blocks.costs) / _mean_yield(blocks.lengths, acceptance[i, j])
            chosen.add(int(value.argmin()))
        chosen_list = sorted(chosen)
        kept.costs = np.concatenate([kept.costs, blocks.costs[chosen_list]])
        kept.lengths = np.concatenate([kept.lengths, blocks.lengths[chosen_list]])
        kept.chains += [blocks.chains[n] for n in chosen_list]
    return kept


def _improved(count: int, most: int, candidates: list[Chain], value: Callable[[Chain], float]) -> Chain:
    """Returns the best candidate after the best single change, and the next, until none is better."""
    best, least = None, math.inf
    while True:
        chain = min(candidates, key=value)
        if best is not None and value(chain) >= least * (1 - 1e-12):
            return best
        best, least, candidates = chain, value(chain), _neighbours(chain, count, most)


def _neighbours(chain: Chain, count: int, most: int) -> list[Chain]:
    """Every chain with one budget changed, one level left out, one exchanged for another, or one put in."""
    models, budgets = chain
    drafts = list(zip(models[:-1], budgets, strict=True))
    changed = [
        [*drafts[:n], (model, t), *drafts[n + 1 :]] for n, (model, _) in enumerate(drafts) for t in range(1, most + 1)
    ]
    left_out = [drafts[:n] + drafts[n + 1 :] for n in range(len(drafts))]
    others = [model for model in range(count - 1) if model not in models]
    put_in = [
        sorted([*each, (model, t)]) for each in (drafts, *left_out) for model in others for t in range(1, most + 1)
    ]
    chains = [*changed, *left_out, *put_in]
    return [((*(model for model, _ in each), count - 1), tuple(t for _, t in each)) for each in chains] or [chain]
