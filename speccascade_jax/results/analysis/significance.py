"""What may be called better: spots of a panel against the target alone and against the best of their column.

Every comparison is paired over examples (`bootstrap`). Where records do not hold single examples (or hold
too few) there is no interval, and without one nothing is called better. Of latencies nothing is called better either
that differs by less than equal work was seen to (`noise`), or that was timed in too few trials. Needs no JAX.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from speccascade_jax.results.analysis.bootstrap import (
    LEAST_EXAMPLES,
    LEAST_TRIALS,
    Bootstrap,
    Interval,
    has_latency,
    judged_alike,
    trials,
)
from speccascade_jax.results.analysis.panels import Panel, Spot, latency_of
from speccascade_jax.results.store.result_store import Record

BEST, TIE = "*", "≈"

BUSY = math.log(1.1)
"""A target that comes out at 1.1 times its own latency was timed on a machine that did other things."""


def quality_gain(panel: Panel, spot: Spot, bootstrap: Bootstrap, over: Spot | None = None) -> Interval | None:
    """The spot's quality minus the target's, or another's; `None` against itself and without single examples."""
    over = panel.target if over is None else over
    if over is None or spot is over or not _judged(over, spot):
        return None
    return bootstrap.quality_difference(spot.records, over.records)


def latency(spot: Spot, bootstrap: Bootstrap, floor: float = 0.0) -> Interval | None:
    """The spot's latency over the target's, beside which it ran; `None` without single examples.

    Args:
        floor: what equal work was seen to differ by (`noise`); 0 for the target itself.
    """
    return bootstrap.latency_ratio(spot.records).at_least(floor) if _timed(spot) else None


def latency_between(spot: Spot, over: Spot, bootstrap: Bootstrap, floor: float = 0.0) -> Interval | None:
    """The spot's latency over another's, each relative to the target beside it; `None` without single examples."""
    if not _timed(spot, over):
        return None
    return bootstrap.latency_ratio(spot.records, over.records).at_least(floor)


def noise(panel: Panel) -> float:
    """How far apart equal work was timed in a panel: the largest log ratio seen, 0 where nothing equal was timed.

    The target alone is timed against itself, beside which all else is timed; and methods may write the same tokens by
    the same calls, which happens where their laws agree.
    """
    seen = [self_noise(panel)]
    by_work = sorted((spot for spot in panel.spots if _work(spot)), key=_work)
    for _, same in itertools.groupby(by_work, key=_work):
        logs = [math.log(latency_of(spot)) for spot in same]
        seen.append(max(logs) - min(logs))
    return max(seen)


def self_noise(panel: Panel) -> float:
    """The log ratio of the target alone to itself, 0 where that was not timed."""
    return abs(math.log(latency_of(panel.target))) if panel.target and panel.target.latency else 0.0


def noise_notes(panel: Panel) -> Iterator[str]:
    """What readers must know of a panel's latencies."""
    if not any(spot.latency for spot in panel.spots):
        return
    if panel.target and panel.target.latency:
        own = latency_of(panel.target)
        if abs(math.log(own)) > BUSY:
            yield f"The target timed against itself came out at {own:.2f}: the machine was busy, latencies mean little."
    if floor := noise(panel):
        yield (
            f"Equal work was timed up to {math.expm1(floor):.1%} apart (the target against itself, methods that made "
            "the same calls): no interval of a latency is narrower, and nothing closer is told apart."
        )
    if any(trials(spot.records) < LEAST_TRIALS for spot in panel.spots if _timed(spot)):
        yield f"No mark for latencies of fewer than {LEAST_TRIALS} trials."


def _work(spot: Spot) -> tuple:
    """What the timed runs of a spot did, seed by seed: tokens and calls of every one; nothing where records do not say.

    Numbers of calls alone tell little of blocks of different lengths, so these are a part of it.
    """
    found = []
    for record in spot.records:
        timed = record.get("latency") or {}
        names = ("tokens", "draft_steps", "target_calls")
        if any(f"per_example_{name}" not in timed for name in names):
            return ()
        counts = b"".join(np.ravel(timed[f"per_example_{name}"]).astype(np.int64).tobytes() for name in names)
        found.append((record["point"]["block_size"] or 0, record["point"]["seed"], counts))
    return tuple(found)


