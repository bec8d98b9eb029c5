"""Estimates of the time of one forward pass of target and draft, and tokens per second predicted from these times.

A regression fits the seconds of whole generations to their draft steps and target calls (Huang et al., 2024
(SpecDec++), section 4.2 and Table 2; docs/methods.md, section 6). The paper's equation 2.1, `T = t_draft · draft_steps
+ t_target · target_calls`, has no constant. Here a generation also includes its prefill and the overhead of its call,
so the fit has an intercept; tables also show the fit without intercept.

The generations of one record ran within minutes, in the same state of the machine, so they are not independent. For
this reason, standard errors treat records as clusters (Liang & Zeger, 1986: the sandwich with its factor G / (G - 1)).
Errors without clusters are too small: clustered errors are more than 1.5 times as large if records ran at speeds 10%
apart.

Tokens per second are predicted from counts and forward times, and also measured (the same paper, eq. 2.1 and Table 1).
A prediction uses the counts of all examples on which quality is measured, and the fit of all timed speculative runs.
The target alone has its own fit, as in the paper's stand-alone setting. The intervals of predictions include the fits'
errors between records (`Fit.draws`), but not errors of the regression model itself. Measured throughput uses the timed
runs only. Arrays `[1 + samples]` hold a value for all examples, then one for each bootstrap resample. Needs no JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.analysis.families import THRESHOLD, Families, Family
from speccascade_jax.results.analysis.panels import Spot
from speccascade_jax.results.store.record import Record, Timed, get_entry

LEAST_GENERATIONS = 10
"""The fewest generations that are fitted. With fewer, the quality of the fit is unknown."""

MOST_INFLATION = 100.0
"""The largest accepted variance inflation. If the two counts have correlation r, the variance of their coefficients
grows by the factor `1 / (1 − r²)`. Beyond this bound (`r` above 0.995) the two coefficients cannot be separated."""

NAMES = ("draft_steps", "target_calls")
COEFFICIENTS = (*NAMES, "generation")

MOST_OFF = 10.0
"""Bound on the log ratio of a resampled time to its estimate. Beyond this bound, a time carries no information."""


@dataclass(frozen=True)
class Fit:
    """A least-squares fit of the seconds per forward pass.

    Attributes:
        draft, target: seconds per draft step and per target call; 0 for a model that is not part of the fit.
        constant: seconds per generation; 0 for a fit without intercept.
        fitted: names of the fitted `COEFFICIENTS`.
        covariance: covariance matrix of `draft`, `target` and `constant`, `[3][3]`, with records as clusters; 0 for
            coefficients that were not fitted.
        clusters: number of records, or of generations if all belong to one record.
        r_squared: explained share of the variance *about the mean*, also for a fit without intercept, so that both fits
            are comparable.
        generations: number of generations.
    """

    draft: float
    target: float
    constant: float
    fitted: tuple[str, ...]
    covariance: np.ndarray
    clusters: int
    r_squared: float
    generations: int

    @property
    def times(self) -> tuple[float, float, float]:
        """The fitted seconds per draft step, per target call and per generation."""
        return self.draft, self.target, self.constant

    @property
    def errors(self) -> dict[str, float]:
        """Standard errors of the fitted coefficients, by name."""
        errors = dict(zip(COEFFICIENTS, np.sqrt(np.diag(self.covariance)).tolist(), strict=True))
        return {name: errors[name] for name in self.fitted}

    def seconds(self, generations: float, draft_steps: float, target_calls: float) -> float:
        """Returns the seconds that these generations and forward passes take (eq. 2.1 plus the constant)."""
        return self.constant * generations + self.draft * draft_steps + self.target * target_calls

    def draws(self, samples: int, seed: Sequence[int]) -> "Draws":
        """Draws errors of the coefficients from a multivariate t whose degrees of freedom follow from the clusters."""
        rng, degrees = np.random.default_rng(seed), max(self.clusters - 3, 1)
        normal = rng.multivariate_normal(np.zeros(3), self.covariance, samples, method="svd")
        return Draws(self, normal / np.sqrt(rng.chisquare(degrees, (samples, 1)) / degrees))


class Draws(NamedTuple):
    """A fit, and random draws of the errors of its coefficients, `[samples, 3]`."""

    fit: Fit
    off: np.ndarray

    def seconds(self, generations: float, draft_steps: np.ndarray, target_calls: np.ndarray) -> np.ndarray:
        """Returns the seconds for counts `[1 + samples]`: the first by the fit itself, the others with drawn errors.

        The errors apply to the logarithm, so that times stay positive for any error.
        """
        expected = self.fit.constant * generations + self.fit.draft * draft_steps + self.fit.target * target_calls
        counts = np.stack([draft_steps, target_calls, np.full_like(expected, generations)], axis=-1)
        off = (counts[1:] * self.off).sum(-1) / expected[1:]
        return expected * np.exp(np.concatenate([[0.0], off]).clip(-MOST_OFF, MOST_OFF))


class Runs(NamedTuple):
    """Timed generations: their seconds, draft steps, target calls and record index, each `[N]`."""

    seconds: np.ndarray
    draft_steps: np.ndarray
    target_calls: np.ndarray
    record: np.ndarray


def runs(records: Sequence[Record], entry: Timed = "latency") -> Runs:
    """Returns all timed generations of some records.

    Args:
        records: the records; those without timings are skipped.
        entry: "latency", or "target_latency" for the target's interleaved runs.
    """
    timed = [record for record in records if record.get(entry)]
    ms, steps, calls = (
        np.concatenate([np.ravel(get_entry(record[entry], f"per_example_{name}")) for record in timed] or [np.zeros(0)])
        for name in ("ms", *NAMES)
    )
    sizes = [np.size(record[entry]["per_example_ms"]) for record in timed]
    return Runs(ms / 1e3, steps, calls, np.repeat(np.arange(len(timed)), sizes))


def speculative(records: Sequence[Record], *, intercept: bool = True) -> Fit:
    """Fits the forward times `t_draft` and `t_target` to the records of methods that use both models.

    Raises:
        ValueError: as in `fit`.
    """
    pooled = runs([record for record in records if record["point"]["method"] not in (TARGET, DRAFT)])
    counts = {"draft_steps": pooled.draft_steps, "target_calls": pooled.target_calls}
    return fit(pooled.seconds, **counts, clusters=pooled.record, intercept=intercept)


def alone(records: Sequence[Record], end: str, *, intercept: bool = True) -> Fit:
    """Fits the forward time of a model that generates alone.

    Args:
        records: all records. The target's fit uses the generations of its own records, and also its runs that
            alternated with the runs of every other record.
        end: the model: `names.TARGET` or `names.DRAFT`.
        intercept: whether a generation also has a constant cost.

    Raises:
        ValueError: as in `fit`.
    """
    end_runs = runs([record for record in records if record["point"]["method"] == end])
    if end == DRAFT:
        return fit(end_runs.seconds, draft_steps=end_runs.draft_steps, clusters=end_runs.record, intercept=intercept)
    paired_runs = runs(records, "target_latency")
    apart = end_runs._replace(record=end_runs.record - 1 - np.max(end_runs.record, initial=0))
    pooled = Runs._make(np.concatenate(columns) for columns in zip(apart, paired_runs, strict=True))
    return fit(pooled.seconds, target_calls=pooled.target_calls, clusters=pooled.record, intercept=intercept)


def fit(
    seconds: np.ndarray,
    *,
    draft_steps: np.ndarray | None = None,
    target_calls: np.ndarray | None = None,
    clusters: np.ndarray | None = None,
    intercept: bool = True,
) -> Fit:
    """Fits the seconds of generations to their counts by least squares; all arrays are `[N]`.

    Args:
        seconds: seconds of each generation.
        draft_steps: draft steps of each generation; `None` if the draft is not used.
        target_calls: target calls of each generation; `None` if the target is not used.
        clusters: index of the group (record) to which a generation belongs; with `None`, or a single group, each
            generation is its own cluster.
        intercept: whether a generation also has a constant cost.

    Raises:
        ValueError: fewer than `LEAST_GENERATIONS` generations, or counts too nearly collinear to separate their costs.
    """
    named_counts = zip(NAMES, (draft_steps, target_calls), strict=True)
    counts = {name: np.asarray(values, float) for name, values in named_counts if values is not None}
    if len(seconds) < LEAST_GENERATIONS:
        raise ValueError(
            f"{len(seconds)} timed generations are too few to fit forward times: at least {LEAST_GENERATIONS} are "
            "needed; raise latency_examples or latency_trials"
        )
    _refuse_collinear(counts, intercept)
    if clusters is None or len(np.unique(clusters)) < 2:
        clusters = np.arange(len(seconds))
    columns = counts | ({"generation": np.ones(len(seconds))} if intercept else {})
    return _solved(columns, np.asarray(seconds, float), clusters)


def _solved(columns: Mapping[str, np.ndarray], seconds: np.ndarray, clusters: np.ndarray) -> Fit:
    design, names = np.stack([*columns.values()], -1), (*columns,)
    # columns are scaled to equal norm, because a constant beside counts of hundreds makes an ill-conditioned system
    scale = np.linalg.norm(design, axis=0)
    scaled = design / scale
    solution = np.linalg.lstsq(scaled, seconds, rcond=None)[0]
    residuals = seconds - scaled @ solution
    squares, about = float((residuals**2).sum()), float(((seconds - seconds.mean()) ** 2).sum())
    explained = 1 - squares / about if about else float("nan")
    places = [COEFFICIENTS.index(name) for name in names]
    values, covariance = np.zeros(3), np.zeros((3, 3))
    values[places] = solution / scale
    covariance[np.ix_(places, places)] = _sandwich(scaled, residuals, clusters) / np.outer(scale, scale)
    draft, target, constant = values.tolist()
    number = len(np.unique(clusters))
    return Fit(draft, target, constant, names, covariance, number, r_squared=explained, generations=len(seconds))


def _sandwich(design: np.ndarray, residuals: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Returns the covariance of least-squares coefficients if residuals correlate in any way within a cluster."""
    bread = np.linalg.inv(design.T @ design)
    numbers, cluster_index = np.unique(clusters, return_inverse=True)
    scores = np.zeros((len(numbers), design.shape[1]))
    np.add.at(scores, cluster_index, design * residuals[:, None])
    return len(numbers) / (len(numbers) - 1) * bread @ scores.T @ scores @ bread


