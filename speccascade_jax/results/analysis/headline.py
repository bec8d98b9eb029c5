"""One sentence about the result of a panel (a group of comparable curves): how fast the best point is, at what loss.

The sentence is about the point that plots mark with a ring: the fastest one with little or no loss of quality
(`significance.Places.chosen`). The sentence also names the fastest lossless method, for comparison. It calls a
difference measurable only if a paired 95% interval excludes equality. The intervals ignore that the point was chosen on
the same examples. Needs no JAX.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from speccascade_jax.results.analysis import significance
from speccascade_jax.results.analysis.bootstrap import LEAST_EXAMPLES, Bootstrap, Interval
from speccascade_jax.results.analysis.panels import Panel, Spot, metric_name
from speccascade_jax.results.analysis.significance import Place, Places


class Headline(NamedTuple):
    """A sentence about a panel, and the speed-up of the point in it.

    `speed` is `None` unless the point is measurably faster than the target, without a measurable loss of quality.
    """

    text: str
    speed: float | None = None


def headline(panel: Panel, places: Places | None = None) -> Headline:
    """Returns the result of a panel; `places` are its points' positions, if they are already computed."""
    places = places or significance.places(panel)
    spots = [place for curve in places.curves.values() for place in curve]
    if not spots:
        return Headline(_ends_only(panel, places))
    if not any(place.latency for place in spots):
        return Headline(_untimed(panel, spots))
    source = f"Predicted for {panel.predicted}, not measured: " if panel.predicted else ""
    if places.chosen is None:
        return Headline(source + _nothing_better(panel, places, spots))
    speed, sure = _speed(panel, places.chosen)
    loss, lossless = quality(panel, places.chosen.spot)
    text = f"{source}{name(places.chosen.spot)} {speed}{beside_lossless(panel, places.chosen)}{loss}"
    return Headline(
        text, places.chosen.latency.inverse().value if sure and lossless and places.chosen.latency else None
    )


def summary(panels: Sequence[Panel], headlines: Sequence[Headline]) -> str:
    """Returns the headline of a single panel, or in how many of several panels a method is faster without a loss."""
    if len(headlines) == 1:
        return headlines[0].text
    speeds = [entry.speed for entry in headlines if entry.speed]
    metrics = " or ".join(dict.fromkeys(metric_name(panel.metric) for panel in panels))
    count = f"{len(speeds)} of {len(headlines)} settings" if speeds else f"none of {len(headlines)} settings"
    said = f"In {count}, a method is measurably faster than the target with no measurable loss of {metrics}"
    if not speeds:
        return said
    span = " to ".join(dict.fromkeys(f"{speed:.2f}" for speed in (min(speeds), max(speeds))))
    return f"{said} ({span} times as fast)"


def name(spot: Spot) -> str:
    """Returns a point's name as the subject of a sentence, such as "SpecCascade [Token] at α 0.5"."""
    return spot.label + ("" if spot.alpha is None else f" at {spot.axis} {spot.alpha:g}")


def _speed(panel: Panel, place: Place) -> tuple[str, bool]:
    """Returns a clause about the speed of a point that is faster than the target, and whether this is certain."""
    assert place.latency is not None, place.spot.label
    speed = place.latency.inverse()
    shown = f"{speed.value:.2f} times as fast{brackets(speed, '.2f')}"
    if panel.predicted:
        return f"is {speed.value:.2f} times as fast as the target{brackets(speed, '.2f')}", speed.low > 1
    if not significance.tried(place.spot):
        return f"seems {shown} as the target, on too few trials or examples to be certain", False
    if speed.low <= 1:
        return f"is not measurably faster than the target ({shown})", False
    return f"is {speed.value:.2f} times as fast as the target{brackets(speed, '.2f')}", True


