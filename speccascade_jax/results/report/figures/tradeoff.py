"""The figures of panels, a file per setting: quality against latency and rejection rate, and fronts of thresholds.

Quality is less the target's, against relative latency and against the rejection rate: one line per rule through its
α's; bars are paired 95% intervals of the difference to the target on the same examples, where records hold them; hollow
markers are inconclusive points. Fronts are paper 3's Figure 4: verification rate over discard rate, a curve per family.
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

from speccascade_jax.results.analysis import forward_times
from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval
from speccascade_jax.results.analysis.families import GAMMA, Families, Family, rates
from speccascade_jax.results.analysis.panels import SHARES, Panel, Spot, metric_name, share_of
from speccascade_jax.results.analysis.significance import Place, Places, places
from speccascade_jax.results.report.figures.styles import styles
from speccascade_jax.storage.files import write_atomically

Horizontal = Callable[[Place], Interval | None]


def draw_all(
    panels: Sequence[Panel], folder: Path, stem: str, form: str = "png", share: str = "rejection_rate"
) -> list[Path]:
    """One file per panel that has a curve, `<stem>.png` or `<stem>-<setting>.png`; returns the paths.

    Raises:
        ValueError: there is no curve.
    """
    panels = [panel for panel in panels if panel.curves]
    if not panels:
        raise ValueError("the records hold no method beside target and draft alone: nothing to plot")
    paths: list[Path] = []
    for panel in panels:
        paths.append(_unused(panel, folder, stem, form, paths, alone=len(panels) == 1))
        draw(panel, paths[-1], share)
    return paths


def _unused(panel: Panel, folder: Path, stem: str, form: str, taken: Sequence[Path], alone: bool) -> Path:
    """Returns a panel's file, numbered where another figure took it: titles leave out some settings."""
    title = re.sub(r"[^A-Za-z0-9._]+", "-", panel.title().replace("γ", "g").replace(" = ", "")).strip("-")
    name = stem if alone else f"{stem}-{title}"
    path = folder / f"{name}.{form}"
    return folder / f"{name}-{len(taken) + 1}.{form}" if path in taken else path


def draw(panel: Panel, path: Path, share: str = "rejection_rate") -> None:
    """Write one panel's figure, replacing an old one in a single step.

    Left: quality against latency as in paper 1's Figure 4, left out where none was measured; right: its Figure 3.
    """
    found = places(panel)
    timed = any(spot.latency for spot in panel.spots)
    figure, plots = subplots(1, 1 + timed, (12 if timed else 7.5, 5.8), sharey=True)
    first, last = plots[0, 0], plots[0, -1]
    if timed:
        _axes(first, panel, found, lambda place: place.latency)
        _in_speed_ups(first)
        _baselines(first, panel, found)
    _axes(last, panel, found, lambda place: share_of(place.spot, share))
    last.set_xlabel(f"{SHARES[share]}" + ("" if share == "draft_share" else "   (← fewer)"))
    last.tick_params(labelleft=True)
    less = " less the target's" if panel.target else ""
    first.set_ylabel(f"{metric_name(panel.metric)}{less}   (better →)")
    handles, names = first.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3 if timed else 2, frameon=False)
    figure.suptitle(f"{panel.title()}\n", fontsize=13 if timed else 11)
    legend = f"{panel.sizes()}; a ring marks each rule's largest α; bars: paired 95% intervals"
    figure.text(0.5, 0.937, legend, ha="center", va="top", fontsize=9.5 if timed else 8, color="0.35")
    save(figure, path)


_APART = 0.06
"""Of the axis's length: what a label such as "1.25×" takes."""


def _in_speed_ups(axes: Axes) -> None:
    """Latency below, the speed-up that it is above."""
    axes.set_xlabel("latency relative to the target alone, batch 1   (← faster)")
    axes.axvline(1.0, color="0.8", lw=1, zorder=0)
    low, high = axes.get_xlim()
    low = max(low, 0.02)  # an inverse has no place at 0
    axes.set_xlim(low, high)
    marks = list[float]()
    for each in (1, 2, 1.5, 1.25, 0.8, 4, 3, 10, 6, 2.5, 20):  # the ones that say most first; none where another stands
        if low <= 1 / each <= high and all(abs(1 / each - 1 / other) > _APART * (high - low) for other in marks):
            marks.append(each)
    above = axes.secondary_xaxis("top")
    above.set_xticks([1 / each for each in marks], [f"{each:g}×" for each in marks])
    above.spines["top"].set_visible(False)


def _baselines(axes: Axes, panel: Panel, found: Places) -> None:
    """What needs no method at all: requests sent at random, and the target at lower temperatures (no faster)."""
    if found.random:
        axes.plot(*found.random, color="0.65", lw=2.5, zorder=0, label="Whole requests sent at random")
    if panel.cooler and panel.target:
        gaps = [spot.quality.value - panel.target.quality.value for spot in panel.cooler.values()]
        named = ", ".join(f"{at:g}" for at in panel.cooler)
        axes.scatter([1.0] * len(gaps), gaps, marker="_", s=260, color="0.25", lw=2, zorder=4,
                     label=f"Target alone at T = {named}")  # fmt: skip
    if found.chosen and found.chosen.latency:
        axes.scatter([found.chosen.latency.value], [found.chosen.difference.value], s=420, facecolors="none",
                     edgecolors="#2E7D32", lw=2, zorder=4,
                     label=f"Fastest within {found.margin:g} of the target")  # fmt: skip


