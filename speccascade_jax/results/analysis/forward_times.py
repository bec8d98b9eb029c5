"""What one forward pass of either model costs, and the tokens per second that follow from it.

Seconds of whole generations are regressed on their counts (paper 3, section 4.2 and Table 2; METHODS section 6
*Figures*). The paper's equation 2.1, `T = t_draft · draft_steps + t_target · target_calls`, has no constant. Here a
generation also pays for its prefill and for what it costs to be called at all, so there is an intercept; the fit
without one is reported beside it.

Generations of one record ran within minutes and share what the machine was like then, so they are no independent
witnesses. Errors are those of records as clusters (Liang & Zeger 1986, the sandwich with its factor G / (G - 1));
taken generation by generation they come out too small, by more than half again where records ran at speeds 10% apart.

Tokens per second are predicted from counts and forward times, and measured (paper 3, eq. 2.1, Table 1). A prediction
rests on the counts of all examples that quality is taken on, and on the fit of all speculative runs that were timed;
the target alone has a fit of its own, as the paper's stand-alone setting. The fits' errors, between records and not
between their generations, are in the intervals of predictions (`Fit.draws`); whether the model of times is right is
not. What was measured rests on the timed runs alone. Needs no JAX.
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
"""Fewer do not say how well the line fits."""

MOST_INFLATION = 100.0
"""Where counts are correlated, the variance of their coefficients grows by `1 / (1 − r²)`; beyond this (`r` above
0.995) the two coefficients cannot be told apart."""

NAMES = ("draft_steps", "target_calls")
COEFFICIENTS = (*NAMES, "generation")

MOST_OFF = 10.0
"""A log ratio beyond which a time says nothing."""


@dataclass(frozen=True)
class Fit:
    """Seconds per forward pass, by least squares.

    Attributes:
        draft, target: seconds per draft step and per target call; 0 for a model that took no part.
        constant: seconds per generation; 0 for a fit without intercept.
        fitted: the `COEFFICIENTS` that were.
        covariance: of `draft`, `target` and `constant`, `[3][3]`, 0 for what was not fitted; records are clusters.
        clusters: how many records, or generations where all are of one record.
        r_squared: explained share of the variance *about the mean*, with and without intercept, so that both compare.
        generations: how many.
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
        """Returns the values of `COEFFICIENTS`."""
        return self.draft, self.target, self.constant

    @property
    def errors(self) -> dict[str, float]:
        """Name of a coefficient that was fitted -> its standard error."""
        errors = dict(zip(COEFFICIENTS, np.sqrt(np.diag(self.covariance)).tolist(), strict=True))
        return {name: errors[name] for name in self.fitted}

    def seconds(self, generations: float, draft_steps: float, target_calls: float) -> float:
        """What so many generations with so many forward passes in all take (paper 3, eq. 2.1, and the constant)."""
        return self.constant * generations + self.draft * draft_steps + self.target * target_calls

    def draws(self, samples: int, seed: Sequence[int]) -> "Draws":
        """The coefficients and how wrong they may be: a multivariate t of as many degrees as clusters allow."""
        rng, degrees = np.random.default_rng(seed), max(self.clusters - 3, 1)
        normal = rng.multivariate_normal(np.zeros(3), self.covariance, samples, method="svd")
        return Draws(self, normal / np.sqrt(rng.chisquare(degrees, (samples, 1)) / degrees))


class Draws(NamedTuple):
    """A fit, and by how much its coefficients may be off, `[samples, 3]`."""

    fit: Fit
    off: np.ndarray

    def seconds(self, generations: float, draft_steps: np.ndarray, target_calls: np.ndarray) -> np.ndarray:
        """As `Fit.seconds`, `[1 + samples]` of counts `[1 + samples]`.

        Errors are taken to be of the logarithm, which leaves times positive however wide they are.
        """
        found = self.fit.constant * generations + self.fit.draft * draft_steps + self.fit.target * target_calls
        counts = np.stack([draft_steps, target_calls, np.full_like(found, generations)], axis=-1)
        off = (counts[1:] * self.off).sum(-1) / found[1:]
        return found * np.exp(np.concatenate([[0.0], off]).clip(-MOST_OFF, MOST_OFF))


class Runs(NamedTuple):
    """Timed generations: seconds, counts and the number of their record, each `[N]`."""

    seconds: np.ndarray
    draft_steps: np.ndarray
    target_calls: np.ndarray
    record: np.ndarray


def runs(records: Sequence[Record], entry: Timed = "latency") -> Runs:
    """All timed generations of some records.

    Args:
        records: those without timings are passed over.
        entry: "latency", or "target_latency" for the runs of the target alone beside them.
    """
    timed = [record for record in records if record.get(entry)]
    ms, steps, calls = (
        np.concatenate([np.ravel(get_entry(record[entry], f"per_example_{name}")) for record in timed] or [np.zeros(0)])
        for name in ("ms", *NAMES)
    )
    sizes = [np.size(record[entry]["per_example_ms"]) for record in timed]
    return Runs(ms / 1e3, steps, calls, np.repeat(np.arange(len(timed)), sizes))


