"""Paper 2's Figure 3: histograms of divergences, one panel per survey."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from speccascade_jax.results.analysis.histograms import name_of
from speccascade_jax.results.analysis.panels import short_name
from speccascade_jax.results.report.figures import tradeoff


def draw(surveys: Sequence[dict[str, Any]], path: Path) -> None:
    """Write one figure with a panel per survey, replacing an old one in a single step."""
    columns = min(len(surveys), 3)
    rows = -(-len(surveys) // columns)
    figure, plots = plt.subplots(
        rows, columns, figsize=(0.6 + 3.6 * columns, 0.9 + 2.6 * rows), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axes, survey in zip(plots.flat, surveys, strict=False):
        _panel(axes, survey)
    for axes in plots.flat[len(surveys) :]:
        axes.set_visible(False)
    for axes in plots.flat[max(0, len(surveys) - columns) : len(surveys)]:
        axes.tick_params(labelbottom=True)  # also above a place that stays empty
    figure.supxlabel(f"{name_of(surveys[0]['histogram']['quantity'])} of draft and target", fontsize=10)
    figure.supylabel("share of positions", fontsize=10)
    tradeoff.save(figure, path)


def _panel(axes: Axes, survey: dict[str, Any]) -> None:
    """Bars, the median as a line, and in words what is beyond the last edge."""
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
    backing = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # the dashed line may pass behind the words
    axes.text(0.98, 0.96, "\n".join(notes), transform=axes.transAxes, ha="right", va="top", fontsize=8.5, color="0.25",
              bbox=backing)  # fmt: skip
    axes.set_title(f"{survey['task']}, {short_name(survey['pair'])}\nalong {survey['along']} outputs", fontsize=9.5)
    axes.set_xlim(edges[0], last)
    axes.locator_params(axis="x", nbins=4)  # more would touch the next panel's
    axes.grid(axis="y", alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
