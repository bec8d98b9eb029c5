"""Significance of differences between the points of a panel (a group of comparable curves) and their baselines.

Every comparison is paired over examples (`bootstrap`): an example's difficulty or length affects both sides and
cancels. Records with too few single examples have no interval, and without an interval no point is called better. A
latency is not called better either if the difference is below that of equal work (`noise`), or if there are too few
trials.

Besides the target, there are two baselines that need no further measurement. The first sends whole requests at random
to draft or target (the grey line of Holsman et al., 2025): a method whose points are below that line is worse than a
random choice. The second baseline is for temperatures above 0: rules gain a part of their quality by sharpening the
distribution, and the target alone also has a sharper distribution at a lower temperature (`Panel.cooler`). Needs no
JAX.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from speccascade_jax.results.analysis import prediction
from speccascade_jax.results.analysis.bootstrap import LEAST_EXAMPLES, Bootstrap, Interval, has_latency, judged_alike
from speccascade_jax.results.analysis.panels import LOSS, Panel, Spot, latency_of
from speccascade_jax.results.store.record import TIMES, Record, get_entry

BEST, TIE = "*", "≈"

CALLS = ("draft_steps", "target_calls")
"""Counts that determine the time of a run; a record holds each under `per_example_` and this name."""

BUSY, BUSY_TRIAL = math.log(1.1), math.log(1.2)
"""Largest log ratios between times of equal work at which a machine does not count as busy: over all trials, and
between single trials."""

LEAST_TRIALS = 3
"""Fewest trials for which latencies get the marks `BEST` and `TIE`. With fewer trials, the machine's effect on a trial
cannot be distinguished from the method's."""


def quality_gain(panel: Panel, spot: Spot, bootstrap: Bootstrap, over: Spot | None = None) -> Interval | None:
    """Returns a point's quality minus that of `over` (default: the target); `None` for the same or unpaired points."""
    over = panel.target if over is None else over
    if over is None or spot is over or not _judged(over, spot):
        return None
    return bootstrap.quality_difference(spot.records, over.records)


def latency(spot: Spot, bootstrap: Bootstrap, floor: float = 0.0, over: Spot | None = None) -> Interval | None:
    """Returns a point's latency relative to the target's, or `None` without times per example.

    A predicted latency has a band, because the time to start an op is unknown; the interval then covers the band.

    Args:
        spot: the point whose latency is returned.
        bootstrap: resamples of the examples.
        floor: the log ratio measured between equal work (`noise`); 0 for the target itself.
        over: another point; if passed, the result is the ratio of the two points' relative latencies.
    """
    spots = (spot,) if over is None else (spot, over)
    if not _timed(*spots):
        return None
    sides = [timed_spot.records for timed_spot in spots]
    ratio = bootstrap.latency_ratio(*sides)
    for end_sides in prediction.ends(*sides):
        ratio = ratio.covering(bootstrap.latency_ratio(*end_sides))
    return ratio.at_least(floor)


class Place(NamedTuple):
    """A point's position in a plot: its relative latency (`None` if not timed) and its quality minus the target's.

    Both are paired intervals, or the value alone if records hold too few single examples.
    """

    spot: Spot
    latency: Interval | None
    difference: Interval


class Places(NamedTuple):
    """The plot positions of a panel's points, the line of random requests, and the fastest point with a small loss.

    Attributes:
        curves: positions of the points of each curve; ends: positions of the target alone and the draft alone.
        random: relative latencies and quality differences of whole requests sent at random, or `None`.
        margin: the accepted loss of quality.
        chosen: the fastest place whose measured quality is at least the target's or, without such a place, within
            `margin` of it; `None` if no such place is faster than the target.
        certain: whether the whole interval of the quality of `chosen` is within the margin.
    """

    curves: dict[str, list[Place]]
    ends: list[Place]
    random: tuple[list[float], list[float]] | None
    margin: float
    chosen: Place | None
    certain: bool

    @property
    def ring(self) -> str:
        """The legend text of the ring around the chosen place."""
        if self.chosen and self.chosen.difference.value >= 0:
            return "Fastest without a measured loss"
        return f"Fastest, loss ≤ {self.margin:g}" + (not self.certain) * " (uncertain)"


