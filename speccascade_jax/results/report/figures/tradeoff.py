"""Figures of panels (groups of comparable curves): quality against speed-up, and against the rejected draft tokens.

The vertical axis shows quality minus the target's quality, and a line per rule connects the points of its α's. The grey
line shows whole requests sent at random to draft or target (a coin decides): a useful method is above it. A ring marks
the fastest point without a measured loss. Error bars are paired 95% intervals of the difference to the target on the
same examples, if the records contain them; among many points, only the ringed one has bars, because those of all points
would hide the points. Hollow markers are inconclusive points, where nothing was drafted.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from speccascade_jax.results.analysis import prediction
from speccascade_jax.results.analysis.bootstrap import Interval
from speccascade_jax.results.analysis.panels import SHARES, Panel, metric_name, share_of
from speccascade_jax.results.analysis.significance import Place, Places, places
from speccascade_jax.results.report.figures.drawing import DOT, Label, bars, label_points, plain, save, subplots
from speccascade_jax.results.report.figures.styles import (
    COIN,
    FAINT,
    INK,
    OTHER,
    PAPER,
    RING,
    bar_note,
    barred,
    dashes,
    prominent,
    styles,
)

Horizontal = Callable[[Place], Interval | None]
Points = Sequence[tuple[Place, Interval]]
"""Points of a curve, each with its value on the horizontal axis."""

RING_SIZE = 19
"""Diameter of the ring around the chosen point, in typographic points."""
BESIDE = 1.4
"""The draft alone is a point of the plot if it is at most this many times as fast as the fastest point.

A faster draft would compress all other points, so an arrow at the edge takes its place.
"""


def draw_all(
    panels: Sequence[Panel], folder: Path, stem: str, form: str = "png", share: str = "rejection_rate"
) -> list[Path]:
    """Draws one file per panel that has a curve, `<stem>.png` or `<stem>-<setting>.png`; returns the paths.

    Raises:
        ValueError: no panel has a curve.
    """
    panels = [panel for panel in panels if panel.curves]
    if not panels:
        raise ValueError(
            "the records hold no method other than target and draft alone: nothing to plot; measure a method too"
        )
    paths: list[Path] = []
    for panel in panels:
        paths.append(unused_path(panel, folder, stem, form, paths, alone=len(panels) == 1))
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


def unused_path(panel: Panel, folder: Path, stem: str, form: str, taken: Sequence[Path], alone: bool) -> Path:
    """Returns the path of a panel's figure, with a number if another panel with the same title uses the path."""
    title = re.sub(r"[^A-Za-z0-9._]+", "-", panel.title().replace("γ", "g").replace(" = ", "")).strip("-")
    name = stem if alone else f"{stem}-{title}"
    path = folder / f"{name}.{form}"
    return folder / f"{name}-{len(taken) + 1}.{form}" if path in taken else path


def draw(panel: Panel, path: Path, share: str | None = "rejection_rate") -> None:
    """Writes one panel's figure; replaces an older file atomically.

    Args:
        panel: the group of curves to draw.
        path: the file to write; its suffix is the format.
        share: the measure (`panels.SHARES`) on the horizontal axis of a second plot, as in Figure 3 of Narasimhan et
            al. (2024); `None` for no second plot. If nothing was timed, this plot is the only one.
    """
    panel_places = places(panel)
    timed = is_timed(panel)
    columns = 1 + (timed and share is not None)
    figure, plots = subplots(1, columns, (5.2 * columns, 5.2), sharey=True)
    if timed:
        speed_plot(plots[0, 0], panel, panel_places)
    if share or not timed:
        share_plot(plots[0, -1], panel, panel_places, share or "rejection_rate")
        plots[0, -1].tick_params(labelleft=True)
    legend(figure, 2 * columns)
    notes = [panel.title(), panel.sizes(), bar_note(panel, panel_places)]
    figure.suptitle("\n".join(notes), fontsize=8, color=FAINT)
    save(figure, path)


def is_timed(panel: Panel) -> bool:
    """Returns whether a panel has the latency of any point."""
    return any(spot.latency for spot in panel.spots)