def _refuse_collinear(counts: Mapping[str, np.ndarray], intercept: bool) -> None:
    """Raises ValueError for counts that do not determine the two costs.

    This is so if a count is the same in all generations, or if the two counts are nearly proportional.
    """
    centred = {name: values - values.mean() if intercept else values for name, values in counts.items()}
    for name, values in centred.items():
        if np.linalg.norm(values) <= 1e-9 * (np.linalg.norm(counts[name]) + 1.0):
            same = f"every generation has the same {name} ({counts[name][0]:g})"
            raise ValueError(f"{same}: its cost cannot be separated from the others; time outputs of different lengths")
    if len(centred) < 2:
        return
    first, second = centred.values()
    r = float(first @ second / (np.linalg.norm(first) * np.linalg.norm(second)))
    if r * r >= 1 - 1 / MOST_INFLATION:
        raise ValueError(
            f"draft_steps and target_calls are nearly collinear over these {len(first)} generations (r = {r:.4f}), "
            "as they are with one fixed block size: their costs cannot be separated; fit several block sizes or stop "
            "thresholds together"
        )


def suggested_threshold(draft: float, target: float, delta: float = 0.0) -> float:
    """Returns theorem 3.1's stop threshold `(c_2 + Δ) / (c_1 + c_2 + Δ)`, `c_1 = t_draft`, `c_2 = t_target − t_draft`.

    Args:
        draft: seconds per forward pass of the draft.
        target: seconds per forward pass of the target.
        delta: the theorem's constant Δ, which is unknown in general; with 0 the threshold is only a suggestion.

    Raises:
        ValueError: the draft is not cheaper than the target, or a time is not positive (a fit of noise).
    """
    if not 0 < draft < target:
        raise ValueError(
            f"no stop threshold follows from t_draft = {draft:.3g} s and t_target = {target:.3g} s: theorem 3.1 needs "
            "0 < t_draft < t_target"
        )
    return (target - draft + delta) / (target + delta)


