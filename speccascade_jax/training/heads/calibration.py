"""How good predicted probabilities of acceptance are: discrimination (AUC) and calibration (ECE, Brier, log loss).

Labels are soft: a position at which the target keeps the token with probability `P` counts as a kept one with weight
`P` and as a rejected one with weight `1 − P`, which is the expectation over the coin that verification throws. So the
best that any prediction can reach in Brier score and log loss is not 0: it is what predicting `P` itself gives.
"""

from dataclasses import dataclass

import numpy as np

BINS = 15
_TINY = 1e-7


@dataclass(frozen=True)
class Bins:
    """A reliability diagram: per bin the share of positions, the mean prediction and the mean label (nan if empty)."""

    share: np.ndarray
    predicted: np.ndarray
    kept: np.ndarray

    @property
    def ece(self) -> float:
        """Expected calibration error `Σ share |predicted − kept|` (Naeini et al., 2015)."""
        return float(np.nansum(self.share * np.abs(self.predicted - self.kept)))


def auc(scores: np.ndarray, kept: np.ndarray) -> float:
    """Probability that a kept token has a higher score than a rejected one, ties counted half.

    Args:
        scores: `[N]`, any increasing function of the prediction; kept: `[N]` in [0, 1], `P`.

    Returns:
        nan where nothing was ever kept, or nothing rejected.
    """
    kept = np.asarray(kept, np.float64)
    _, group = np.unique(np.asarray(scores), return_inverse=True)
    positive, negative = (np.bincount(group, weights) for weights in (kept, 1.0 - kept))
    both = positive.sum() * negative.sum()
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / both) if both > 0 else float("nan")


def brier(predicted: np.ndarray, kept: np.ndarray) -> float:
    """Mean squared error against the outcome, in expectation: `P (1 − P̂)² + (1 − P) P̂²`."""
    predicted, kept = np.asarray(predicted, np.float64), np.asarray(kept, np.float64)
    return float(np.mean(kept * (1 - predicted) ** 2 + (1 - kept) * predicted**2))


def log_loss(predicted: np.ndarray, kept: np.ndarray) -> float:
    """Mean negative log-likelihood of the outcome in nats, in expectation; predictions are kept off 0 and 1 by 1e-7."""
    clipped = np.clip(np.asarray(predicted, np.float64), _TINY, 1 - _TINY)
    kept = np.asarray(kept, np.float64)
    return float(-np.mean(kept * np.log(clipped) + (1 - kept) * np.log1p(-clipped)))


def reliability(predicted: np.ndarray, kept: np.ndarray, bins: int = BINS, equal_mass: bool = False) -> Bins:
    """Predictions in bins of equal width over [0, 1], or of equally many positions as nearly as ties allow.

    Equal predictions share a bin, the one that the middle of them belongs to.

    Args:
        predicted, kept: `[N]` in [0, 1].
    """
    predicted, kept = np.asarray(predicted, np.float64), np.asarray(kept, np.float64)
    if equal_mass:
        _, group, size = np.unique(predicted, return_inverse=True, return_counts=True)
        middle = np.cumsum(size) - (size + 2) // 2  # rank, the lower one of two
        which = middle[group] * bins // max(len(predicted), 1)
    else:
        which = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    count = np.bincount(which, minlength=bins).astype(np.float64)
    sums = [np.bincount(which, weights, minlength=bins) for weights in (predicted, kept)]
    with np.errstate(invalid="ignore"):
        return Bins(count / max(count.sum(), 1), *(total / count for total in sums))


def measures(predicted: np.ndarray, kept: np.ndarray) -> dict[str, float]:
    """Everything about predictions `[N]` of `P`: `auc`, `ece`, `ece_equal_mass`, `brier`, `log_loss` and means."""
    means = {"positions": len(kept), "kept": float(np.mean(kept)), "predicted": float(np.mean(predicted))}
    errors = {"ece": reliability(predicted, kept).ece}
    errors["ece_equal_mass"] = reliability(predicted, kept, equal_mass=True).ece
    scores = {"brier": brier(predicted, kept), "log_loss": log_loss(predicted, kept)}
    return means | {"auc": auc(predicted, kept)} | errors | scores


@dataclass(frozen=True)
class Isotonic:
    """The rising step function of a score that fits labels best; linear between its steps' middles.

    Attributes:
        scores: float64 `[K]`, rising; values: float64 `[K]`, never falling.
    """

    scores: np.ndarray
    values: np.ndarray

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Predicted probabilities; the ends' values beyond the ends."""
        return np.interp(scores, self.scores, self.values)


def isotonic(scores: np.ndarray, kept: np.ndarray) -> Isotonic:
    """Least squares under a rising order, by pooling adjacent violators (Barlow et al., 1972).

    Args:
        scores, kept: `[N]`; for a score that falls with acceptance, such as an entropy, give its negative.
    """
    unique, group = np.unique(np.asarray(scores, np.float64), return_inverse=True)
    weight, total = np.bincount(group), np.bincount(group, np.asarray(kept, np.float64))
    places = np.bincount(group, np.asarray(scores, np.float64))
    pools: list[list[float]] = []  # weight, sum of labels, sum of scores
    for one in zip(weight.tolist(), total.tolist(), places.tolist(), strict=True):
        pools.append(list(one))
        while len(pools) > 1 and pools[-2][1] * pools[-1][0] >= pools[-1][1] * pools[-2][0]:
            last = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
    found = np.asarray(pools)
    return Isotonic(found[:, 2] / found[:, 0], found[:, 1] / found[:, 0])