def places(panel: Panel, margin: float = LOSS) -> Places:
    """Computes the plot positions of a panel's points; without a target, `difference` is the quality itself."""
    target, bootstrap, floor = panel.target, Bootstrap(), noise(panel)
    base = target.quality.value if target else 0.0

    def place(spot: Spot) -> Place:
        gap = spot.quality.value - base
        difference = quality_gain(panel, spot, bootstrap) or (Interval(gap, gap, gap) if target else spot.quality)
        if spot is target:  # all latencies are relative to the target's latency, so that of the target itself is 1
            return Place(spot, spot.latency and Interval(1.0, 1.0, 1.0), difference)
        return Place(spot, spot.latency and (latency(spot, bootstrap, floor) or spot.latency), difference)

    curves = {name: [place(spot) for spot in spots] for name, spots in panel.curves.items()}
    line = random_line(panel)
    drawn = None if line is None else (line.latency.tolist(), (line.quality - base).tolist())
    chosen = _chosen(curves, margin) if target else None
    gain = quality_gain(panel, chosen.spot, bootstrap) if chosen else None
    certain = gain is not None and gain.low >= -margin
    return Places(curves, [place(spot) for spot in panel.ends], drawn, margin, chosen, certain)


def _chosen(curves: Mapping[str, Sequence[Place]], margin: float) -> Place | None:
    """Returns the place that `Places.chosen` describes."""
    quick = [
        candidate
        for curve in curves.values()
        for candidate in curve
        if candidate.latency and candidate.latency.value < 1 and not candidate.spot.inconclusive
    ]
    for loss in (0.0, margin):
        within = [candidate for candidate in quick if candidate.difference.value >= -loss]
        if within:
            return min(within, key=lambda candidate: latency_of(candidate.spot))
    return None


class Line(NamedTuple):
    """Relative latency and quality, `[N]`, of random mixtures of target and draft, from target alone to draft alone."""

    latency: np.ndarray
    quality: np.ndarray


def random_line(panel: Panel, points: int = 41) -> Line | None:
    """Returns latency and quality if whole requests go to draft or target at random, by ascending share of the draft.

    The result is `None` if target alone or draft alone is missing, or if the draft was not timed. A corpus score (BLEU)
    is not linear in the share. If the records contain no single examples, a straight line approximates the score.
    """
    target, draft = panel.target, panel.draft
    if target is None or draft is None or not draft.latency:
        return None
    share = np.linspace(0, 1, points)
    quality = (1 - share) * target.quality.value + share * draft.quality.value
    if _judged(target, draft):
        all_examples = Bootstrap(samples=1)
        quality = np.asarray(
            [all_examples.mixed(target.records, draft.records, draft_share)[0] for draft_share in share]
        )
    return Line(1 - share + share * latency_of(draft), quality)


def gain_over_random(panel: Panel, spot: Spot, bootstrap: Bootstrap) -> Interval | None:
    """Returns a point's quality minus that of requests sent at random at the same latency; `None` if not measured.

    A point that is slower than the target is compared with the target alone; one faster than the draft, with the draft
    alone.
    """
    target, draft = panel.target, panel.draft
    if target is None or draft is None or not (draft.latency and spot.latency) or latency_of(draft) >= 1:
        return None
    if not _judged(spot, target, draft) or not _timed(spot, draft):
        return None
    saved = 1 - bootstrap.latencies(spot.records), 1 - bootstrap.latencies(draft.records)
    share = np.clip(saved[0] / np.maximum(saved[1], 1e-9), 0, 1)
    spot_quality, _ = bootstrap.qualities(spot.records, target.records)
    return bootstrap.interval(spot_quality - bootstrap.mixed(target.records, draft.records, share))


def random_notes(panel: Panel, bootstrap: Bootstrap) -> list[str]:
    """Returns notes on which points are worse than requests sent at random, and which are significantly worse."""
    shown = [spot for spot in panel.spots if not spot.inconclusive]
    gains = {spot.name(): gain for spot in shown if (gain := gain_over_random(panel, spot, bootstrap))}
    below = [name for name, gain in gains.items() if gain.value < 0]
    sure = [name for name in below if gains[name].high < 0]
    random = "whole requests sent at random to draft or target (grey line)"
    if not below:
        return [f"At equal latency, no point is worse than {random}."] if gains else []
    listed = f"At equal latency, {random} are better than {len(below)} of {len(gains)} points: {', '.join(below)}."
    return [
        listed,
        f"Significant differences: {', '.join(sure)}." if sure else "None of these differences is significant.",
    ]


def noise(panel: Panel) -> float:
    """Returns the largest log ratio between latencies of equal work in a panel, 0 if no equal work was timed.

    Equal work occurs in two cases. The target alone is timed against itself, and methods whose distributions agree make
    the same calls.
    """
    logs = defaultdict[Hashable, list[float]](list)
    for spot in panel.spots:
        if work := _work(spot):
            logs[work].append(math.log(latency_of(spot)))
    return max([self_noise(panel), *_widths(logs)])


