"""Section `hierarchy`: time to find the best stack of models for two objectives, by the number of candidate models.

The candidate models are random. Each has a distribution over a few tokens, between noise and the target's distribution,
so that acceptance obeys the triangle inequality. Costs are lognormal and sorted. A level's last round may exceed its
budget; one objective counts these additional tokens (*overshoot*), and the paper's does not.
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
    """Returns the seconds to optimise for both objectives, and the latency of both solutions with overshoot."""
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
