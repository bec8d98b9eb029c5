"""Where the points of a panel lie: quality as the difference to the target, latency as a share of its, with intervals.

The examples are the same for both sides, and what makes one hard or slow cancels: a paired interval is what a picture
may show, and far narrower than the spread of the quality itself. Needs no JAX.
"""

from __future__ import annotations

from typing import NamedTuple

from speccascade_jax.results.analysis import baselines
from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval, has_latency, judged_alike
from speccascade_jax.results.analysis.panels import LOSS, Panel, Spot, Value
from speccascade_jax.results.analysis.significance import noise


class Place(NamedTuple):
    """A spot; its latency relative to the target's, `None` where it was not timed; its quality less the target's.

    Both are paired intervals; where records hold too few single examples, the value alone.
    """

    spot: Spot
    latency: Interval | None
    difference: Interval


class Places(NamedTuple):
    """Those of a panel.

    Attributes:
        curves: as in the panel; ends: the target's and the draft's.
        random: relative latencies and differences of whole requests sent at random, or `None`.
        margin: how much quality may be lost; chosen: the fastest place within it, `None` where none is faster than the
            target.
    """

    curves: dict[str, list[Place]]
    ends: list[Place]
    random: tuple[list[float], list[float]] | None
    margin: float
    chosen: Place | None


def places(panel: Panel, margin: float = LOSS, bootstrap: Bootstrap | None = None) -> Places:
    """The places of a panel's spots; without a record of the target alone qualities stand as they are."""
    target, sampled, floor = panel.target, bootstrap or Bootstrap(), noise(panel)
    curves = {name: [_place(spot, target, sampled, floor) for spot in spots] for name, spots in panel.curves.items()}
    ends = [_place(spot, target, sampled, floor) for spot in panel.ends]
    line, base = baselines.line(panel), target.quality.value if target else 0.0
    drawn = None if line is None else (line.latency.tolist(), (line.quality - base).tolist())
    found = [place for curve in curves.values() for place in curve]
    within = [
        each
        for each in found
        if target
        and each.latency
        and each.latency.value < 1
        and each.difference.value >= -margin
        and not each.spot.inconclusive
    ]
    chosen = min(within, key=lambda each: each.latency.value if each.latency else 1.0, default=None)
    return Places(curves, ends, drawn, margin, chosen)


def _place(spot: Spot, target: Spot | None, bootstrap: Bootstrap, floor: float) -> Place:
    if target is None:
        difference = _of(spot.quality)
    elif judged_alike((*spot.records, *target.records)):
        difference = bootstrap.quality_difference(spot.records, target.records)
    else:
        gap = spot.quality.value - target.quality.value
        difference = Interval(gap, gap, gap)
    return Place(spot, _latency(spot, target, bootstrap, floor), difference)


def _latency(spot: Spot, target: Spot | None, bootstrap: Bootstrap, floor: float) -> Interval | None:
    if spot is target:  # beside which everything else is timed
        return Interval(1.0, 1.0, 1.0) if spot.latency else None
    if spot.latency is None:
        return None
    if all(map(has_latency, spot.records)):
        return bootstrap.latency_ratio(spot.records).at_least(floor)
    return _of(spot.latency)


def _of(value: Value) -> Interval:
    return Interval(value.value, value.low, value.high)