def trial_noise(panel: Panel) -> float:
    """Returns the largest log ratio between single trials of equal work, of one point or of several.

    Ratios over all trials can hide that the machine was busy for a while: trials of 1.22, 0.89 and 1.05 average to
    1.04.
    """
    logs = defaultdict[Hashable, list[float]](list)
    for spot in (*panel.ends, *panel.spots):
        for record in filter(has_latency, spot.records):
            if spot is panel.target:  # each trial of the target should have a relative latency of 1
                logs[spot.method] += [0.0, *_trial_logs(record)]
                continue
            for work, log in zip(_trial_work(record), _trial_logs(record), strict=False):
                logs[work].append(log)
    return max(_widths(logs), default=0.0)


def _widths(logs: Mapping[Hashable, Sequence[float]]) -> list[float]:
    return [max(values) - min(values) for values in logs.values()]


def self_noise(panel: Panel) -> float:
    """Returns the absolute log ratio of two timings of the target alone, or 0 if the target was not timed."""
    return abs(math.log(latency_of(panel.target))) if panel.target and panel.target.latency else 0.0


def noise_notes(panel: Panel) -> Iterator[str]:
    """Yields notes on how reliable a panel's latencies are."""
    if not any(spot.latency for spot in panel.spots):
        return
    if panel.predicted:
        yield (
            "Predicted latencies have no marks (best, tied), because their band does not bound the error of a "
            "comparison between two programs."
        )
        return
    yield from busy_notes(panel)
    floor, trial = noise(panel), trial_noise(panel)
    if floor or trial:
        yield (
            "To find the noise, runs that do equal work are compared (the target against itself, and methods that made "
            f"the same calls). Their times differ by up to {math.expm1(floor):.1%} over all trials, and by up to "
            f"{math.expm1(trial):.1%} between single trials. So every interval of a latency is widened to at least "
            f"±{math.expm1(floor):.1%}, and smaller differences count as ties."
        )
    if any(_trials(spot) < LEAST_TRIALS for spot in panel.spots if _timed(spot)):
        yield f"No mark for latencies of fewer than {LEAST_TRIALS} trials."


def busy_notes(panel: Panel) -> Iterator[str]:
    """Yields a note if times of equal work differ so much that the machine must have been busy."""
    if not panel.predicted and (noise(panel) > BUSY or trial_noise(panel) > BUSY_TRIAL):
        yield "The machine was busy, and the latencies are unreliable: measure again when nothing else runs."


_COSTS = ("block_size", "tree", "verify", "drafters", "tail")
"""Settings that determine the cost of one call of a model."""


def _work(spot: Spot) -> tuple:
    """Returns an identifier of the work in a point's timed runs, seed by seed; `()` if a record does not contain it."""
    work = [(record["point"]["seed"], *_trial_work(record)) for record in spot.records]
    return tuple(work) if all(len(entry) > 1 for entry in work) else ()


def _trial_work(record: Record) -> list[tuple]:
    """Returns the work of each trial: the calls of both models, and the settings that determine their cost.

    The calls of the target's interleaved runs are included, because latencies are relative to these runs. The list is
    empty if the record does not contain the calls.
    """
    times: list[Mapping[str, Any]] = [record.get(name) or {} for name in TIMES]
    if any(f"per_example_{name}" not in times[0] for name in CALLS):
        return []
    cost = repr([record["point"].get(name) for name in _COSTS])
    calls = [times[0].get(f"per_example_{name}") for name in CALLS] + [times[1].get(f"per_example_{CALLS[1]}", [])]
    totals = [np.sum(np.atleast_2d(np.asarray(count, np.int64)), 1) for count in calls]
    return [(cost, *work) for work in zip(*map(np.ndarray.tolist, np.broadcast_arrays(*totals)), strict=True)]


def _trial_logs(record: Record) -> list[float]:
    """Returns the log of each trial's latency relative to the target's."""
    ours, alone = (np.sum(np.atleast_2d(get_entry(record[name], "per_example_ms")), 1) for name in TIMES)
    logs: list[float] = np.log(ours / alone).tolist()
    return logs


def quality_marks(spots: Sequence[Spot | None], bootstrap: Bootstrap) -> list[str]:
    """Returns `BEST`, `TIE` or "" for each entry of a column of qualities.

    An entry is tied with the column's highest entry if the interval of their difference includes 0. All tied entries,
    including the highest, are marked `TIE`. The highest entry is marked `BEST` only if every other entry was compared
    with it and none is tied. A single entry has no mark.
    """
    return _marks(spots, lambda spot: spot.quality.value, _judged, bootstrap.quality_difference, 0)


