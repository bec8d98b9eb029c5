"""Two records on the same examples compared: paired bootstrap intervals (Koehn 2004) of quality and of latency.

Every resample of the examples scores both sides. What makes an example hard, or slow, is in both and cancels: the
interval of a difference is far narrower than the intervals of the two scores suggest. All resamples are one matrix of
counts, and a record's statistics times it are the sums of every resample. sacrebleu's own paired test wants texts,
which records do not hold, and knows none of the other metrics.

Each side is a list of records that differ in their seed only. A side's score is the mean over its records, on every
resample as in the tables; the seeds themselves are not resampled. Latencies resample the trials too, each record its
own: two records were timed at different times, and what the machine did meanwhile is no property of either. Needs no
JAX.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from speccascade_jax.core.names import PER_EXAMPLE
from speccascade_jax.metrics import quality
from speccascade_jax.results.store import Record

LEAST_EXAMPLES = 8
"""Below this a percentile interval is too narrow to speak of 95%. Of normal numbers, 95% intervals of the mean hold the
truth in 83% of all cases with 5 examples, in 89% with 8, in 92% with 16, in 94% with 64."""


class Interval(NamedTuple):
    """A number from all examples, and from `low` to `high` what resamples of them make of it."""

    value: float
    low: float
    high: float

    def excludes(self, number: float) -> bool:
        """Whether `number` lies outside."""
        return not self.low <= number <= self.high


def has_quality(record: Record) -> bool:
    """Whether a record tells the quality of its examples one by one, and of enough of them."""
    return len(record["quality"].get("per_example", {}).get("ids", ())) >= LEAST_EXAMPLES


def has_latency(record: Record) -> bool:
    """Whether a record tells the times of its examples one by one, and of enough of them."""
    both = (record.get(name, {}).get("per_example_ms", ()) for name in ("latency", "target_latency"))
    return min(np.shape(each)[-1] if len(each) else 0 for each in both) >= LEAST_EXAMPLES


TIMED = ("tokens", "draft_steps", "target_calls")
"""What timed runs hold beside their milliseconds, under `per_example_` and the name."""


class Bootstrap:
    """Resamples of examples, the same ones for every record; scores of a record are computed once.

    Args:
        samples: how many resamples.
        seed: of the resamples; equal seeds give equal intervals.
        confidence: the share of resamples between `low` and `high`, the same share left out on either side.
    """

    def __init__(self, samples: int = 1000, seed: int = 0, confidence: float = 0.95):
        self.samples, self.seed, self.confidence = samples, seed, confidence
        self._counts: dict[int, np.ndarray] = {}
        # By identity, not by key: the record is kept beside its scores, so an id is never that of another one.
        self._scores: dict[tuple[str, int], tuple[Record, np.ndarray]] = {}

    def quality_difference(self, ours: Sequence[Record], theirs: Sequence[Record]) -> Interval:
        """Our quality minus theirs, in points of the metric.

        Raises:
            ValueError: records on different examples or with different metrics, both named; a record without the
                statistics of its examples, or with fewer than `LEAST_EXAMPLES` of them.
        """
        first, second = self.qualities(ours, theirs)
        return self.interval(first - second)

    def qualities(self, ours: Sequence[Record], theirs: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
        """Our quality and theirs, each `[1 + samples]`: first on all examples, then on the same resamples of them.

        Raises:
            ValueError: as `quality_difference`.
        """
        for record in (*ours, *theirs):
            _refuse_without(record, has_quality(record), "quality")
            _refuse_unlike(ours[0], record, "metrics", lambda r: r["quality"]["metric"])
            _refuse_unlike(ours[0], record, "examples", _judged)
        return self._mean(ours, self._quality), self._mean(theirs, self._quality)

    def latency_ratio(self, ours: Sequence[Record], theirs: Sequence[Record] | None = None) -> Interval:
        """Our latency over that of the target runs beside ours; with `theirs`, over theirs relative to their targets.

        Raises:
            ValueError: as `quality_difference`, of times per example.
        """
        ratio = self.latencies(ours, *(theirs or ()))
        return self.interval(ratio if theirs is None else ratio / self.latencies(theirs))

    def latencies(self, records: Sequence[Record], *others: Record) -> np.ndarray:
        """Latency over that of the target runs beside, `[1 + samples]`: first on all examples, then on resamples.

        Args:
            records: what is averaged; others: what they are to be compared with.

        Raises:
            ValueError: as `latency_ratio`.
        """
        for record in (*records, *others):
            _refuse_without(record, has_latency(record), "latency")
            _refuse_unlike(records[0], record, "examples", _timed)
        return self._mean(records, self._latency)

    def counts(self, records: Sequence[Record]) -> dict[str, np.ndarray]:
        """`labels.PER_EXAMPLE` name -> its sum `[1 + samples]`: over all examples, then over resamples of them.

        Of several records it is their mean.

        Raises:
            ValueError: as `quality_difference`, of counts.
        """
        for record in records:
            _refuse_without(record, len(record["per_example"]["ids"]) >= LEAST_EXAMPLES, "counts")
            _refuse_unlike(records[0], record, "examples", _counted)
        return dict(zip(PER_EXAMPLE, self._mean(records, self._count_sums).T, strict=True))

    def timed(self, records: Sequence[Record]) -> dict[str, np.ndarray]:
        """Sums `[1 + samples]` over the timed runs: "seconds" and `TIMED`, and with "alone_" the target's beside them.

        First over all runs, then over resamples of examples and trials; of several records it is their mean.

        Raises:
            ValueError: as `latency_ratio`.
        """
        for record in records:
            _refuse_without(record, has_latency(record), "latency")
            _refuse_unlike(records[0], record, "examples", _timed)
        names = [side + what for side in ("", "alone_") for what in ("seconds", *TIMED)]
        return dict(zip(names, self._mean(records, self._timed_sums).T, strict=True))

    def _mean(self, records: Sequence[Record], scores: Callable[[Record], np.ndarray]) -> np.ndarray:
        """Mean over records of what `scores` gives: `[1 + samples]`."""
        found = []
        for record in records:
            name = scores.__name__, id(record)
            if name not in self._scores:
                self._scores[name] = record, scores(record)
            found.append(self._scores[name][1])
        return np.mean(found, axis=0)

    def _quality(self, record: Record) -> np.ndarray:
        name, given = record["quality"]["metric"], record["quality"]["per_example"]
        order = np.argsort(given["ids"])  # records list their examples in any order; a pair is two equal ids
        statistics = np.asarray(given["statistics"][name], np.float64).reshape(len(order), -1)[order]
        return quality.get_metric(name).from_sums(self._resamples(len(order)) @ statistics, len(order))

    def _latency(self, record: Record) -> np.ndarray:
        own, target = (np.atleast_2d(record[name]["per_example_ms"]) for name in ("latency", "target_latency"))
        trials, examples = own.shape
        counts, weights = self._resamples(examples), self._trials(trials, record["key"])
        ours, theirs = (((weights @ times) * counts).sum(-1) for times in (own, target))
        return ours / theirs

    def _count_sums(self, record: Record) -> np.ndarray:
        """`[1 + samples, len(PER_EXAMPLE)]`."""
        given = record["per_example"]
        order = np.argsort(given["ids"])
        counts = np.asarray([given[name] for name in PER_EXAMPLE], np.float64)[:, order]
        return self._resamples(len(order)) @ counts.T

    def _timed_sums(self, record: Record) -> np.ndarray:
        """`[1 + samples, 2 (1 + len(TIMED))]`."""
        values = []
        for side in ("latency", "target_latency"):
            values.append(np.atleast_2d(record[side]["per_example_ms"]) / 1e3)
            values += [np.atleast_2d(record[side][f"per_example_{what}"]) for what in TIMED]
        trials, examples = values[0].shape
        counts, weights = self._resamples(examples), self._trials(trials, record["key"])
        return np.stack([((weights @ each) * counts).sum(-1) for each in values], axis=-1)

    def _trials(self, trials: int, key: str) -> np.ndarray:
        """How much each trial weighs in each resample, `[1 + samples, trials]`; every record has draws of its own.

        Examples are the same for all records, trials are not: they ran at another time, on a machine that drifts.
        Resamples of `n` have (n − 1)/n of the variance that is looked for, which matters where `n` is 2.
        """
        seed = self.seed, zlib.crc32(key.encode())
        drawn = np.random.default_rng(seed).multinomial(trials, np.full(trials, 1 / trials), size=self.samples)
        wider = (trials / (trials - 1)) ** 0.5 if trials > 1 else 0.0
        return np.vstack([np.ones(trials), 1 + wider * (drawn - 1)])

    def _resamples(self, examples: int) -> np.ndarray:
        """How often each example is in each corpus, `[1 + samples, examples]`: first all once, then the resamples."""
        if examples not in self._counts:
            drawn = np.random.default_rng(self.seed).multinomial(
                examples, np.full(examples, 1 / examples), size=self.samples
            )
            self._counts[examples] = np.vstack([np.ones(examples), drawn])
        return self._counts[examples]

    def interval(self, scores: np.ndarray) -> Interval:
        """The first of `scores`, `[1 + samples]`, and what lies between its quantiles over the others."""
        low, high = np.quantile(scores[1:], [(1 - self.confidence) / 2, (1 + self.confidence) / 2])
        return Interval(float(scores[0]), float(low), float(high))


def _refuse_without(record: Record, present: bool, what: str) -> None:
    if not present:
        raise ValueError(
            f"{_name(record)} does not hold the {what} of {LEAST_EXAMPLES} or more single examples; measure it again"
        )


def _refuse_unlike(one: Record, other: Record, what: str, of: Callable[[Record], object]) -> None:
    if of(one) != of(other):
        raise ValueError(f"{_name(one)} and {_name(other)} have different {what} and cannot be paired")


def _judged(record: Record) -> tuple:
    return record["fingerprints"]["examples"], sorted(record["quality"]["per_example"]["ids"])


def _counted(record: Record) -> tuple:
    return record["fingerprints"]["examples"], sorted(record["per_example"]["ids"])


def _timed(record: Record) -> tuple:
    """Times have no ids: they are those of a task's examples, in its order, from the point's first one on."""
    first = record["point"]["first_example"]
    return record["fingerprints"]["examples"], first, np.shape(record["latency"]["per_example_ms"])[-1]


def _name(record: Record) -> str:
    point = record["point"]
    alpha = "" if point["alpha"] is None else f" α={point['alpha']:g}"
    return f"{point['method']}{alpha} seed={point['seed']} (record {record['key'][:8]})"