def speculative(records: Sequence[Record], *, intercept: bool = True) -> Fit:
    """`t_draft` and `t_target` where both models took part: the records that are neither end's.

    Raises:
        ValueError: as `fit`.
    """
    both = runs([record for record in records if record["point"]["method"] not in (TARGET, DRAFT)])
    counts = {"draft_steps": both.draft_steps, "target_calls": both.target_calls}
    return fit(both.seconds, **counts, clusters=both.record, intercept=intercept)


def alone(records: Sequence[Record], end: str, *, intercept: bool = True) -> Fit:
    """A model's forward pass where it writes alone.

    Args:
        records: the target's runs are those of its own record and those beside every other one.
        end: `names.TARGET` or `names.DRAFT`; intercept: as `fit`.

    Raises:
        ValueError: as `fit`.
    """
    own = runs([record for record in records if record["point"]["method"] == end])
    if end == DRAFT:
        return fit(own.seconds, draft_steps=own.draft_steps, clusters=own.record, intercept=intercept)
    beside = runs(records, "target_latency")
    apart = own._replace(record=own.record - 1 - np.max(own.record, initial=0))
    both = Runs._make(np.concatenate(columns) for columns in zip(apart, beside, strict=True))
    return fit(both.seconds, target_calls=both.target_calls, clusters=both.record, intercept=intercept)


def fit(
    seconds: np.ndarray,
    *,
    draft_steps: np.ndarray | None = None,
    target_calls: np.ndarray | None = None,
    clusters: np.ndarray | None = None,
    intercept: bool = True,
) -> Fit:
    """Least squares of seconds on counts, all `[N]`.

    Args:
        seconds: of each generation; draft_steps, target_calls: its counts, or `None` where a model takes no part.
        clusters: which generations were run together; `None`, or one for all: each by itself.
        intercept: whether a generation has a constant cost too.

    Raises:
        ValueError: fewer than `LEAST_GENERATIONS`, or counts too nearly collinear to tell their costs apart.
    """
    both = zip(NAMES, (draft_steps, target_calls), strict=True)
    counts = {name: np.asarray(values, float) for name, values in both if values is not None}
    if len(seconds) < LEAST_GENERATIONS:
        raise ValueError(
            f"{len(seconds)} timed generations are too few for forward times, {LEAST_GENERATIONS} are the least: raise "
            "latency_examples or latency_trials"
        )
    _refuse_collinear(counts, intercept)
    if clusters is None or len(np.unique(clusters)) < 2:
        clusters = np.arange(len(seconds))
    columns = counts | ({"generation": np.ones(len(seconds))} if intercept else {})
    return _solved(columns, np.asarray(seconds, float), clusters)


def _solved(columns: Mapping[str, np.ndarray], seconds: np.ndarray, clusters: np.ndarray) -> Fit:
    design, names = np.stack([*columns.values()], -1), (*columns,)
    scale = np.linalg.norm(design, axis=0)  # columns of one size: a constant and counts of hundreds solve equally well
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
    """Covariance of least squares whose residuals may have anything in common within a cluster."""
    bread = np.linalg.inv(design.T @ design)
    numbers, which = np.unique(clusters, return_inverse=True)
    scores = np.zeros((len(numbers), design.shape[1]))
    np.add.at(scores, which, design * residuals[:, None])
    return len(numbers) / (len(numbers) - 1) * bread @ scores.T @ scores @ bread


def _refuse_collinear(counts: Mapping[str, np.ndarray], intercept: bool) -> None:
    """Beside a constant only what varies says anything; without one, what is not a multiple of the other."""
    centred = {name: values - values.mean() if intercept else values for name, values in counts.items()}
    for name, values in centred.items():
        if np.linalg.norm(values) <= 1e-9 * (np.linalg.norm(counts[name]) + 1.0):
            same = f"every generation has the same {name} ({counts[name][0]:g})"
            raise ValueError(f"{same}: its cost cannot be told from the rest; time outputs of different lengths")
    if len(centred) < 2:
        return
    first, second = centred.values()
    r = float(first @ second / (np.linalg.norm(first) * np.linalg.norm(second)))
    if r * r >= 1 - 1 / MOST_INFLATION:
        raise ValueError(
            f"draft_steps and target_calls are nearly collinear over these {len(first)} generations (r = {r:.4f}), "
            "as they are with one fixed block size: their costs cannot be told apart; fit several block sizes or stop "
            "thresholds together"
        )


def suggested_threshold(draft: float, target: float, delta: float = 0.0) -> float:
    """Theorem 3.1: the stop threshold `(c_2 + Δ) / (c_1 + c_2 + Δ)`, `c_1 = t_draft`, `c_2 = t_target − t_draft`.

    Args:
        draft, target: seconds per forward pass; delta: the theorem's constant, unknown in general; 0 is a suggestion.

    Raises:
        ValueError: a draft that is not cheaper than the target, or a time that is not positive (a fit of noise).
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
    """A family's best setting: γ or h, tokens per second and the speed-up over the target alone, `[1 + samples]`."""

    at: float
    tokens: np.ndarray
    speed_up: np.ndarray