def _positive(fit: Fit, *names: str) -> Fit:
    for name in names:
        if getattr(fit, name) <= 0:
            raise ValueError(
                f"t_{name} = {1e3 * getattr(fit, name):.3g} ms, fitted with R² {fit.r_squared:.3f}, predicts nothing: "
                "the timings are noise; repeat them on a quiet machine, with more latency_examples and latency_trials"
            )
    return fit


class Best(NamedTuple):
    """The best block size γ or stop threshold h of a family, and its throughput.

    Attributes:
        number: γ or h.
        tokens: tokens per second, `[1 + samples]` (all examples, then resamples).
        speed_up: the speed-up over the target alone, `[1 + samples]`.
    """

    number: float
    tokens: np.ndarray
    speed_up: np.ndarray


class Suggestion(NamedTuple):
    """The stop threshold of theorem 3.1, compared with the best measured threshold.

    Attributes:
        family: the family of the thresholds; threshold: the suggested h.
        tokens: predicted tokens per second at the suggested h, `[1 + samples]`.
        between: the measured thresholds from which `tokens` is interpolated; a single one if `threshold` equals it or
            is outside the measured range.
        best: the best measured threshold.
    """

    family: Family
    threshold: float
    tokens: np.ndarray
    between: tuple[float, ...]
    best: Best

    @property
    def lost(self) -> np.ndarray:
        """The share of the best throughput that is lost at the suggested threshold, `[1 + samples]`."""
        return 1.0 - self.tokens / self.best.tokens


