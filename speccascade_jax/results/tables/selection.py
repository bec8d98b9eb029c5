"""Drafters chosen for each query beside each of them always (paper 5, Tables 1 to 6 and 11 to 14).

A row for every way of choosing, a group of columns for every domain, which is a task. Two rows are made of others: each
query's best arm, known afterwards, and with it what a perfect policy would have gained. Needs no JAX.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from speccascade_jax.results import comparisons
from speccascade_jax.results.bootstrap import Bootstrap
from speccascade_jax.results.panels import Panel, Spot, Value
from speccascade_jax.results.store import Record
from speccascade_jax.results.tables.grid import NONE, Grid

ORACLE = "each query's best arm"
_APART = ("task", "split", "max_new_tokens", "first_example", "quality_examples", "latency_examples")


def selection_grids(panels: Sequence[Panel]) -> list[Grid]:
    """A table for every setting, all its domains side by side.

    Raises:
        ValueError: no record chose among drafters.
    """
    chosen = [panel for panel in panels if any(map(_selects, panel.spots))]
    if not chosen:
        raise ValueError("no record chose among drafters: name several as a method's drafters, and how (choose)")
    grids = []
    for _, same in itertools.groupby(sorted(chosen, key=_setting), key=_setting):
        grids.append(_grid(list(same)))
    return grids


def _setting(panel: Panel) -> str:
    told = {name: value for name, value in panel.setting.items() if name not in _APART}
    return repr(sorted((name, value) for name, value in told.items() if name not in ("examples", "stop_ids")))


def _selects(spot: Spot) -> bool:
    return "selection" in spot.records[0]


def _way(spot: Spot) -> str:
    """How a spot chooses; what drafts, where it does not."""
    told = spot.records[0].get("selection")
    if told is None:
        return spot.label
    return f"always {told['choose']}" if told["choose"] in told["arms"] else _policy(told)


def _order(way: str) -> int:
    """One drafter always, at random, a policy, what none can know."""
    return 3 if way == ORACLE else 0 if way.startswith("always ") else 1 if way == "random" else 2


def _policy(told: dict[str, Any]) -> str:
    return f"{told['choose']} π ({told['trained']})" if "trained" in told else str(told["choose"])


def _grid(panels: list[Panel]) -> Grid:
    bootstrap = Bootstrap()
    columns = [_column(panel) for panel in panels]
    ways = sorted(dict.fromkeys(way for column in columns for way in column), key=_order)
    header, rows = ["Drafter"], [["target alone"], *([way] for way in ways)]
    for panel, column in zip(panels, columns, strict=True):
        header += [f"{panel.setting['task']}: {what}" for what in (panel.metric, *_SHOWN)]
        spots, noise = [column.get(way) for way in ways], comparisons.noise(panel)
        real = [None if way == ORACLE else spot for way, spot in zip(ways, spots, strict=True)]
        marks = comparisons.latency_marks(real, bootstrap, noise)
        rows[0] += _target_cells(panel)
        for row, spot, mark in zip(rows[1:], spots, marks, strict=True):
            row += _cells(spot, mark, bootstrap, noise)
    header.append("mean speed-up")
    rows[0].append("1.00")
    for row, way in zip(rows[1:], ways, strict=True):
        known = [speed for column in columns if way in column and (speed := _speed_up(column[way])) is not None]
        row.append(f"{np.mean(known):.2f}" if len(known) == len(columns) else NONE)
    return Grid(title=f"Selection: {_title(panels[0])}", header=header, rows=rows, notes=_notes(panels))


_SHOWN = ("speed-up", "ms/token", "accepted", "choices")


def _notes(panels: list[Panel]) -> list[str]:
    notes = [
        "Speed-up: time per token of each query, over the target alone's, beside which it ran; whole generations at "
        "batch 1, the policy's own time among them. Brackets: 95% intervals over examples; * better than all else in "
        "its column, ≈ not told apart from the best.",
        "Accepted: kept of all that was drafted; what stands behind a rejection counts as rejected (paper 5, A.6).",
        f"{ORACLE}: the arm that was fastest for a query in the other trials, and its time in this one.",
        *(f"{panel.setting['task']}: {panel.sizes()}." for panel in panels),
    ]
    lossy = sorted({name for panel in panels for spot in panel.spots if _selects(spot) for name in _lossy(spot)})
    if lossy:
        notes.append(f"LOSSY: outputs of rows that {' or '.join(lossy)} drafted do not have the target's law.")
    return notes


def _column(panel: Panel) -> dict[str, Spot]:
    """Way of choosing -> its spot, with times per token; and each query's best arm, where that can be told."""
    spots = [spot for spot in panel.spots if _selects(spot)]
    ways = [_way(spot) for spot in spots]
    found = {
        way if ways.count(way) == 1 else f"{way}, {spot.name()}": per_token(spot)
        for way, spot in zip(ways, spots, strict=True)
    }
    best = oracle(list(found.values()))
    return found if best is None else found | {ORACLE: best}


def per_token(spot: Spot) -> Spot:
    """The spot with every query's time divided by the tokens that it wrote: sampled outputs differ in length."""

    def divided(timed: dict[str, Any]) -> dict[str, Any]:
        each = np.asarray(timed["per_example_ms"]) / np.maximum(timed["per_example_tokens"], 1)
        return {**timed, "per_example_ms": each.tolist()}

    records = tuple(
        {**record, **{name: divided(record[name]) for name in ("latency", "target_latency")}}
        if record.get("latency")
        else record
        for record in spot.records
    )
    made = replace(spot, records=records)
    ratio = _ratio(made)
    return made if ratio is None else replace(made, latency=Value(ratio, ratio, ratio))


