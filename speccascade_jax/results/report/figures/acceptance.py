"""Who accepts whose tokens, as a heat map, and where a token's time goes in the stacks that were run (paper 4)."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from speccascade_jax.results.analysis.panels import short_name
from speccascade_jax.results.report.figures import tradeoff
from speccascade_jax.storage.files import expanded


def read(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """What `experiments.optimize_hierarchy` wrote.

    Raises:
        ValueError: a file that is none of these; names it.
    """
    found = []
    for path in paths:
        try:
            report = json.loads(expanded(path).read_text())
            report["names"], report["acceptance"], report["costs"], report["pair"], report["task"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a file that experiments.optimize_hierarchy wrote") from error
        found.append(report)
    return found


def draw(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Write one figure, replacing an old one in one step: per report its matrix, below it the stacks that were run."""
    size = 1.6 + 0.55 * max(len(report["names"]) for report in reports)
    bars = max(len(_ran(report)) for report in reports)
    heights = [size, 0.9 + 0.4 * bars] if bars else [size]
    figure, plots = plt.subplots(
        len(heights), len(reports), figsize=(max(4.5, 0.6 + size) * len(reports), sum(heights)), squeeze=False,
        layout="constrained", height_ratios=heights,
    )  # fmt: skip
    for column, report in enumerate(reports):
        _panel(plots[0, column], report)
        if bars:
            _stacks(plots[1, column], report)
    tradeoff.save(figure, path)


def _ran(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The stacks whose calls were counted."""
    return [row for row in report.get("rows", ()) if "calls_per_token" in row]


def _stacks(axes: Axes, report: dict[str, Any]) -> None:
    """A bar for every stack: calls of each model per token at their cost; beside it the time that was measured."""
    colours = dict(zip(report["names"], itertools.cycle(map(plt.get_cmap("tab10"), range(10))), strict=False))
    costs = dict(zip(report["names"], report["costs"], strict=True))
    scale, unit = _unit(report)
    for at, row in enumerate(_ran(report)):
        left = 0.0
        for name in report["names"]:
            width = scale * costs[name] * row["calls_per_token"].get(name, 0.0)
            axes.barh(at, width, left=left, height=0.6, color=colours[name], label=None if at else name)
            left += width
        if "seconds_per_token" in row and unit:
            axes.plot(1e3 * row["seconds_per_token"], at, "kD", ms=5, label=None if at else "measured")
            axes.axvline(1e3 * row["target_seconds_per_token"], color="0.4", ls="--", lw=1)
    axes.set_yticks(range(len(_ran(report))), [row["name"] for row in _ran(report)], fontsize=8)
    axes.invert_yaxis()
    label = "ms per token: calls at the cost of one token\n(dashed: the target alone, measured)"
    axes.set_xlabel(label if unit else "calls per token at the costs given", fontsize=8)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _unit(report: dict[str, Any]) -> tuple[float, str]:
    """By what costs are multiplied to be shown, and the unit behind them: none where the costs were given."""
    return (1e3, " ms") if report.get("unit", "ms") == "ms" else (1.0, "")


def _panel(axes: Axes, report: dict[str, Any]) -> None:
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
    axes.set_xlabel("accepts", fontsize=9)
    axes.set_ylabel("what this one drafts", fontsize=9)
    heat = f"T = {report['temperature']:g}" if "temperature" in report else ""
    axes.set_title(f"{report['task']}, {short_name(report['pair'])}, {heat}\nframed: the best stack", fontsize=9.5)
    axes.spines[:].set_visible(False)


def _links(report: dict[str, Any]) -> list[tuple[int, int]]:
    """Row and column of each link of the stack that is best with overshoot counted, or of the last one."""
    if not (rows := report.get("rows")):
        return []
    best = next((row for row in rows if row.get("name") == "overshoot optimum"), rows[-1])
    places = [report["names"].index(name) for name in best["models"]]
    return list(zip(places[:-1], places[1:], strict=True))