def beside_lossless(panel: Panel, place: Place) -> str:
    """Returns a clause that compares a point with the fastest lossless point.

    The clause is empty if there is no lossless point, or if the point itself is lossless.
    """
    alternatives = [spot for spot in panel.spots if _is_lossless(spot) and spot.latency and not spot.inconclusive]
    if _is_lossless(place.spot) or not alternatives:
        return ""
    best = min(alternatives, key=lambda spot: spot.latency.value if spot.latency else 0.0)
    assert best.latency is not None, best.label
    speed = f"{name(best)} ({1 / best.latency.value:.2f})"
    if panel.predicted or not significance.tried(place.spot, best):
        return f", beside {speed}"
    ratio = significance.latency(place.spot, Bootstrap(), significance.noise(panel), best)
    if ratio is None or not ratio.excludes(1):
        return f", tied with {speed}"
    return f", {'ahead of' if ratio.value < 1 else 'behind'} {speed}"


def _is_lossless(spot: Spot) -> bool:
    return bool(spot.records[0]["point"].get("lossless"))


def quality(panel: Panel, spot: Spot) -> tuple[str, bool]:
    """Returns a clause about a point's quality relative to the target's, and whether no loss is measurable."""
    metric, gain = metric_name(panel.metric), significance.quality_gain(panel, spot, Bootstrap())
    if gain is None:
        gap = spot.quality.value - panel.required_target().quality.value
        return f", at {gap:+.1f} {metric} (no interval: fewer than {LEAST_EXAMPLES} common examples)", False
    if gain.low == gain.high == 0:
        return f", at exactly the target's {metric}", True
    shown = f"({gain.value:+.1f}{brackets(gain, '+.1f')})"
    if gain.high < 0:
        return f", but it loses {metric} {shown}", False
    if gain.low > 0:
        return f", and its {metric} is higher {shown}", True
    return f", and no loss of {metric} is measurable {shown}", True


def brackets(interval: Interval, form: str) -> str:
    """Returns an interval's ends after a space, such as " [2.13, 2.56]"; "" if they are equal."""
    return "" if interval.low == interval.high else f" {interval.brackets(form)}"


def _nothing_better(panel: Panel, places: Places, spots: Iterable[Place]) -> str:
    """Returns a sentence about a panel in which no point is faster and near the target's quality; names the fastest."""
    timed = [(place.latency.inverse(), place) for place in spots if place.latency]
    speed, place = max(timed, key=lambda pair: pair[0].value)
    shown = f"{speed.value:.2f} times as fast{brackets(speed, '.2f')}"
    if speed.value <= 1:
        return f"Nothing is faster than the target: the fastest point, {name(place.spot)}, is {shown}"
    loss, _ = quality(panel, place.spot)
    near = f"No method is faster than the target with a loss of at most {places.margin:g} {metric_name(panel.metric)}"
    return f"{near}: {name(place.spot)} is {shown}{loss}"


def _untimed(panel: Panel, spots: Sequence[Place]) -> str:
    """Returns a sentence about a panel without latencies: which point rejects the fewest draft tokens, at what quality.

    Only points that are not worse than the target are considered.
    """
    rates = [
        (rate.value, place)
        for place in spots
        if (rate := place.spot.measures.get("rejection_rate")) and not place.spot.inconclusive
    ]
    near = [pair for pair in rates if pair[1].difference.value >= 0] if panel.target else []
    if not near:
        return "No latency was measured"
    least, place = min(near, key=lambda pair: pair[0])
    loss, _ = quality(panel, place.spot)
    return f"{name(place.spot)} rejects {least:.0%} of draft tokens{loss}; no latency was measured"


def _ends_only(panel: Panel, places: Places) -> str:
    """Returns a sentence about a panel with only the target alone, or with target and draft alone."""
    metric, target = metric_name(panel.metric), panel.required_target()
    draft = next((place for place in places.ends if place.spot is panel.draft), None)
    if draft is None:
        return f"Only the target alone was measured: {target.quality.value:.1f} {metric}"
    speed = f"{1 / draft.latency.value:.1f} times as fast, at " if draft.latency else ""
    gap = f"{draft.difference.value:+.1f}{brackets(draft.difference, '+.1f')} {metric}"
    return f"Only target and draft alone were measured: the draft is {speed}{gap}"
