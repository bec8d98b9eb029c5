"""Significance of differences: spots of a panel against the target, random requests, and each other in a column.

Every comparison is paired over examples (`bootstrap`): an example's difficulty or length affects both sides and
cancels. Records with too few single examples have no interval, and without an interval nothing is called better. A
latency is also not called better if it differs by less than equal work did (`noise`), or was timed in too few trials.

Two critical baselines need no further measurement. The first sends whole requests at random to draft or target (the
grey line of Holsman et al., 2025): a method whose points are below that line is worse than a coin toss. The second is
for T > 0: rules gain a part of their quality by sharpening the distribution, which the target alone also does at a
lower temperature (`Panel.cooler`). Needs no JAX.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from speccascade_jax.results.analysis.bootstrap import LEAST_EXAMPLES, Bootstrap, Interval, has_latency, judged_alike
from speccascade_jax.results.analysis.panels import LOSS, Panel, Spot, latency_of
from speccascade_jax.results.store.record import TIMES, Record, get_entry

BEST, TIE = "*", "≈"

CALLS = ("draft_steps", "target_calls")
"""Counts of timed runs that determine their time, each under `per_example_` and its name."""

BUSY, BUSY_TRIAL = math.log(1.1), math.log(1.2)
"""Largest log ratios between equal work, over all trials and between single trials, of a machine that is not busy."""

LEAST_TRIALS = 3
"""Fewest trials for `BEST` or `TIE`: with fewer, the machine's effect on a trial cannot be told from the method's."""


def quality_gain(panel: Panel, spot: Spot, bootstrap: Bootstrap, over: Spot | None = None) -> Interval | None:
    """Returns a spot's quality minus the target's or that of `over`; `None` for the same spot or unpaired examples."""
    over = panel.target if over is None else over
    if over is None or spot is over or not _judged(over, spot):
        return None
    return bootstrap.quality_difference(spot.records, over.records)


def latency(spot: Spot, bootstrap: Bootstrap, floor: float = 0.0, over: Spot | None = None) -> Interval | None:
    """Returns the spot's latency over that of the target's interleaved runs; `None` without times per example.

    Args:
        spot: the spot whose latency is returned.
        bootstrap: resamples the examples.
        floor: the log ratio measured between equal work (`noise`); 0 for the target itself.
        over: a spot whose relative latency the spot's relative latency is divided by.
    """
    spots = (spot,) if over is None else (spot, over)
    return (
        bootstrap.latency_ratio(*(timed_spot.records for timed_spot in spots)).at_least(floor)
        if _timed(*spots)
        else None
    )


class Place(NamedTuple):
    """A spot, its latency relative to the target's (`None` if it was not timed) and its quality minus the target's.

    Both are paired intervals, or the value alone if records hold too few single examples.
    """

    spot: Spot
    latency: Interval | None
    difference: Interval


class Places(NamedTuple):
    """A panel's spots as a plot shows them, with the line of random requests and the chosen spot.

    Attributes:
        curves: as in the panel; ends: the target's and the draft's.
        random: relative latencies and differences of whole requests sent at random, or `None`.
        margin: the accepted loss of quality.
        chosen: the place that measured fastest within it, `None` if none is faster than the target.
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
        """The legend of the ring around the chosen place."""
        return f"Fastest within {self.margin:g} of the target's quality" + (not self.certain) * " (not certain)"


def places(panel: Panel, margin: float = LOSS) -> Places:
    """Computes the places of a panel's spots; without a record of the target, `difference` is the quality itself."""
    target, bootstrap, floor = panel.target, Bootstrap(), noise(panel)
    base = target.quality.value if target else 0.0

    def place(spot: Spot) -> Place:
        gap = spot.quality.value - base
        difference = quality_gain(panel, spot, bootstrap) or (Interval(gap, gap, gap) if target else spot.quality)
        if spot is target:  # all latencies are relative to the target, so its own is 1
            return Place(spot, spot.latency and Interval(1.0, 1.0, 1.0), difference)
        return Place(spot, spot.latency and (latency(spot, bootstrap, floor) or spot.latency), difference)

    curves = {name: [place(spot) for spot in spots] for name, spots in panel.curves.items()}
    line = random_line(panel)
    drawn = None if line is None else (line.latency.tolist(), (line.quality - base).tolist())
    within = [
        (candidate.latency.value, candidate)
        for curve in curves.values()
        for candidate in curve
        if candidate.latency
        and candidate.latency.value < 1
        and candidate.difference.value >= -margin
        and not candidate.spot.inconclusive
    ]
    chosen = min(within, key=lambda pair: pair[0])[1] if target and within else None
    gain = quality_gain(panel, chosen.spot, bootstrap) if chosen else None
    certain = gain is not None and gain.low >= -margin
    return Places(curves, [place(spot) for spot in panel.ends], drawn, margin, chosen, certain)


class Line(NamedTuple):
    """Relative latency and quality, `[N]`, of mixtures of draft and target, from target alone to draft alone."""

    latency: np.ndarray
    quality: np.ndarray


