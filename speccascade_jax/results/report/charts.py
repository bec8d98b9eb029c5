"""The report's charts, by Bokeh: a well-kept library whose script (1.3 MB) goes into the page and asks no server.

The others that were looked at: plotly's script alone is as large as a whole report may be, and Vega's comes in a binary
of 30 MB.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from speccascade_jax.results.analysis.bootstrap import Interval
from speccascade_jax.results.analysis.panels import Spot
from speccascade_jax.results.analysis.significance import Place, Places
from speccascade_jax.results.report.figures.styles import styles
from speccascade_jax.results.store.outputs import Output
from speccascade_jax.results.store.trace import Trace

MARKERS = {
    "D": "diamond", "s": "square", "P": "plus", "X": "x", "v": "inverted_triangle", "^": "triangle", "o": "circle",
    "*": "star", "<": "hex", ">": "triangle_pin", "h": "hex", "d": "diamond_dot", "p": "square_pin", "H": "circle_dot",
}  # fmt: skip
SIGNS = dict(zip("DsPXv^o*<>hdpH", "◆■✚✖▼▲●★⬢◭⬢◈▣⊙", strict=True))
_SPEED = "return tick.toFixed(2) + '\\n' + (1 / tick).toFixed(1) + '×'"
_GREY = "#8a8a8a"


def script() -> str:
    """Bokeh's own script, to stand in the page."""
    from bokeh.resources import Resources

    found: str = Resources(mode="inline", components=["bokeh"], minified=True).render_js()
    return found


def embedded(figures: Sequence[Any]) -> tuple[str, list[str]]:
    """A script of all figures, and where each stands."""
    from bokeh.embed import components

    code, places = components(tuple(figures))
    return str(code), [str(each) for each in places]


def _figure(**more: Any) -> Any:
    from bokeh.plotting import figure

    made = figure(sizing_mode="stretch_width", tools="pan,box_zoom,reset,save", toolbar_location="above", **more)
    made.toolbar.logo = None
    made.xgrid.grid_line_color = made.ygrid.grid_line_color = "#e6e6e6"
    made.outline_line_color = None
    return made


class Key(NamedTuple):
    """A line of a legend: it stands below the plot as text, which wraps on narrow screens."""

    colour: str
    sign: str
    label: str


def curves_key(found: Places) -> list[Key]:
    """The legend of a panel's curves."""
    looks = styles(found.curves)
    return [Key(looks[name][0], SIGNS[looks[name][1]], curve[0].spot.label) for name, curve in found.curves.items()]


def ends_key(found: Places, timed: bool) -> list[Key]:
    """The legend of what stands beside the curves."""
    keys = [Key("#444444", "○", "target alone and draft alone")]
    if found.random and timed:
        keys.append(Key("#bdbdbd", "▬", "whole requests sent at random"))
    if found.chosen and timed:
        keys.append(Key("#2e7d32", "◯", f"fastest within {found.margin:g} of the target"))
    return keys


def trade_off(found: Places, metric: str, anchors: Mapping[int, str], commands: Mapping[int, str]) -> Any:
    """Quality less the target's against relative latency; of spots that were not timed, against the rejected share.

    Args:
        anchors, commands: by `id` of a spot: the element that a click opens, and the command that made it.
    """
    from bokeh.models import ColumnDataSource, CustomJSTickFormatter, HoverTool, OpenURL, TapTool
    from bokeh.models.annotations import BoxAnnotation, Span

    timed = any(place.latency for curve in found.curves.values() for place in curve)
    made = _figure(height=480)
    looks = styles(found.curves)
    made.add_layout(BoxAnnotation(bottom=-found.margin, top=0, fill_color="#2e7d32", fill_alpha=0.08))
    made.add_layout(Span(location=0, dimension="width", line_color=_GREY, line_dash="dotted"))
    if found.random and timed:
        made.line(*found.random, color="#bdbdbd", line_width=4)
    curves = [(curve, *looks[name], False) for name, curve in found.curves.items()]
    points = []
    for curve, colour, marker, hollow in [*curves, *(([place], "#444444", "o", True) for place in found.ends)]:
        shown = [(place, x) for place in curve if (x := _horizontal(place, timed))]
        if shown:
            points.append(_curve(made, ColumnDataSource(_table(shown, anchors, commands)), colour, marker, hollow))
    if found.chosen and found.chosen.latency:
        ring = {"size": 24, "marker": "circle", "fill_color": None, "line_color": "#2e7d32", "line_width": 2.5}
        at = {"x": [found.chosen.latency.value], "y": [found.chosen.difference.value]}
        made.scatter("x", "y", source=ColumnDataSource(at), **ring)
    made.add_tools(HoverTool(renderers=points, tooltips=_HOVER), TapTool(renderers=points))
    made.select_one(TapTool).callback = OpenURL(url="#@anchor", same_tab=True)
    if timed:
        made.xaxis.axis_label = "latency relative to the target alone (below: speed-up); left is faster"
        made.xaxis.formatter = CustomJSTickFormatter(code=_SPEED)
    else:
        made.xaxis.axis_label = "rejected share of examined draft tokens"
    made.yaxis.axis_label = f"{metric} less the target's; bars: paired 95% intervals"
    return made


