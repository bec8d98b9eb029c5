"""The report's charts, by Bokeh: a well-kept library whose script (1.3 MB) goes into the page and asks no server.

The others that were looked at: plotly's script alone is as large as a whole report may be, and Vega's comes in a binary
of 30 MB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from speccascade_jax.results.analysis.bootstrap import Interval
from speccascade_jax.results.analysis.relative_to_target import Place, Places
from speccascade_jax.results.report.figures.styles import styles
from speccascade_jax.results.report.rejections import by_divergence, by_position
from speccascade_jax.results.store.outputs import Output

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
    keys = [Key(looks[name][0], SIGNS[looks[name][1]], curve[0].spot.label) for name, curve in found.curves.items()]
    return keys


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
    points = []
    for name, curve in found.curves.items():
        points += _curve(made, curve, *looks[name], timed, anchors, commands)
    for place in found.ends:
        points += _curve(made, [place], "#444444", "o", timed, anchors, commands, hollow=True)
    if found.chosen and timed:
        at = ColumnDataSource({"x": [_x(found.chosen, timed)], "y": [found.chosen.difference.value]})
        made.scatter("x", "y", source=at, size=24, marker="circle", fill_color=None, line_color="#2e7d32",
                     line_width=2.5)  # fmt: skip
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


def _x(place: Place, timed: bool) -> float:
    if timed:
        return place.latency.value if place.latency else float("nan")
    rejected = place.spot.measures.get("rejection_rate")
    return rejected.value if rejected else float("nan")


def _curve(
    made: Any,
    curve: Sequence[Place],
    colour: str,
    marker: str,
    timed: bool,
    anchors: Mapping[int, str],
    commands: Mapping[int, str],
    hollow: bool = False,
) -> list[Any]:
    """Draw a curve; returns what can be pointed at."""
    from bokeh.models import ColumnDataSource

    shown = [place for place in curve if not math.isnan(_x(place, timed))]
    if not shown:
        return []
    ys = [place.difference for place in shown]
    xs = [place.latency if timed and place.latency else Interval(*(_x(place, timed),) * 3) for place in shown]
    data: dict[str, list[Any]] = {"x": [x.value for x in xs], "y": [y.value for y in ys]}
    data |= {"low": [y.low for y in ys], "high": [y.high for y in ys]}
    data |= {"left": [x.low for x in xs], "right": [x.high for x in xs]}
    data |= {name: [_told(place)[name] for place in shown] for name in _told(shown[0])}
    data |= {"anchor": [anchors.get(id(place.spot), "") for place in shown]}
    data |= {"command": [commands.get(id(place.spot), "") for place in shown]}
    source = ColumnDataSource(data)
    bars = {"source": source, "line_color": colour, "line_alpha": 0.35}
    made.segment("x", "low", "x", "high", **bars)
    made.segment("left", "y", "right", "y", **bars)
    if len(shown) > 1:
        made.line("x", "y", source=source, color=colour, line_width=2)
    fill = "#ffffff" if hollow else colour
    return [
        made.scatter(
            "x",
            "y",
            source=source,
            size=11,
            marker=MARKERS[marker],
            fill_color=fill,
            line_color=colour,
            line_width=2 if hollow else 1,
        )
    ]


def _told(place: Place) -> dict[str, str]:
    """What hovering over a place says."""
    spot, rejected = place.spot, place.spot.measures.get("rejection_rate")
    quick = place.latency
    return {
        "name": spot.name(),
        "quality": f"{spot.quality.value:.2f}",
        "difference": spanned(place.difference, "+.2f"),
        "latency": "not timed" if quick is None else spanned(quick, ".2f"),
        "speed": ""
        if quick is None
        else spanned(Interval(1 / quick.value, 1 / quick.high, 1 / quick.low), ".2f") + "×",
        "rejected": f"{rejected.value:.1%}" if rejected else "–",
    }


def spanned(interval: Interval, form: str) -> str:
    """`0.81 [0.75, 0.90]`."""
    if interval.low == interval.high:
        return f"{interval.value:{form}}"
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def rejections(found: Places, outputs: Mapping[int, Sequence[Output]]) -> list[Any]:
    """Where drafted tokens are rejected: by position in the block, and by how far the two laws are apart.

    Args:
        outputs: by `id` of a spot; those with traces say how far the laws were apart.
    """
    looks, made = styles(found.curves), []
    chosen = {name: curve[len(curve) // 2] for name, curve in found.curves.items()}
    positions = {name: by_position(place.spot) for name, place in chosen.items()}
    traces = {name: [o.trace for o in outputs.get(id(place.spot), ()) if o.trace] for name, place in chosen.items()}
    distances = {name: by_divergence(each) for name, each in traces.items()}
    for axis, lines in (("position in the block, from 1", positions), ("TV(q, p) at the position", distances)):
        if not any(lines.values()):
            continue
        one = _figure(height=340)
        for name, line in lines.items():
            if line:
                xs, ys = zip(*line, strict=True)
                one.line(xs, ys, color=looks[name][0], line_width=2)
                one.scatter(xs, ys, color=looks[name][0], size=8, marker=MARKERS[looks[name][1]])
        one.xaxis.axis_label, one.yaxis.axis_label = axis, "rejected share of those examined"
        one.y_range.start = 0
        made.append(one)
    return made
