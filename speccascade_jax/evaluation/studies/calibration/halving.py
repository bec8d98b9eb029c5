"""Successive halving under a tolerance: each round measures the better half of the candidates on twice the examples.

The search follows Jamieson and Talwalkar (2016), with two changes. A candidate that keeps the tolerance in too few
resamples is dropped even from the better half. The candidate that keeps it in the most resamples always stays, so that
the search ends with an answer if there is one.

The best of many candidates is partly the luckiest: it looks better on the examples that selected it than on others. So
the remaining candidates are tested on fresh examples. They are tested in an order that is fixed before the test, the
safest first, each at the full confidence, up to the first that fails. Then the probability that any passed candidate
breaks the tolerance is at most that of a single test (fixed-sequence testing; Angelopoulos et al., 2021, "Learn then
Test"), up to the accuracy of the resamples.

`Bench` measures the points of a calibration, with one store, one session, and ranges of its examples (`Window`).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation.points import Evaluation, Point, Settings
from speccascade_jax.evaluation.session import Session
from speccascade_jax.results.analysis.bootstrap import LEAST_EXAMPLES, Bootstrap
from speccascade_jax.results.store.record import Record, get_entry
from speccascade_jax.results.store.result_store import ResultStore

Records = tuple[Record, ...]
"""The records of one point, one record per seed."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Range of consecutive examples.

    Attributes:
        first: index of the first example.
        judged: number of examples on which quality is measured.
        timed: number of examples, the first ones of the range, on which latency is measured too.
    """

    first: int
    judged: int
    timed: int

    @property
    def end(self) -> int:
        """The index of the first example after the window."""
        return self.first + self.judged

    def of(self, evaluation: Evaluation) -> Evaluation:
        """Returns a copy of `evaluation` that uses the examples of this window."""
        return replace(evaluation, first_example=self.first, quality_examples=self.judged, latency_examples=self.timed)

    def part(self, judged: int) -> Window:
        """Returns the first `judged` examples of the window.

        The same share of them is timed, but at least `LEAST_EXAMPLES` if the window has so many timed examples.
        """
        timed = max(math.ceil(self.timed * judged / self.judged), LEAST_EXAMPLES)
        return replace(self, judged=judged, timed=min(timed, judged, self.timed))


class Bench:
    """Runner that measures points and stores their records, so that a killed calibration can resume.

    Args:
        store: receives the records, and holds the records of an earlier calibration. The keys of records depend on all
            loaded examples, so a calibration with other numbers of examples starts anew.
        session: provides the examples of all windows.
        seeds: random seeds; each point is measured once with each seed.
    """

    def __init__(self, store: ResultStore, session: Session, seeds: Sequence[int] = (0,)):
        self.store, self.session, self.seeds = store, session, tuple(seeds)

    def measure(self, points: Sequence[Point], window: Window) -> dict[Point, Records]:
        """Measures points on a range of examples; points that differ only in α share batches and programs.

        Args:
            points: points with equal sampling settings; their own examples and seed are ignored.
            window: the range of examples.

        Raises:
            FloatingPointError: a point failed on some example, so it cannot be compared with the others.
        """
        # the target is timed like the other points, because tables compare it with points on the same examples
        placed = {
            point: [replace(point, evaluation=window.of(point.evaluation), seed=seed) for seed in self.seeds]
            for point in points
        }
        groups: dict[tuple[Settings, int], list[Point]] = defaultdict(list)
        for run in itertools.chain(*placed.values()):
            groups[replace(run.settings, alpha=None), run.seed].append(run)
        experiment.measure(list(groups.values()), self.store, self.session)
        records = {record["key"]: record for record in self.store.records}
        for run in itertools.chain(*placed.values()):
            if failed := {"failed_examples", "failed_timings"} & records[self.session.key(run)].keys():
                why = records[self.session.key(run)].get("failure", "some timed runs ended early")
                raise FloatingPointError(
                    f"{run.label()} has {min(failed)} and cannot be compared: {why}; check the weights, or leave this "
                    "setting out"
                )
        return {point: tuple(records[self.session.key(run)] for run in runs) for point, runs in placed.items()}


def mean(records: Records, part: str, name: str) -> float:
    """Returns the mean over seeds of entry `name` in a part of the records; undefined `measures` count as 0."""
    return statistics.fmean(get_entry(record, part)[name] or 0.0 for record in records)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Bounds on quality, on latency, or on both, relative to the target alone.

    With a bound on quality, the search looks for the fastest setting; with a bound on latency alone, for the setting
    with the best quality.

    Attributes:
        max_loss: share of the target's quality that may be lost; 0.01 demands at least 0.99 of the target's quality.
        max_latency: largest latency relative to the target's; 0.6 demands at most 0.6 of the target's latency.
        confidence: share of paired resamples of the examples in which every bound must hold.

    Raises:
        ValueError: there is no bound, or a value is invalid.
    """

    max_loss: float | None = None
    max_latency: float | None = None
    confidence: float = 0.9

    def __post_init__(self) -> None:
        if self.max_loss is None and self.max_latency is None:
            raise ValueError(
                "max_loss and max_latency are both None: give one, for example max_loss=0.01 to allow a loss of 1%"
            )
        if self.max_loss is not None and not 0 <= _number("max_loss", self.max_loss) < 1:
            raise ValueError(f"max_loss={self.max_loss} is not in [0, 1): 0.01 allows a loss of 1% of quality")
        if self.max_latency is not None and not _number("max_latency", self.max_latency) > 0:
            raise ValueError(f"max_latency={self.max_latency} is not above 0: 0.6 allows 0.6 of the target's latency")
        if not 0.5 < _number("confidence", self.confidence) < 1:
            raise ValueError(f"confidence={self.confidence} is not between 0.5 and 1: 0.9 is the usual choice")

    def describe(self) -> str:
        """Returns the bounds of the tolerance in words."""
        loss, latency = self.max_loss, self.max_latency
        bounds = [] if loss is None else [f"at most {100 * loss:g}% of the target's quality lost"]
        bounds += [] if latency is None else [f"latency at most {latency:g} of the target's"]
        return " and ".join(bounds)

    def kept(self, ours: Sequence[Record], target: Sequence[Record], bootstrap: Bootstrap) -> np.ndarray:
        """Returns whether all bounds hold, bool `[1 + samples]`: first on all examples, then on each resample.

        Examples for quality and timed examples are resampled separately.

        Args:
            ours: records of one setting, one per seed.
            target: records of the target alone, one per seed, on the same examples; ValueError if they cannot be
                paired.
            bootstrap: resamples the examples.
        """
        kept = np.ones(1 + bootstrap.samples, bool)
        if self.max_loss is not None:
            quality, reference = bootstrap.qualities(ours, target)
            kept &= quality >= (1 - self.max_loss) * reference
        if self.max_latency is not None:
            kept &= bootstrap.latencies(ours) <= self.max_latency
        return kept

    def check(self, target: Sequence[Record]) -> None:
        """Refuses a target with quality 0, because then every candidate meets the bound on quality.

        A small number of examples may cause this.
        """
        quality = target[0]["quality"]
        if self.max_loss is not None and not quality["value"] > 0:
            raise ValueError(
                f"the target's {quality['metric']} is {quality['value']:g} on {quality['examples']} examples, so a "
                "relative loss is undefined: check pair and task, or give max_latency instead of max_loss"
            )

    def share(self, ours: Sequence[Record], target: Sequence[Record], bootstrap: Bootstrap) -> float:
        """Returns the share of resamples in which every bound holds; `kept` describes the arguments and errors."""
        return float(self.kept(ours, target, bootstrap)[1:].mean())

    def cost(self, ours: Sequence[Record]) -> float:
        """Returns the value to minimise, as a mean over seeds.

        This is the relative latency, or minus the quality if only latency is bounded.
        """
        if self.max_loss is None:
            return -statistics.fmean(record["quality"]["value"] for record in ours)
        return statistics.fmean(record["relative_latency"]["value"] for record in ours)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is not a finite number; give one such as 0.01")
    return float(value)