class Suggestion(NamedTuple):
    """What theorem 3.1's threshold gives beside the best one that was measured.

    Attributes:
        family: whose thresholds; at: the suggested h; tokens: predicted there, `[1 + samples]`.
        between: the measured thresholds that it was read off from, one where it is a measured one or beyond all.
        best: the best measured one.
    """

    family: Family
    at: float
    tokens: np.ndarray
    between: tuple[float, ...]
    best: Best

    @property
    def lost(self) -> np.ndarray:
        """The share of the best throughput that is left on the table, `[1 + samples]`."""
        return 1.0 - self.tokens / self.best.tokens


@dataclass(frozen=True)
class Throughputs:
    """Predicted and measured throughputs of a panel's families; all methods raise ValueError on records without counts.

    Attributes:
        families: of which panel; bootstrap: its resamples.
    """

    families: Families
    bootstrap: Bootstrap

    @cached_property
    def times(self) -> Fit:
        """Forward times where both models take part.

        Raises:
            ValueError: as `fit`, or a time that is not positive.
        """
        return _positive(speculative(self.families.records), "draft", "target")

    @cached_property
    def times_alone(self) -> Fit:
        """The target's forward time where it writes alone; errors as of `times`."""
        return _positive(alone(self.families.records, TARGET), "target")

    def predicted(self, spot: Spot) -> np.ndarray:
        """Tokens per second from a spot's counts, `[1 + samples]`; counts and forward times are resampled."""
        counts = self.bootstrap.counts(spot.records)
        examples = len(spot.records[0]["per_example"]["ids"])
        # one draw for every spot of a fit: what is wrong with its times cancels where two of them are compared
        draws = self._drawn[spot.method == TARGET]
        return counts["committed"] / draws.seconds(examples, counts["draft_steps"], counts["target_calls"])

    def measured(self, spot: Spot) -> np.ndarray:
        """Tokens per second of the timed runs, `[1 + samples]`."""
        return self.bootstrap.rates(spot.records)[0]

    def error(self, spot: Spot) -> float:
        """Predicted over measured throughput, less 1, both of the timed runs themselves."""
        timed, times = runs(spot.records), self.times_alone if spot.method == TARGET else self.times
        seconds = times.seconds(len(timed.seconds), timed.draft_steps.sum(), timed.target_calls.sum())
        return float(timed.seconds.sum() / seconds - 1)

    @cached_property
    def _drawn(self) -> tuple[Draws, Draws]:
        samples, seed = self.bootstrap.samples, self.bootstrap.seed
        return self.times.draws(samples, (seed, 0)), self.times_alone.draws(samples, (seed, 1))

    def speed_up_predicted(self, spot: Spot) -> np.ndarray:
        """Predicted throughput over the target's, on the same resamples."""
        return self.predicted(spot) / self.predicted(self.families.target)

    def speed_up_measured(self, spot: Spot) -> np.ndarray:
        """Measured throughput over that of the target's runs beside, on the same resamples."""
        return self.bootstrap.rates(spot.records)[1]

    def best_predicted(self, family: Family) -> Best:
        """The setting of the highest predicted throughput."""
        return self._best(family, self.predicted, self.predicted, self.speed_up_predicted)

    def best_measured(self, family: Family) -> Best:
        """The setting of the highest measured speed-up: settings ran at different hours, the target beside each."""
        return self._best(family, self.speed_up_measured, self.measured, self.speed_up_measured)

    @staticmethod
    def _best(family: Family, *scores: Callable[[Spot], np.ndarray]) -> Best:
        """Returns the setting of the highest first score, with its tokens per second and its speed-up by the others."""
        by, tokens, speed_up = scores
        at = max(family.spots, key=lambda each: by(family.spots[each])[0])
        return Best(at, tokens(family.spots[at]), speed_up(family.spots[at]))

    def suggestion(self, family: Family) -> Suggestion:
        """Theorem 3.1's threshold with Δ = 0 against the best measured one, by prediction.

        Between two measured thresholds the throughput is taken as linear in h, beyond them as that of the nearest.

        Raises:
            ValueError: a family of fixed blocks, or forward times that suggest nothing.
        """
        if family.symbol != THRESHOLD:
            raise ValueError(f"{family.name} has no stop threshold to suggest")
        at = suggested_threshold(self.times.draft, self.times.target)
        places = np.asarray(list(family.spots))
        above, same = int(np.searchsorted(places, at)), np.flatnonzero(np.isclose(places, at)).tolist()
        near = same or [n for n in (above - 1, above) if 0 <= n < len(places)]
        found = [self.predicted(family.spots[places[n]]) for n in near]
        weight = 0.0 if len(near) < 2 else (at - places[near[0]]) / (places[near[1]] - places[near[0]])
        tokens = found[0] * (1 - weight) + found[-1] * weight
        return Suggestion(family, at, tokens, tuple(map(float, places[near])), self.best_predicted(family))
