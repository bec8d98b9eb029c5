"""Tokens per second: predicted from counts and forward times, and measured (paper 3, eq. 2.1, Table 1).

A prediction rests on the counts of all examples that quality is taken on, and on the fit of all speculative runs that
were timed; the target alone has a fit of its own, as the paper's stand-alone setting. The fits' errors, between
records and not between their generations, are in the intervals of predictions (`Fit.draws`); whether the model of times
is right is not. What was measured rests on the timed runs alone. Needs no JAX.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from speccascade_jax.core.names import TARGET
from speccascade_jax.results.analysis import forward_times
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.analysis.families import THRESHOLD, Families, Family
from speccascade_jax.results.analysis.forward_times import Draws, Fit
from speccascade_jax.results.analysis.panels import Spot


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
            ValueError: as `forward_times.fit`, or a time that is not positive.
        """
        return _positive(forward_times.speculative(self.families.records), "draft", "target")

    @cached_property
    def times_alone(self) -> Fit:
        """The target's forward time where it writes alone; errors as of `times`."""
        return _positive(forward_times.alone(self.families.records, TARGET), "target")

    def predicted(self, spot: Spot) -> np.ndarray:
        """Tokens per second from a spot's counts, `[1 + samples]`; counts and forward times are resampled."""
        counts = self.bootstrap.counts(spot.records)
        examples = len(spot.records[0]["per_example"]["ids"])
        seconds = self._draws(spot).seconds(examples, counts["draft_steps"], counts["target_calls"])
        return counts["committed"] / seconds

    def measured(self, spot: Spot) -> np.ndarray:
        """Tokens per second of the timed runs, `[1 + samples]`."""
        return self.bootstrap.rates(spot.records)[0]

    def error(self, spot: Spot) -> float:
        """Predicted over measured throughput, less 1, both of the timed runs themselves."""
        timed = self.bootstrap.timed(spot.records)
        generations = sum(np.size(record["latency"]["per_example_ms"]) for record in spot.records)
        seconds = self._times(spot).seconds(generations, timed["draft_steps"], timed["target_calls"])
        return float(timed["seconds"] / seconds - 1)

    def _times(self, spot: Spot) -> Fit:
        return self.times_alone if spot.method == TARGET else self.times

    def _draws(self, spot: Spot) -> Draws:
        """The same for every spot of a fit: what is wrong with its times cancels where two of them are compared."""
        return self._drawn[spot.method == TARGET]

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
        at = max(family.spots, key=lambda each: self.predicted(family.spots[each])[0])
        spot = family.spots[at]
        return Best(at, self.predicted(spot), self.speed_up_predicted(spot))

    def best_measured(self, family: Family) -> Best:
        """The setting of the highest measured speed-up: settings ran at different hours, the target beside each."""
        at = max(family.spots, key=lambda each: self.speed_up_measured(family.spots[each])[0])
        spot = family.spots[at]
        return Best(at, self.measured(spot), self.speed_up_measured(spot))

    def suggestion(self, family: Family) -> Suggestion:
        """Theorem 3.1's threshold with Δ = 0 against the best measured one, by prediction.

        Between two measured thresholds the throughput is taken as linear in h, beyond them as that of the nearest.

        Raises:
            ValueError: a family of fixed blocks, or forward times that suggest nothing.
        """
        if family.symbol != THRESHOLD:
            raise ValueError(f"{family.name} has no stop threshold to suggest")
        at = forward_times.suggested_threshold(self.times.draft, self.times.target)
        places = np.asarray(list(family.spots))
        above, same = int(np.searchsorted(places, at)), np.flatnonzero(np.isclose(places, at)).tolist()
        near = same or [n for n in (above - 1, above) if 0 <= n < len(places)]
        found = [self.predicted(family.spots[places[n]]) for n in near]
        weight = 0.0 if len(near) < 2 else (at - places[near[0]]) / (places[near[1]] - places[near[0]])
        tokens = found[0] * (1 - weight) + found[-1] * weight
        return Suggestion(family, at, tokens, tuple(map(float, places[near])), self.best_predicted(family))