def legend(figure: Figure, columns: int = 2) -> None:
    """Writes the legend of the first plot below all plots."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "columnspacing": 1.2, "handlelength": 1.8}
    figure.legend(handles, names, loc="outside lower center", ncols=columns, **look)


def speed_plot(axes: Axes, panel: Panel, panel_places: Places, anchors: Mapping[int, str] | None = None) -> None:
    """Draws quality against speed-up, with the line of random requests, a ring around one point, and α's at points.

    Args:
        axes: the empty axes.
        panel: the group of curves to draw.
        panel_places: the plot positions of the panel's points.
        anchors: the id of the HTML element that a point links to, by the `id()` of the point's `Spot`.
    """
    axes.axvline(1.0, color=FAINT, lw=0.8, zorder=0)
    _coin_line(axes, panel, panel_places)
    _points(axes, panel, panel_places, _speed, anchors or {})
    fastest = max((x.value for points in _shown(panel_places, _speed).values() for _, x in points), default=1.0)
    ends = [(place, speed.value) for place in panel_places.ends if (speed := _speed(place))]
    beside = [place for place, speed in ends if speed <= BESIDE * max(fastest, 1.0)]
    _limits(axes, panel, panel_places, beside)
    for place, _ in ends:
        _end(axes, panel, place, _speed, anchors or {}, place not in beside)
    source = f"{prediction.LABEL}:\n" if panel.predicted else ""
    axes.set_xlabel(f"{source}speed-up over the target alone, batch 1   (faster →)")
    axes.xaxis.set_major_formatter("{x:g}×")
    _labels(axes, panel_places, _speed)


def share_plot(
    axes: Axes, panel: Panel, panel_places: Places, share: str, anchors: Mapping[int, str] | None = None
) -> None:
    """Draws quality against a share of tokens, as in Figure 3 of Narasimhan et al. (2024); arguments: `speed_plot`."""

    def horizontal(place: Place) -> Interval | None:
        return share_of(place.spot, share)

    _points(axes, panel, panel_places, horizontal, anchors or {})
    for place in panel_places.ends:
        if horizontal(place):
            _end(axes, panel, place, horizontal, anchors or {}, beyond=False)
    axes.set_xlabel(SHARES[share] + ("" if share == "draft_share" else "   (← fewer)"))
    axes.margins(x=0.12)
    _labels(axes, panel_places, horizontal)


def _speed(place: Place) -> Interval | None:
    return place.latency and place.latency.inverse()


def _shown(panel_places: Places, horizontal: Horizontal) -> dict[str, list[tuple[Place, Interval]]]:
    return {
        name: [(place, x) for place in curve if (x := horizontal(place)) is not None]
        for name, curve in panel_places.curves.items()
    }


def _coin_line(axes: Axes, panel: Panel, panel_places: Places) -> None:
    """Draws the line of random requests, and the target at lower temperatures."""
    if panel_places.random:
        latencies, gaps = panel_places.random
        axes.plot([1 / latency for latency in latencies], gaps, color=COIN, lw=3, zorder=1,
                  label="Coin: draft or target, per request")  # fmt: skip
    if panel.cooler and panel.target:
        gaps = [spot.quality.value - panel.target.quality.value for spot in panel.cooler.values()]
        named = ", ".join(f"{temperature:g}" for temperature in panel.cooler)
        axes.scatter([1.0] * len(gaps), gaps, marker="_", s=200, color=INK, lw=2, zorder=4,
                     label=f"Target alone at T = {named}")  # fmt: skip


def _limits(axes: Axes, panel: Panel, panel_places: Places, ends: Sequence[Place]) -> None:
    """Sets limits that contain every point, the error bars and `ends`; the line of random requests may be cut off."""
    curves = [place for curve in panel_places.curves.values() for place in curve if place.latency]
    with_bars = [place for place in curves if id(place) in barred(panel_places)]
    speeds = [1.0, *(1 / place.latency.value for place in (*curves, *ends) if place.latency)]
    speeds += [end for place in with_bars if (x := _speed(place)) for end in (x.low, x.high)]
    low, high = min(speeds), max(speeds)
    axes.set_xlim(low - 0.05 * (high - low), high + 0.08 * (high - low))
    gaps = [place.difference.value for place in (*curves, *ends)]
    gaps += [end for place in with_bars for end in place.difference[1:]]
    if panel.target:
        gaps += [spot.quality.value - panel.target.quality.value for spot in panel.cooler.values()]
    latencies, line = panel_places.random or ([], [])
    gaps += [gap for latency, gap in zip(latencies, line, strict=True) if 1 / latency <= axes.get_xlim()[1]]
    low, high = min(gaps), max(gaps)
    pad = 0.08 * (high - low) or 1.0
    axes.set_ylim(low - pad, high + pad)


def _points(axes: Axes, panel: Panel, panel_places: Places, horizontal: Horizontal, anchors: Mapping[int, str]) -> None:
    """Draws the curves, the prominent ones in colour, the ring, and the target's quality."""
    looks, bright = styles(panel.curves), prominent(panel_places)
    others = len(panel_places.curves) - len(bright)
    label = f"{others} other method{'s' * (others > 1)}"
    for name, points in _shown(panel_places, horizontal).items():
        colour, marker = looks[name]
        if points and name in bright:
            _curve(axes, points, colour, marker, 1.8, points[0][0].spot.label)
        elif points:
            _curve(axes, points, OTHER, marker, 0.8, label)
            label = ""  # all curves in the background have one entry in the legend
        _bars(axes, panel_places, points, colour)
        _links(axes, points, anchors)
    if panel.target:
        axes.axhline(0.0, color=FAINT, ls=":", lw=1.2, zorder=0, label="Target's quality")
    ringed = panel_places.chosen
    if ringed and (x := horizontal(ringed)):
        axes.plot([x.value], [ringed.difference.value], "o", ms=RING_SIZE, mfc="none", mec=RING, mew=2, zorder=5)
        axes.plot([], [], "o", ms=11, mfc="none", mec=RING, mew=2, label=panel_places.ring)
    less = " minus the target's" if panel.target else ""
    axes.set_ylabel(f"{metric_name(panel.metric)}{less}   (better →)")
    plain(axes)


