"""A panel's points as families that differ in one number: γ of fixed blocks, or the stop threshold h. Needs no JAX.

Families of one law are compared by verification rate against discard rate: fronts of stop thresholds, and whether they
beat fixed blocks (paper 3, section 4.3 and Figure 4). Both rates are ratios of sums over the examples; neither depends
on the machine. Every comparison is paired: both sides are counted on the same resamples of the examples.
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
"""Rule, α, and whether a kept block is followed by the target's law instead of the rule's."""


@dataclass(frozen=True)
class Family:
    """Points of one method, or of one rule with fixed blocks.

    Attributes:
        name: for readers; symbol: `GAMMA` or `THRESHOLD`.
        law: what says the outputs' law; only families of one law are rivals.
        spots: γ or h -> what was measured there, rising.
        on_rejection: whether h is compared with an estimate of P(some token of the block is rejected), as theorem 3.1
            does; those with a head do so where its loss weighed rejections once (`w_rej`).
        w_rej: weight of rejections in its head's loss; `None` where there is no head, or the records do not say.
        verify: "token" or "block": only families that are verified alike are rivals.
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
    """What a panel holds: families, and oracles, which have no number to choose."""

    panel: Panel
    fixed: list[Family]
    adaptive: list[Family]
    oracles: dict[str, Spot]

    @property
    def target(self) -> Spot:
        """The target alone; errors as `Panel.required_target`."""
        return self.panel.required_target()

    @property
    def records(self) -> list[Record]:
        """All records of the panel."""
        return self.panel.records

    def rival(self, family: Family) -> Family | None:
        """The fixed blocks of the same law."""
        same = [fixed for fixed in self.fixed if (fixed.law, fixed.verify) == (family.law, family.verify)]
        return same[0] if same else None


def of_records(records: Iterable[Record]) -> list[Families]:
    """The families of every panel that has any: one task, pair and sampling, all block sizes together.

    Raises:
        ValueError: no panel has any.
    """
    every = [_of_panel(panel) for panel in panels.panels(records, together=("block_size",))]
    if not (compared := [families for families in every if families.fixed or families.adaptive]):
        raise ValueError("the records hold neither fixed block sizes nor stop thresholds: nothing to compare")
    return compared


class _Kind(NamedTuple):
    """What the points of a family share; `block` only where it is a cap and not the number in which they differ."""

    name: str
    symbol: str
    law: Law
    block: int | str | None
    bonus: str | None
    head: str | None


def _of_panel(panel: Panel) -> Families:
    """Returns the families of a panel whose block sizes stand together, without methods that have neither number."""
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
    """Returns a record's family, and γ or h; `None` where it has neither and is no oracle."""
    point = record["point"]
    name, block, bonus = point["family"], point["block_size"], point["bonus"]
    law = point["law"], point["alpha"], bonus == "target" and not point["lossless"]
    if (stop := point["stop_threshold"]) is not None:
        return _Kind(name, THRESHOLD, law, block, bonus, setting(record, HEAD)), stop
    if panels.is_swept(record):
        return _Kind(name, GAMMA, law, None, bonus, None), cast(int, block)  # "auto" is never swept
    return None if point["timed"] else (_Kind(name, NO_NUMBER, law, block, bonus, None), 0.0)


def _names(kinds: Sequence[_Kind], records: Sequence[Record]) -> list[str]:
    """Returns what families are called: by more than method and α only where a panel has several of one."""
    same = [(kind.name, kind.symbol, kind.law[1]) for kind in kinds]
    fixed, others = (suffixes(records, same, names) for names in (("bonus",), ("block_size", "bonus", HEAD)))
    names = []
    for kind, record, *words in zip(kinds, records, fixed, others, strict=True):
        alpha = "" if kind.law[1] is None else f" α {kind.law[1]:g}"
        names.append(label(record, alpha + words[kind.symbol != GAMMA], threshold=False))
    return names


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
    """Returns a spot's rates; ValueError on records without counts of single examples."""
    counts = bootstrap.counts(spot.records)
    return Rates(counts["discarded"] / counts["committed"], counts["target_calls"] / counts["committed"])


def front_at(front: Iterable[Rates], discard: np.ndarray) -> np.ndarray:
    """Returns a front's verification rate at given discard rates, all `[1 + samples]`.

    The front is what no other point of it beats in both rates, joined by straight lines; they are what a mixture of
    two neighbours reaches. Above its highest discard rate it goes on level, for tokens can always be discarded in
    vain. Below its lowest it has none: NaN.
    """
    points = np.stack([*front], -1)  # [2, 1 + samples, points]

    def at(xs: np.ndarray, ys: np.ndarray, to: float) -> float:
        order = np.lexsort((ys, xs))
        xs, ys = xs[order], ys[order]
        kept = np.append(True, ys[1:] < np.minimum.accumulate(ys)[:-1])
        return float(np.interp(to, xs[kept], ys[kept], left=np.nan))

    return np.asarray([at(*each) for each in zip(*points, discard, strict=True)])


def compare(families: Families, bootstrap: Bootstrap) -> Iterator[Comparison]:
    """Compares every adaptive family with every γ of the fixed blocks that obey the same law.

    On resamples where the front does not reach down to γ's discard rate it counts as the target alone, 1 call per
    token, which never makes it look better than it is.
    """
    for family in families.adaptive:
        if (fixed := families.rival(family)) is None:
            continue
        front = [rates(spot, bootstrap) for spot in family.spots.values()]
        for block, spot in fixed.spots.items():
            own = rates(spot, bootstrap)
            reached, verdict, difference = front_at(front, own.discard), BEYOND, None
            if not np.isnan(reached[0]):
                difference = bootstrap.interval(np.nan_to_num(reached, nan=1.0) - own.verification)
                verdict = LOSES if difference.low > 0 else DOMINATES if difference.high < 0 else TIES
            at = float(own.discard[0]), float(own.verification[0])
            level = at[0] > max(each.discard[0] for each in front)
            yield Comparison(family, fixed, int(block), at, float(reached[0]), level, difference, verdict)
