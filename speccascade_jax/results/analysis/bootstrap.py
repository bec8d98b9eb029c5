"""Paired bootstrap intervals (Koehn, 2004) of the difference in quality or latency between two records.

Both records are measured on the same examples, and every resample of the examples scores both. An example's difficulty
or length affects both scores and cancels in their difference. The interval of a difference is therefore much narrower
than the intervals of the two scores. All resamples are one matrix of counts; the product of this matrix with a record's
statistics gives the sums of every resample. sacrebleu's own paired test needs texts, which records do not contain, and
supports only its own metrics. If answers are only right or wrong, a few made-up answers are resampled together with the
real ones (`metrics.quality.COINS`).

Each side of a comparison is a list of records that differ in their random seed only. A side's score is the mean over
its records, on every resample and in the tables. The seeds themselves are not resampled.

Latencies are ratios of times. They are resampled as log ratios, so that no interval reaches 0. Examples are resampled
as for qualities, and the intervals are widened to correct for few examples (Hesterberg, 2015: "expanded percentile
interval"). The machine may be slower during a whole trial (one timing of all examples), which is not a property of the
method. A two-way analysis of variance of trials and examples estimates the variance of the effect. Independent draws
from Student's t add this variance to each record. With log-normal noise and periods in which the machine is busy, 95%
intervals contain the true value in 93 to 97% of all cases, if there are at least 3 trials
(`tests/results/analysis/bootstrap_test.py`). Needs no JAX.
"""

import zlib
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from speccascade_jax.core.names import PER_EXAMPLE
from speccascade_jax.metrics import quality
from speccascade_jax.results.store.record import TIMES, Record, Timed, get_entry

LEAST_EXAMPLES = 8
"""The fewest examples from which an interval is computed. With fewer, a percentile interval is much too narrow for 95%.
For normally distributed numbers, 95% intervals of the mean contain the true mean in 83% of all cases with 5 examples,
in 89% with 8, in 92% with 16, in 94% with 64."""


class Interval(NamedTuple):
    """A number and its interval from `low` to `high`, over resamples of the examples, over trials, or over seeds.

    If only the number is known, `value`, `low` and `high` are equal.
    """

    value: float
    low: float
    high: float

    def excludes(self, number: float) -> bool:
        """Returns whether `number` is outside the interval."""
        return not self.low <= number <= self.high

    def inverse(self) -> "Interval":
        """Returns the interval of 1 / `value`; for a relative latency, this is the speed-up."""
        return Interval(1 / self.value, 1 / self.high, 1 / self.low)

    def text(self, form: str, unit: str = "") -> str:
        """Returns the number with its unit and its interval as formatted text, such as `0.81 [0.75, 0.90]`."""
        return f"{self.value:{form}}{unit} {self.brackets(form)}"

    def brackets(self, form: str) -> str:
        """Returns the two ends of the interval as formatted text, such as `[0.75, 0.90]`."""
        return f"[{self.low:{form}}, {self.high:{form}}]"

    def at_least(self, floor: float) -> "Interval":
        """Returns the interval of a ratio, widened to at least ±`floor` on the log scale.

        `floor` is the largest log ratio that was measured between two timings of equal work.
        """
        narrow = float(np.exp(-floor))
        return Interval(self.value, min(self.low, self.value * narrow), max(self.high, self.value / narrow))

    def covering(self, other: "Interval") -> "Interval":
        """Returns the interval, widened so that it contains the interval `other`."""
        return Interval(self.value, min(self.low, other.low), max(self.high, other.high))

    def among(self, pairs: int) -> "Interval":
        """Returns a ratio's interval, widened so that all `pairs` comparisons hold jointly at 95% (Bonferroni).

        The widening assumes a normal distribution, because there are too few resamples to estimate such extreme
        quantiles.
        """
        normal = NormalDist()
        wider = normal.inv_cdf(1 - 0.025 / max(pairs, 1)) / normal.inv_cdf(0.975)
        low, high = (self.value * (end / self.value) ** wider for end in (self.low, self.high))
        return Interval(self.value, low, high)


def has_quality(record: Record) -> bool:
    """Returns whether a record contains the quality of single examples, for at least `LEAST_EXAMPLES` examples."""
    return len(record["quality"].get("per_example", {}).get("ids", ())) >= LEAST_EXAMPLES


def judged_alike(records: Sequence[Record]) -> bool:
    """Returns whether all records contain the quality of enough examples, and omit the same failed examples."""
    lost = {tuple(sorted(record.get("failed_examples", ()))) for record in records}
    return len(lost) <= 1 and all(map(has_quality, records))


