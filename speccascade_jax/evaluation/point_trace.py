"""Trace of one point (configuration) by XLA's profiler; the traced generations are never the measured ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

from speccascade_jax.evaluation.points import Point
from speccascade_jax.evaluation.session import Session
from speccascade_jax.results.store.record import Record
from speccascade_jax.runtime import hosts
from speccascade_jax.runtime.profiles import host_folder, traced

Evaluate = Callable[[Sequence[Point]], Iterator[Record]]


def trace(session: Session, point: Point, place: str | Path) -> Path:
    """Traces one batch of a point and, if its latency is measured, one example alone; prints and returns the folder.

    Both run once before the trace, so that it holds no compilation. Several processes trace the same generations, and
    each writes the trace of its own devices to `<place>/host-<index>/<first digits of the key>`.

    Args:
        session: provides the pair and its examples.
        point: the point to trace.
        place: a local folder, or an address in a bucket.
    """
    evaluation = point.evaluation
    (rows, _), *_ = session.batches(evaluation)
    runs = {"batch": session.prepare(point, rows)}
    if evaluation.latency_examples and point.method.timed:
        runs["single"] = session.prepare(point, session.window(evaluation, 1))
    for run in runs.values():
        jax.block_until_ready(run(point.seed))
    folder = host_folder(place) / session.key(point)[:8]
    with traced(folder):
        for name, run in runs.items():
            with jax.profiler.TraceAnnotation(name):
                jax.block_until_ready(run(point.seed))
    if hosts.first():
        print(f"trace of {point.label()}: {folder}")
    return folder


class FirstPoint:
    """A sweep's function for measuring groups of points, which also traces the first point that it measures.

    The trace begins when all records of the point's group are complete, because it would slow timed runs down.

    Args:
        evaluate: measures a group of points.
        session: provides the pair and its examples.
        place: as in `trace`; `None` traces nothing.
    """

    def __init__(self, evaluate: Evaluate, session: Session, place: str | Path | None):
        self._evaluate, self._session, self._place = evaluate, session, place

    def __call__(self, points: Sequence[Point]) -> Iterator[Record]:
        """Yields the record of each point, and then traces the first of them, unless that was done before."""
        yield from self._evaluate(points)
        self.trace(points[0])

    def trace(self, point: Point) -> None:
        """Traces a point, unless one was traced before."""
        if self._place is not None:
            trace(self._session, point, self._place)
            self._place = None