FIRST_RUNG = 32


class Verdict(NamedTuple):
    """Result of a candidate on one range of examples.

    `share` is the share of resamples in which the candidate keeps the tolerance, and `cost` is the value to minimise.
    """

    point: Point
    records: Records
    share: float
    cost: float


class Choice(NamedTuple):
    """Result of a search: the best candidate that passed the test, or `None`, and the other candidates, best first."""

    chosen: Verdict | None
    others: list[Verdict]


def rungs(whole: Window, first: int = FIRST_RUNG) -> list[Window]:
    """Returns nested windows of at least `first` examples, each twice as long as the one before, up to `whole`."""
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
    """Measures fewer and fewer candidates on more and more examples, and tests the last candidates on fresh examples.

    Args:
        bench: measures points and stores their records.
        candidates: the settings to choose from.
        target: the target alone.
        tolerance: the bounds that the choice must keep.
        windows: ranges of examples of increasing size, as `rungs` returns them.
        fresh: a window that shares no example with `windows`.
        least: smallest number of candidates that remain after each window, as long as they may keep the tolerance.
    """
    bootstrap = Bootstrap()

    def judge(measured: Mapping[Point, Records]) -> list[Verdict]:
        """Compares every candidate with the target on the same examples."""
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
    """Ranks candidates in layers; no candidate of the first layer is beaten by another in both safety and cost.

    Safety is the share of resamples in which a candidate keeps the tolerance. The next layer is found in the same way
    among the rest. Few examples cannot show which balance of safety and cost is right, so a layer holds the whole
    range. Within a layer, candidates that keep the tolerance in at least half of the resamples come first, and cheaper
    candidates come before more expensive ones.
    """
    rest, order = sorted(verdicts, key=lambda verdict: (verdict.share < 0.5, verdict.cost)), list[Verdict]()
    while rest:
        layer = [candidate for candidate in rest if not any(_dominates(rival, candidate) for rival in rest)]
        order += layer
        rest = [candidate for candidate in rest if not any(candidate is placed for placed in layer)]
    return order


