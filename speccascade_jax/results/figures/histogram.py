"""How far apart draft and target are, position by position: paper 2's Figure 3, one panel per task.

A survey counts (`count`) and writes the counts into its JSON file; `read` and `draw` make one figure of several files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speccascade_jax.core import names
from speccascade_jax.results.panels import short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 30
_LAST = {"js": 0.3, "tv": 0.3, "js_reference": 0.3, "kl": 1.5, "kl_reversed": 1.5}
LAST_EDGES = {f"{name}{form}": last for name, last in _LAST.items() for form in ("", "_scaled")}
"""Quantity of a survey -> where its histogram ends; the paper truncates `js` at 0.3. The same for every file."""
UNITS = {"js": "bits", "js_reference": "nats", "kl": "nats", "kl_reversed": "nats"}


def check(quantity: str) -> None:
    """Refuse a quantity that has no histogram.

    Raises:
        ValueError: with the nearest names.
    """
    if quantity not in LAST_EDGES:
        near = names.hint(quantity, LAST_EDGES)
        raise ValueError(f"no histogram of {quantity!r}: {near}choose one of {', '.join(LAST_EDGES)}")


def count(quantity: str, values: np.ndarray) -> dict[str, Any]:
    """The histogram of `values` `[N]`, each at least 0 and possibly infinite, as JSON takes it.

    Returns:
        `quantity`; `edges` (31, ascending) of bins closed below and open above; `counts` (30); `above`: how many values
        lie at or beyond the last edge; `median` (`None` if infinite).

    Raises:
        ValueError: no such quantity, or no values.
    """
    check(quantity)
    if not len(values):
        raise ValueError(f"no positions to count {quantity} at: the outputs are empty")
    edges = np.linspace(0.0, LAST_EDGES[quantity], BINS + 1)
    inside = values[values < edges[-1]]
    median = float(np.median(values))
    return {
        "quantity": quantity,
        "edges": [float(f"{edge:.6g}") for edge in edges],
        "counts": np.histogram(inside, edges)[0].tolist(),
        "above": len(values) - len(inside),
        "median": median if np.isfinite(median) else None,
    }


def line(histogram: dict[str, Any]) -> str:
    """A histogram in one line."""
    total = sum(histogram["counts"]) + histogram["above"]
    median = "infinite" if histogram["median"] is None else f"{histogram['median']:.3g}"
    beyond = f"{histogram['above'] / total:.1%} of {total:,} positions from {histogram['edges'][-1]:g} on"
    return f"{name_of(histogram['quantity'])} of draft and target: median {median}, {beyond}"


def name_of(quantity: str) -> str:
    """A quantity for readers, with its unit."""
    plain = quantity.removesuffix("_scaled")
    details = ", ".join([*([UNITS[plain]] if plain in UNITS else []), *(["p̃, q̃"] if plain != quantity else [])])
    return plain + (f" ({details})" if details else "")


def read(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """The surveys in files that `experiments/survey.py` wrote, all with histograms of one quantity.

    Raises:
        ValueError: a file that is none, or files of different quantities.
        OSError: a file that cannot be read.
    """
    surveys = [_read(Path(path)) for path in paths]
    found = {survey["histogram"]["quantity"]: path for survey, path in zip(surveys, paths, strict=True)}
    if len(found) > 1:
        each = ", ".join(f"{quantity} in {path}" for quantity, path in found.items())
        raise ValueError(f"histograms of different quantities ({each}): draw one figure for each")
    return surveys


def _read(path: Path) -> dict[str, Any]:
    try:
        survey = json.loads(path.read_text())
        survey["task"], survey["pair"], survey["along"], survey["histogram"]["counts"]
    except (ValueError, TypeError, KeyError) as error:
        why = "give the file that experiments/survey.py wrote with --gin.survey.output"
        raise ValueError(f"{path} holds no histogram: {why}") from error
    return survey


def draw(surveys: Sequence[dict[str, Any]], path: Path) -> None:
    """Write one figure with a panel per survey, replacing an old one in a single step."""
    # here: whoever only counts, as every survey does, should not wait for matplotlib
    from matplotlib import pyplot as plt

    from speccascade_jax.results.figures import tradeoff

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
