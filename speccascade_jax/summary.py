"""From records to curves and to paper 1's Table 2; what tables and plots share. Needs no JAX."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from speccascade_jax.results import Record

TARGET = "autoregressive"
DRAFT = "autoregressive_draft"

LABELS = {
    TARGET: "Target alone",
    DRAFT: "Draft alone",
    "spec_decode": "SpecDecode",
    "lossy": "SpecDecode [Lossy]",
    "lossy_tuned": "SpecDecode [Lossy*]",
    "lossy_greedy": "SpecDecode [Lossy, greedy]",
    "bild_star": "BiLD*",
    "chow": "SpecCascade [Chow]",
    "chow_log": "SpecCascade [ChowLog]",
    "diff": "SpecCascade [Diff]",
    "diff_log": "SpecCascade [DiffLog]",
    "opt": "SpecCascade [OPT]",
    "opt_log": "SpecCascade [OPTLog]",
    "token_v1": "SpecCascade [TokenV1]",
    "token_v2": "SpecCascade [TokenV2]",
    "token_v3": "SpecCascade [Token]",
}
"""Rows in the order of paper 1's Table 2, under its names; other methods follow under their own."""

_SHARED = (
    "pair", "task", "split", "max_new_tokens", "quality_examples", "latency_examples", "latency_trials",
    "temperature", "top_p", "top_k", "draft_temperature",
)  # fmt: skip


class Value(NamedTuple):
    """A number and its spread: `low` to `high`, both equal to `value` where no spread is known."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Spot:
    """One point of a curve, averaged over seeds. `None` where it was not measured or is undefined.

    Spreads: with one seed those of the record (bootstrap over examples; extremes of the trials), with several one
    standard deviation over seeds to either side. `records` are what it is the average of, one per seed.
    """

    method: str
    alpha: float | None
    quality: Value
    latency: Value | None
    ms_per_example: float | None
    measures: dict[str, Value]
    seeds: int
    inconclusive: bool
    records: tuple[Record, ...]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Everything that may be compared: one pair, task, sampling, block size and bonus.

    Attributes:
        setting: the shared coordinates, `block_size` and `bonus` among them, the weights' fingerprint and the device.
        metric: name of the quality metric.
        target, draft: the two ends; `None` where the records have none.
        curves: method -> its spots by rising α, in the order of `LABELS`.
    """

    setting: dict[str, Any]
    metric: str
    target: Spot | None
    draft: Spot | None
    curves: dict[str, list[Spot]]

    def title(self) -> str:
        """What the panel is, in one line."""
        s = self.setting
        parts = [f"{s['task']}, {short_name(s['pair'])}", f"T = {s['temperature']:g}"]
        if s["draft_temperature"] is not None:
            parts.append(f"draft T = {s['draft_temperature']:g}")
        if s["top_p"] < 1:
            parts.append(f"top-p = {s['top_p']:g}")
        if s["top_k"]:
            parts.append(f"top-k = {s['top_k']}")
        if s["block_size"] is not None:
            parts += [f"γ = {s['block_size']}", f"bonus {s['bonus']}"]
        return ", ".join(parts)

    def sizes(self) -> str:
        """On how much it rests, in one line."""
        spots = [spot for curve in self.curves.values() for spot in curve]
        spots += [end for end in (self.target, self.draft) if end]
        seeds = sorted({spot.seeds for spot in spots})
        text = f"{self.setting['quality_examples']} examples for quality"
        if self.setting["latency_examples"]:
            text += (
                f", {self.setting['latency_examples']} examples × {self.setting['latency_trials']} trials for latency"
            )
        return f"{text}, {'–'.join(map(str, seeds))} {'seed' if seeds == [1] else 'seeds'}"


def label(method: str) -> str:
    """A method's name in tables and legends: paper 1's, else its own."""
    return LABELS.get(method, method)


def short_name(pair: str) -> str:
    """A pair's name, or the last part of its path."""
    return pair.rstrip("/").rsplit("/", 1)[-1]


def panels(records: Iterable[Record]) -> list[Panel]:
    """The records sorted into what may be compared with each other.

    Target and draft alone belong to every block size and bonus of their sampling.
    """
    shared: dict[tuple, list[Record]] = defaultdict(list)
    for record in records:
        values = (
            *(record["point"][name] for name in _SHARED),
            record["fingerprints"]["weights"],
            record["fingerprints"]["examples"],
            f"{record['device']['kind']} ({record['device']['processor']})",
        )
        shared[values].append(record)
    out = []
    for values, members in shared.items():
        ends = {r["point"]["method"] for r in members} & {TARGET, DRAFT}
        blocks = sorted({_block(r) for r in members if r["point"]["method"] not in ends}, key=str) or [(None, None)]
        for block_size, bonus in blocks:
            mine = [r for r in members if r["point"]["method"] in ends or _block(r) == (block_size, bonus)]
            setting = dict(zip((*_SHARED, "weights", "examples", "device"), values, strict=True))
            out.append(_panel(setting | {"block_size": block_size, "bonus": bonus}, mine))
    return out


