"""The overshoot objective: what a level hands up has a random length, so the best block is not one number.

Two blocks of one model and budget differ in cost and in how long they are, and which is better depends on what is
above. So several are kept for each (model, budget): the best as judged from a few levels that might stand above it,
the target among them. The winner is then improved by single changes (a budget, a level more, a level less) until none
helps.
Exact wherever the blocks kept are all there are; how often it is elsewhere is tested against enumeration.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from speccascade_jax.hierarchy import rounds
from speccascade_jax.hierarchy.latency import latency

Chain = tuple[tuple[int, ...], tuple[int, ...]]
LEVELS = 5
"""The most drafts in one hierarchy that the search considers; the improvements may add more."""
ABOVE = 4
"""Levels that blocks are judged from."""


@dataclass
class Blocks:
    """Ways of one model to hold tokens: `[n]` costs, `[n, W]` probabilities of their lengths, and what they are."""

    costs: np.ndarray
    lengths: np.ndarray
    chains: list[Chain] = field(default_factory=list)


def best(costs: np.ndarray, acceptance: np.ndarray, most: int, start: Chain) -> Chain:
    """The best chain found, `start` among the candidates (see `solve`)."""
    count, width = len(costs), LEVELS * (most + 1) + 1
    kept: list[Blocks] = []
    for i in range(count - 1):
        kept.append(_keep(i, costs, acceptance, most, _all_blocks(i, costs, acceptance, most, width, kept)))
    found = [start, ((count - 1,), ())]
    for i, blocks in enumerate(kept):
        value = (costs[-1] + blocks.costs) / _mean_yield(blocks.lengths, acceptance[i, -1])
        models, budgets = blocks.chains[int(value.argmin())]
        found.append(((*models, count - 1), budgets))
    return _improved(costs, acceptance, most, min(found, key=lambda chain: _value(costs, acceptance, chain)))


def _value(costs: np.ndarray, acceptance: np.ndarray, chain: Chain) -> float:
    return latency(costs, acceptance, *chain, "overshoot")


def _mean_yield(lengths: np.ndarray, alpha: float) -> np.ndarray:
    yielded = rounds.yields(lengths, np.full(len(lengths), alpha))
    return np.asarray(yielded @ np.arange(yielded.shape[-1]))


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


def _improved(costs: np.ndarray, acceptance: np.ndarray, most: int, chain: Chain) -> Chain:
    """`chain` after the best single change, and the next, until none is better."""
    value = _value(costs, acceptance, chain)
    while True:
        found = min(_neighbours(chain, len(costs), most), key=lambda each: _value(costs, acceptance, each))
        better = _value(costs, acceptance, found)
        if better >= value * (1 - 1e-12):
            return chain
        chain, value = found, better


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
    found = [*changed, *left_out, *put_in]
    return [((*(model for model, _ in each), count - 1), tuple(t for _, t in each)) for each in found] or [chain]
