"""Verification rate against discard rate: fronts of stop thresholds, and whether they beat fixed blocks.

Paper 3, section 4.3 and Figure 4. Both rates are ratios of sums over the examples; neither depends on the machine.
Every comparison is paired: both sides are counted on the same resamples of the examples. Needs no JAX.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval
from speccascade_jax.results.analysis.families import Families, Family
from speccascade_jax.results.analysis.panels import Spot

DOMINATES, TIES, LOSES, BEYOND = "dominates", "ties", "loses", "not reached"


class Rates(NamedTuple):
    """Discarded tokens and target calls per committed token, each `[1 + samples]`: all examples, then resamples."""

    discard: np.ndarray
    verification: np.ndarray


class Comparison(NamedTuple):
    """A fixed block size against a front of stop thresholds.

    Attributes:
        family: the front's; fixed: the fixed blocks'; block: γ.
        rates: at γ; front: the front's verification rate at the same discard rate, NaN below all that it reaches.
        level: whether γ discards more than any threshold measured, so that the front was drawn on to there.
        difference: front less γ, so that less than 0 is better; `None` where the front has no rate.
        verdict: `DOMINATES` or `LOSES` where the interval excludes 0, else `TIES`; `BEYOND` where there is none.
    """

    family: Family
    fixed: Family
    block: int
    rates: tuple[float, float]
    front: float
    level: bool
    difference: Interval | None
    verdict: str


def rates(spot: Spot, bootstrap: Bootstrap) -> Rates:
    """A spot's rates; ValueError on records without counts of single examples."""
    counts = bootstrap.counts(spot.records)
    return Rates(counts["discarded"] / counts["committed"], counts["target_calls"] / counts["committed"])


def front_at(front: Iterable[Rates], discard: np.ndarray) -> np.ndarray:
    """A front's verification rate at given discard rates, all `[1 + samples]`.

    The front is what no other point of it beats in both rates, joined by straight lines; they are what a mixture of
    two neighbours reaches. Above its highest discard rate it goes on level, for tokens can always be discarded in
    vain. Below its lowest it has none: NaN.
    """
    xs, ys = np.stack([each.discard for each in front], -1), np.stack([each.verification for each in front], -1)
    return np.asarray([_at(x, y, to) for x, y, to in zip(xs, ys, discard, strict=True)])


def _at(xs: np.ndarray, ys: np.ndarray, to: float) -> float:
    order = np.lexsort((ys, xs))
    xs, ys = xs[order], ys[order]
    lowest = np.minimum.accumulate(ys)
    kept = np.append(True, ys[1:] < lowest[:-1])
    return float(np.interp(to, xs[kept], ys[kept], left=np.nan))


def compare(families: Families, bootstrap: Bootstrap) -> Iterator[Comparison]:
    """Every adaptive family with every γ of the fixed blocks that obey the same law.

    On resamples where the front does not reach down to γ's discard rate it counts as the target alone, 1 call per
    token, which never makes it look better than it is.
    """
    for family in families.adaptive:
        if (fixed := families.rival(family)) is None:
            continue
        front = [rates(spot, bootstrap) for spot in family.spots.values()]
        for block, spot in fixed.spots.items():
            own = rates(spot, bootstrap)
            found = front_at(front, own.discard)
            difference, verdict = _verdict(found, own.verification, bootstrap)
            at = float(own.discard[0]), float(own.verification[0])
            level = at[0] > max(each.discard[0] for each in front)
            yield Comparison(family, fixed, int(block), at, float(found[0]), level, difference, verdict)


def _verdict(front: np.ndarray, fixed: np.ndarray, bootstrap: Bootstrap) -> tuple[Interval | None, str]:
    if np.isnan(front[0]):
        return None, BEYOND
    difference = bootstrap.interval(np.nan_to_num(front, nan=1.0) - fixed)
    return difference, LOSES if difference.low > 0 else DOMINATES if difference.high < 0 else TIES
