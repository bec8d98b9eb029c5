"""Section `hierarchy`: time to find the best stack of models for two objectives, by the number of candidate models.

The candidate models are random: each is a distribution over a few tokens between noise and the target's distribution.
Acceptance rates follow from these distributions, so they obey the triangle inequality, as those of real models do.
Costs are lognormal and sorted. The last round of a level of the stack may draft more tokens than the level's budget;
one objective counts these additional tokens (*overshoot*), and the paper's does not.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.setting import Bench, Rows
from speccascade_jax import hierarchy

LAST = 80
"""Largest number of candidates for which the search with overshoot is timed."""


def run(bench: Bench) -> Rows:
    """Measures one row per number of candidate models; a level's budget is at most 15 tokens."""
    return {"hierarchy": [_row(count) for count in bench.track(bench.settings.candidates)]}


def _row(count: int) -> dict[str, Any]:
    """Returns the seconds that the search takes for each objective, and both solutions' latency with overshoot."""
    costs, acceptance = candidates(count)
    seconds, solutions = {}, {}
    for objective in ("paper", "overshoot") if count <= LAST else ("paper",):
        began = time.perf_counter()
        solutions[objective] = hierarchy.solve(costs, acceptance, objective=objective)
        seconds[f"{objective}_seconds"] = time.perf_counter() - began
    paper = solutions["paper"]
    real = hierarchy.latency(costs, acceptance, paper.models, paper.budgets, "overshoot")
    row: dict[str, Any] = {"candidates": count, "levels": len(paper.models), "speedup": paper.speedup}
    row |= {"overshoot_seconds": None, "lost": None} | seconds
    row["of_predicted"] = paper.latency / real
    if "overshoot" in solutions:
        row["lost"] = real / solutions["overshoot"].latency - 1
    return row


def candidates(count: int) -> tuple[list[float], np.ndarray]:
    """Returns costs and acceptance of `count` random models; the last one is the target."""
    draws = np.random.default_rng(count)
    laws = draws.dirichlet(np.full(8, 0.3), count)
    near = np.linspace(0.2, 1, count)[:, None]
    laws = near * laws[-1] + (1 - near) * laws
    shared = 1 - 0.5 * np.abs(laws[:, None] - laws[None]).sum(-1)
    return np.sort(draws.lognormal(0, 2.0, count)).tolist(), shared
