"""The figures: quality against relative latency and against the rejection rate, one file per setting.

One line per rule through its α's, spread as bars, the target's quality dotted; hollow markers are inconclusive points.
"""

import io
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

from speccascade_jax.core.files import write_atomically
from speccascade_jax.results import mixture
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
        paths.append(unused(folder, stem if len(panels) == 1 else f"{stem}-{slug(panel.title())}", form, paths))
        draw(panel, paths[-1], share)
    return paths


def unused(folder: Path, name: str, form: str, taken: Sequence[Path]) -> Path:
    """The file `name.form`, numbered where another figure took it: settings may differ in what titles leave out."""
    path = folder / f"{name}.{form}"
    return folder / f"{name}-{len(taken) + 1}.{form}" if path in taken else path


def draw(panel: Panel, path: Path, share: str = "rejection_rate") -> None:
    """Write one panel's figure, replacing an old one in a single step.

    Left: quality against latency as in paper 1's Figure 4, left out where none was measured; right: its Figure 3.
    """
    timed = any(spot.latency for spot in panel.spots)
    figure, plots = plt.subplots(
        1, 1 + timed, figsize=(12 if timed else 7.5, 5.6), sharey=True, layout="constrained", squeeze=False
    )
    first, last = plots[0, 0], plots[0, -1]
    if timed:
        _axes(first, panel, lambda spot: spot.latency)
        first.set_xlabel("latency relative to the target alone, batch 1   (← faster)")
        first.axvline(1.0, color="0.8", lw=1, zorder=0)
        _baselines(first, panel)
    _axes(last, panel, lambda spot: share_of(spot, share))
    last.set_xlabel(f"{SHARES[share]}" + ("" if share == "draft_share" else "   (← fewer)"))
    last.tick_params(labelleft=True)
    first.set_ylabel(f"{METRIC_NAMES.get(panel.metric, panel.metric)}   (better →)")
    handles, names = first.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3 if timed else 2, frameon=False)
    figure.suptitle(f"{panel.title()}\n", fontsize=13 if timed else 11)
    legend = f"{panel.sizes()}; a ring marks each rule's largest α; bars: spread"
    figure.text(0.5, 0.937, legend, ha="center", va="top", fontsize=9.5 if timed else 8, color="0.35")
    save(figure, path)


def _baselines(axes: Axes, panel: Panel) -> None:
    """What needs no method at all: requests sent at random, and the target at lower temperatures (no faster)."""
    if mixed := mixture.line(panel):
        axes.plot(*mixed, color="0.65", lw=2.5, zorder=0.5, label="Whole requests sent at random")
    if panel.cooler:
        qualities = [spot.quality.value for spot in panel.cooler.values()]
        named = ", ".join(f"{at:g}" for at in panel.cooler)
        axes.scatter([1.0] * len(qualities), qualities, marker="_", s=260, color="0.25", lw=2, zorder=4,
                     label=f"Target alone at T = {named}")  # fmt: skip


def save(figure: Figure, path: Path) -> None:
    """Write a figure, replacing an old one in a single step, and close it."""
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format=path.suffix.removeprefix("."))
    plt.close(figure)
    write_atomically(path, content.getvalue())


def _axes(axes: Axes, panel: Panel, horizontal: Horizontal) -> None:
    """The curves, the target's quality as a dotted line, and both ends."""
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
        alphas = [spot.alpha for spot in spots if spot.alpha is not None]
        name = spots[0].label + (f", {spots[0].axis} {alphas[0]:g} … {alphas[-1]:g}" if alphas else "")
        axes.plot([], [], color=colour, marker=marker, lw=1.6, ms=10 if marker == "*" else 6.5, label=name)
    if panel.target:
        axes.axhline(panel.target.quality.value, color="0.25", ls=":", lw=1.4, zorder=0, label="Target's quality")
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    _ends(axes, panel, horizontal)


def _ends(axes: Axes, panel: Panel, horizontal: Horizontal) -> None:
    """Target and draft alone, named where they stand; nothing where they have no place on the axis."""
    shown = [(spot, x) for spot in panel.ends if (x := horizontal(spot)) is not None]
    for spot, x in shown:
        at, marker = (x.value, spot.quality.value), "s" if spot is panel.target else "o"
        axes.errorbar(*at, xerr=bars([x]), yerr=bars([spot.quality]), fmt=marker, ms=9, color="0.25",
                      mfc="white", mew=2, elinewidth=0.8, zorder=4)  # fmt: skip
        name = spot.label[0].lower() + spot.label[1:]
        text = axes.annotate(name, at, xytext=(10, -14), textcoords="offset points", fontsize=10, weight="bold",
                             zorder=5)  # fmt: skip
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])
    low, high = axes.get_xlim()
    axes.set_xlim(low, max([high, *(x.value + 0.16 * (high - low) for _, x in shown)]))  # room for the names


def bars(values: Sequence[Value]) -> list[list[float]]:
    """Distances below and above, never negative: a resampled interval need not hold the value."""
    return [[max(v.value - v.low, 0.0) for v in values], [max(v.high - v.value, 0.0) for v in values]]


def slug(text: str) -> str:
    """`text` as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text.replace("γ", "g").replace(" = ", "")).strip("-")
