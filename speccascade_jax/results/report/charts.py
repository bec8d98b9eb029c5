"""Charts of the report, drawn by Bokeh, whose script (1.3 MB) is embedded in the page so that it needs no server.

Two alternative libraries are too large: plotly's script alone exceeds the size limit of a report, and Vega needs a
binary of 30 MB.
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
    """Returns Bokeh's script, which is embedded in the page."""
    from bokeh.resources import Resources

    javascript: str = Resources(mode="inline", components=["bokeh"], minified=True).render_js()
    return javascript


def embedded(figures: Sequence[Any]) -> tuple[str, list[str]]:
    """Returns a script that draws all figures, and the HTML placeholder of each figure."""
    from bokeh.embed import components

    code, places = components(tuple(figures))
    return str(code), [str(placeholder) for placeholder in places]


def _figure(**more: Any) -> Any:
    from bokeh.plotting import figure

    plot = figure(sizing_mode="stretch_width", tools="pan,box_zoom,reset,save", toolbar_location="above", **more)
    plot.toolbar.logo = None
    plot.xgrid.grid_line_color = plot.ygrid.grid_line_color = "#e6e6e6"
    plot.outline_line_color = None
    return plot


class Key(NamedTuple):
    """An entry of a legend; the legend is text below the plot, because text wraps on narrow screens."""

    colour: str
    sign: str
    label: str


def curves_key(places: Places) -> list[Key]:
    """Returns the legend of a panel's curves."""
    looks = styles(places.curves)
    return [Key(looks[name][0], SIGNS[looks[name][1]], curve[0].spot.label) for name, curve in places.curves.items()]


def ends_key(places: Places, timed: bool) -> list[Key]:
    """Returns the legend of all elements of the plot that are not curves."""
    keys = [Key("#444444", "○", "target alone and draft alone")]
    if places.random and timed:
        keys.append(Key("#bdbdbd", "▬", "whole requests sent at random"))
    if places.chosen and timed:
        keys.append(Key("#2e7d32", "◯", places.ring))
    return keys


def trade_off(places: Places, metric: str, anchors: Mapping[int, str], commands: Mapping[int, str]) -> Any:
    """Draws the quality minus the target's quality against the relative latency, as an interactive chart.

    If nothing was timed, the horizontal axis shows the rejected share of examined draft tokens.

    Args:
        places: the plot positions of a panel's points.
        metric: name of the metric, for the vertical axis.
        anchors: the HTML element that a click on a point opens, by the spot's `id()`.
        commands: the command that runs a point again, by the spot's `id()`.
    """
    from bokeh.models import ColumnDataSource, CustomJSTickFormatter, HoverTool, OpenURL, TapTool
    from bokeh.models.annotations import BoxAnnotation, Span

    timed = any(place.latency for curve in places.curves.values() for place in curve)
    plot = _figure(height=480)
    looks = styles(places.curves)
    plot.add_layout(BoxAnnotation(bottom=-places.margin, top=0, fill_color="#2e7d32", fill_alpha=0.08))
    plot.add_layout(Span(location=0, dimension="width", line_color=_GREY, line_dash="dotted"))
    if places.random and timed:
        plot.line(*places.random, color="#bdbdbd", line_width=4)
    curves = [(curve, *looks[name], False) for name, curve in places.curves.items()]
    points = []
    for curve, colour, marker, hollow in [*curves, *(([place], "#444444", "o", True) for place in places.ends)]:
        shown = [(place, x) for place in curve if (x := _horizontal(place, timed))]
        if shown:
            points.append(_curve(plot, ColumnDataSource(_table(shown, anchors, commands)), colour, marker, hollow))
    if places.chosen and places.chosen.latency:
        ring = {"size": 24, "marker": "circle", "fill_color": None, "line_color": "#2e7d32", "line_width": 2.5}
        position = {"x": [places.chosen.latency.value], "y": [places.chosen.difference.value]}
        plot.scatter("x", "y", source=ColumnDataSource(position), **ring)
    plot.add_tools(HoverTool(renderers=points, tooltips=_HOVER), TapTool(renderers=points))
    plot.select_one(TapTool).callback = OpenURL(url="#@anchor", same_tab=True)
    if timed:
        plot.xaxis.axis_label = "latency relative to the target alone (below: speed-up); left is faster"
        plot.xaxis.formatter = CustomJSTickFormatter(code=_SPEED)
    else:
        plot.xaxis.axis_label = "rejected share of examined draft tokens"
    plot.yaxis.axis_label = f"{metric} minus the target's; bars: paired 95% confidence intervals"
    return plot


