"""Figures of panels, one file per panel: quality against latency and rejection rate, and fronts of stop thresholds.

The vertical axis shows quality minus the target's quality, and a line per rule connects the points of its α's. Bars are
paired 95% intervals of the difference to the target on the same examples, if the records contain them. Hollow markers
are inconclusive points, where nothing was drafted. Fronts are Figure 4 of Huang et al., 2024 (SpecDec++): verification
rate against discard rate, with a curve per family.
"""

import io
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from speccascade_jax.results.analysis import forward_times, prediction
from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval
from speccascade_jax.results.analysis.families import GAMMA, Families, Family, rates
from speccascade_jax.results.analysis.panels import SHARES, Panel, Spot, metric_name, share_of
from speccascade_jax.results.analysis.significance import Place, Places, places
from speccascade_jax.results.report.figures import FIGURE, MAKER
from speccascade_jax.results.report.figures.styles import styles
from speccascade_jax.storage.files import rewrite

Horizontal = Callable[[Place], Interval | None]


def draw_all(
    panels: Sequence[Panel], folder: Path, stem: str, form: str = "png", share: str = "rejection_rate"
) -> list[Path]:
    """Draws one file per panel that has a curve, `<stem>.png` or `<stem>-<setting>.png`; returns the paths.

    Raises:
        ValueError: no panel has a curve.
    """
    panels = [panel for panel in panels if panel.curves]
    if not panels:
        raise ValueError("the records hold no method other than target and draft alone: nothing to plot")
    paths: list[Path] = []
    for panel in panels:
        paths.append(_unused(panel, folder, stem, form, paths, alone=len(panels) == 1))
        draw(panel, paths[-1], share)
    return paths


def draw_predicted(
    panels: Sequence[Panel], folder: Path, stem: str, form: str = "png", share: str = "rejection_rate"
) -> list[Path]:
    """Draws the panels of each predicted hardware, as `draw_all` does, as `<stem>-predicted-<hardware>.png`."""
    paths: list[Path] = []
    for hardware in dict.fromkeys(panel.predicted for panel in panels):
        members = [panel for panel in panels if panel.predicted == hardware]
        name = f"{stem}-predicted-{re.sub(r'[^A-Za-z0-9]+', '-', hardware)}"
        paths += draw_all(members, folder, name, form, share)
    return paths


def _unused(panel: Panel, folder: Path, stem: str, form: str, taken: Sequence[Path], alone: bool) -> Path:
    """Returns the path of a panel's figure, with a number if another panel with the same title uses the path."""
    title = re.sub(r"[^A-Za-z0-9._]+", "-", panel.title().replace("γ", "g").replace(" = ", "")).strip("-")
    name = stem if alone else f"{stem}-{title}"
    path = folder / f"{name}.{form}"
    return folder / f"{name}-{len(taken) + 1}.{form}" if path in taken else path


def draw(panel: Panel, path: Path, share: str = "rejection_rate") -> None:
    """Writes one panel's figure of quality against latency and rejection rate; replaces an older file atomically.

    The left plot shows quality against latency, as in Figure 4 of Narasimhan et al. (2024). It is left out if no
    latency was measured. The right plot is as in Figure 3 of the same paper.
    """
    panel_places = places(panel)
    timed = any(spot.latency for spot in panel.spots)
    figure, plots = subplots(1, 1 + timed, (12 if timed else 7.5, 5.8), sharey=True)
    first, last = plots[0, 0], plots[0, -1]
    if timed:
        _axes(first, panel, panel_places, lambda place: place.latency)
        _in_speed_ups(first, f"latency {prediction.LABEL},\n" if panel.predicted else "latency")
        _baselines(first, panel, panel_places)
    _axes(last, panel, panel_places, lambda place: share_of(place.spot, share))
    last.set_xlabel(f"{SHARES[share]}" + ("" if share == "draft_share" else "   (← fewer)"))
    last.tick_params(labelleft=True)
    less = " minus the target's" if panel.target else ""
    first.set_ylabel(f"{metric_name(panel.metric)}{less}   (better →)")
    handles, names = first.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3 if timed else 2, frameon=False)
    figure.suptitle(f"{panel.title()}\n", fontsize=13 if timed else 11)
    bands = " and bands" * bool(panel.predicted)
    legend = f"{panel.sizes()}; a ring marks each rule's largest α; bars: paired 95% intervals{bands}"
    figure.text(0.5, 0.937, legend, ha="center", va="top", fontsize=9.5 if timed else 8, color="0.35")
    save(figure, path)


