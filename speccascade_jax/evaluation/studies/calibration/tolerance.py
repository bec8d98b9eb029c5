"""What a calibration may lose: bounds relative to the target, and how sure records make us that they are kept.

Needs no JAX.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.store.result_store import Record


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Bounds of quality and latency relative to the target alone; at least one of them.

    Under a bound of quality the fastest setting is looked for, under one of latency alone the best.

    Attributes:
        max_loss: share of the target's quality that may be lost: at 0.01, quality >= 0.99 of the target's.
        max_latency: largest latency over the target's: 0.6 is no slower than 0.6 of the target.
        confidence: share of paired resamples of the examples in which every bound must be kept.

    Raises:
        ValueError: no bound, or a value without meaning.
    """

    max_loss: float | None = None
    max_latency: float | None = None
    confidence: float = 0.9

    def __post_init__(self) -> None:
        if self.max_loss is None and self.max_latency is None:
            raise ValueError(
                "max_loss and max_latency are both None: give one, for example max_loss=0.01, at most 1% lost"
            )
        if self.max_loss is not None and not 0 <= _number("max_loss", self.max_loss) < 1:
            raise ValueError(f"max_loss={self.max_loss} is no share in [0, 1): 0.01 allows 1% of the target's quality")
        if self.max_latency is not None and not _number("max_latency", self.max_latency) > 0:
            raise ValueError(f"max_latency={self.max_latency} is not above 0: 0.6 allows 0.6 of the target's latency")
        if not 0.5 < _number("confidence", self.confidence) < 1:
            raise ValueError(f"confidence={self.confidence} is not between 0.5 and 1: 0.9 is the usual choice")

    def describe(self) -> str:
        """The bounds in words."""
        loss, latency = self.max_loss, self.max_latency
        bounds = [] if loss is None else [f"at most {100 * loss:g}% of the target's quality lost"]
        bounds += [] if latency is None else [f"latency at most {latency:g} of the target's"]
        return " and ".join(bounds)

    def kept(self, ours: Sequence[Record], target: Sequence[Record], bootstrap: Bootstrap) -> np.ndarray:
        """Whether every bound is kept, bool `[1 + samples]`: first on all examples, then on each resample.

        Examples judged and examples timed are resampled each on their own.

        Args:
            ours, target: records of one setting and of the target alone, one per seed, on the same examples; ValueError
                if they cannot be paired.
        """
        kept = np.ones(1 + bootstrap.samples, bool)
        if self.max_loss is not None:
            quality, reference = bootstrap.qualities(ours, target)
            kept &= quality >= (1 - self.max_loss) * reference
        if self.max_latency is not None:
            kept &= bootstrap.latencies(ours) <= self.max_latency
        return kept

    def check(self, target: Sequence[Record]) -> None:
        """ValueError for a target without quality: chance, on few examples, but every candidate keeps the bound."""
        quality = target[0]["quality"]
        if self.max_loss is not None and not quality["value"] > 0:
            raise ValueError(
                f"the target's {quality['metric']} is {quality['value']:g} on {quality['examples']} examples, so no "
                "share of it can be lost: check pair and task, or give max_latency instead of max_loss"
            )

    def share(self, ours: Sequence[Record], target: Sequence[Record], bootstrap: Bootstrap) -> float:
        """Share of resamples in which every bound is kept; arguments and errors as `kept`."""
        return float(self.kept(ours, target, bootstrap)[1:].mean())

    def cost(self, ours: Sequence[Record]) -> float:
        """What is to be low: relative latency, or minus the quality where nothing bounds quality; a mean over seeds."""
        if self.max_loss is None:
            return -statistics.fmean(record["quality"]["value"] for record in ours)
        return statistics.fmean(record["relative_latency"]["value"] for record in ours)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is not a finite number; 0.01 is one")
    return float(value)