def random_line(panel: Panel, points: int = 41) -> Line | None:
    """Returns latency and quality if whole requests go to draft or target at random, by ascending share of the draft.

    It is `None` without both ends, or if the draft was not timed. A corpus score (BLEU) is not linear in the share; if
    records hold no single examples, a straight line approximates it.
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
    """Returns the spot's quality minus that of requests sent at random at the same latency; `None` if not measured.

    A spot slower than the target is compared with the target alone, one faster than the draft with the draft alone.
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
    """Returns sentences that list the points below the line of random requests, and those significantly below it."""
    shown = [spot for spot in panel.spots if not spot.inconclusive]
    gains = {spot.name(): gain for spot in shown if (gain := gain_over_random(panel, spot, bootstrap))}
    below = [name for name, gain in gains.items() if gain.value < 0]
    sure = [name for name in below if gains[name].high < 0]
    said = "At equal latency, whole requests sent at random to draft or target (grey line) are better than "
    if not below:
        return [f"{said}none of the points."] if gains else []
    listed = f"{said}{len(below)} of {len(gains)} points: {', '.join(below)}."
    return [
        listed,
        f"Significant differences: {', '.join(sure)}." if sure else "None of these differences is significant.",
    ]


def noise(panel: Panel) -> float:
    """Returns the largest log ratio between latencies of equal work in a panel, 0 if no equal work was timed.

    The target alone is timed against itself; and methods may make the same calls, which happens if their distributions
    agree.
    """
    logs = defaultdict[Hashable, list[float]](list)
    for spot in panel.spots:
        if work := _work(spot):
            logs[work].append(math.log(latency_of(spot)))
    return max([self_noise(panel), *_widths(logs)])


def trial_noise(panel: Panel) -> float:
    """Returns the largest log ratio between single trials of equal work, of one point or of several.

    Ratios over all trials hide a machine that was busy for a while: trials of 1.22, 0.89 and 1.05 average to 1.04.
    """
    logs = defaultdict[Hashable, list[float]](list)
    for spot in (*panel.ends, *panel.spots):
        for record in filter(has_latency, spot.records):
            if spot is panel.target:  # all of its trials should be 1
                logs[spot.method] += [0.0, *_trial_logs(record)]
                continue
            for work, log in zip(_trial_work(record), _trial_logs(record), strict=False):
                logs[work].append(log)
    return max(_widths(logs), default=0.0)


def _widths(logs: Mapping[Hashable, Sequence[float]]) -> list[float]:
    return [max(values) - min(values) for values in logs.values()]


def self_noise(panel: Panel) -> float:
    """Returns the absolute log ratio of two timings of the target alone, 0 if it was not timed."""
    return abs(math.log(latency_of(panel.target))) if panel.target and panel.target.latency else 0.0


def noise_notes(panel: Panel) -> Iterator[str]:
    """Yields notes on how reliable a panel's latencies are."""
    if not any(spot.latency for spot in panel.spots):
        return
    floor, trial = noise(panel), trial_noise(panel)
    if floor > BUSY or trial > BUSY_TRIAL:
        yield "The machine was busy, and the latencies are unreliable: measure again when nothing else runs."
    if floor or trial:
        yield (
            f"Times of equal work (the target against itself, methods that made the same calls) differ by up to "
            f"{math.expm1(floor):.1%} over all trials, and by up to {math.expm1(trial):.1%} between single trials: no "
            f"interval of a latency is narrower than {math.expm1(floor):.1%}, and smaller differences are ties."
        )
    if any(_trials(spot) < LEAST_TRIALS for spot in panel.spots if _timed(spot)):
        yield f"No mark for latencies of fewer than {LEAST_TRIALS} trials."


_COSTS = ("block_size", "tree", "verify", "drafters", "tail")
"""Settings that determine the cost of a call."""


def _work(spot: Spot) -> tuple:
    """Returns the work of a spot's timed runs, seed by seed; `()` if a record does not hold it."""
    work = [(record["point"]["seed"], *_trial_work(record)) for record in spot.records]
    return tuple(work) if all(len(entry) > 1 for entry in work) else ()


def _trial_work(record: Record) -> list[tuple]:
    """Returns the work of each trial: the calls of both models, and the settings that determine their cost.

    The target's calls beside it are included, because latencies are relative to them. The list is empty if the record
    does not hold the calls.
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

    An entry ties with the column's highest if the interval of their difference includes 0; tied entries, the highest
    among them, are marked `TIE`. The highest is marked `BEST` only if every other entry was compared with it and none
    ties. A single entry has no mark.
    """
    return _marks(spots, lambda spot: spot.quality.value, _judged, bootstrap.quality_difference, 0)


def latency_marks(spots: Sequence[Spot | None], bootstrap: Bootstrap, floor: float) -> list[str]:
    """Returns marks like `quality_marks` for latencies: the lowest is best; in a tie the ratio's interval includes 1.

    The intervals of all pairs of the column hold jointly: otherwise the best of many equal entries is far from the
    worst by chance. An entry that did the same work as a tied entry ties too.

    Args:
        spots: the entries of the column; `None`: no entry.
        bootstrap: resamples the examples.
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
    """Returns sentences that count the spots without an interval, and name the spots that left examples out."""
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
    """Returns the marks of a column; `comparable` tests whether spots can be paired, `equal` means no difference."""
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
    """Returns whether spots were timed on enough examples and in enough trials to call one of them faster."""
    return _timed(*spots) and min(map(_trials, spots)) >= LEAST_TRIALS


def _trials(spot: Spot) -> int:
    """Returns the number of trials that a spot was timed in, over all seeds."""
    return sum(len(np.atleast_2d(record["latency"]["per_example_ms"])) for record in spot.records)


def _timed(*spots: Spot) -> bool:
    return all(has_latency(record) for spot in spots for record in spot.records)
