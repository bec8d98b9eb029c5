"""Successive halving: all candidates on few examples, the better half of them on twice as many, and so on.

Jamieson and Talwalkar 2016, with two changes: who cannot keep the tolerance goes whatever the half is, and whoever
keeps it most surely stays, so that the search ends with an answer wherever there is one.

The best of many is in part the luckiest: examples that chose it flatter it. So those that are left are tested on fresh
examples, in an order that was fixed before: the safest first, each at the full confidence, up to the first that fails.
The probability that any of those that passed breaks the tolerance is then at most that of a single test (fixed-sequence
testing; Angelopoulos et al. 2021, "Learn then Test"), as far as resamples tell it. Needs no JAX.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from speccascade_jax.evaluation.points import Point
from speccascade_jax.evaluation.studies.calibration.bench import Bench, Records, Window
from speccascade_jax.evaluation.studies.calibration.tolerance import Tolerance
from speccascade_jax.results.analysis.bootstrap import Bootstrap

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
    fresh: Window,
    least: int = 4,
) -> Choice:
    """Measure the candidates on the windows one after the other, fewer and fewer of them; test the last on fresh ones.

    Args:
        bench: what measures and remembers; target: the target alone.
        windows: as `rungs` gives them; fresh: examples of none of them.
        least: how many candidates go on at least, as long as they may hold.
    """
    bootstrap = Bootstrap()

    def judge(measured: Mapping[Point, Records]) -> list[Verdict]:
        """Every candidate held against the target on the same examples."""
        return [
            Verdict(point, ours, tolerance.share(ours, measured[target], bootstrap), tolerance.cost(ours))
            for point, ours in measured.items()
            if point != target
        ]

    remaining, verdicts = list(candidates), list[Verdict]()
    for number, window in enumerate(windows, start=1):
        print(f"rung {number} of {len(windows)}: {len(remaining)} candidates on {window.judged} examples")
        verdicts = survivors(judge(bench.measure([target, *remaining], window)), tolerance.confidence, least)
        remaining = [verdict.point for verdict in verdicts]
    order = [verdict.point for verdict in sorted(verdicts, key=_safety)]
    print(f"test: {len(order)} candidates on {fresh.judged} fresh examples, the safest first")
    measured = bench.measure([target, *order], fresh)
    tolerance.check(measured[target])
    return choose(judge(measured), tolerance.confidence)


def ranked(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """In layers: first those than whom nobody is both surer to keep the tolerance and cheaper, then so of the rest.

    On few examples nobody can tell where on the way from safe to cheap the answer lies: a layer holds all of that way.
    Within a layer those come first who more likely than not keep the tolerance, by cost.
    """
    rest, order = sorted(verdicts, key=lambda verdict: (verdict.share < 0.5, verdict.cost)), list[Verdict]()
    while rest:
        layer = [each for each in rest if not any(_dominates(other, each) for other in rest)]
        order += layer
        rest = [each for each in rest if not any(each is one for one in layer)]
    return order


def _dominates(one: Verdict, other: Verdict) -> bool:
    """Whether one is at least as sure and at most as dear as the other, and not its equal in both."""
    no_worse = one.share >= other.share and one.cost <= other.cost
    return no_worse and (one.share > other.share or one.cost < other.cost)


def _safety(verdict: Verdict) -> tuple[float, float]:
    """A key of sorting: first who keeps the tolerance most surely; among equals, at the lowest cost."""
    return -verdict.share, verdict.cost


def survivors(verdicts: Sequence[Verdict], confidence: float, least: int) -> list[Verdict]:
    """Who goes on: half of them, but at least `least`; the safest always, nobody else below `1 − confidence`."""
    half, safe = max(math.ceil(len(verdicts) / 2), least), min(verdicts, key=_safety)
    possible = [verdict for verdict in ranked(verdicts) if verdict.share >= 1 - confidence][:half]
    if any(verdict is safe for verdict in possible):
        return possible
    return [*possible[: half - 1], safe]


def choose(verdicts: Sequence[Verdict], confidence: float) -> Choice:
    """The cheapest of those that pass.

    Args:
        verdicts: in the order of the test; one passes that keeps the tolerance in at least `confidence` of the
            resamples, and all before it too.
    """
    passed = list(itertools.takewhile(lambda each: each.share >= confidence, verdicts))
    failed = sorted(verdicts[len(passed) :], key=_safety)
    passed.sort(key=lambda each: each.cost)
    return Choice(passed[0], [*passed[1:], *failed]) if passed else Choice(None, failed)
