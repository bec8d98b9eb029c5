"""What one forward pass of either model costs: seconds of whole generations regressed on their counts.

Paper 3, section 4.2 and Table 2; METHODS section 6 *Figures*. The paper's equation 2.1,
`T = t_draft · draft_steps + t_target · target_calls`, has no constant. Here a generation also pays for its prefill and
for what it costs to be called at all, so there is an intercept; the fit without one is reported beside it.

Generations of one record ran within minutes and share what the machine was like then, so they are no independent
witnesses. Errors are those of records as clusters (Liang & Zeger 1986, the sandwich with its factor G / (G - 1));
taken generation by generation they come out too small, by more than half again where records ran at speeds 10% apart.
Needs no JAX.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.results.store.result_store import Record

LEAST_GENERATIONS = 10
"""Fewer do not say how well the line fits."""

MOST_INFLATION = 100.0
"""Where counts are correlated, the variance of their coefficients grows by `1 / (1 − r²)`; beyond this (`r` above
0.995) the two coefficients cannot be told apart."""

NAMES = ("draft_steps", "target_calls")
COEFFICIENTS = (*NAMES, "generation")

MOST_OFF = 10.0
"""A log ratio beyond which a time says nothing."""


@dataclass(frozen=True, kw_only=True)
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

    draft: float = 0.0
    target: float = 0.0
    constant: float = 0.0
    fitted: tuple[str, ...]
    covariance: np.ndarray
    clusters: int
    r_squared: float
    generations: int

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


def runs(records: Sequence[Record], entry: str = "latency") -> Runs:
    """All timed generations of some records.

    Args:
        records: those without timings are passed over.
        entry: "latency", or "target_latency" for the runs of the target alone beside them.
    """
    timed = [record for record in records if record.get(entry)]
    ms, steps, calls = (
        np.concatenate([np.ravel(record[entry][f"per_example_{name}"]) for record in timed] or [np.zeros(0)])
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
    return fit(
        both.seconds,
        draft_steps=both.draft_steps,
        target_calls=both.target_calls,
        clusters=both.record,
        intercept=intercept,
    )


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
    counts = {
        name: np.asarray(values, float)
        for name, values in zip(NAMES, (draft_steps, target_calls), strict=True)
        if values is not None
    }
    if len(seconds) < LEAST_GENERATIONS:
        raise ValueError(
            f"{len(seconds)} timed generations are too few for forward times, {LEAST_GENERATIONS} are the least: raise "
            "latency_examples or latency_trials"
        )
    _refuse_collinear(counts, intercept)
    columns = [*counts.values(), *([np.ones(len(seconds))] if intercept else [])]
    names = [*counts, *(["generation"] if intercept else [])]
    if clusters is None or len(np.unique(clusters)) < 2:
        clusters = np.arange(len(seconds))
    return _solved(np.stack(columns, -1), np.asarray(seconds, float), names, clusters)


def _solved(design: np.ndarray, seconds: np.ndarray, names: Sequence[str], clusters: np.ndarray) -> Fit:
    scale = np.linalg.norm(design, axis=0)  # columns of one size: a constant and counts of hundreds solve equally well
    scaled = design / scale
    solution = np.linalg.lstsq(scaled, seconds, rcond=None)[0]
    residuals = seconds - scaled @ solution
    squares, about = float((residuals**2).sum()), float(((seconds - seconds.mean()) ** 2).sum())
    value = dict(zip(names, map(float, solution / scale), strict=True))
    return Fit(
        draft=value.get("draft_steps", 0.0),
        target=value.get("target_calls", 0.0),
        constant=value.get("generation", 0.0),
        fitted=tuple(names),
        covariance=_placed(_sandwich(scaled, residuals, clusters) / np.outer(scale, scale), names),
        clusters=len(np.unique(clusters)),
        r_squared=1 - squares / about if about else float("nan"),
        generations=len(seconds),
    )


def _sandwich(design: np.ndarray, residuals: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Covariance of least squares whose residuals may have anything in common within a cluster."""
    bread = np.linalg.inv(design.T @ design)
    numbers, which = np.unique(clusters, return_inverse=True)
    scores = np.zeros((len(numbers), design.shape[1]))
    np.add.at(scores, which, design * residuals[:, None])
    return len(numbers) / (len(numbers) - 1) * bread @ scores.T @ scores @ bread


def _placed(covariance: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """`[3, 3]`: in the order of `COEFFICIENTS`, 0 for those that were not fitted."""
    out, at = np.zeros((3, 3)), [COEFFICIENTS.index(name) for name in names]
    out[np.ix_(at, at)] = covariance
    return out


def _refuse_collinear(counts: Mapping[str, np.ndarray], intercept: bool) -> None:
    """Beside a constant only what varies says anything; without one, what is not a multiple of the other."""
    centred = {name: values - values.mean() if intercept else values for name, values in counts.items()}
    for name, values in centred.items():
        if np.linalg.norm(values) <= 1e-9 * (np.linalg.norm(counts[name]) + 1.0):
            raise ValueError(
                f"every generation has the same {name} ({counts[name][0]:g}): its cost cannot be told from the rest; "
                "time outputs of different lengths"
            )
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
