"""Policies that choose a drafter: by what they have seen, what they are rewarded for, while they serve (paper 5)."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from speccascade_jax.results.report.figures import tradeoff

Row = dict[str, Any]
MARKS = ("o-", "s--", "^:", "d-.", "v-")


def draw_curves(rows: Sequence[Row], path: Path) -> None:
    """Held-out reward by the number of queries, a line per objective; dotted: one arm always, at random, the best."""
    figure, axes = plt.subplots(figsize=(5.6, 3.8), layout="constrained")
    for name, mark in zip(dict.fromkeys(row["objective"] for row in rows), itertools.cycle(MARKS), strict=False):
        own = [row for row in rows if row["objective"] == name]
        counts = sorted({row["queries"] for row in own})
        found = [[row["reward"]["greedy"] for row in own if row["queries"] == count] for count in counts]
        line = axes.plot(counts, [np.mean(each) for each in found], mark, ms=4, label=name)[0]
        low, high = ([of(each) for each in found] for of in (min, max))
        axes.fill_between(counts, low, high, color=line.get_color(), alpha=0.15)
    levels = {name: np.mean([row["reward"][name] for row in rows]) for name in rows[0]["reward"]}
    for name, value in levels.items():
        if name not in ("greedy", "dynamic"):
            axes.axhline(value, color="0.5", lw=0.8, ls=":")
            axes.annotate(name, (1.0, value), xycoords=("axes fraction", "data"), fontsize=7, color="0.3", va="center")
    axes.set_xscale("log")
    axes.set_xlabel("queries learnt from")
    axes.set_ylabel("reward of held-out queries")
    axes.legend(fontsize=7, frameon=False)
    tradeoff.save(figure, path)


def draw_weights(rows: Sequence[Row], path: Path) -> None:
    """How often each arm is chosen by `alignment_weight`, a panel per domain."""
    domains = list(rows[0]["choices"])
    figure, plots = plt.subplots(
        1, len(domains), figsize=(3.6 * len(domains) + 0.8, 3.2), squeeze=False, sharey=True, layout="constrained"
    )
    weights = [row["alignment_weight"] for row in rows]
    for axes, domain in zip(plots[0], domains, strict=True):
        for arm, mark in zip(rows[0]["choices"][domain], itertools.cycle(MARKS), strict=False):
            axes.plot(weights, [row["choices"][domain][arm] for row in rows], mark, ms=4, label=arm)
        axes.set_title(domain, fontsize=9)
        axes.set_xlabel("alignment weight")
    plots[0, 0].set_ylabel("share of queries")
    plots[0, 0].legend(fontsize=7, frameon=False)
    tradeoff.save(figure, path)


def draw_regret(rows: Sequence[Row], found: Row, path: Path) -> None:
    """Above: regret per query so far against the best fixed arm; below: how often each learner took each phase's best.

    Both over the queries of the stream; a vertical line is where the domain shifts.
    """
    count = len(rows)
    shifts = [n for n in range(1, count) if rows[n]["phase"] != rows[n - 1]["phase"]]
    spent = {
        name: np.asarray([1e3 * row["runs"][name]["seconds"] / max(row["runs"][name]["tokens"], 1) for row in rows])
        for name in rows[0]["runs"]
    }
    arms = list(rows[0]["arms"])
    best = [arms.index(phase["best"].removeprefix("always ")) for phase in found["phases"]]
    figure, plots = plt.subplots(2, 1, figsize=(6.4, 5.2), sharex=True, layout="constrained")
    for name in found["learners"]:
        so_far = np.cumsum(spent[name] - spent[found["best"]]) / np.arange(1, count + 1)
        plots[0].plot(np.arange(1, count + 1), so_far, lw=1.2, label=name)
        right = np.asarray([row["runs"][name]["arm"] == best[row["phase"]] for row in rows], float)
        width = max(1, count // 20)
        plots[1].plot(np.arange(1, count + 1), np.convolve(right, np.ones(width), "same") / np.convolve(
            np.ones(count), np.ones(width), "same"), lw=1.2)  # fmt: skip
    plots[0].axhline(0.0, color="0.5", lw=0.8)
    plots[0].set_ylabel(f"regret per query so far,\nms per token, against\n{found['best']}", fontsize=8)
    plots[1].set_ylabel("took the phase's best drafter\n(running mean)", fontsize=8)
    plots[1].set_xlabel("query")
    for axes in plots:
        for shift in shifts:
            axes.axvline(shift + 0.5, color="0.4", ls="--", lw=0.8)
    plots[0].legend(fontsize=7, frameon=False)
    tradeoff.save(figure, path)
