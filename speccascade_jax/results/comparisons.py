"""What may be called better: spots of a panel against the target alone and against the best of their column.

Every comparison is paired over examples (`results.bootstrap`). Where records do not hold single examples (or hold
too few) there is no interval, and without one nothing is called better. Needs no JAX.
"""

from collections.abc import Callable, Sequence

from speccascade_jax.results.bootstrap import LEAST_EXAMPLES, Bootstrap, Interval, has_latency, has_quality
from speccascade_jax.results.panels import Panel, Spot

BEST, TIE = "*", "≈"


def quality_gain(panel: Panel, spot: Spot, bootstrap: Bootstrap, over: Spot | None = None) -> Interval | None:
    """The spot's quality minus the target's, or another's; `None` against itself and without single examples."""
    over = panel.target if over is None else over
    if over is None or spot is over or not _judged(over, spot):
        return None
    return bootstrap.quality_difference(spot.records, over.records)


def latency(spot: Spot, bootstrap: Bootstrap) -> Interval | None:
    """The spot's latency over the target's, beside which it ran; `None` without single examples."""
    return bootstrap.latency_ratio(spot.records) if _timed(spot) else None


def quality_marks(spots: Sequence[Spot | None], bootstrap: Bootstrap) -> list[str]:
    """`BEST`, `TIE` or nothing for each entry of a column of qualities.

    An entry ties with the column's highest when the interval of their difference includes 0; those that tie, the
    highest among them, are marked `TIE`. The highest is marked `BEST` only where every other entry was compared with it
    and none ties. An entry alone has nothing to be better than.
    """

    def differ(best: Spot, other: Spot) -> bool | None:
        if not _judged(best, other):
            return None
        return bootstrap.quality_difference(best.records, other.records).excludes(0)

    return _marks(spots, lambda spot: spot.quality.value, differ)


def latency_marks(spots: Sequence[Spot | None], bootstrap: Bootstrap) -> list[str]:
    """As `quality_marks`, for a column of latencies or speed-ups: the lowest is best, a tie's ratio includes 1."""

    def differ(best: Spot, other: Spot) -> bool | None:
        if not _timed(best, other):
            return None
        return bootstrap.latency_ratio(best.records, other.records).excludes(1)

    return _marks(spots, lambda spot: -spot.latency.value if spot.latency else float("-inf"), differ)


def uncompared(panel: Panel) -> str | None:
    """Which of a panel's spots have no interval and why, as one sentence; `None` where all have."""
    ends = [end for end in (panel.target, panel.draft) if end]
    spots = [*ends, *(spot for curve in panel.curves.values() for spot in curve)]
    lacking = {
        "quality": sum(not _judged(spot) for spot in spots),
        "latency": sum(not _timed(spot) for spot in spots if spot.latency),
    }
    counts = " and ".join(f"the {what} of {number}" for what, number in lacking.items() if number)
    if not counts:
        return None
    return (
        f"No interval and no mark for {counts} of {len(spots)} points: their records hold no single examples, or fewer "
        f"than {LEAST_EXAMPLES}"
    )


def _marks(
    spots: Sequence[Spot | None], score: Callable[[Spot], float], differ: Callable[[Spot, Spot], bool | None]
) -> list[str]:
    """`differ`: whether two spots differ for certain; `None` where that cannot be told."""
    present = [spot for spot in spots if spot is not None]
    if len(present) < 2:
        return [""] * len(spots)
    best = max(present, key=score)
    verdicts = [None if spot is None or spot is best else differ(best, spot) for spot in spots]
    tied = any(verdict is False for verdict in verdicts)
    certain = sum(verdict is True for verdict in verdicts) == len(present) - 1
    own = TIE if tied else BEST if certain else ""
    return [
        own if spot is best else TIE if verdict is False else "" for spot, verdict in zip(spots, verdicts, strict=True)
    ]


def _judged(*spots: Spot) -> bool:
    return all(has_quality(record) for spot in spots for record in spot.records)


def _timed(*spots: Spot) -> bool:
    return all(has_latency(record) for spot in spots for record in spot.records)