def subplots(rows: int, columns: int, size: tuple[float, float], **more: Any) -> tuple[Figure, Any]:
    """Makes a figure and its axes `[rows, columns]`, laid out so that nothing overlaps."""
    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **more)


def plain(axes: Axes, **grid: Any) -> None:
    """Gives axes a faint grid, and no frame at the top and on the right."""
    axes.grid(**grid, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a figure, replacing an old one in a single step, and close it."""
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format=path.suffix.removeprefix("."))
    plt.close(figure)
    write_atomically(path, content.getvalue())


def _axes(axes: Axes, panel: Panel, found: Places, horizontal: Horizontal) -> None:
    """The curves, the target's quality as a dotted line with the margin below it, and both ends."""
    looks = styles(panel.curves)
    for name, curve in found.curves.items():
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
        told = spots[0].label + (f", {spots[0].axis} {alphas[0]:g} … {alphas[-1]:g}" if alphas else "")
        axes.plot([], [], color=colour, marker=marker, lw=1.6, ms=10 if marker == "*" else 6.5, label=told)
    if panel.target:
        axes.axhline(0.0, color="0.25", ls=":", lw=1.4, zorder=0, label="Target's quality")
        axes.axhspan(-found.margin, 0.0, color="#2E7D32", alpha=0.06, lw=0, zorder=0)
    plain(axes, alpha=0.25)
    _ends(axes, panel, found, horizontal)


def _ends(axes: Axes, panel: Panel, found: Places, horizontal: Horizontal) -> None:
    """Target and draft alone, named where they stand; nothing where they have no place on the axis."""
    shown = [(place, x) for place in found.ends if (x := horizontal(place)) is not None]
    for place, x in shown:
        at, marker = (x.value, place.difference.value), "s" if place.spot is panel.target else "o"
        axes.errorbar(*at, xerr=bars([x]), yerr=bars([place.difference]), fmt=marker, ms=9, color="0.25",
                      mfc="white", mew=2, elinewidth=0.8, zorder=4)  # fmt: skip
        label = place.spot.label
        text = axes.annotate(label[0].lower() + label[1:], at, xytext=(10, -14), textcoords="offset points",
                             fontsize=10, weight="bold", zorder=5)  # fmt: skip
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])
    low, high = axes.get_xlim()
    axes.set_xlim(low, max([high, *(x.value + 0.16 * (high - low) for _, x in shown)]))  # room for the names


def bars(values: Sequence[Interval]) -> list[list[float]]:
    """Distances below and above, never negative: a resampled interval need not hold the value."""
    return [[max(v.value - v.low, 0.0) for v in values], [max(v.high - v.value, 0.0) for v in values]]


FIXED = ("#000000", "D")
SYMBOLS = (("#0072B2", "o"), ("#D55E00", "^"), ("#009E73", "s"), ("#CC79A7", "v"), ("#E69F00", "P"), ("#56B4E9", "X"))
LINES = 7


def draw_fronts(every: Sequence[Families], folder: Path, stem: str, form: str = "png") -> tuple[list[Path], list[str]]:
    """Draws paper 3's Figure 4: one file per panel, `<stem>-pareto.png` or `<stem>-pareto-<setting>.png`.

    Returns:
        The paths, and why panels have none: records without counts of single examples, or of too few.
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
    """Writes one panel's figure, replacing an old one in a single step.

    Raises:
        ValueError: records without counts of single examples, or of too few.
    """
    every = (*families.fixed, *families.adaptive)
    # refused before a figure is begun; the bootstrap keeps what it has computed
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
    """A family's points in the order of γ or h, its numbers beside them."""
    xs, ys = _rates(list(family.spots.values()), bootstrap)
    places = [x.value for x in xs], [y.value for y in ys]
    axes.errorbar(*places, xerr=bars(xs), yerr=bars(ys), fmt="none", ecolor=colour, elinewidth=0.8,
                  alpha=0.4, zorder=1)  # fmt: skip
    name = f"{family.name}, {family.symbol} {min(family.spots):g} … {max(family.spots):g}"
    axes.plot(*places, color=colour, marker=marker, ls=line, lw=1.4, ms=5.5, label=name, zorder=3)
    side = (6, 5) if family.symbol == GAMMA else (-6, -11)
    for at, x, y in zip(family.spots, *places, strict=True):
        axes.annotate(f"{at:g}", (x, y), xytext=side, textcoords="offset points", fontsize=7.5, color=colour,
                      ha="left" if side[0] > 0 else "right")  # fmt: skip


def _iso_latency(axes: Axes, families: Families) -> str:
    """Lines of equal time per token by equation 2.3, slope −c_1/c_2; says so, or why there are none."""
    try:
        times = forward_times.speculative(families.records)
        forward_times.suggested_threshold(times.draft, times.target)  # refuses times that make no line
    except ValueError:
        return ""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    slope = -times.draft / (times.target - times.draft)
    for start in np.linspace(low, high - slope * (right - left), LINES + 2)[1:-1]:
        axes.plot([left, right], [start, start + slope * (right - left)], color="0.85", lw=0.8, zorder=0)
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    return f"; grey: equal time, slope −{-slope:.2f}"