def has_latency(record: Record) -> bool:
    """Returns whether a record contains the times of single examples, for at least `LEAST_EXAMPLES` examples."""
    per_record = (record.get(name, {}).get("per_example_ms", ()) for name in TIMES)
    return min(np.shape(times)[-1] if len(times) else 0 for times in per_record) >= LEAST_EXAMPLES


MOST = 50.0
"""Bound on log ratios, far beyond any measured log ratio, so that their exponentials do not overflow."""


class Bootstrap:
    """Resamples of the examples, the same for all records; a record's scores on the resamples are computed only once.

    Args:
        samples: number of resamples.
        seed: random seed of the resamples; equal seeds give equal intervals.
        confidence: fraction of the resamples between `low` and `high`; equal fractions are left out below and above.
    """

    def __init__(self, samples: int = 1000, seed: int = 0, confidence: float = 0.95):
        self.samples, self.seed, self.confidence = samples, seed, confidence
        self._counts: dict[int, np.ndarray] = {}
        # The key contains the record's `id()`. The record is stored beside its scores, so Python does not reuse this
        # id.
        self._scores: dict[tuple[str, int], tuple[Record, np.ndarray]] = {}

    def quality_difference(self, ours: Sequence[Record], theirs: Sequence[Record]) -> Interval:
        """Returns the quality of `ours` minus that of `theirs`, in points of the metric.

        Raises:
            ValueError: two records, which the message names, have different examples or metrics; or a record lacks the
                statistics of single examples, or has fewer than `LEAST_EXAMPLES` of them.
        """
        first, second = self.qualities(ours, theirs)
        return self.interval(first - second)

    def qualities(self, ours: Sequence[Record], theirs: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the quality of both sides, each `[1 + samples]`: on all examples, then on shared resamples.

        Raises:
            ValueError: as in `quality_difference`.
        """
        _check([*ours, *theirs], "quality")
        return self._mean(ours, self._quality), self._mean(theirs, self._quality)

    def mixed(self, ours: Sequence[Record], theirs: Sequence[Record], share: np.ndarray | float) -> np.ndarray:
        """Returns the quality `[1 + samples]` of a random mixture: `theirs` with probability `share`, otherwise `ours`.

        Each whole request goes to one side. The statistics are averaged before scoring, because a corpus score (BLEU)
        is not linear in its statistics.

        Args:
            ours: records of one side, on the same examples as `theirs`.
            theirs: records of the other side.
            share: probability of `theirs`: one number, or one for each of the `1 + samples`.

        Raises:
            ValueError: as in `quality_difference`.
        """
        _check([*ours, *theirs], "quality")
        weight = np.broadcast_to(share, 1 + self.samples)[:, None]
        sums = (1 - weight) * self._mean(ours, self._quality_sums) + weight * self._mean(theirs, self._quality_sums)
        return _scores(ours[0], sums)

    def latency_ratio(self, ours: Sequence[Record], theirs: Sequence[Record] | None = None) -> Interval:
        """Returns the relative latency of `ours`, divided by that of `theirs` if they are passed.

        A relative latency is the time relative to that of the target's runs, which alternated with the record's own
        runs.

        Raises:
            ValueError: as in `quality_difference`, for times per example.
        """
        ratio = self.latencies(ours, *(theirs or ()))
        return self.interval(ratio if theirs is None else ratio / self.latencies(theirs))

    def latencies(self, records: Sequence[Record], *others: Record) -> np.ndarray:
        """Returns the latency relative to the target's interleaved runs, `[1 + samples]`: all examples, then resamples.

        Args:
            records: the records that are averaged.
            others: records that they will be compared with; they are only checked.

        Raises:
            ValueError: as in `latency_ratio`.
        """
        _check([*records, *others], "latency")
        return self._mean(records, self._latency)

    def counts(self, records: Sequence[Record]) -> dict[str, np.ndarray]:
        """Returns the sums `[1 + samples]` of the counts in `PER_EXAMPLE`, by name: all examples, then resamples.

        For several records, the result is the mean of their sums.

        Raises:
            ValueError: as in `quality_difference`, for counts.
        """
        _check(records, "counts")
        return dict(zip(PER_EXAMPLE, self._mean(records, self._count_sums).T, strict=True))

    def rates(self, records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens per second of the timed runs, and their ratio to the target's runs, each `[1 + samples]`.

        The trials of several records are pooled.

        Raises:
            ValueError: as in `latency_ratio`.
        """
        _check(records, "latency")

        def cells(entry: Timed, name: str) -> np.ndarray:
            rows = [np.atleast_2d(get_entry(record[entry], f"per_example_{name}")) for record in records]
            return np.concatenate(rows).astype(np.float64)

        (tokens, ms), (alone_tokens, alone_ms) = ([cells(entry, name) for name in ("tokens", "ms")] for entry in TIMES)
        key, seconds, alone_seconds = "".join(map(_seed, records)), ms / 1e3, alone_ms / 1e3
        over = self._ratios([tokens, alone_seconds], [seconds, alone_tokens], key)
        return self._ratios([tokens], [seconds], key), over

    def ratio(self, above: np.ndarray, below: np.ndarray) -> np.ndarray:
        """Returns the ratio of two sums over examples, `[1 + samples]`: all examples, then resamples.

        Differences of two ratios are paired, because equal numbers of examples are resampled in the same way.

        Args:
            above: terms of the numerator, `[N]`, one per example.
            below: terms of the denominator, `[N]`.
        """
        resamples = self._resamples(len(above))
        return np.asarray((resamples @ above) / (resamples @ below))

    def _mean(self, records: Sequence[Record], scores: Callable[[Record], np.ndarray]) -> np.ndarray:
        """Returns the mean of `scores` over the records, `[1 + samples]`; the scores of each record are cached."""
        record_scores = []
        for record in records:
            name = scores.__name__, id(record)
            if name not in self._scores:
                self._scores[name] = record, scores(record)
            record_scores.append(self._scores[name][1])
        return np.mean(record_scores, axis=0)

    def _quality(self, record: Record) -> np.ndarray:
        return _scores(record, self._quality_sums(record))

    def _quality_sums(self, record: Record) -> np.ndarray:
        """Returns the sums of the metric's statistics, `[1 + samples, K]`: all examples, then resamples."""
        name, per_example = record["quality"]["metric"], record["quality"]["per_example"]
        # records list their examples in any order: sorting by id pairs the examples of two records
        order = np.argsort(per_example["ids"])
        statistics = np.asarray(per_example["statistics"][name], np.float64).reshape(len(order), -1)[order]
        if not quality.get_metric(name).right_or_wrong:
            return self._resamples(len(order)) @ statistics
        drawn = self._resamples(len(order) + quality.COINS)[1:]
        rng = np.random.default_rng((self.seed, zlib.crc32(_answerer(record).encode())))
        return np.vstack([statistics.sum(0), quality.sums_with_coins(name, statistics, drawn, rng)])

    def _latency(self, record: Record) -> np.ndarray:
        method, target = (np.atleast_2d(record[name]["per_example_ms"]) for name in TIMES)
        return self._ratios([method], [target], _seed(record))

    def _count_sums(self, record: Record) -> np.ndarray:
        """Returns the sums of the counts, `[1 + samples, len(PER_EXAMPLE)]`."""
        per_example = record["per_example"]
        order = np.argsort(per_example["ids"])
        counts = np.asarray([per_example[name] for name in PER_EXAMPLE], np.float64)[:, order]
        return self._resamples(len(order)) @ counts.T

    def _ratios(self, above: Sequence[np.ndarray], below: Sequence[np.ndarray], key: str) -> np.ndarray:
        """Returns the product of the totals of `above` over that of the totals of `below`, `[1 + samples]`.

        Args:
            above: arrays `[trials, examples]`, the factors of the numerator.
            below: arrays `[trials, examples]`, the factors of the denominator.
            key: text that seeds the random draws of the trials' error.
        """
        trials, examples = above[0].shape
        logs = np.zeros(1 + self.samples)
        # first-order effect of each trial of an example on the log of the ratio
        influence = np.zeros((trials, examples))
        for sign, parts in ((1, above), (-1, below)):
            for cells in parts:
                logs += sign * np.log(self._resamples(examples) @ cells.mean(0))
                influence += sign * cells / cells.mean()
        logs[1:] = logs[0] + _wider(examples) * (logs[1:] - logs[0])
        logs[1:] += _trial_error(influence) * self._trials(trials, key)
        return np.exp(logs.clip(-MOST, MOST))

    def _trials(self, trials: int, key: str) -> np.ndarray:
        """Draws the random effect of a record's trials for each resample, `[samples]`, in units of its standard error.

        The draws are from Student's t. All records share the examples but not the trials, because trials run at
        different times on a machine whose speed drifts. A single trial gives no estimate of this error, so its draws
        are 0.
        """
        rng = np.random.default_rng((self.seed, zlib.crc32(key.encode())))
        return rng.standard_t(trials - 1, self.samples) if trials > 1 else np.zeros(self.samples)

    def _resamples(self, examples: int) -> np.ndarray:
        """Returns how often each example occurs, `[1 + samples, examples]`: once in row 0, then as resampled."""
        if examples not in self._counts:
            rng = np.random.default_rng(self.seed)
            drawn = rng.multinomial(examples, np.full(examples, 1 / examples), size=self.samples)
            self._counts[examples] = np.vstack([np.ones(examples), drawn])
        return self._counts[examples]

    def interval(self, scores: np.ndarray) -> Interval:
        """Returns the first of `scores` `[1 + samples]`, with the quantiles of the others as its interval."""
        low, high = np.quantile(scores[1:], [(1 - self.confidence) / 2, (1 + self.confidence) / 2])
        return Interval(float(scores[0]), float(low), float(high))


def _seed(record: Record) -> str:
    """Returns the text that seeds a record's random draws: its key before any migration.

    So a change of the format of records changes no interval.
    """
    return str(record.get("former_key", record["key"]))


def _answerer(record: Record) -> str:
    """Returns the text that seeds the made-up answers of a record (`quality.COINS`).

    Lossless records share their made-up answers with the target, because the target would answer any further example in
    the same way. Records that differ in their seed only also share them.
    """
    point = record["point"]
    return "target" if point.get("lossless") else str(sorted((k, v) for k, v in point.items() if k != "seed"))


def _wider(examples: int) -> float:
    """Returns the factor (>= 1) that widens a percentile interval of a mean of `examples` examples, 8 or more.

    The factor corrects two errors. The variance of resampled means is too small by (n - 1) / n for n examples. The
    percentiles of resampled means are those of a normal distribution, but those of Student's t are correct. The
    expansion of Abramowitz & Stegun 26.7.5 gives the ratio of the two at 97.5% (importing scipy would take a second).
    """
    z, n = 1.959963984540054, examples - 1
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return float(t / z * (examples / n) ** 0.5)


def _trial_error(influence: np.ndarray) -> float:
    """Returns the standard error of a mean that is due to whole trials, from values `[trials, examples]`.

    The part that is due to single runs is subtracted, because the resamples of examples include it already.
    """
    trials, examples = influence.shape
    if trials < 2:
        return 0.0
    by_trial, by_example = influence.mean(1, keepdims=True), influence.mean(0, keepdims=True)
    rest = influence - by_trial - by_example + influence.mean()
    of_trials = examples * ((by_trial - influence.mean()) ** 2).sum() / (trials - 1)
    of_cells = (rest**2).sum() / ((trials - 1) * (examples - 1))
    return float(np.sqrt(max(of_trials - of_cells, 0.0) / influence.size))


def _scores(record: Record, sums: np.ndarray) -> np.ndarray:
    """Computes scores `[N]` by a record's metric from sums of the metric's statistics, `[N, K]`."""
    recorded = record["quality"]
    return quality.get_metric(recorded["metric"]).from_sums(sums, len(recorded["per_example"]["ids"]))


def has_counts(record: Record) -> bool:
    """Returns whether a record contains the counts of single examples, for at least `LEAST_EXAMPLES` examples."""
    return len(record["per_example"]["ids"]) >= LEAST_EXAMPLES


def _examples(record: Record, quantity: str) -> tuple:
    """Returns an identifier of the examples for which a record contains quality, counts or times.

    Times have no example ids: they belong to the task's examples in order, starting at the point's `first_example`.
    """
    task = record["fingerprints"]["examples"]
    if quantity == "latency":
        return task, record["point"]["first_example"], np.shape(record["latency"]["per_example_ms"])[-1]
    return task, sorted((record["quality"] if quantity == "quality" else record)["per_example"]["ids"])


def _check(records: Sequence[Record], quantity: str) -> None:
    """Raises ValueError for records that cannot be paired: too few examples, different examples or metrics."""
    first, present = records[0], {"quality": has_quality, "counts": has_counts, "latency": has_latency}[quantity]
    for record in records:
        if not present(record):
            few = f"{LEAST_EXAMPLES} or more single examples"
            raise ValueError(f"{_name(record)} holds no {quantity} of {few}; measure it again on enough examples")
        metrics = quantity == "quality" and record["quality"]["metric"] != first["quality"]["metric"]
        if metrics or _examples(record, quantity) != _examples(first, quantity):
            unlike = "metrics" if metrics else "examples"
            raise ValueError(
                f"{_name(first)} and {_name(record)} have different {unlike} and cannot be paired: compare records of "
                f"equal {unlike}"
            )


def _name(record: Record) -> str:
    point = record["point"]
    alpha = "" if point["alpha"] is None else f" α={point['alpha']:g}"
    return f"{point['method']}{alpha} seed={point['seed']} (record {record['key'][:8]})"
