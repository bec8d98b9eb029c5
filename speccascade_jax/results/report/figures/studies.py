"""Figures of studies: divergences, acceptance between models, and policies that choose a drafter.

Histograms of divergences are Figure 3 of Holsman et al. (2025). Figures of acceptance contain a heat map of how often
each model accepts another model's tokens, and the time per token of the measured stacks; in a stack, each model drafts
for the next larger one (Globerson et al., 2025). Figures of policies show three things: their reward against training
queries, their choices against the alignment weight, and their regret while they serve (Huang et al., 2024 (assistant
selection)). Each figure replaces an older file atomically.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from speccascade_jax.results.analysis.histograms import name_of
from speccascade_jax.results.analysis.panels import short_name
from speccascade_jax.results.report.figures import drawing
from speccascade_jax.storage.files import expanded

Report = dict[str, Any]
"""Content of a study's file: a survey, an optimised stack, or a row of a comparison of policies."""
MARKS = ("o-", "s--", "^:", "d-.", "v-")


def draw_histograms(surveys: Sequence[Report], path: Path) -> None:
    """Draws histograms of divergences, one plot per survey (Holsman et al., 2025, Figure 3)."""
    columns = min(len(surveys), 3)
    rows = -(-len(surveys) // columns)
    size = (0.6 + 3.6 * columns, 0.9 + 2.6 * rows)
    figure, plots = drawing.subplots(rows, columns, size, sharex=True, sharey=True)
    for axes, survey in zip(plots.flat, surveys, strict=False):
        _histogram(axes, survey)
    for axes in plots.flat[len(surveys) :]:
        axes.set_visible(False)
    for axes in plots.flat[max(0, len(surveys) - columns) : len(surveys)]:
        axes.tick_params(labelbottom=True)  # axes above an empty cell of the grid show tick labels too
    figure.supxlabel(f"{name_of(surveys[0]['histogram']['quantity'])} of draft and target", fontsize=10)
    figure.supylabel("share of positions", fontsize=10)
    drawing.save(figure, path)


def _histogram(axes: Axes, survey: Report) -> None:
    """Draws a histogram's bars, its median as a line, and the share beyond the last edge as text."""
    histogram = survey["histogram"]
    edges, counts = np.asarray(histogram["edges"]), np.asarray(histogram["counts"])
    total = counts.sum() + histogram["above"]
    axes.bar(edges[:-1], counts / total, np.diff(edges), align="edge", color="#0072B2", edgecolor="white", lw=0.4)
    median, last = histogram["median"], edges[-1]
    shown = median is not None and median < last
    if shown:
        axes.axvline(median, color="#D55E00", ls="--", lw=1.2)
    notes = [f"median {'infinite' if median is None else f'{median:.3g}'}{' (dashed)' if shown else ''}"]
    notes += [f"{histogram['above'] / total:.1%} beyond {last:g}", f"{total:,} positions"]
    backing = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # keeps the text readable over the dashed line
    look: Report = {"ha": "right", "va": "top", "fontsize": 8.5, "color": "0.25", "bbox": backing}
    axes.text(0.98, 0.96, "\n".join(notes), transform=axes.transAxes, **look)
    axes.set_title(f"{survey['task']}, {short_name(survey['pair'])}\nalong {survey['along']} outputs", fontsize=9.5)
    axes.set_xlim(edges[0], last)
    axes.locator_params(axis="x", nbins=4)  # more tick labels would overlap those of the next plot
    drawing.plain(axes, alpha=0.25, axis="y")


def read_acceptance(paths: Sequence[str | Path]) -> list[Report]:
    """Reads the reports that `experiments.optimize_hierarchy` wrote.

    Raises:
        ValueError: a file is not such a report; the message names it.
    """
    reports = []
    for path in paths:
        try:
            report = json.loads(expanded(path).read_text())
            report["names"], report["acceptance"], report["costs"], report["pair"], report["task"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a file that experiments.optimize_hierarchy wrote") from error
        reports.append(report)
    return reports


def draw_acceptance(reports: Sequence[Report], path: Path) -> None:
    """Draws for each report how often each model accepts another one's tokens, and below it the measured stacks.

    The heat maps show the analysis of Globerson et al. (2025).
    """
    size = 1.6 + 0.55 * max(len(report["names"]) for report in reports)
    bars = max(len(_ran(report)) for report in reports)
    heights = [size, 0.9 + 0.4 * bars] if bars else [size]
    whole = (max(4.5, 0.6 + size) * len(reports), sum(heights))
    figure, plots = drawing.subplots(len(heights), len(reports), whole, height_ratios=heights)
    for column, report in enumerate(reports):
        _heat_map(plots[0, column], report)
        if bars:
            _stacks(plots[1, column], report)
    drawing.save(figure, path)


def _ran(report: Report) -> list[Report]:
    """Returns the rows of a report for stacks whose model calls were counted."""
    return [row for row in report.get("rows", ()) if "calls_per_token" in row]


def _stacks(axes: Axes, report: Report) -> None:
    """Draws a bar per stack: each model's calls per token times its cost, and a marker at the measured time."""
    colours = dict(zip(report["names"], itertools.cycle(map(plt.get_cmap("tab10"), range(10))), strict=False))
    costs = dict(zip(report["names"], report["costs"], strict=True))
    scale, unit = _unit(report)
    for row_index, row in enumerate(_ran(report)):
        start = 0.0
        for name in report["names"]:
            width = scale * costs[name] * row["calls_per_token"].get(name, 0.0)
            axes.barh(row_index, width, left=start, height=0.6, color=colours[name], label=None if row_index else name)
            start += width
        if "seconds_per_token" in row and unit:
            axes.plot(1e3 * row["seconds_per_token"], row_index, "kD", ms=5, label=None if row_index else "measured")
            axes.axvline(1e3 * row["target_seconds_per_token"], color="0.4", ls="--", lw=1)
    axes.set_yticks(range(len(_ran(report))), [row["name"] for row in _ran(report)], fontsize=8)
    axes.invert_yaxis()
    label = "ms per token: calls × cost of a call on one token\n(dashed: the target alone, measured)"
    axes.set_xlabel(label if unit else "cost per token: calls × the given costs", fontsize=8)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _unit(report: Report) -> tuple[float, str]:
    """Returns the display factor of costs, and their unit; the unit is empty if the user set the costs."""
    return (1e3, " ms") if report.get("unit", "ms") == "ms" else (1.0, "")


def _heat_map(axes: Axes, report: Report) -> None:
    names, matrix = report["names"], np.asarray(report["acceptance"], float)
    above = np.triu(np.ones(matrix.shape, bool), 1)
    axes.imshow(np.where(above, matrix, np.nan), cmap="YlGnBu", vmin=0.0, vmax=1.0)
    for i, j in np.argwhere(above):
        dark = matrix[i, j] > 0.6
        axes.text(j, i, f"{matrix[i, j]:.2f}", ha="center", va="center", fontsize=8, color="w" if dark else "0.15")
    for i, j in _links(report):
        axes.add_patch(plt.Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor="#D55E00", lw=2))
    scale, unit = _unit(report)
    costs = [f"{name}\n{scale * cost:.3g}{unit}" for name, cost in zip(names, report["costs"], strict=True)]
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), costs, fontsize=8)
    axes.set_xlabel("model that accepts", fontsize=9)
    axes.set_ylabel("model that drafts", fontsize=9)
    heat = f"T = {report['temperature']:g}" if "temperature" in report else ""
    axes.set_title(f"{report['task']}, {short_name(report['pair'])}, {heat}\nframed: the best stack", fontsize=9.5)
    axes.spines[:].set_visible(False)


