"""Successive halving: all candidates on few examples, the better half of them on twice as many, and so on.

Jamieson and Talwalkar 2016, with two changes: who cannot keep the tolerance goes whatever the half is, and whoever
keeps it most surely stays, so that the search ends with an answer wherever there is one. Needs no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from speccascade_jax.calibration.bench import Bench, Records, Window
from speccascade_jax.calibration.tolerance import Tolerance
from speccascade_jax.metrics.paired import Bootstrap
from speccascade_jax.points import Point

FIRST_RUNG = 32


class Verdict(NamedTuple):
    """A candidate on a window: its records, the share of resamples in which it keeps the tolerance, what it costs."""

    point: Point
    records: Records
    share: float
    cost: float


class Choice(NamedTuple):
    """How a search ended: the best that keeps the tolerance surely enough, if any does; the others, best first."""

    chosen: Verdict | None
    others: list[Verdict]


def rungs(whole: Window, first: int = FIRST_RUNG) -> list[Window]:
    """Windows from the same example on, each twice as long as the one before, the last `whole`; none below `first`."""
    sizes = [whole.judged]
    while math.ceil(sizes[0] / 2) >= first:
        sizes.insert(0, math.ceil(sizes[0] / 2))
    return [whole.part(size) for size in sizes]


def search(
    bench: Bench,
    candidates: Sequence[Point],
    target: Point,
    tolerance: Tolerance,
    windows: Sequence[Window],
    least: int = 4,
) -> Choice:
    """Measure the candidates on the windows one after the other, fewer and fewer of them.

    Args:
        bench: what measures and remembers; target: the target alone.
        windows: as `rungs` gives them; least: how many candidates go on at least, as long as they may hold.
    """
    remaining, verdicts, bootstrap = list(candidates), list[Verdict](), Bootstrap()
    for number, window in enumerate(windows, start=1):
        print(f"rung {number} of {len(windows)}: {len(remaining)} candidates on {window.judged} examples")
        verdicts = judge(bench, remaining, target, tolerance, window, bootstrap)
        remaining = [verdict.point for verdict in survivors(verdicts, tolerance.confidence, least)]
    return choose(verdicts, tolerance.confidence)


def judge(
    bench: Bench,
    candidates: Sequence[Point],
    target: Point,
    tolerance: Tolerance,
    window: Window,
    bootstrap: Bootstrap,
) -> list[Verdict]:
    """Every candidate held against the target on the same examples."""
    measured = bench.measure([target, *candidates], window)
    reference = measured[target]
    return [
        Verdict(
            point,
            measured[point],
            tolerance.share(measured[point], reference, bootstrap),
            tolerance.cost(measured[point]),
        )
        for point in candidates
    ]


def ranked(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """First who more likely than not keeps the tolerance, by cost; then the others, by how likely they keep it."""

    def place(verdict: Verdict) -> tuple[bool, float, float]:
        likely = verdict.share >= 0.5
        return (not likely, verdict.cost if likely else -verdict.share, verdict.cost)

    return sorted(verdicts, key=place)


def safest(verdicts: Sequence[Verdict]) -> Verdict:
    """Who keeps the tolerance most surely; among equals, at the lowest cost."""
    return min(verdicts, key=lambda verdict: (-verdict.share, verdict.cost))


def survivors(verdicts: Sequence[Verdict], confidence: float, least: int) -> list[Verdict]:
    """Who goes on: half of them, but at least `least`; the safest always, nobody else below `1 − confidence`."""
    half, safe = max(math.ceil(len(verdicts) / 2), least), safest(verdicts)
    possible = [verdict for verdict in ranked(verdicts) if verdict.share >= 1 - confidence][:half]
    if any(verdict is safe for verdict in possible):
        return possible
    return [*possible[: half - 1], safe]


def choose(verdicts: Sequence[Verdict], confidence: float) -> Choice:
    """The cheapest among those that keep the tolerance in at least `confidence` of the resamples."""
    sure = [verdict for verdict in ranked(verdicts) if verdict.share >= confidence]
    unsure = [verdict for verdict in ranked(verdicts) if verdict.share < confidence]
    return Choice(sure[0], [*sure[1:], *unsure]) if sure else Choice(None, unsure)
