"""A panel's points as families that differ in one number: γ of fixed blocks, or the stop threshold h. Needs no JAX."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from speccascade_jax import summary
from speccascade_jax.labels import TARGET, label, ordered
from speccascade_jax.results import Record
from speccascade_jax.summary import Panel, Spot

GAMMA, THRESHOLD = "γ", "h"

ORACLES = ("stop_oracle",)

REJECTION = ("specdecpp", "specdecpp_lag0", "stop_cumulative_confidence")
"""Methods that compare h with an estimate of P(some token of the block is rejected), as theorem 3.1 does."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Points of one method, or of one rule with fixed blocks.

    Attributes:
        name: for readers; symbol: `GAMMA` or `THRESHOLD`.
        law: rule and α, which say what the outputs' law is; only families of one law are rivals.
        spots: γ or h -> what was measured there, rising.
        on_rejection: whether h is compared with an estimate of P(some token of the block is rejected).
    """

    name: str
    symbol: str
    law: tuple[str, float | None]
    spots: dict[float, Spot]
    on_rejection: bool = False


@dataclass(frozen=True, kw_only=True)
class Families:
    """What a panel holds: families, and oracles, which have no number to choose."""

    panel: Panel
    fixed: list[Family] = field(default_factory=list)
    adaptive: list[Family] = field(default_factory=list)
    oracles: dict[str, Spot] = field(default_factory=dict)

    @property
    def target(self) -> Spot:
        """The target alone.

        Raises:
            ValueError: the records hold none.
        """
        if self.panel.target is None:
            raise ValueError(f"no record of the target alone ({TARGET}) for {self.panel.title()}; sweep.py measures it")
        return self.panel.target

    @property
    def records(self) -> list[Record]:
        """All records of the panel."""
        panel = self.panel
        spots = [*(end for end in (panel.target, panel.draft) if end), *(s for c in panel.curves.values() for s in c)]
        return [record for spot in spots for record in spot.records]

    def rival(self, family: Family) -> Family | None:
        """The fixed blocks of the same law."""
        return next((fixed for fixed in self.fixed if fixed.law == family.law), None)


def of_records(records: Iterable[Record]) -> list[Families]:
    """The families of every panel that has any: one task, pair and sampling, all block sizes together.

    Raises:
        ValueError: no panel has any.
    """
    found = [of_panel(panel) for panel in summary.panels(records, together=("block_size",))]
    found = [each for each in found if each.fixed or each.adaptive]
    if not found:
        raise ValueError("the records hold neither fixed block sizes nor stop thresholds: nothing to compare")
    return found


def of_panel(panel: Panel) -> Families:
    """The families of a panel whose block sizes stand together; methods with neither number are left out."""
    sorted_ = defaultdict[tuple, dict[float, Spot]](dict)
    oracles = {}
    for spot in (spot for curve in panel.curves.values() for spot in curve):
        point = spot.records[0]["point"]
        name = point.get("family", point["method"])  # older records have none
        law = (point.get("law", name), point["alpha"])
        if point.get("stop_threshold") is not None:
            sorted_[name, THRESHOLD, law][point["stop_threshold"]] = spot
        elif summary.is_swept(spot.records[0]):
            sorted_[name, GAMMA, law][point["block_size"]] = spot
        elif name in ORACLES:
            oracles[_named(name, point)] = spot
    order = ordered({name for name, _, _ in sorted_})
    families = [
        Family(
            name=_named(name, {"alpha": law[1]}),
            symbol=symbol,
            law=law,
            spots=dict(sorted(spots.items())),
            on_rejection=re.split(r"[\[:]", name)[0] in REJECTION,
        )
        for (name, symbol, law), spots in sorted(
            sorted_.items(), key=lambda item: (order.index(item[0][0]), item[0][2][1] or 0.0)
        )
    ]
    fixed, adaptive = ([each for each in families if each.symbol == symbol] for symbol in (GAMMA, THRESHOLD))
    return Families(panel=panel, fixed=fixed, adaptive=adaptive, oracles=oracles)


def _named(name: str, point: dict[str, Any]) -> str:
    return label(name) + ("" if point["alpha"] is None else f" α {point['alpha']:g}")
