"""Quality of predicted acceptance probabilities: discrimination (AUC) and calibration (ECE, Brier score, log loss).

Labels are soft. At a position where the target keeps the token with probability `P`, the position counts as a kept
token with weight `P` and as a rejected token with weight `1 − P`. This is the expectation over the random decision to
accept. So the best possible Brier score and log loss are not 0, but those of the prediction `P` itself.
"""

from dataclasses import dataclass

import numpy as np

BINS = 15
_TINY = 1e-7


@dataclass(frozen=True)
class Bins:
    """Reliability diagram: share of positions, mean prediction and mean label in each bin (nan if the bin is empty)."""

    share: np.ndarray
    predicted: np.ndarray
    kept: np.ndarray

    @property
    def ece(self) -> float:
        """Expected calibration error `Σ share |predicted − kept|` (Naeini et al., 2015)."""
        return float(np.nansum(self.share * np.abs(self.predicted - self.kept)))


def auc(scores: np.ndarray, kept: np.ndarray) -> float:
    """Returns the probability that a kept token has a higher score than a rejected one; a tie counts half.

    Args:
        scores: `[N]`, the predictions or any increasing function of them.
        kept: `[N]` in [0, 1], the labels `P`.

    Returns:
        The probability; nan if every label is 0, or every label is 1.
    """
    kept = np.asarray(kept, np.float64)
    _, group = np.unique(np.asarray(scores), return_inverse=True)
    positive, negative = (np.bincount(group, weights) for weights in (kept, 1.0 - kept))
    pairs = positive.sum() * negative.sum()
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / pairs) if pairs > 0 else float("nan")


def brier(predicted: np.ndarray, kept: np.ndarray) -> float:
    """Returns the expected mean squared error against the outcome: `P (1 − P̂)² + (1 − P) P̂²`."""
    predicted, kept = np.asarray(predicted, np.float64), np.asarray(kept, np.float64)
    return float(np.mean(kept * (1 - predicted) ** 2 + (1 - kept) * predicted**2))


def log_loss(predicted: np.ndarray, kept: np.ndarray) -> float:
    """Returns the expected negative log-likelihood of the outcome in nats; predictions are clipped by 1e-7."""
    clipped = np.clip(np.asarray(predicted, np.float64), _TINY, 1 - _TINY)
    kept = np.asarray(kept, np.float64)
    return float(-np.mean(kept * np.log(clipped) + (1 - kept) * np.log1p(-clipped)))


def reliability(predicted: np.ndarray, kept: np.ndarray, bins: int = BINS, equal_mass: bool = False) -> Bins:
    """Sorts predictions into bins of equal width over [0, 1], or of equal size as far as ties allow.

    Equal predictions share the bin that contains their middle rank.

    Args:
        predicted: `[N]` in [0, 1], the predicted probabilities.
        kept: `[N]` in [0, 1], the labels `P`.
        bins: number of bins.
        equal_mass: whether bins have equal size instead of equal width.
    """
    predicted, kept = np.asarray(predicted, np.float64), np.asarray(kept, np.float64)
    if equal_mass:
        _, group, size = np.unique(predicted, return_inverse=True, return_counts=True)
        middle = np.cumsum(size) - (size + 2) // 2  # middle rank of equal predictions (the lower of two)
        bin_index = middle[group] * bins // max(len(predicted), 1)
    else:
        bin_index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    count = np.bincount(bin_index, minlength=bins).astype(np.float64)
    sums = [np.bincount(bin_index, weights, minlength=bins) for weights in (predicted, kept)]
    with np.errstate(invalid="ignore"):
        return Bins(count / max(count.sum(), 1), *(total / count for total in sums))


def measures(predicted: np.ndarray, kept: np.ndarray) -> dict[str, float]:
    """Compares predictions `[N]` with labels `[N]`; returns measures by name.

    The names are `positions` (`N`), `kept` and `predicted` (the means of labels and predictions), `auc`, `ece`,
    `ece_equal_mass`, `brier` and `log_loss`.
    """
    means = {"positions": len(kept), "kept": float(np.mean(kept)), "predicted": float(np.mean(predicted))}
    errors = {"ece": reliability(predicted, kept).ece}
    errors["ece_equal_mass"] = reliability(predicted, kept, equal_mass=True).ece
    scores = {"brier": brier(predicted, kept), "log_loss": log_loss(predicted, kept)}
    return means | {"auc": auc(predicted, kept)} | errors | scores


@dataclass(frozen=True)
class Isotonic:
    """Non-decreasing function from a score to a probability: an isotonic regression, linear between its steps.

    Attributes:
        scores: float64 `[K]`, increasing; values: float64 `[K]`, non-decreasing.
    """

    scores: np.ndarray
    values: np.ndarray

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Returns predicted probabilities, which are constant beyond the first and the last score."""
        return np.interp(scores, self.scores, self.values)


def isotonic(scores: np.ndarray, kept: np.ndarray) -> Isotonic:
    """Fits an isotonic regression by pooling adjacent violators (Barlow et al., 1972).

    Args:
        scores: `[N]`; if acceptance falls with a score, such as an entropy, give the negative score.
        kept: `[N]` in [0, 1], the labels `P`.
    """
    unique, group = np.unique(np.asarray(scores, np.float64), return_inverse=True)
    weight, total = np.bincount(group), np.bincount(group, np.asarray(kept, np.float64))
    places = np.bincount(group, np.asarray(scores, np.float64))
    # each pool is [weight, sum of labels, sum of scores]
    pools: list[list[float]] = []
    for pool in zip(weight.tolist(), total.tolist(), places.tolist(), strict=True):
        pools.append(list(pool))
        while len(pools) > 1 and pools[-2][1] * pools[-1][0] >= pools[-1][1] * pools[-2][0]:
            last = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
    pooled = np.asarray(pools)
    return Isotonic(pooled[:, 2] / pooled[:, 0], pooled[:, 1] / pooled[:, 0])