def _links(report: Report) -> list[tuple[int, int]]:
    """Returns (row, column) of neighbouring models in the stack "overshoot optimum" or, without it, the last stack."""
    if not (rows := report.get("rows")):
        return []
    best = next((row for row in rows if row.get("name") == "overshoot optimum"), rows[-1])
    return list(itertools.pairwise(report["names"].index(name) for name in best["models"]))


def draw_curves(rows: Sequence[Report], path: Path) -> None:
    """Draws held-out reward against the number of training queries, with a line per objective.

    Dotted lines show the rewards of single arms, of a random choice and of the best choice.
    """
    figure, axes = plt.subplots(figsize=(5.6, 3.8), layout="constrained")
    for name, mark in zip(dict.fromkeys(row["objective"] for row in rows), itertools.cycle(MARKS), strict=False):
        objective_rows = [row for row in rows if row["objective"] == name]
        counts = sorted({row["queries"] for row in objective_rows})
        rewards = [[row["reward"]["greedy"] for row in objective_rows if row["queries"] == count] for count in counts]
        line = axes.plot(counts, [np.mean(run_rewards) for run_rewards in rewards], mark, ms=4, label=name)[0]
        low, high = ([of(run_rewards) for run_rewards in rewards] for of in (min, max))
        axes.fill_between(counts, low, high, color=line.get_color(), alpha=0.15)
    levels = {name: np.mean([row["reward"][name] for row in rows]) for name in rows[0]["reward"]}
    for name, value in levels.items():
        if name not in ("greedy", "dynamic"):
            axes.axhline(value, color="0.5", lw=0.8, ls=":")
            axes.annotate(name, (1.0, value), xycoords=("axes fraction", "data"), fontsize=7, color="0.3", va="center")
    axes.set_xscale("log")
    axes.set_xlabel("training queries")
    axes.set_ylabel("reward on held-out queries")
    axes.legend(fontsize=7, frameon=False)
    drawing.save(figure, path)


