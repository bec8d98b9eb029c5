"""A session whose records come from formulas: a test sets a method's quality, latency and kept share."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from speccascade_jax.evaluation.heads import Heads
from speccascade_jax.evaluation.measuring import Earlier, never
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Point, Settings
from speccascade_jax.evaluation.session import Identity
from speccascade_jax.results.store.record import Provenance
from speccascade_jax.results.store.result_store import FORMAT, Record
from speccascade_jax.storage.files import plain, point_key

EXAMPLES = 400
DRAWS = 0
TASK = Evaluation(task="tiny_translation", latency_examples=16, latency_trials=1)
SOURCE = ModelPair(name="fake")

Law = Callable[[Settings], tuple[float, ...]]
"""Function from settings to three numbers: quality, latency relative to the target's, and share of kept tokens."""


class FakeSession:
    """A session that measures nothing and returns records from formulas.

    `asked` holds the points whose records were requested, `seen` the examples on which these were judged.

    Args:
        law: the average values.
        noise: standard deviation, over examples, of the score around the average (of 50).
    """

    def __init__(self, law: Law, noise: float = 2.0):
        self.law, self.noise, self.asked, self.heads = law, noise, list[Point](), Heads(None)

    def check(self, chosen) -> None:
        self.heads.check(chosen)

    def share(self, chosen) -> None:
        """Compiles nothing, so there is nothing to share."""

    def key(self, point: Point) -> str:
        return point_key(configuration=point.configuration())

    def identity(self, point: Point) -> Identity:
        return Identity(self.key(point), self.key(point), Provenance(code=None, toolchain={}))

    def evaluate(self, points: Sequence[Point], earlier: Earlier = never) -> Iterator[Record]:
        for point in points:
            self.asked.append(point)
            yield plain(self._record(point))

    @property
    def seen(self) -> set[int]:
        return {n for point in self.asked for n in examples_of(point)}

    def _record(self, point: Point) -> Record:
        quality, latency, kept, *used = self.law(point.settings)
        ids, timed = examples_of(point), point.evaluation.latency_examples
        # without the repr of all settings, so that a new field of `Settings` does not change the random draws
        said = (DRAWS, point.settings.method, point.settings.alpha, point.settings.block_size, point.seed)
        draws = np.random.default_rng(zlib.crc32(repr(said).encode()))
        hard = np.random.default_rng(0).normal(50, 10, EXAMPLES)
        exact = point.settings.method in ("autoregressive", "spec_decode")
        scores = (hard * quality + (0 if exact else self.noise) * draws.normal(size=EXAMPLES))[ids]
        target = np.random.default_rng(1).uniform(50, 150, EXAMPLES)[ids][:timed]
        spent = latency * target * draws.normal(1, 0.02, len(target))
        times = {"latency": {"per_example_ms": [spent]}, "target_latency": {"per_example_ms": [target]}}
        times |= {"relative_latency": {"value": spent.sum() / target.sum()}} if timed else {}
        return {
            "key": self.key(point), "format": FORMAT, "point": point.coordinates(), "fingerprints": {"examples": "all"},
            "quality": {
                "metric": "rougeL", "value": scores.mean(), "examples": len(ids),
                "per_example": {"ids": ids, "statistics": {"rougeL": scores}},
            },
            "measures": {"acceptance_rate": kept, "rejection_rate": 1 - kept, "draft_utilisation": [kept, *used][-1]},
        } | (times if timed else {})  # fmt: skip


def examples_of(point: Point) -> list[int]:
    """Returns the examples that a point is judged on."""
    first = point.evaluation.first_example
    return list(range(first, first + point.evaluation.quality_examples))


def point(name: str, alpha: float | None = None, **others) -> Point:
    """Returns a point at temperature 0."""
    return Point(pair=SOURCE, evaluation=TASK.resolved(), settings=Settings(method=name, alpha=alpha, **others))