def _dominates(verdict: Verdict, other: Verdict) -> bool:
    """Returns whether a candidate is at least as safe and at most as expensive as the other, and not equal in both."""
    no_worse = verdict.share >= other.share and verdict.cost <= other.cost
    return no_worse and (verdict.share > other.share or verdict.cost < other.cost)


def _safety(verdict: Verdict) -> tuple[float, float]:
    """Returns a sort key: candidates within the tolerance in the most resamples come first, then cheaper ones."""
    return -verdict.share, verdict.cost


def survivors(verdicts: Sequence[Verdict], confidence: float, least: int) -> list[Verdict]:
    """Returns the better half of the candidates, or `least` of them if that is more; the safest one always remains.

    Every other candidate is dropped if the share of resamples in which it keeps the tolerance is below `1 −
    confidence`.
    """
    half, safe = max(math.ceil(len(verdicts) / 2), least), min(verdicts, key=_safety)
    possible = [verdict for verdict in ranked(verdicts) if verdict.share >= 1 - confidence][:half]
    if any(verdict is safe for verdict in possible):
        return possible
    return [*possible[: half - 1], safe]


def choose(verdicts: Sequence[Verdict], confidence: float) -> Choice:
    """Chooses the cheapest candidate that passes.

    Args:
        verdicts: results on the fresh examples, in the order of the test.
        confidence: smallest share of the resamples. A candidate passes if it and all candidates before it keep the
            tolerance in at least this share of the resamples.
    """
    passed = list(itertools.takewhile(lambda verdict: verdict.share >= confidence, verdicts))
    failed = sorted(verdicts[len(passed) :], key=_safety)
    passed.sort(key=lambda verdict: verdict.cost)
    return Choice(passed[0], [*passed[1:], *failed]) if passed else Choice(None, failed)
