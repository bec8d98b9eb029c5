"""Charts of the report: SVG elements drawn by matplotlib, whose points link to their outputs on the page."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from speccascade_jax.results.analysis.bootstrap import Interval
from speccascade_jax.results.analysis.panels import Panel, Spot
from speccascade_jax.results.analysis.significance import Place, Places
from speccascade_jax.results.store.outputs import Output
from speccascade_jax.results.store.trace import Trace


class Chart(NamedTuple):
    """An SVG element, and the text that the page shows for each of its points, by the id of the linked element."""

    svg: str
    tips: dict[str, str] = {}


def trade_off(panel: Panel, places: Places, anchors: Mapping[int, str], commands: Mapping[int, str]) -> Chart:
    """Draws quality against speed-up or, if nothing was timed, against the rejected share of examined draft tokens.

    Args:
        panel: the group of curves to draw.
        places: the plot positions of the panel's points.
        anchors: the id of the HTML element that a point links to, by the `id()` of the point's `Spot`.
        commands: the command that runs a point again, by the `id()` of the point's `Spot`.
    """
    from speccascade_jax.results.report.figures import drawing, tradeoff

    figure, plots = drawing.subplots(1, 1, (5.2, 4.8))
    if tradeoff.is_timed(panel):
        tradeoff.speed_plot(plots[0, 0], panel, places, anchors)
    else:
        tradeoff.share_plot(plots[0, 0], panel, places, "rejection_rate", anchors)
    tradeoff.legend(figure)
    everything = [*places.ends, *(place for curve in places.curves.values() for place in curve)]
    tips = {anchors[id(p.spot)]: _tip(p, commands.get(id(p.spot), "")) for p in everything if anchors.get(id(p.spot))}
    return Chart(drawing.as_svg(figure), tips)


def _tip(place: Place, command: str) -> str:
    """Returns a point's numbers and its command, one line each."""
    spot, quality = place.spot, f"quality {place.spot.quality.value:.2f}"
    lines = [spot.name(), f"{quality} (minus the target's: {spanned(place.difference, '+.2f')})"]
    if place.latency:
        lines.append(f"speed-up {spanned(place.latency.inverse(), '.2f')}")
    if rejected := spot.measures.get("rejection_rate"):
        lines.append(f"rejected {rejected.value:.1%}")
    return "\n".join([*lines, command])


def spanned(interval: Interval, form: str) -> str:
    """Returns an interval as text, such as `0.81 [0.75, 0.90]`; the value alone if both ends are equal."""
    return f"{interval.value:{form}}" if interval.low == interval.high else interval.text(form)


def rejections(places: Places, outputs: Mapping[int, Sequence[Output] | None]) -> list[Chart]:
    """Draws the rejected share against the position in the block, and against the divergence of draft and target.

    Args:
        places: the plot positions of a panel's points.
        outputs: outputs of each point, by the `id()` of the point's `Spot`. Their traces contain the divergences.
    """
    chosen = {name: curve[len(curve) // 2].spot for name, curve in places.curves.items()}
    positions = {name: by_position(spot) for name, spot in chosen.items()}
    traces = {name: [o.trace for o in outputs.get(id(spot)) or () if o.trace] for name, spot in chosen.items()}
    distances = {name: by_divergence(curve_traces) for name, curve_traces in traces.items()}
    labels = {name: spot.label for name, spot in chosen.items()}
    axes = ("position in the block, from 1", positions), ("TV(q, p) at the position", distances)
    return [_lines(axis, lines, labels) for axis, lines in axes if any(lines.values())]


def _lines(axis: str, lines: Mapping[str, Sequence[tuple[float, float]]], labels: Mapping[str, str]) -> Chart:
    """Draws the rejected share against a quantity, with a line per curve."""
    from speccascade_jax.results.report.figures import drawing, tradeoff
    from speccascade_jax.results.report.figures.styles import dashes, styles

    figure, plots = drawing.subplots(1, 1, (5.2, 3.6))
    looks = styles(lines)
    for name, points in lines.items():
        if points:
            colour, marker = looks[name]
            look = {"color": colour, "marker": marker, "ls": dashes(marker), "ms": 9 if marker == "*" else 6}
            plots[0, 0].plot(*zip(*points, strict=True), label=labels[name], lw=1.6, **look)
    plots[0, 0].set(xlabel=axis, ylabel="rejected share of draft tokens")
    plots[0, 0].set_ylim(bottom=0)
    if all(isinstance(x, int) for points in lines.values() for x, _ in points):
        plots[0, 0].locator_params(axis="x", integer=True)
    drawing.plain(plots[0, 0])
    tradeoff.legend(figure)
    return Chart(drawing.as_svg(figure))


BINS = 10
"""Number of bins of the divergence (total variation)."""


def by_position(spot: Spot) -> list[tuple[int, float]]:
    """Returns the rejected share of the tokens examined at each position (from 1), over all seeds."""
    counted = [counts for record in spot.records if (counts := record.get("by_position"))]
    longest = max((len(counts["examined"]) for counts in counted), default=0)
    examined, kept = (
        [
            sum(column)
            for column in zip(*(counts[name] + [0] * (longest - len(counts[name])) for counts in counted), strict=True)
        ]
        for name in ("examined", "kept")
    )
    return [(n + 1, 1 - kept[n] / examined[n]) for n in range(longest) if examined[n]]


def by_divergence(traces: Iterable[Trace]) -> list[tuple[float, float]]:
    """Returns the middle of each bin of total variation, and the rejected share of tokens examined in the bin."""
    examined, rejected = [0] * BINS, [0] * BINS
    for step in (step for trace in traces for round_ in trace.rounds for step in round_.steps):
        if step.fate in ("kept", "rejected") and step.divergence is not None:
            place = min(int(step.divergence * BINS), BINS - 1)
            examined[place] += 1
            rejected[place] += step.fate == "rejected"
    return [((n + 0.5) / BINS, rejected[n] / examined[n]) for n in range(BINS) if examined[n]]