_APART = 0.06
"""Width of a label such as "1.25×", as a share of the axis's length; labels that are closer would overlap."""


def _in_speed_ups(axes: Axes, quantity: str = "latency") -> None:
    """Labels the horizontal axis with the relative latency below the plot, and with the speed-up above it."""
    axes.set_xlabel(f"{quantity} relative to the target alone, batch 1   (← faster)")
    axes.axvline(1.0, color="0.8", lw=1, zorder=0)
    low, high = axes.get_xlim()
    low = max(low, 0.02)  # the speed-up of a latency of 0 is infinite
    axes.set_xlim(low, high)
    marks = list[float]()
    # speed-ups are labelled in this order, and a label is left out if it would overlap an earlier one
    for speed_up in (1, 2, 1.5, 1.25, 0.8, 4, 3, 10, 6, 2.5, 20):
        if low <= 1 / speed_up <= high and all(
            abs(1 / speed_up - 1 / taken) > _APART * (high - low) for taken in marks
        ):
            marks.append(speed_up)
    above = axes.secondary_xaxis("top")
    above.set_xticks([1 / speed_up for speed_up in marks], [f"{speed_up:g}×" for speed_up in marks])
    above.spines["top"].set_visible(False)


def _baselines(axes: Axes, panel: Panel, panel_places: Places) -> None:
    """Draws the line of random requests, the target at lower temperatures, and a ring around the chosen point."""
    if panel_places.random:
        axes.plot(*panel_places.random, color="0.65", lw=2.5, zorder=0, label="Whole requests sent at random")
    if panel.cooler and panel.target:
        gaps = [spot.quality.value - panel.target.quality.value for spot in panel.cooler.values()]
        named = ", ".join(f"{temperature:g}" for temperature in panel.cooler)
        axes.scatter([1.0] * len(gaps), gaps, marker="_", s=260, color="0.25", lw=2, zorder=4,
                     label=f"Target alone at T = {named}")  # fmt: skip
    if panel_places.chosen and panel_places.chosen.latency:
        axes.scatter([panel_places.chosen.latency.value], [panel_places.chosen.difference.value], s=420,
                     facecolors="none", edgecolors="#2E7D32", lw=2, zorder=4,
                     label=panel_places.ring)  # fmt: skip


def subplots(rows: int, columns: int, size: tuple[float, float], **more: Any) -> tuple[Figure, Any]:
    """Returns a figure and its axes `[rows, columns]`, in a layout without overlaps."""
    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **more)