def _ratio(spot: Spot) -> float | None:
    """Time per token over the target's, of a spot of `per_token`; mean over seeds."""
    times = [
        [np.sum(record[name]["per_example_ms"]) for name in ("latency", "target_latency")]
        for record in spot.records
        if record.get("latency")
    ]
    return float(np.mean([own / beside for own, beside in times])) if times else None


def _title(panel: Panel) -> str:
    return panel.title().partition(", ")[2]


def _lossy(spot: Spot) -> list[str]:
    told = spot.records[0]["selection"]
    rules = zip(told["arms"], told["rules"], strict=True)
    return [f"{arm} ({rule})" for arm, rule in rules if rule != "spec_decode"] if told["lossy_arms"] else []


def _target_cells(panel: Panel) -> list[str]:
    target = panel.target
    if target is None:
        return [NONE] * 5
    return [f"{target.quality.value:.2f}", "1.00", _ms(target), NONE, NONE]


def _ms(spot: Spot) -> str:
    times = [record["latency"]["ms_per_token"]["value"] for record in spot.records if record.get("latency")]
    return f"{np.mean(times):.3f}" if times else NONE


def _cells(spot: Spot | None, mark: str, bootstrap: Bootstrap, noise: float) -> list[str]:
    if spot is None:
        return [NONE] * 5
    speed, told, shown = _speed_up(spot), spot.measures.get("draft_utilisation"), NONE
    if speed is not None:
        shown = f"{speed:.2f}{mark}"
        ratio = comparisons.latency(spot, bootstrap, noise)
        shown += "" if ratio is None else f" [{1 / ratio.high:.2f}, {1 / ratio.low:.2f}]"
    quality = NONE if spot.label == ORACLE else f"{spot.quality.value:.2f}"
    return [quality, shown, _ms(spot), NONE if told is None else f"{told.value:.1%}", _choices(spot)]


def _speed_up(spot: Spot) -> float | None:
    ratio = _ratio(spot)
    return None if ratio is None else 1 / ratio


def _choices(spot: Spot) -> str:
    """How often each arm was chosen; nothing where that is in the name."""
    told = spot.records[0]["selection"]
    if told["choose"] in told["arms"]:
        return NONE
    counts = np.zeros(len(told["arms"]))
    for record in spot.records:
        counts += np.bincount(record["per_example"]["arm"], minlength=len(counts))
    shares = counts / max(counts.sum(), 1)
    return ", ".join(f"{arm} {share:.0%}" for arm, share in zip(told["arms"], shares, strict=True))


def oracle(spots: Sequence[Spot]) -> Spot | None:
    """What each query's best arm would have taken, from spots of `per_token`; `None` without enough trials.

    The arm is the fastest one in the other trials, as a ratio to the target beside it: the fastest of one trial is
    partly luck, which would be counted as speed.
    """
    always = [spot for spot in spots if _selects(spot) and spot.records[0]["selection"]["choose"] in _arms(spot)]
    by_seed = [{record["point"]["seed"]: record for record in spot.records if _tried(record)} for spot in always]
    if len(always) < 2 or not (seeds := set.intersection(*map(set, by_seed))):
        return None
    places = np.asarray([_arms(spot).index(spot.records[0]["selection"]["choose"]) for spot in always])
    records = tuple(_best_of([found[seed] for found in by_seed], places) for seed in sorted(seeds))
    made = Spot(
        method=ORACLE, label=ORACLE, alpha=None, quality=always[0].quality, latency=always[0].latency,
        ms_per_example=None, measures={}, seeds=len(seeds), inconclusive=False, records=records,
    )  # fmt: skip
    ratio = _ratio(made) or 1.0
    return replace(made, latency=Value(ratio, ratio, ratio))


def _tried(record: Record) -> bool:
    return bool(record.get("latency")) and len(record["latency"]["per_example_ms"]) > 1


def _best_of(timed: list[Record], places: np.ndarray) -> Record:
    """A record of each query's best arm, from records of one arm always each; `places`: of these arms."""
    own, beside = (
        np.asarray([each[name]["per_example_ms"] for each in timed]) for name in ("latency", "target_latency")
    )
    ratios = own / beside  # [arms, trials, examples]
    best = (ratios.sum(1, keepdims=True) - ratios).argmin(0)[None]

    def picked(values: np.ndarray) -> list[Any]:
        found: list[Any] = np.take_along_axis(values, best, axis=0)[0].tolist()
        return found

    like = timed[0]
    per_token = float(np.median(np.mean(picked(own), axis=1)))
    return {
        **like,
        "key": ORACLE,
        "latency": {**like["latency"], "per_example_ms": picked(own), "ms_per_token": {"value": per_token}},
        "target_latency": {**like["target_latency"], "per_example_ms": picked(beside)},
        "selection": {**like["selection"], "choose": ORACLE},
        "per_example": {"arm": places[best].ravel().tolist()},
    }


def _arms(spot: Spot) -> list[str]:
    return list(spot.records[0]["selection"]["arms"])