def latency_marks(spots: Sequence[Spot | None], bootstrap: Bootstrap, floor: float) -> list[str]:
    """Returns `BEST`, `TIE` or "" for each entry of a column of latencies, where the lowest latency is the best.

    Two latencies are tied if the interval of their ratio includes 1. The intervals are widened such that those of all
    pairs hold jointly. Otherwise, the best of many equal entries would differ from the worst by chance. An entry that
    did the same work as a tied entry is also tied.

    Args:
        spots: the entries of the column; `None` for an empty entry.
        bootstrap: resamples of the examples.
        floor: `noise` of the panel.
    """
    pairs = math.comb(sum(spot is not None for spot in spots), 2)

    def compare(ours: Sequence[Record], theirs: Sequence[Record]) -> Interval:
        return bootstrap.latency_ratio(ours, theirs).among(pairs).at_least(floor)

    marks = _marks(spots, lambda spot: -latency_of(spot), tried, compare, 1)
    ties = {work for spot, mark in zip(spots, marks, strict=True) if spot and mark and (work := _work(spot))}
    alike = [TIE if spot and not mark and _work(spot) in ties and tried(spot) else mark
             for spot, mark in zip(spots, marks, strict=True)]  # fmt: skip
    return [TIE if mark == BEST and TIE in alike else mark for mark in alike]


def uncompared(panel: Panel) -> list[str]:
    """Returns notes on points without an interval, and on points for which failed examples are left out."""
    spots = [*panel.ends, *panel.spots]
    lacking = {
        "quality": sum(not _judged(spot) for spot in spots),
        "latency": sum(not _timed(spot) for spot in spots if spot.latency),
    }
    counts = " and ".join(f"the {quantity} of {number}" for quantity, number in lacking.items() if number)
    why = f"their records hold no results of single examples, or of fewer than {LEAST_EXAMPLES}"
    said = [f"No interval and no mark for {counts} of {len(spots)} points: {why}."] if counts else []
    lost = {spot.label: sum(len(r.get("failed_examples", ())) for r in spot.records) for spot in spots}
    untimed = {spot.label: sum(r.get("failed_timings", 0) for r in spot.records) for spot in spots}
    omissions = [f"{label}: {count} examples" for label, count in lost.items() if count]
    omissions += [f"{label}: all timed runs ({count} failed)" for label, count in untimed.items() if count]
    why = "a model returned NaN or infinite logits (no interval against points on all examples)"
    return said + [f"Left out, because {why}: {'; '.join(omissions)}."] * bool(omissions)


def _marks(
    spots: Sequence[Spot | None],
    score: Callable[[Spot], float],
    comparable: Callable[[Spot, Spot], bool],
    compare: Callable[[Sequence[Record], Sequence[Record]], Interval],
    equal: float,
) -> list[str]:
    """Returns the mark of each entry of a table column: best, tied with the best, or none.

    Args:
        spots: the entries; `None` for an empty entry.
        score: returns the value by which the best entry is found; higher is better.
        comparable: whether two points can be compared, example by example.
        compare: returns the interval of the comparison of two points.
        equal: the value of the comparison for two equal points.
    """
    present = [spot for spot in spots if spot is not None]
    if len(present) < 2:
        return [""] * len(spots)
    best = max(present, key=score)
    verdicts = [
        compare(best.records, spot.records).excludes(equal)
        if spot and spot is not best and comparable(best, spot)
        else None
        for spot in spots
    ]
    certain = verdicts.count(True) == len(present) - 1
    best_mark = TIE if False in verdicts else BEST if certain else ""
    return [
        best_mark if spot is best else TIE if verdict is False else ""
        for spot, verdict in zip(spots, verdicts, strict=True)
    ]


def _judged(*spots: Spot) -> bool:
    return judged_alike([record for spot in spots for record in spot.records])


def tried(*spots: Spot) -> bool:
    """Returns whether points were timed on enough examples and in enough trials to call one of them faster."""
    return _timed(*spots) and min(map(_trials, spots)) >= LEAST_TRIALS


def _trials(spot: Spot) -> int:
    """Returns the number of trials that a point was timed in, over all seeds."""
    return sum(len(np.atleast_2d(record["latency"]["per_example_ms"])) for record in spot.records)


def _timed(*spots: Spot) -> bool:
    return all(has_latency(record) for spot in spots for record in spot.records)
