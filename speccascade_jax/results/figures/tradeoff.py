"""The figures: quality against relative latency and against the rejection rate, one file per setting.

One line per rule through its α's, spread as bars, the target's quality dotted; hollow markers are inconclusive points.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from speccascade_jax.results.labels import SHARES
from speccascade_jax.results.panels import Panel, Spot, Value, share_of

# Okabe and Ito's palette: distinct under the common kinds of colour blindness; markers tell the rest apart.
STYLES = {
    "spec_decode": ("#000000", "D"),
    "lossy": ("#999999", "s"),
    "lossy_tuned": ("#999999", "P"),
    "bild_star": ("#CC79A7", "X"),
    "chow": ("#E69F00", "v"),
    "diff": ("#56B4E9", "^"),
    "opt": ("#0072B2", "o"),
    "token_v3": ("#D55E00", "*"),
    "token_v1": ("#009E73", "<"),
    "token_v2": ("#009E73", ">"),
}
# five other colours (Tol's muted ones) and four markers: no pair of both comes twice in twenty curves
SPARE = tuple(zip(("#117733", "#332288", "#882255", "#44AA99", "#999933") * 4, "hdpH" * 5, strict=True))
METRIC_NAMES = {
    "bleu": "BLEU",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "exact_match": "exact match",
}
Horizontal = Callable[[Spot], Value | None]


def draw_all(
    panels: Sequence[Panel], folder: Path, stem: str, form: str = "png", share: str = "rejection_rate"
) -> list[Path]:
    """One file per panel that has a curve, `<stem>.png` or `<stem>-<setting>.png`; returns the paths."""
    panels = [panel for panel in panels if panel.curves]
    if not panels:
        raise ValueError("the records hold no method beside target and draft alone: nothing to plot")
    paths: list[Path] = []
    for panel in panels:
        name = stem if len(panels) == 1 else f"{stem}-{slug(panel.title())}"
        if folder / f"{name}.{form}" in paths:
            name += f"-{len(paths) + 1}"
        paths.append(folder / f"{name}.{form}")
        draw(panel, paths[-1], share)
    return paths


def draw(panel: Panel, path: Path, share: str = "rejection_rate") -> None:
    """Write one panel's figure, replacing an old one in a single step; no plot of latency where none was measured."""
    timed = any(spot.latency for curve in panel.curves.values() for spot in curve)
    figure, plots = plt.subplots(
        1, 1 + timed, figsize=(12 if timed else 7.5, 5.6), sharey=True, layout="constrained", squeeze=False
    )
    first, last = plots[0, 0], plots[0, -1]
    if timed:
        _latency_axes(first, panel)
    _axes(last, panel, lambda spot: share_of(spot, share))
    _ends(last, panel, lambda spot: share_of(spot, share))
    last.set_xlabel(f"{SHARES[share]}" + ("" if share == "draft_share" else "   (← fewer)"))
    last.tick_params(labelleft=True)
    first.set_ylabel(f"{METRIC_NAMES.get(panel.metric, panel.metric)}   (better →)")
    handles, names = first.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3 if timed else 2, frameon=False)
    figure.suptitle(f"{panel.title()}\n", fontsize=13 if timed else 11)
    legend = f"{panel.sizes()}; a ring marks each rule's largest α; bars: spread"
    figure.text(0.5, 0.937, legend, ha="center", va="top", fontsize=9.5 if timed else 8, color="0.35")
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure, replacing an old one in a single step, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    figure.savefig(partial, dpi=150)
    plt.close(figure)
    partial.replace(path)


def _latency_axes(axes: Axes, panel: Panel) -> None:
    """Quality against latency, as in paper 1's Figure 4."""
    _axes(axes, panel, lambda spot: spot.latency)
    _ends(axes, panel, lambda spot: spot.latency)
    axes.set_xlabel("latency relative to the target alone, batch 1   (← faster)")
    axes.axvline(1.0, color="0.8", lw=1, zorder=0)


def _axes(axes: Axes, panel: Panel, horizontal: Horizontal) -> None:
    """The curves, and the target's quality as a dotted line."""
    spare = itertools.cycle(SPARE)
    for method, spots in panel.curves.items():
        colour, marker = STYLES.get(method) or next(spare)
        shown = [(spot, x) for spot in spots if (x := horizontal(spot)) is not None]
        if not shown:
            continue
        xs, ys = [x.value for _, x in shown], [spot.quality.value for spot, _ in shown]
        axes.errorbar(xs, ys, xerr=bars([x for _, x in shown]), yerr=bars([s.quality for s, _ in shown]),
                      fmt="none", ecolor=colour, elinewidth=0.8, alpha=0.3, zorder=1)  # fmt: skip
        faces = ["white" if spot.inconclusive else colour for spot, _ in shown]
        axes.plot(xs, ys, color=colour, lw=1.6, zorder=2)
        axes.scatter(xs, ys, c=faces, edgecolors=colour, marker=marker, s=110 if marker == "*" else 46, zorder=3)
        if len(shown) > 1:
            axes.scatter(xs[-1:], ys[-1:], s=230, facecolors="none", edgecolors=colour, lw=1.2, zorder=3)
        axes.plot([], [], color=colour, marker=marker, lw=1.6, ms=10 if marker == "*" else 6.5, label=_name(spots))
    if panel.target:
        axes.axhline(panel.target.quality.value, color="0.25", ls=":", lw=1.4, zorder=0, label="Target's quality")
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _name(spots: Sequence[Spot]) -> str:
    """A curve in the legend: method and range of α."""
    alphas = [spot.alpha for spot in spots if spot.alpha is not None]
    return spots[0].label + (f", {spots[0].axis} {alphas[0]:g} … {alphas[-1]:g}" if alphas else "")


def _ends(axes: Axes, panel: Panel, horizontal: Horizontal) -> None:
    """Target and draft alone, named where they stand; nothing where they have no place on the axis."""
    for spot, marker in ((panel.target, "s"), (panel.draft, "o")):
        x = None if spot is None else horizontal(spot)
        if spot is None or x is None:
            continue
        at = (x.value, spot.quality.value)
        axes.errorbar(*at, xerr=bars([x]), yerr=bars([spot.quality]), fmt=marker, ms=9, color="0.25",
                      mfc="white", mew=2, elinewidth=0.8, zorder=4)  # fmt: skip
        name = spot.label
        text = axes.annotate(
            name[0].lower() + name[1:],
            at,
            xytext=(10, -14),
            textcoords="offset points",
            fontsize=10,
            weight="bold",
            zorder=5,
        )
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])
    places = [x.value for spot in (panel.target, panel.draft) if spot and (x := horizontal(spot))]
    low, high = axes.get_xlim()
    axes.set_xlim(low, max([high, *(place + 0.16 * (high - low) for place in places)]))  # room for the names


def bars(values: Sequence[Value]) -> list[list[float]]:
    """Distances below and above, never negative: a resampled interval need not hold the value."""
    return [[max(v.value - v.low, 0.0) for v in values], [max(v.high - v.value, 0.0) for v in values]]


def slug(text: str) -> str:
    """`text` as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text.replace("γ", "g").replace(" = ", "")).strip("-")