def quality_marks(spots: Sequence[Spot | None], bootstrap: Bootstrap) -> list[str]:
    """`BEST`, `TIE` or nothing for each entry of a column of qualities.

    An entry ties with the column's highest when the interval of their difference includes 0; those that tie, the
    highest among them, are marked `TIE`. The highest is marked `BEST` only where every other entry was compared with it
    and none ties. An entry alone has nothing to be better than.
    """
    return _marks(spots, lambda spot: spot.quality.value, _judged, bootstrap.quality_difference, 0)


def latency_marks(spots: Sequence[Spot | None], bootstrap: Bootstrap, floor: float) -> list[str]:
    """As `quality_marks`, for a column of latencies or speed-ups: the lowest is best, a tie's ratio includes 1.

    All pairs of the column hold at once: the best of many equal ones is otherwise far from the worst by chance. What
    did the same work as another ties with whatever that one ties with.

    Args:
        floor: `noise` of the panel.
    """
    pairs = math.comb(sum(spot is not None for spot in spots), 2)

    def compare(ours: Sequence[Record], theirs: Sequence[Record]) -> Interval:
        return bootstrap.latency_ratio(ours, theirs).among(pairs).at_least(floor)

    marks = _marks(spots, lambda spot: -latency_of(spot), _tried, compare, 1)
    ties = {work for spot, mark in zip(spots, marks, strict=True) if spot and mark and (work := _work(spot))}
    alike = [TIE if spot and not mark and _work(spot) in ties and _tried(spot) else mark
             for spot, mark in zip(spots, marks, strict=True)]  # fmt: skip
    return [TIE if mark == BEST and TIE in alike else mark for mark in alike]


def uncompared(panel: Panel) -> list[str]:
    """Which of a panel's spots have no interval and why, as one sentence; none where all have."""
    spots = [*panel.ends, *panel.spots]
    lacking = {
        "quality": sum(not _judged(spot) for spot in spots),
        "latency": sum(not _timed(spot) for spot in spots if spot.latency),
    }
    counts = " and ".join(f"the {what} of {number}" for what, number in lacking.items() if number)
    why = f"their records hold no single examples, or fewer than {LEAST_EXAMPLES}"
    said = [f"No interval and no mark for {counts} of {len(spots)} points: {why}."] if counts else []
    return [*said, *_failed(spots)]


def _failed(spots: Sequence[Spot]) -> list[str]:
    """Which spots left examples out, as one sentence."""
    lost = {spot.label: sum(len(r.get("failed_examples", ())) for r in spot.records) for spot in spots}
    untimed = {spot.label: sum(r.get("failed_timings", 0) for r in spot.records) for spot in spots}
    told = [f"{label}: {count} examples" for label, count in lost.items() if count]
    told += [f"{label}: {count} timed runs, so all" for label, count in untimed.items() if count]
    why = "a model gave NaN or infinite logits; no interval against points on all examples"
    return [f"Left out, because {why}: {'; '.join(told)}."] if told else []


def _marks(
    spots: Sequence[Spot | None],
    score: Callable[[Spot], float],
    told: Callable[[Spot, Spot], bool],
    compare: Callable[[Sequence[Record], Sequence[Record]], Interval],
    equal: float,
) -> list[str]:
    """Two spots differ for certain where `compare`'s interval excludes `equal`; `told`: whether that can be told."""
    present = [spot for spot in spots if spot is not None]
    if len(present) < 2:
        return [""] * len(spots)
    best = max(present, key=score)
    verdicts = [
        compare(best.records, spot.records).excludes(equal) if spot and spot is not best and told(best, spot) else None
        for spot in spots
    ]
    tied = any(verdict is False for verdict in verdicts)
    certain = sum(verdict is True for verdict in verdicts) == len(present) - 1
    own = TIE if tied else BEST if certain else ""
    return [
        own if spot is best else TIE if verdict is False else "" for spot, verdict in zip(spots, verdicts, strict=True)
    ]


def _judged(*spots: Spot) -> bool:
    return judged_alike([record for spot in spots for record in spot.records])


def _tried(*spots: Spot) -> bool:
    return _timed(*spots) and min(trials(spot.records) for spot in spots) >= LEAST_TRIALS


def _timed(*spots: Spot) -> bool:
    return all(has_latency(record) for spot in spots for record in spot.records)