def _curve(axes: Axes, points: Points, colour: str, marker: str, width: float, label: str) -> None:
    """Draws a curve with its markers; `width` is that of the line, and a thin line has small markers."""
    xs, ys = [x.value for _, x in points], [place.difference.value for place, _ in points]
    look: dict[str, Any] = {"color": colour, "ls": dashes(marker), "lw": width}
    axes.plot(xs, ys, zorder=1 + width, **look)
    faces = [PAPER if place.spot.inconclusive else colour for place, _ in points]
    area = (110 if marker == "*" else 50) * min(1.0, width / 1.8)
    axes.scatter(xs, ys, c=faces, edgecolors=colour, marker=marker, s=area, zorder=4)
    if label:
        axes.plot([], [], marker=marker, ms=area**0.5, label=label, **look)


def _bars(axes: Axes, panel_places: Places, points: Points, colour: str) -> None:
    """Draws the error bars of the points that have some (`styles.barred`)."""
    for place, x in points:
        if id(place) in barred(panel_places):
            axes.errorbar(x.value, place.difference.value, xerr=bars([x]), yerr=bars([place.difference]), fmt="none",
                          ecolor=colour, elinewidth=1.2, alpha=0.55, zorder=2)  # fmt: skip


def _links(axes: Axes, points: Points, anchors: Mapping[int, str]) -> None:
    """Draws invisible circles around points, which link to the points' outputs: large enough for a finger."""
    if anchors and points:
        xs, ys = [x.value for _, x in points], [place.difference.value for place, _ in points]
        urls = [_url(place, anchors) for place, _ in points]
        axes.scatter(xs, ys, s=220, facecolors="none", edgecolors="none", zorder=6).set_urls(urls)


def _url(place: Place, anchors: Mapping[int, str]) -> str | None:
    anchor = anchors.get(id(place.spot))
    return f"#{anchor}" if anchor else None


def _end(
    axes: Axes, panel: Panel, place: Place, horizontal: Horizontal, anchors: Mapping[int, str], beyond: bool
) -> None:
    """Draws the target alone or the draft alone with its name; beyond the axis, as an arrow with its numbers."""
    x = horizontal(place)
    if x is None:
        return
    name, position = place.spot.label[0].lower() + place.spot.label[1:], (x.value, place.difference.value)
    if beyond:
        text = f"{name}: {x.value:.3g}×, {place.difference.value:+.1f} →".replace("-", "−")
        axes.text(0.99, 0.02, text, transform=axes.transAxes, ha="right", fontsize=9, url=_url(place, anchors))
        return
    marker, side, offset = ("s", "left", (8, 6)) if place.spot is panel.target else ("o", "right", (-4, -16))
    axes.scatter(*position, marker=marker, s=64, facecolors=PAPER, edgecolors=INK, lw=1.8, zorder=4)
    _links(axes, [(place, x)], anchors)
    axes.annotate(name, position, xytext=offset, textcoords="offset points", fontsize=9, ha=side, zorder=5)


def _labels(axes: Axes, panel_places: Places, horizontal: Horizontal) -> None:
    """Writes α beside points of prominent curves.

    If labels compete for space, the ringed point comes first, then the ends of curves.
    """
    labels, lines, bright = list[Label](), list[list[tuple[float, float]]](), prominent(panel_places)
    for name, points in _shown(panel_places, horizontal).items():
        lines.append([(x.value, place.difference.value) for place, x in points])
        for index, (place, x) in enumerate(points):
            outer, ringed, spot = index in (0, len(points) - 1), place is panel_places.chosen, place.spot
            text = "" if spot.alpha is None or name not in bright else f"{spot.alpha:g}".replace("-", "−")
            text = f"{spot.axis} {text}" if text and (outer or ringed) else text
            radius = RING_SIZE / 2 if ringed else DOT
            labels.append(Label(x.value, place.difference.value, text, outer + 2 * ringed, radius))
    label_points(axes, labels, lines)