_HOVER = """<div style="max-width:24rem"><b>@name</b><br>quality @quality (minus the target's: @difference)<br>
latency @latency (@speed)<br>rejected @rejected<br><code style="font-size:11px">@command</code></div>"""


def _horizontal(place: Place, timed: bool) -> Interval | None:
    """Returns a point's horizontal position: its latency or, if nothing was timed, its rejected share without bars."""
    if timed:
        return place.latency
    rejected = place.spot.measures.get("rejection_rate")
    return rejected and Interval(*[rejected.value] * 3)


def _table(
    shown: Sequence[tuple[Place, Interval]], anchors: Mapping[int, str], commands: Mapping[int, str]
) -> dict[str, list[Any]]:
    """Returns the columns from which a curve is drawn, and those of the text shown when the pointer is over a point."""
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
        "latency": [spanned(interval, ".2f") if interval else "not timed" for interval in quick],
        "speed": [spanned(interval.inverse(), ".2f") + "×" if interval else "" for interval in quick],
        "rejected": [f"{interval.value:.1%}" if interval else "–" for interval in rejected],
        "anchor": [anchors.get(id(spot), "") for spot in spots],
        "command": [commands.get(id(spot), "") for spot in spots],
    }


def _curve(plot: Any, source: Any, colour: str, marker: str, hollow: bool) -> Any:
    """Draws a curve with its error bars; returns the renderer of the markers, which shows the hover text."""
    bars = {"source": source, "line_color": colour, "line_alpha": 0.35}
    plot.segment("x", "low", "x", "high", **bars)
    plot.segment("left", "y", "right", "y", **bars)
    if len(source.data["x"]) > 1:
        plot.line("x", "y", source=source, color=colour, line_width=2)
    look = {"fill_color": "#ffffff", "line_width": 2} if hollow else {"fill_color": colour, "line_width": 1}
    return plot.scatter("x", "y", source=source, size=11, marker=MARKERS[marker], line_color=colour, **look)


def spanned(interval: Interval, form: str) -> str:
    """Returns an interval as text, such as `0.81 [0.75, 0.90]`; the value alone if both ends are equal."""
    return f"{interval.value:{form}}" if interval.low == interval.high else interval.text(form)


def rejections(places: Places, outputs: Mapping[int, Sequence[Output] | None]) -> list[Any]:
    """Draws the rejected share against the position in the block, and against the divergence of draft and target.

    Args:
        places: the plot positions of a panel's points.
        outputs: outputs of each point, by the spot's `id()`; the divergences are in their traces.
    """
    looks, figures = styles(places.curves), []
    chosen = {name: curve[len(curve) // 2].spot for name, curve in places.curves.items()}
    positions = {name: by_position(spot) for name, spot in chosen.items()}
    traces = {name: [o.trace for o in outputs.get(id(spot)) or () if o.trace] for name, spot in chosen.items()}
    distances = {name: by_divergence(curve_traces) for name, curve_traces in traces.items()}
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
        figure.xaxis.axis_label, figure.yaxis.axis_label = axis, "rejected share of examined draft tokens"
        figure.y_range.start = 0
        figures.append(figure)
    return figures


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