_HOVER = """<div style="max-width:24rem"><b>@name</b><br>quality @quality, less the target's @difference<br>
latency @latency (@speed)<br>rejected @rejected<br><code style="font-size:11px">@command</code></div>"""


def _horizontal(place: Place, timed: bool) -> Interval | None:
    """Returns where a place stands: its latency, or the rejected share, which has no bars."""
    if timed:
        return place.latency
    rejected = place.spot.measures.get("rejection_rate")
    return rejected and Interval(*[rejected.value] * 3)


def _table(
    shown: Sequence[tuple[Place, Interval]], anchors: Mapping[int, str], commands: Mapping[int, str]
) -> dict[str, list[Any]]:
    """Returns the columns that a curve is drawn from, and what hovering over its places says."""
    spots, ys, xs = [place.spot for place, _ in shown], [place.difference for place, _ in shown], [x for _, x in shown]
    quick, rejected = [place.latency for place, _ in shown], [spot.measures.get("rejection_rate") for spot in spots]
    return {
        "x": [x.value for x in xs],
        "y": [y.value for y in ys],
        "low": [y.low for y in ys],
        "high": [y.high for y in ys],
        "left": [x.low for x in xs],
        "right": [x.high for x in xs],
        "name": [spot.name() for spot in spots],
        "quality": [f"{spot.quality.value:.2f}" for spot in spots],
        "difference": [spanned(y, "+.2f") for y in ys],
        "latency": [spanned(each, ".2f") if each else "not timed" for each in quick],
        "speed": [spanned(each.inverse(), ".2f") + "×" if each else "" for each in quick],
        "rejected": [f"{each.value:.1%}" if each else "–" for each in rejected],
        "anchor": [anchors.get(id(spot), "") for spot in spots],
        "command": [commands.get(id(spot), "") for spot in spots],
    }


def _curve(made: Any, source: Any, colour: str, marker: str, hollow: bool) -> Any:
    """Draws a curve with its bars; returns what can be pointed at."""
    bars = {"source": source, "line_color": colour, "line_alpha": 0.35}
    made.segment("x", "low", "x", "high", **bars)
    made.segment("left", "y", "right", "y", **bars)
    if len(source.data["x"]) > 1:
        made.line("x", "y", source=source, color=colour, line_width=2)
    look = {"fill_color": "#ffffff", "line_width": 2} if hollow else {"fill_color": colour, "line_width": 1}
    return made.scatter("x", "y", source=source, size=11, marker=MARKERS[marker], line_color=colour, **look)


def spanned(interval: Interval, form: str) -> str:
    """`0.81 [0.75, 0.90]`."""
    return f"{interval.value:{form}}" if interval.low == interval.high else interval.text(form)


def rejections(found: Places, outputs: Mapping[int, Sequence[Output] | None]) -> list[Any]:
    """Where drafted tokens are rejected: by position in the block, and by how far the two laws are apart.

    Args:
        outputs: by `id` of a spot; those with traces say how far the laws were apart.
    """
    looks, made = styles(found.curves), []
    chosen = {name: curve[len(curve) // 2].spot for name, curve in found.curves.items()}
    positions = {name: by_position(spot) for name, spot in chosen.items()}
    traces = {name: [o.trace for o in outputs.get(id(spot)) or () if o.trace] for name, spot in chosen.items()}
    distances = {name: by_divergence(each) for name, each in traces.items()}
    for axis, lines in (("position in the block, from 1", positions), ("TV(q, p) at the position", distances)):
        if not any(lines.values()):
            continue
        figure = _figure(height=340)
        for name, line in lines.items():
            if line:
                xs, ys = zip(*line, strict=True)
                colour, marker = looks[name]
                figure.line(xs, ys, color=colour, line_width=2)
                figure.scatter(xs, ys, color=colour, size=8, marker=MARKERS[marker])
        figure.xaxis.axis_label, figure.yaxis.axis_label = axis, "rejected share of those examined"
        figure.y_range.start = 0
        made.append(figure)
    return made


BINS = 10
"""Of the distance between the laws."""


def by_position(spot: Spot) -> list[tuple[int, float]]:
    """Counts, by position (from 1), the rejected share of the tokens examined there, over all seeds."""
    counted = [each for record in spot.records if (each := record.get("by_position"))]
    longest = max((len(each["examined"]) for each in counted), default=0)
    examined, kept = (
        [
            sum(column)
            for column in zip(*(each[name] + [0] * (longest - len(each[name])) for each in counted), strict=True)
        ]
        for name in ("examined", "kept")
    )
    return [(n + 1, 1 - kept[n] / examined[n]) for n in range(longest) if examined[n]]


def by_divergence(traces: Iterable[Trace]) -> list[tuple[float, float]]:
    """Counts, by the middle of each tenth of total variation, the rejected share of the tokens examined there."""
    examined, rejected = [0] * BINS, [0] * BINS
    for step in (step for trace in traces for round_ in trace.rounds for step in round_.steps):
        if step.fate in ("kept", "rejected") and step.divergence is not None:
            place = min(int(step.divergence * BINS), BINS - 1)
            examined[place] += 1
            rejected[place] += step.fate == "rejected"
    return [((n + 0.5) / BINS, rejected[n] / examined[n]) for n in range(BINS) if examined[n]]