def plain(axes: Axes, **grid: Any) -> None:
    """Gives axes a faint grid, and removes the frame at the top and on the right."""
    axes.grid(**grid, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Writes a figure to a file and closes it; an older figure of this package is replaced atomically."""
    form, content = path.suffix.removeprefix("."), io.BytesIO()
    author = {("Software" if form == "png" else "Creator"): MAKER}
    figure.savefig(content, dpi=150, format=form, metadata=author)
    plt.close(figure)
    rewrite(path, content.getvalue(), start=FIGURE)


def _axes(axes: Axes, panel: Panel, panel_places: Places, horizontal: Horizontal) -> None:
    """Draws the curves, the target's quality with the accepted loss below it, and target and draft alone."""
    looks = styles(panel.curves)
    for name, curve in panel_places.curves.items():
        colour, marker = looks[name]
        shown = [(place, x) for place in curve if (x := horizontal(place)) is not None]
        if not shown:
            continue
        xs, ys = [x.value for _, x in shown], [place.difference.value for place, _ in shown]
        axes.errorbar(xs, ys, xerr=bars([x for _, x in shown]), yerr=bars([p.difference for p, _ in shown]),
                      fmt="none", ecolor=colour, elinewidth=0.8, alpha=0.3, zorder=1)  # fmt: skip
        faces = ["white" if place.spot.inconclusive else colour for place, _ in shown]
        axes.plot(xs, ys, color=colour, lw=1.6, zorder=2)
        axes.scatter(xs, ys, c=faces, edgecolors=colour, marker=marker, s=110 if marker == "*" else 46, zorder=3)
        if len(shown) > 1:
            axes.scatter(xs[-1:], ys[-1:], s=230, facecolors="none", edgecolors=colour, lw=1.2, zorder=3)
        spots = [place.spot for place in curve]
        alphas = [spot.alpha for spot in spots if spot.alpha is not None]
        legend = spots[0].label + (f", {spots[0].axis} {alphas[0]:g} … {alphas[-1]:g}" if alphas else "")
        axes.plot([], [], color=colour, marker=marker, lw=1.6, ms=10 if marker == "*" else 6.5, label=legend)
    if panel.target:
        axes.axhline(0.0, color="0.25", ls=":", lw=1.4, zorder=0, label="Target's quality")
        axes.axhspan(-panel_places.margin, 0.0, color="#2E7D32", alpha=0.06, lw=0, zorder=0)
    plain(axes, alpha=0.25)
    _ends(axes, panel, panel_places, horizontal)


def _ends(axes: Axes, panel: Panel, panel_places: Places, horizontal: Horizontal) -> None:
    """Draws the target alone and the draft alone with their names; skips those without a value on the axis."""
    shown = [(place, x) for place in panel_places.ends if (x := horizontal(place)) is not None]
    for place, x in shown:
        position, marker = (x.value, place.difference.value), "s" if place.spot is panel.target else "o"
        axes.errorbar(*position, xerr=bars([x]), yerr=bars([place.difference]), fmt=marker, ms=9, color="0.25",
                      mfc="white", mew=2, elinewidth=0.8, zorder=4)  # fmt: skip
        label = place.spot.label
        text = axes.annotate(label[0].lower() + label[1:], position, xytext=(10, -14), textcoords="offset points",
                             fontsize=10, weight="bold", zorder=5)  # fmt: skip
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])
    low, high = axes.get_xlim()
    # widens the axis, so that the names are not cut off
    axes.set_xlim(low, max([high, *(x.value + 0.16 * (high - low) for _, x in shown)]))


def bars(values: Sequence[Interval]) -> list[list[float]]:
    """Returns the lengths of error bars below and above; 0 where a resampled interval excludes the value itself."""
    return [[max(v.value - v.low, 0.0) for v in values], [max(v.high - v.value, 0.0) for v in values]]


FIXED = ("#000000", "D")
SYMBOLS = (("#0072B2", "o"), ("#D55E00", "^"), ("#009E73", "s"), ("#CC79A7", "v"), ("#E69F00", "P"), ("#56B4E9", "X"))
LINES = 7


def draw_fronts(every: Sequence[Families], folder: Path, stem: str, form: str = "png") -> tuple[list[Path], list[str]]:
    """Draws Figure 4 of Huang et al., 2024 (SpecDec++): a file per panel, `<stem>-pareto[-<setting>].png`.

    Returns:
        The paths, and the reasons why some panels have no figure: their records lack the counts of single examples, or
        contain too few of them.
    """
    bootstrap, paths, missing = Bootstrap(), list[Path](), list[str]()
    for families in every:
        path = _unused(families.panel, folder, f"{stem}-pareto", form, paths, alone=len(every) == 1)
        try:
            _draw_front(families, path, bootstrap)
        except ValueError as error:
            missing.append(f"{families.panel.title()}: {error}")
        else:
            paths.append(path)
    return paths, missing


