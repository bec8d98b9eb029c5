"""Families of measured points that differ in one number only: the fixed block size γ, or the stop threshold h.

Families with the same output distribution are compared by two rates: verification rate (target calls per generated
token) and discard rate (discarded draft tokens per generated token). The module computes the Pareto front of a family
of stop thresholds, and tests whether this front is better than fixed block sizes (Huang et al., 2024 (SpecDec++),
section 4.3 and Figure 4). Both rates are ratios of sums over the examples and do not depend on the machine. Every
comparison is paired: both sides are counted on the same resamples of the examples. Needs no JAX.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from speccascade_jax.core.names import natural
from speccascade_jax.results.analysis import panels
from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval
from speccascade_jax.results.analysis.panels import HEAD, Panel, Spot, label, place, setting, suffixes
from speccascade_jax.results.store.result_store import Record

GAMMA, THRESHOLD, NO_NUMBER = "γ", "h", ""

Law = tuple[str, float | None, bool]
"""Identifier of an output distribution: rule, α, and whether the token after an accepted block is from the target's
distribution instead of the rule's."""


@dataclass(frozen=True)
class Family:
    """Points of one method, or of one rule with a fixed block size, that differ in γ or h only.

    Attributes:
        name: the family's name in figures and tables; symbol: `GAMMA` or `THRESHOLD`.
        law: identifies the output distribution; only families with equal `law` are compared.
        spots: the measured point of each γ or h, ascending.
        on_rejection: whether h is compared with an estimate of P(some token of the block is rejected), as in theorem
            3.1. For a family with an acceptance head, this is so if the head's loss gave rejections weight 1 (`w_rej`).
        w_rej: weight of rejections in the head's loss; `None` if there is no head, or the records do not contain it.
        verify: "token" or "block": only families with the same kind of verification are compared.
    """

    name: str
    symbol: str
    law: Law
    spots: dict[float, Spot]
    on_rejection: bool
    w_rej: float | None
    verify: str = "token"


@dataclass(frozen=True, kw_only=True)
class Families:
    """Families of one panel (a group of comparable curves), and its oracles.

    An oracle knows in advance which draft tokens will be rejected. It has neither γ nor h.

    Attributes:
        panel: the panel.
        fixed: the families with fixed block sizes.
        adaptive: the families with stop thresholds.
        oracles: the point of each oracle, by name.
    """

    panel: Panel
    fixed: list[Family]
    adaptive: list[Family]
    oracles: dict[str, Spot]

    @property
    def target(self) -> Spot:
        """The target alone.

        Raises:
            ValueError: the records contain no target alone.
        """
        return self.panel.required_target()

    @property
    def records(self) -> list[Record]:
        """All records of the panel."""
        return self.panel.records

    def rival(self, family: Family) -> Family | None:
        """Returns the family of fixed blocks with the same output distribution and verification, or `None`."""
        same = [fixed for fixed in self.fixed if (fixed.law, fixed.verify) == (family.law, family.verify)]
        return same[0] if same else None


def of_records(records: Iterable[Record]) -> list[Families]:
    """Returns the families of every panel that has any; here a panel combines all block sizes of its task and pair.

    Raises:
        ValueError: no panel has families.
    """
    every = [_of_panel(panel) for panel in panels.panels(records, together=("block_size",))]
    if not (compared := [families for families in every if families.fixed or families.adaptive]):
        raise ValueError(
            "the records contain neither fixed block sizes nor stop thresholds to compare: sweep block_sizes or "
            "stop_thresholds"
        )
    return compared


class _Kind(NamedTuple):
    """Settings that all points of a family (one line of a plot) share; `block` is `None` if the block size varies."""

    name: str
    symbol: str
    law: Law
    block: int | str | None
    bonus: str | None
    head: str | None


def _of_panel(panel: Panel) -> Families:
    """Returns the families of a panel that joins all block sizes; methods with neither γ nor h are left out."""
    members = defaultdict[_Kind, dict[float, Spot]](dict)
    for spot in panel.spots:
        if placed := _place(spot.records[0]):
            members[placed[0]][placed[1]] = spot
    first = {kind: next(iter(spots.values())).records[0] for kind, spots in members.items()}

    def order(kind: _Kind) -> tuple:
        return place(first[kind], kind.name), kind.law[1] or 0.0, kind.block or 0, natural(str(kind[4:]))

    kinds, families = sorted(first, key=order), defaultdict[str, list[Family]](list)
    for kind, name in zip(kinds, _names(kinds, [first[kind] for kind in kinds]), strict=True):
        point, weight = first[kind]["point"], first[kind].get("head", {}).get("w_rej")
        verify, on_rejection = point.get("verify", "token"), point["on_rejection"] and weight in (None, 1.0)
        spots = dict(sorted(members[kind].items()))
        family = Family(name, kind.symbol, kind.law, spots, on_rejection, w_rej=weight, verify=verify)
        families[kind.symbol].append(family)
    oracles = {family.name: spot for family in families[NO_NUMBER] for spot in family.spots.values()}
    return Families(panel=panel, fixed=families[GAMMA], adaptive=families[THRESHOLD], oracles=oracles)


