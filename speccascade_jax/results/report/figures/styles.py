"""Colours, markers and error bars of curves, the same in all figures. Needs no plotting library."""

import colorsys
import math
import statistics
from collections.abc import Iterable
from typing import Any

from speccascade_jax.results.analysis.panels import Panel, metric_name
from speccascade_jax.results.analysis.significance import Place, Places

INK, FAINT, LINE, PAPER = "#1c1c1c", "#6a6a6a", "#d5d5d5", "#ffffff"
"""Colours of text, of less important text, of grids and of the background: those of the report in a light theme."""
COIN, RING, OTHER = "#9a9a9a", "#14763b", "#b5b5b5"
"""Colours of the line of random requests, of the ring around the chosen point, and of curves in the background."""

# the palette of Okabe and Ito, whose colours are distinct for people with the common kinds of colour blindness; two
# curves of one colour have different markers
STYLES = {
    "spec_decode": (INK, "D"),
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
# muted colours by Paul Tol, and some colours between them; none of them is in the palette above
_SPARE = (
    "#117733", "#332288", "#882255", "#44AA99", "#999933", "#AA4499", "#661100", "#6699CC", "#DDCC77", "#CC6677",
    "#2F4B26", "#7A4FBF",
)  # fmt: skip
_MARKERS = "hdpH"
DASHES = {"v": ":", "^": "--", "o": "-.", "s": (0, (5, 1, 1, 1, 1, 1)), "P": (0, (1, 2)), "X": (0, (6, 2)), "<": "--"}
"""Dashes of a curve's line, by the curve's marker, so that curves can be distinguished without colours."""


def dashes(marker: str) -> Any:
    """Returns the line style, in matplotlib's form, of a curve with this marker."""
    return DASHES.get(marker, "-")


def styles(curves: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns the colour and marker of each curve: its fixed style, or a spare style with a colour of its own."""
    looks, spare = {}, 0
    for curve in curves:
        if curve not in STYLES:
            looks[curve] = _spare(spare), _MARKERS[spare % len(_MARKERS)]
            spare += 1
        else:
            looks[curve] = STYLES[curve]
    return looks


def _spare(number: int) -> str:
    """Returns the spare colour of index `number`; after the end of the list, hues that never repeat."""
    if number < len(_SPARE):
        return _SPARE[number]
    hue = (number - len(_SPARE)) * 0.61803398875 % 1.0  # the golden ratio spreads any number of hues evenly
    return "#" + "".join(f"{round(255 * channel):02X}" for channel in colorsys.hls_to_rgb(hue, 0.42, 0.55))


FEW_POINTS = 4
"""Number of points up to which all of them have error bars."""


def bar_note(panel: Panel, panel_places: Places) -> str:
    """Returns a line about the error bars, with the mean size of the intervals that are not drawn."""
    bands = " and bands" * bool(panel.predicted)
    drawn = barred(panel_places)
    hidden = [place for curve in panel_places.curves.values() for place in curve if id(place) not in drawn]
    if not hidden:
        return f"bars: paired 95% intervals{bands}"
    quality = statistics.fmean((place.difference.high - place.difference.low) / 2 for place in hidden)
    speeds = [speed for place in hidden if (speed := place.latency and place.latency.inverse())]
    sizes = [f"±{quality:.1f} {metric_name(panel.metric)}"]
    sizes += [f"±{statistics.fmean((speed.high - speed.low) / 2 for speed in speeds):.2f}×"] if speeds else []
    return f"bars: paired 95% interval{bands} of the ringed point; others about {', '.join(sizes)}"


def barred(panel_places: Places) -> set[int]:
    """Returns the `id()`s of the places with error bars: all places if there are few, otherwise the chosen place."""
    all_places = [place for curve in panel_places.curves.values() for place in curve]
    few = len(all_places) <= FEW_POINTS or panel_places.chosen is None
    return set(map(id, all_places)) if few else {id(panel_places.chosen)}


FEW = 5
"""Number of curves up to which all of them are drawn in colour."""


def prominent(panel_places: Places) -> set[str]:
    """Returns the curves to draw in colour: all curves if there are few, otherwise the lossless and the unbeaten ones.

    A curve is unbeaten if one of its points is faster than every other point of at least the same quality.
    """
    if len(panel_places.curves) <= FEW:
        return set(panel_places.curves)
    timed = any(place.latency for curve in panel_places.curves.values() for place in curve)
    kept = {name for name, curve in panel_places.curves.items() if curve[0].spot.records[0]["point"].get("lossless")}
    highest = -math.inf
    costs = [
        (_cost(place, timed), -place.difference.value, name)
        for name, curve in panel_places.curves.items()
        for place in curve
        if not place.spot.inconclusive
    ]
    for cost, loss, name in sorted(costs):
        if cost < math.inf and -loss > highest:
            highest = -loss
            kept.add(name)
    return kept


def _cost(place: Place, timed: bool) -> float:
    """Returns a point's latency, or its rejected share if nothing was timed; infinite if it was not measured."""
    value = place.latency if timed else place.spot.measures.get("rejection_rate")
    return value.value if value else math.inf