def _draw_front(families: Families, path: Path, bootstrap: Bootstrap) -> None:
    """Writes the figure of one panel's fronts; replaces an older file atomically.

    Raises:
        ValueError: records lack the counts of single examples, or have too few of them.
    """
    every = (*families.fixed, *families.adaptive)
    # computed here so that errors are raised before the figure is created; the bootstrap caches these rates
    _rates([*families.oracles.values(), *(spot for family in every for spot in family.spots.values())], bootstrap)
    figure, axes = plt.subplots(figsize=(7.5, 5.6), layout="constrained")
    spare, fixed = itertools.cycle(SYMBOLS), itertools.cycle(("-", "--", ":"))
    for family in every:
        colour, marker = FIXED if family.symbol == GAMMA else next(spare)
        _family(axes, family, bootstrap, colour, marker, next(fixed) if family.symbol == GAMMA else "-")
    for name, spot in families.oracles.items():
        (x,), (y,) = _rates([spot], bootstrap)
        axes.plot(x.value, y.value, "*", ms=15, color="#999999", mec="black", label=name, clip_on=False, zorder=4)
    drawn = _iso_latency(axes, families)
    axes.set_xlabel("discard rate: discarded tokens per generated token   (← fewer)")
    axes.set_ylabel("verification rate: target calls per generated token   (↓ fewer)")
    plain(axes, alpha=0.2)
    axes.legend(frameon=False, fontsize=9)
    sizes = f"{families.panel.setting['quality_examples']} examples; bars: 95% bootstrap over examples{drawn}"
    axes.set_title(f"{families.panel.title()}\n", fontsize=11)
    axes.text(0.5, 1.02, sizes, transform=axes.transAxes, ha="center", fontsize=8, color="0.35")
    save(figure, path)


def _rates(spots: Sequence[Spot], bootstrap: Bootstrap) -> list[list[Interval]]:
    """Returns discard and verification rates with their intervals."""
    pairs = [rates(spot, bootstrap) for spot in spots]
    return [[bootstrap.interval(pair[n]) for pair in pairs] for n in (0, 1)]


def _family(axes: Axes, family: Family, bootstrap: Bootstrap, colour: str, marker: str, line: str) -> None:
    """Draws a family's points in the order of γ or h, each labelled with its number."""
    xs, ys = _rates(list(family.spots.values()), bootstrap)
    places = [x.value for x in xs], [y.value for y in ys]
    axes.errorbar(*places, xerr=bars(xs), yerr=bars(ys), fmt="none", ecolor=colour, elinewidth=0.8,
                  alpha=0.4, zorder=1)  # fmt: skip
    name = f"{family.name}, {family.symbol} {min(family.spots):g} … {max(family.spots):g}"
    axes.plot(*places, color=colour, marker=marker, ls=line, lw=1.4, ms=5.5, label=name, zorder=3)
    side = (6, 5) if family.symbol == GAMMA else (-6, -11)
    for value, x, y in zip(family.spots, *places, strict=True):
        axes.annotate(f"{value:g}", (x, y), xytext=side, textcoords="offset points", fontsize=7.5, color=colour,
                      ha="left" if side[0] > 0 else "right")  # fmt: skip


def _iso_latency(axes: Axes, families: Families) -> str:
    """Draws lines of equal time per token (equation 2.3, slope −c_1/c_2); returns a note, or "" without lines."""
    try:
        times = forward_times.speculative(families.records)
        forward_times.suggested_threshold(times.draft, times.target)  # raises ValueError if the times define no lines
    except ValueError:
        return ""
    (x_low, x_high), (low, high) = axes.get_xlim(), axes.get_ylim()
    slope = -times.draft / (times.target - times.draft)
    for start in np.linspace(low, high - slope * (x_high - x_low), LINES + 2)[1:-1]:
        axes.plot([x_low, x_high], [start, start + slope * (x_high - x_low)], color="0.85", lw=0.8, zorder=0)
    axes.set_xlim(x_low, x_high)
    axes.set_ylim(low, high)
    return f"; grey lines: equal time per token, slope −{-slope:.2f}"