def _place(record: Record) -> tuple[_Kind, float] | None:
    """Returns a record's family and its γ or stop threshold h; `None` for records with neither, except an oracle's."""
    point = record["point"]
    name, block, bonus = point["family"], point["block_size"], point["bonus"]
    law = point["law"], point["alpha"], bonus == "target" and not point["lossless"]
    if (stop := point["stop_threshold"]) is not None:
        return _Kind(name, THRESHOLD, law, block, bonus, setting(record, HEAD)), stop
    if panels.is_swept(record):
        # a block size that a sweep varies is a number, never "auto"
        return _Kind(name, GAMMA, law, None, bonus, None), cast(int, block)
    return None if point["timed"] else (_Kind(name, NO_NUMBER, law, block, bonus, None), 0.0)


def _names(kinds: Sequence[_Kind], records: Sequence[Record]) -> list[str]:
    """Returns the families' names: method and α, and settings that distinguish families of equal method and α."""
    same = [(kind.name, kind.symbol, kind.law[1]) for kind in kinds]
    fixed, adaptive = (suffixes(records, same, names) for names in (("bonus",), ("block_size", "bonus", HEAD)))
    names = []
    for kind, record, *words in zip(kinds, records, fixed, adaptive, strict=True):
        alpha = "" if kind.law[1] is None else f" α {kind.law[1]:g}"
        names.append(label(record, alpha + words[kind.symbol != GAMMA], threshold=False))
    return names


DOMINATES, TIES, LOSES, BEYOND = "dominates", "ties", "loses", "not reached"


class Rates(NamedTuple):
    """Discarded tokens and target calls per generated token, each `[1 + samples]`: all examples, then resamples."""

    discard: np.ndarray
    verification: np.ndarray


class Comparison(NamedTuple):
    """The comparison of one fixed block size with the Pareto front of a family of stop thresholds.

    Attributes:
        family: the family of the front; fixed: the family of the fixed block sizes; block: the block size γ.
        rates: discard and verification rate of blocks of size γ.
        front: the front's verification rate at the same discard rate, NaN below the front's lowest discard rate.
        level: whether blocks of size γ discard more tokens than any measured threshold, so that the front was extended
            to this discard rate.
        difference: the front's verification rate minus that of blocks of size γ, negative if the front is better;
            `None` if the front has no verification rate at this discard rate.
        verdict: `DOMINATES` or `LOSES` if the interval of the difference excludes 0, otherwise `TIES`; `BEYOND` without
            an interval.
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
    """Returns the discard and verification rates of a point, on all examples and on resamples.

    Raises:
        ValueError: a record has no counts of single examples.
    """
    counts = bootstrap.counts(spot.records)
    return Rates(counts["discarded"] / counts["committed"], counts["target_calls"] / counts["committed"])


def front_at(front: Iterable[Rates], discard: np.ndarray) -> np.ndarray:
    """Returns a front's verification rate at the discard rates `discard`, all `[1 + samples]`.

    The front consists of the points that no other point beats in both rates, and of straight lines between them. A
    random mixture of two neighbouring points reaches any point of their line. Above its highest discard rate, the front
    continues with a constant verification rate, because a method can always discard more tokens. Below its lowest
    discard rate, the front has no verification rate: the result is NaN.
    """
    points = np.stack([*front], -1)  # [2, 1 + samples, points]

    def at(xs: np.ndarray, ys: np.ndarray, to: float) -> float:
        order = np.lexsort((ys, xs))
        xs, ys = xs[order], ys[order]
        kept = np.append(True, ys[1:] < np.minimum.accumulate(ys)[:-1])
        return float(np.interp(to, xs[kept], ys[kept], left=np.nan))

    return np.asarray([at(*sample) for sample in zip(*points, discard, strict=True)])


def compare(families: Families, bootstrap: Bootstrap) -> Iterator[Comparison]:
    """Yields comparisons of each family of stop thresholds with each fixed γ of the same output distribution.

    On resamples in which the front does not reach the discard rate of γ, the verification rate of the target alone is
    used instead, 1 call per token. This never makes the front look better than it is.
    """
    for family in families.adaptive:
        if (fixed := families.rival(family)) is None:
            continue
        front = [rates(spot, bootstrap) for spot in family.spots.values()]
        for block, spot in fixed.spots.items():
            fixed_rates = rates(spot, bootstrap)
            reached, verdict, difference = front_at(front, fixed_rates.discard), BEYOND, None
            if not np.isnan(reached[0]):
                difference = bootstrap.interval(np.nan_to_num(reached, nan=1.0) - fixed_rates.verification)
                verdict = LOSES if difference.low > 0 else DOMINATES if difference.high < 0 else TIES
            fixed_point = float(fixed_rates.discard[0]), float(fixed_rates.verification[0])
            level = fixed_point[0] > max(front_rates.discard[0] for front_rates in front)
            yield Comparison(family, fixed, int(block), fixed_point, float(reached[0]), level, difference, verdict)