def draw_weights(rows: Sequence[Report], path: Path) -> None:
    """Draws the share of queries for which each arm is chosen against the alignment weight, one plot per domain."""
    domains = list(rows[0]["choices"])
    figure, plots = drawing.subplots(1, len(domains), (3.6 * len(domains) + 0.8, 3.2), sharey=True)
    weights = [row["alignment_weight"] for row in rows]
    for axes, domain in zip(plots[0], domains, strict=True):
        for arm, mark in zip(rows[0]["choices"][domain], itertools.cycle(MARKS), strict=False):
            axes.plot(weights, [row["choices"][domain][arm] for row in rows], mark, ms=4, label=arm)
        axes.set_title(domain, fontsize=9)
        axes.set_xlabel("alignment weight")
    plots[0, 0].set_ylabel("share of queries")
    plots[0, 0].legend(fontsize=7, frameon=False)
    drawing.save(figure, path)


def draw_regret(rows: Sequence[Report], summary: Report, path: Path) -> None:
    """Draws regret and choices of learners over the queries of a stream; vertical lines mark shifts of the domain.

    The upper plot shows the mean regret per query against the best fixed arm. A phase is the part of the stream between
    two shifts; the lower plot shows how often each learner chose the best arm of the current phase.
    """
    count = len(rows)
    shifts = [n for n in range(1, count) if rows[n]["phase"] != rows[n - 1]["phase"]]

    def spent(name: str) -> np.ndarray:
        runs = [row["runs"][name] for row in rows]
        return np.asarray([1e3 * run["seconds"] / max(run["tokens"], 1) for run in runs])

    arms = list(rows[0]["arms"])
    best = [arms.index(phase["best"].removeprefix("always ")) for phase in summary["phases"]]
    figure, plots = plt.subplots(2, 1, figsize=(6.4, 5.2), sharex=True, layout="constrained")
    queries, window = np.arange(1, count + 1), np.ones(max(1, count // 20))
    for name in summary["learners"]:
        plots[0].plot(queries, np.cumsum(spent(name) - spent(summary["best"])) / queries, lw=1.2, label=name)
        right = np.asarray([row["runs"][name]["arm"] == best[row["phase"]] for row in rows], float)
        mean = np.convolve(right, window, "same") / np.convolve(np.ones(count), window, "same")
        plots[1].plot(queries, mean, lw=1.2)
    plots[0].axhline(0.0, color="0.5", lw=0.8)
    plots[0].set_ylabel(f"mean regret per query so far\n(ms per token) against\n{summary['best']}", fontsize=8)
    plots[1].set_ylabel("share of the phase's best drafter\n(running mean)", fontsize=8)
    plots[1].set_xlabel("query")
    for axes in plots:
        for shift in shifts:
            axes.axvline(shift + 0.5, color="0.4", ls="--", lw=0.8)
    plots[0].legend(fontsize=7, frameon=False)
    drawing.save(figure, path)