def _block(record: Record) -> tuple[int | None, str | None]:
    return record["point"]["block_size"], record["point"]["bonus"]


def _panel(setting: dict[str, Any], records: Sequence[Record]) -> Panel:
    by_point: dict[tuple[str, float | None], dict[int, Record]] = defaultdict(dict)
    for record in records:
        # a point measured again (with larger batches, say) is no further seed: the latest record counts
        by_point[record["point"]["method"], record["point"]["alpha"]][record["point"]["seed"]] = record
    curves: dict[str, list[Spot]] = defaultdict(list)
    for (method, alpha), members in by_point.items():
        curves[method].append(_spot(method, alpha, list(members.values())))
    target, draft = (next(iter(curves.pop(end, ())), None) for end in (TARGET, DRAFT))
    order = list(LABELS)
    names = sorted(curves, key=lambda name: (order.index(name) if name in order else len(order), name))
    return Panel(
        setting=setting,
        metric=records[0]["quality"]["metric"],
        target=target,
        draft=draft,
        curves={name: sorted(curves[name], key=lambda spot: spot.alpha or 0.0) for name in names},
    )


def _spot(method: str, alpha: float | None, records: Sequence[Record]) -> Spot:
    relative = [r["relative_latency"] for r in records if r.get("relative_latency")]
    absolute = [r["latency"]["ms_per_example"]["value"] for r in records if r.get("latency")]
    names = dict.fromkeys(name for record in records for name in record["measures"])
    measured = {name: [r["measures"].get(name) for r in records] for name in names}
    return Spot(
        method=method,
        alpha=alpha,
        quality=_pool([value_of(r["quality"]) for r in records]),
        latency=_pool([value_of(each) for each in relative]) if relative else None,
        ms_per_example=statistics.fmean(absolute) if absolute else None,
        measures={
            name: _pool([Value(x, x, x) for x in values])
            for name, values in measured.items()
            if all(isinstance(x, int | float) for x in values)
        },
        seeds=len(records),
        inconclusive=any(r.get("inconclusive", False) for r in records) and method not in (TARGET, DRAFT),
        records=tuple(records),
    )


def value_of(entry: dict[str, Any]) -> Value:
    """A record's entry with `value`, `low` and `high`."""
    return Value(entry["value"], entry["low"], entry["high"])


def _pool(values: Sequence[Value]) -> Value:
    if len(values) == 1:
        return values[0]
    mean, spread = statistics.fmean(v.value for v in values), statistics.stdev(v.value for v in values)
    return Value(mean, mean - spread, mean + spread)


class Row(NamedTuple):
    """A method's row of Table 2; `None` where no point qualifies.

    `fastest`: the fastest spot that reaches the target's quality; `best`: the best one no slower than the target.
    """

    method: str
    fastest: Spot | None
    best: Spot | None


def table2(panel: Panel, tolerance: float = 0.0, margin: float = 0.0) -> list[Row]:
    """Paper 1's Table 2 for one panel.

    Inconclusive points (nothing was drafted) qualify for neither column.

    Args:
        panel: with a target.
        tolerance: quality counts as reached from `target − tolerance` on; 0 is the exact comparison.
        margin: no slower means relative latency up to `1 + margin`.

    Raises:
        ValueError: the records hold no target to compare with.
    """
    if panel.target is None:
        raise ValueError(f"no record of the target alone ({TARGET}) for {panel.title()}; sweep.py always measures it")
    needed = panel.target.quality.value - tolerance
    rows = []
    for method, spots in panel.curves.items():
        valid = [spot for spot in spots if spot.latency is not None and not spot.inconclusive]
        good = [spot for spot in valid if spot.quality.value >= needed]
        quick = [spot for spot in valid if spot.latency and spot.latency.value <= 1 + margin]
        rows.append(Row(method, min(good, key=_latency, default=None), max(quick, key=_quality, default=None)))
    return rows


def _latency(spot: Spot) -> float:
    return spot.latency.value if spot.latency else math.inf


def _quality(spot: Spot) -> float:
    return spot.quality.value