@dataclass(frozen=True)
class Throughputs:
    """Predicted and measured throughputs of a panel's families.

    All methods raise ValueError if a record has no counts.

    Attributes:
        families: the panel's families; bootstrap: resamples of the examples.
    """

    families: Families
    bootstrap: Bootstrap

    @cached_property
    def times(self) -> Fit:
        """The fitted forward times of methods that use both models.

        Raises:
            ValueError: as in `fit`, or a time is not positive.
        """
        return _positive(speculative(self.families.records), "draft", "target")

    @cached_property
    def times_alone(self) -> Fit:
        """The fitted forward time of the target when it generates alone.

        Raises:
            ValueError: as in `fit`, or a time is not positive.
        """
        return _positive(alone(self.families.records, TARGET), "target")

    def predicted(self, spot: Spot) -> np.ndarray:
        """Predicts a point's tokens per second from its counts, `[1 + samples]`: on all examples, then on resamples.

        A resample draws the examples and the errors of the forward times.
        """
        counts = self.bootstrap.counts(spot.records)
        examples = len(spot.records[0]["per_example"]["ids"])
        # all points share the drawn errors of the fitted times, so that these errors cancel when points are compared
        draws = self._drawn[spot.method == TARGET]
        return counts["committed"] / draws.seconds(examples, counts["draft_steps"], counts["target_calls"])

    def measured(self, spot: Spot) -> np.ndarray:
        """Returns tokens per second of the timed runs, `[1 + samples]`: on all examples, then on resamples."""
        return self.bootstrap.rates(spot.records)[0]

    def error(self, spot: Spot) -> float:
        """Returns the ratio of predicted to measured throughput, minus 1, both for the timed runs themselves."""
        timed, times = runs(spot.records), self.times_alone if spot.method == TARGET else self.times
        seconds = times.seconds(len(timed.seconds), timed.draft_steps.sum(), timed.target_calls.sum())
        return float(timed.seconds.sum() / seconds - 1)

    @cached_property
    def _drawn(self) -> tuple[Draws, Draws]:
        samples, seed = self.bootstrap.samples, self.bootstrap.seed
        return self.times.draws(samples, (seed, 0)), self.times_alone.draws(samples, (seed, 1))

    def speed_up_predicted(self, spot: Spot) -> np.ndarray:
        """Returns a point's predicted throughput divided by the target's, on the same resamples."""
        return self.predicted(spot) / self.predicted(self.families.target)

    def speed_up_measured(self, spot: Spot) -> np.ndarray:
        """Returns a point's measured throughput divided by that of the target's runs, which alternated with its own."""
        return self.bootstrap.rates(spot.records)[1]

    def best_predicted(self, family: Family) -> Best:
        """Returns the γ or h of a family with the highest predicted throughput."""
        return self._best(family, self.predicted, self.predicted, self.speed_up_predicted)

    def best_measured(self, family: Family) -> Best:
        """Returns the γ or h of a family with the highest measured speed-up.

        Different values were timed at different times, so they are compared by their speed-up over the target's
        interleaved runs.
        """
        return self._best(family, self.speed_up_measured, self.measured, self.speed_up_measured)

    @staticmethod
    def _best(family: Family, *scores: Callable[[Spot], np.ndarray]) -> Best:
        """Returns the γ or h with the highest first score; the other scores give its tokens per second and speed-up."""
        by, tokens, speed_up = scores
        setting = max(family.spots, key=lambda candidate: by(family.spots[candidate])[0])
        return Best(setting, tokens(family.spots[setting]), speed_up(family.spots[setting]))

    def suggestion(self, family: Family) -> Suggestion:
        """Returns theorem 3.1's threshold with Δ = 0, and the best measured threshold by predicted throughput.

        Between two measured thresholds, the throughput is interpolated linearly in h. Outside their range, the
        throughput is that of the nearest threshold.

        Raises:
            ValueError: the family has fixed blocks, or the forward times suggest no threshold.
        """
        if family.symbol != THRESHOLD:
            raise ValueError(f"{family.name} has no stop threshold: choose a family with a stop policy")
        threshold = suggested_threshold(self.times.draft, self.times.target)
        places = np.asarray(list(family.spots))
        above, same = int(np.searchsorted(places, threshold)), np.flatnonzero(np.isclose(places, threshold)).tolist()
        near = same or [n for n in (above - 1, above) if 0 <= n < len(places)]
        throughputs = [self.predicted(family.spots[places[n]]) for n in near]
        weight = 0.0 if len(near) < 2 else (threshold - places[near[0]]) / (places[near[1]] - places[near[0]])
        tokens = throughputs[0] * (1 - weight) + throughputs[-1] * weight
        return Suggestion(family, threshold, tokens, tuple(map(float, places[near])), self.best_predicted(family))
