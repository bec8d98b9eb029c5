"""Two records on the same examples compared: paired bootstrap intervals (Koehn 2004) of quality and of latency.

Every resample of the examples scores both sides. What makes an example hard, or slow, is in both and cancels: the
interval of a difference is far narrower than the intervals of the two scores suggest. All resamples are one matrix of
counts, and a record's statistics times it are the sums of every resample. sacrebleu's own paired test wants texts,
which records do not hold, and knows none of the other metrics.

Each side is a list of records that differ in their seed only. A side's score is the mean over its records, on every
resample as in the tables; the seeds themselves are not resampled.

Latencies are ratios of times, and their resamples are made of log ratios, so that no interval reaches 0. Examples are
resampled as for qualities, and widened by what few examples lack (Hesterberg 2015, "expanded percentile interval").
What the machine did to a whole trial is no property of a method: its variance, as a two-way analysis of variance of
trials and examples finds it, is added to each record by draws of its own from Student's t. With noise that is
log-normal and spells in which the machine is busy 95% intervals hold the truth in 93 to 97% of all cases from 3 trials
on (`tests/results/analysis/bootstrap_test.py`). Needs no JAX.
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
"""Below this a percentile interval is too narrow to speak of 95%. Of normal numbers, 95% intervals of the mean hold the
truth in 83% of all cases with 5 examples, in 89% with 8, in 92% with 16, in 94% with 64."""


class Interval(NamedTuple):
    """A number, and from `low` to `high` what resamples of the examples make of it, or its spread over trials or seeds.

    All three are equal where nothing is known beside the number.
    """

    value: float
    low: float
    high: float

    def excludes(self, number: float) -> bool:
        """Whether `number` lies outside."""
        return not self.low <= number <= self.high

    def inverse(self) -> "Interval":
        """Returns the interval of 1 / the number: of the speed-up, where this one is of a relative latency."""
        return Interval(1 / self.value, 1 / self.high, 1 / self.low)

    def text(self, form: str, unit: str = "") -> str:
        """Returns the number, its unit behind it, and its interval in a format, as `0.81 [0.75, 0.90]`."""
        return f"{self.value:{form}}{unit} {self.brackets(form)}"

    def brackets(self, form: str) -> str:
        """Returns the two ends in a format, as `[0.75, 0.90]`."""
        return f"[{self.low:{form}}, {self.high:{form}}]"

    def at_least(self, floor: float) -> "Interval":
        """The interval of a ratio, no narrower than what equal things were seen to differ by: a log ratio, >= 0."""
        narrow = float(np.exp(-floor))
        return Interval(self.value, min(self.low, self.value * narrow), max(self.high, self.value / narrow))

    def among(self, pairs: int) -> "Interval":
        """The 95% interval of a ratio as one of so many that all hold at once in 95% of cases (Bonferroni).

        Widened as a normal one would be: quantiles that far out take more resamples than there are.
        """
        normal = NormalDist()
        wider = normal.inv_cdf(1 - 0.025 / max(pairs, 1)) / normal.inv_cdf(0.975)
        low, high = (self.value * (end / self.value) ** wider for end in (self.low, self.high))
        return Interval(self.value, low, high)


def has_quality(record: Record) -> bool:
    """Whether a record tells the quality of its examples one by one, and of enough of them."""
    return len(record["quality"].get("per_example", {}).get("ids", ())) >= LEAST_EXAMPLES


def judged_alike(records: Sequence[Record]) -> bool:
    """Whether all tell the quality of enough examples, and left out the same ones, on which a model failed."""
    lost = {tuple(sorted(record.get("failed_examples", ()))) for record in records}
    return len(lost) <= 1 and all(map(has_quality, records))


def has_latency(record: Record) -> bool:
    """Whether a record tells the times of its examples one by one, and of enough of them."""
    both = (record.get(name, {}).get("per_example_ms", ()) for name in TIMES)
    return min(np.shape(each)[-1] if len(each) else 0 for each in both) >= LEAST_EXAMPLES


MOST = 50.0
"""A log ratio beyond all that is measured, within what floats hold."""


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
        _check([*ours, *theirs], "quality")
        return self._mean(ours, self._quality), self._mean(theirs, self._quality)

    def mixed(self, ours: Sequence[Record], theirs: Sequence[Record], share: np.ndarray | float) -> np.ndarray:
        """Quality `[1 + samples]` if each whole request went to them with probability `share`, and to us else.

        Of the expected statistics: scores of a corpus (BLEU) are not linear in its parts.

        Args:
            share: one number, or one for each of the `1 + samples`.

        Raises:
            ValueError: as `quality_difference`.
        """
        _check([*ours, *theirs], "quality")
        weight = np.broadcast_to(share, 1 + self.samples)[:, None]
        sums = (1 - weight) * self._mean(ours, self._quality_sums) + weight * self._mean(theirs, self._quality_sums)
        return _scores(ours[0], sums)

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
        _check([*records, *others], "latency")
        return self._mean(records, self._latency)

    def counts(self, records: Sequence[Record]) -> dict[str, np.ndarray]:
        """Returns, by name in `PER_EXAMPLE`, its sum `[1 + samples]`: over all examples, then over resamples of them.

        Of several records it is their mean.

        Raises:
            ValueError: as `quality_difference`, of counts.
        """
        _check(records, "counts")
        return dict(zip(PER_EXAMPLE, self._mean(records, self._count_sums).T, strict=True))

    def rates(self, records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens per second of the timed runs, and over those of the target's runs beside, each `[1 + samples]`.

        Trials of several records are taken as trials of one.

        Raises:
            ValueError: as `latency_ratio`.
        """
        _check(records, "latency")

        def cells(entry: Timed, name: str) -> np.ndarray:
            rows = [np.atleast_2d(get_entry(record[entry], f"per_example_{name}")) for record in records]
            return np.concatenate(rows).astype(np.float64)

        (tokens, ms), (alone_tokens, alone_ms) = ([cells(entry, name) for name in ("tokens", "ms")] for entry in TIMES)
        key, seconds, alone_seconds = "".join(map(_seed, records)), ms / 1e3, alone_ms / 1e3
        over = self._ratios([tokens, alone_seconds], [seconds, alone_tokens], key)
        return self._ratios([tokens], [seconds], key), over

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
        return _scores(record, self._quality_sums(record))

    def _quality_sums(self, record: Record) -> np.ndarray:
        """Sums of the metric's statistics, `[1 + samples, K]`."""
        name, given = record["quality"]["metric"], record["quality"]["per_example"]
        order = np.argsort(given["ids"])  # records list their examples in any order; a pair is two equal ids
        statistics = np.asarray(given["statistics"][name], np.float64).reshape(len(order), -1)[order]
        return self._resamples(len(order)) @ statistics

    def _latency(self, record: Record) -> np.ndarray:
        own, target = (np.atleast_2d(record[name]["per_example_ms"]) for name in TIMES)
        return self._ratios([own], [target], _seed(record))

    def _count_sums(self, record: Record) -> np.ndarray:
        """`[1 + samples, len(PER_EXAMPLE)]`."""
        given = record["per_example"]
        order = np.argsort(given["ids"])
        counts = np.asarray([given[name] for name in PER_EXAMPLE], np.float64)[:, order]
        return self._resamples(len(order)) @ counts.T

    def _ratios(self, above: Sequence[np.ndarray], below: Sequence[np.ndarray], key: str) -> np.ndarray:
        """The product of the totals of `above` over that of `below`, `[1 + samples]`; all are `[trials, examples]`."""
        trials, examples = above[0].shape
        logs = np.zeros(1 + self.samples)
        influence = np.zeros((trials, examples))  # of each cell on the log of the ratio of totals, to first order
        for sign, parts in ((1, above), (-1, below)):
            for cells in parts:
                logs += sign * np.log(self._resamples(examples) @ cells.mean(0))
                influence += sign * cells / cells.mean()
        logs[1:] = logs[0] + _wider(examples) * (logs[1:] - logs[0])
        logs[1:] += _trial_error(influence) * self._trials(trials, key)
        return np.exp(logs.clip(-MOST, MOST))

    def _trials(self, trials: int, key: str) -> np.ndarray:
        """How far off the trials of a record are in each resample, `[samples]`, in standard errors: Student's t.

        Examples are the same for all records, trials are not: they ran at another time, on a machine that drifts. One
        trial says nothing of the next.
        """
        rng = np.random.default_rng((self.seed, zlib.crc32(key.encode())))
        return rng.standard_t(trials - 1, self.samples) if trials > 1 else np.zeros(self.samples)

    def _resamples(self, examples: int) -> np.ndarray:
        """How often each example is in each corpus, `[1 + samples, examples]`: first all once, then the resamples."""
        if examples not in self._counts:
            rng = np.random.default_rng(self.seed)
            drawn = rng.multinomial(examples, np.full(examples, 1 / examples), size=self.samples)
            self._counts[examples] = np.vstack([np.ones(examples), drawn])
        return self._counts[examples]

    def interval(self, scores: np.ndarray) -> Interval:
        """The first of `scores`, `[1 + samples]`, and what lies between its quantiles over the others."""
        low, high = np.quantile(scores[1:], [(1 - self.confidence) / 2, (1 + self.confidence) / 2])
        return Interval(float(scores[0]), float(low), float(high))


