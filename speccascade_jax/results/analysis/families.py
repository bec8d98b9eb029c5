"""A panel's points as families that differ in one number: γ of fixed blocks, or the stop threshold h. Needs no JAX."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from speccascade_jax.core.names import natural
from speccascade_jax.results.analysis import curve_labels, panels
from speccascade_jax.results.analysis.curve_labels import HEAD, label, place
from speccascade_jax.results.analysis.panels import Panel, Spot
from speccascade_jax.results.store.result_store import Record

GAMMA, THRESHOLD, NO_NUMBER = "γ", "h", ""

Law = tuple[str, float | None, bool]
"""Rule, α, and whether a kept block is followed by the target's law instead of the rule's."""


@dataclass(frozen=True, kw_only=True)
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
        same = (fixed for fixed in self.fixed if (fixed.law, fixed.verify) == (family.law, family.verify))
        return next(same, None)


def of_records(records: Iterable[Record]) -> list[Families]:
    """The families of every panel that has any: one task, pair and sampling, all block sizes together.

    Raises:
        ValueError: no panel has any.
    """
    found = [_of_panel(panel) for panel in panels.panels(records, together=("block_size",))]
    found = [each for each in found if each.fixed or each.adaptive]
    if not found:
        raise ValueError("the records hold neither fixed block sizes nor stop thresholds: nothing to compare")
    return found


class _Kind(NamedTuple):
    """What the points of a family share; `block` only where it is a cap and not the number in which they differ."""

    name: str
    symbol: str
    law: Law
    block: int | None
    bonus: str | None
    head: str | None


def _of_panel(panel: Panel) -> Families:
    """The families of a panel whose block sizes stand together; methods with neither number are left out."""
    sorted_ = defaultdict[_Kind, dict[float, Spot]](dict)
    for spot in panel.spots:
        if placed := _place(spot.records[0]):
            kind, at = placed
            sorted_[kind][at] = spot
    first = {kind: next(iter(spots.values())).records[0] for kind, spots in sorted_.items()}
    kinds = sorted(
        first,
        key=lambda kind: (place(first[kind], kind.name), kind.law[1] or 0.0, kind.block or 0, natural(str(kind[4:]))),
    )
    records, families = [first[kind] for kind in kinds], defaultdict[str, list[Family]](list)
    for kind, name, record in zip(kinds, _names(kinds, records), records, strict=True):
        weight = record.get("head", {}).get("w_rej")
        family = Family(
            name=name,
            symbol=kind.symbol,
            law=kind.law,
            spots=dict(sorted(sorted_[kind].items())),
            on_rejection=record["point"]["on_rejection"] and weight in (None, 1.0),
            w_rej=weight,
            verify=record["point"].get("verify", "token"),
        )
        families[kind.symbol].append(family)
    oracles = {each.name: spot for each in families[NO_NUMBER] for spot in each.spots.values()}
    return Families(panel=panel, fixed=families[GAMMA], adaptive=families[THRESHOLD], oracles=oracles)


def _place(record: Record) -> tuple[_Kind, float] | None:
    """A record's family, and γ or h; `None` where it has neither and is no oracle."""
    point = record["point"]
    name, bonus = point["family"], point["bonus"]
    law = point["law"], point["alpha"], bonus == "target" and not point["lossless"]
    if (stop := point["stop_threshold"]) is not None:
        return _Kind(name, THRESHOLD, law, point["block_size"], bonus, curve_labels.setting(record, HEAD)), stop
    if panels.is_swept(record):
        return _Kind(name, GAMMA, law, None, bonus, None), point["block_size"]
    if not point["timed"]:
        return _Kind(name, NO_NUMBER, law, point["block_size"], bonus, None), 0.0
    return None


def _names(kinds: Sequence[_Kind], records: Sequence[Record]) -> list[str]:
    """What families are called: by more than method and α only where a panel has several of one."""
    same = [(kind.name, kind.symbol, kind.law[1]) for kind in kinds]
    fixed, others = (
        curve_labels.suffixes(records, same, names) for names in (("bonus",), ("block_size", "bonus", HEAD))
    )
    told = [one if kind.symbol == GAMMA else other for kind, one, other in zip(kinds, fixed, others, strict=True)]
    alphas = ["" if kind.law[1] is None else f" α {kind.law[1]:g}" for kind in kinds]
    apart = map("".join, zip(alphas, told, strict=True))
    return [label(record, words, threshold=False) for record, words in zip(records, apart, strict=True)]
