"""Where a calibration's points become records: one store, one session, windows of its examples. Needs no JAX."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation.points import Evaluation, Point, Settings
from speccascade_jax.evaluation.session import Session
from speccascade_jax.results.analysis.bootstrap import LEAST_EXAMPLES
from speccascade_jax.results.store.result_store import Record, ResultStore

Records = tuple[Record, ...]
"""One point's, one per seed."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Neighbouring examples: `judged` of them from `first` on, of which the first `timed` are timed too."""

    first: int
    judged: int
    timed: int

    @property
    def end(self) -> int:
        """The first example behind it."""
        return self.first + self.judged

    def of(self, evaluation: Evaluation) -> Evaluation:
        """The evaluation, on these examples."""
        return replace(evaluation, first_example=self.first, quality_examples=self.judged, latency_examples=self.timed)

    def part(self, judged: int) -> Window:
        """Its first `judged` examples, with the same share of them timed, but enough for an interval."""
        timed = max(math.ceil(self.timed * judged / self.judged), LEAST_EXAMPLES)
        return replace(self, judged=judged, timed=min(timed, judged, self.timed))


class Bench:
    """Measures points and remembers them in a store, so that a calibration that was killed goes on.

    Args:
        store: where records go, and where those of an earlier calibration are found; their keys hold all examples that
            were loaded, so that one with other numbers of examples begins anew.
        session: with the examples of all windows loaded.
        seeds: each point is measured once with each.
    """

    def __init__(self, store: ResultStore, session: Session, seeds: Sequence[int] = (0,)):
        self.store, self.session, self.seeds = store, session, tuple(seeds)

    def measure(self, points: Sequence[Point], window: Window) -> dict[Point, Records]:
        """The points' records on a window; the α's of one method and block size share batches and programs.

        Args:
            points: of one sampling; their own window and seed do not matter.

        Raises:
            FloatingPointError: a point failed on some example, and so cannot be compared with the others.
        """
        # the target is timed like the others: a table of the store needs it in their panel
        placed = {
            point: [replace(point, evaluation=window.of(point.evaluation), seed=seed) for seed in self.seeds]
            for point in points
        }
        groups: dict[tuple[Settings, int], list[Point]] = defaultdict(list)
        for one in itertools.chain(*placed.values()):
            groups[replace(one.settings, alpha=None), one.seed].append(one)
        experiment.measure(list(groups.values()), self.store, self.session)
        held = {record["key"]: record for record in self.store.records}
        for one in itertools.chain(*placed.values()):
            if failed := {"failed_examples", "failed_timings"} & held[self.session.key(one)].keys():
                why = held[self.session.key(one)].get("failure", "runs that were timed ended early")
                raise FloatingPointError(f"{one.label()} has {min(failed)} and cannot be compared: {why}")
        return {point: tuple(held[self.session.key(one)] for one in ones) for point, ones in placed.items()}


def mean(records: Records, part: str, name: str) -> float:
    """Mean over seeds of a number of the records, `measures` that are undefined counted as 0."""
    return statistics.fmean(record[part][name] or 0.0 for record in records)