def _seed(record: Record) -> str:
    """Returns the text that seeds a record's resamples: its key when it was measured, so that intervals stay."""
    return str(record.get("former_key", record["key"]))


def _wider(examples: int) -> float:
    """By how much a percentile interval of a mean of `examples` is too narrow: >= 1, for 8 examples or more.

    The spread of resampled means is that of n - 1 of n examples, and its percentiles are normal where Student's t is
    due: their ratio at 97.5%, by the expansion of Abramowitz & Stegun 26.7.5 (scipy would take a second to import).
    """
    z, n = 1.959963984540054, examples - 1
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return float(t / z * (examples / n) ** 0.5)


def _trial_error(influence: np.ndarray) -> float:
    """The standard error of a mean that trials cause, from two-way `[trials, examples]`.

    Less what single cells cause: that is in the resamples of examples already.
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
    """Scores `[N]` by a record's metric from sums of its statistics `[N, K]`."""
    given = record["quality"]
    return quality.get_metric(given["metric"]).from_sums(sums, len(given["per_example"]["ids"]))


def has_counts(record: Record) -> bool:
    """Returns whether a record tells the counts of its examples one by one, and of enough of them."""
    return len(record["per_example"]["ids"]) >= LEAST_EXAMPLES


def _examples(record: Record, what: str) -> tuple:
    """Returns on which examples a record holds the quality, the counts or the times of single ones.

    Times have no ids: they are those of a task's examples, in its order, from the point's first one on.
    """
    task = record["fingerprints"]["examples"]
    if what == "latency":
        return task, record["point"]["first_example"], np.shape(record["latency"]["per_example_ms"])[-1]
    return task, sorted((record["quality"] if what == "quality" else record)["per_example"]["ids"])


def _check(records: Sequence[Record], what: str) -> None:
    """Refuses records that cannot be paired: without enough single examples, on other ones, or by other metrics."""
    first, present = records[0], {"quality": has_quality, "counts": has_counts, "latency": has_latency}[what]
    for record in records:
        if not present(record):
            few = f"{LEAST_EXAMPLES} or more single examples"
            raise ValueError(f"{_name(record)} does not hold the {what} of {few}; measure it again")
        metrics = what == "quality" and record["quality"]["metric"] != first["quality"]["metric"]
        if metrics or _examples(record, what) != _examples(first, what):
            unlike = "metrics" if metrics else "examples"
            raise ValueError(f"{_name(first)} and {_name(record)} have different {unlike} and cannot be paired")


def _name(record: Record) -> str:
    point = record["point"]
    alpha = "" if point["alpha"] is None else f" α={point['alpha']:g}"
    return f"{point['method']}{alpha} seed={point['seed']} (record {record['key'][:8]})"
