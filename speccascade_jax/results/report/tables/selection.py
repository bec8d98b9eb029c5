"""Drafters chosen for each query beside each of them always (paper 5, Tables 1 to 6 and 11 to 14).

A row for every way of choosing, a group of columns for every domain, which is a task. Several sets of drafters stand in
one table, each with its own rows; beside them drafters that nothing chose among. Two rows are made of others: each
query's best arm, known afterwards, and with it what a perfect policy would have gained. Needs no JAX.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from speccascade_jax.results.analysis import significance
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.analysis.panels import Panel, Spot
from speccascade_jax.results.report.tables.best_arms import ORACLE, fixed_arm, oracle, per_token, ratio, selects
from speccascade_jax.results.report.tables.grid import NONE, Grid

_APART = ("task", "split", "max_new_tokens", "first_example", "quality_examples", "latency_examples")
Drafters = tuple[str, ...]


def selection_grids(panels: Sequence[Panel]) -> list[Grid]:
    """A table for every setting, all its domains side by side; behind it what choosing costs, where that was timed.

    Raises:
        ValueError: no record chose among drafters.
    """
    chosen = [panel for panel in panels if any(map(selects, panel.spots))]
    if not chosen:
        raise ValueError("no record chose among drafters: name several as a method's drafters, and how (choose)")
    grids = []
    for _, same in itertools.groupby(sorted(chosen, key=_setting), key=_setting):
        together = list(same)
        sets = _sets(together)
        columns = [_column(panel, sets) for panel in together]
        grids.append(_grid(together, columns, sets))
        if costs := _costs(together, columns, sets):
            grids.append(costs)
    return grids


def _setting(panel: Panel) -> str:
    told = {name: value for name, value in panel.setting.items() if name not in _APART}
    return repr(sorted((name, value) for name, value in told.items() if name not in ("examples", "stop_ids")))


def _sets(panels: list[Panel]) -> dict[Drafters, str]:
    """Every set of drafters among which was chosen, the smaller one first -> what rows add; nothing for one alone."""
    found = dict.fromkeys(_drafters(spot) for panel in panels for spot in panel.spots if selects(spot))
    if len(found) == 1:
        return dict.fromkeys(found, "")
    return {each: f" of {chr(ord('A') + n)}" for n, each in enumerate(sorted(found, key=len))}


def _drafters(spot: Spot) -> Drafters:
    return tuple(spot.records[0]["point"]["drafters"])


def _way(spot: Spot) -> str:
    """How a spot chooses among its drafters."""
    told = spot.records[0]["selection"]
    return f"always {told['choose']}" if fixed_arm(spot) is not None else _policy(told)


def _policy(told: dict[str, Any]) -> str:
    return f"{told['choose']} π ({told['trained']})" if "trained" in told else str(told["choose"])


def _ways(columns: list[dict[str, Spot]], sets: dict[Drafters, str]) -> list[str]:
    """Rows: a drafter alone, one always, at random, a policy, what none can know; of each the first set's first."""

    def order(way: str) -> tuple[int, int]:
        kinds = [way.endswith(ALONE), way.startswith("always "), way.startswith("random"), not way.startswith(ORACLE)]
        return [*kinds, True].index(True), [*map(way.endswith, sets.values()), True].index(True)

    return sorted(dict.fromkeys(way for column in columns for way in column), key=order)


ALONE = " alone"
"""Behind a drafter's name: nothing chose it, it is the method's only one."""


def _column(panel: Panel, sets: dict[Drafters, str]) -> dict[str, Spot]:
    """Row -> its spot, with times per token; and each query's best arm of every set, where that can be told."""
    found = [(_way(spot) + sets[_drafters(spot)], per_token(spot)) for spot in panel.spots if selects(spot)]
    for (name, *_), same in itertools.groupby(sorted(found, key=_together(sets)), key=_together(sets)):
        if best := oracle([spot for _, spot in same]):
            found.append((ORACLE + name, best))
    found += [(name, per_token(spot)) for name, spot in _alone(panel)]
    names = [name for name, _ in found]
    return {name if names.count(name) == 1 else f"{name}, {spot.name()}": spot for name, spot in found}


def _together(sets: dict[Drafters, str]) -> Any:
    """Sorts rows by what an oracle may choose among: a set's arms, by one method and α."""

    def key(row: tuple[str, Spot]) -> tuple[str, ...]:
        point = row[1].records[0]["point"]
        return sets[_drafters(row[1])], point["method"], str(point["rule"]), str(point["alpha"])

    return key


def _alone(panel: Panel) -> list[tuple[str, Spot]]:
    """The drafters of the sets each as a method's only one, by their names in the sets."""
    called: dict[str, str] = {}
    for told in (spot.records[0]["selection"] for spot in panel.spots if selects(spot)):
        called |= dict(zip(told.get("drafts", told["arms"]), told["arms"], strict=True))
    plain = [spot for spot in panel.spots if not selects(spot) and len(_drafters(spot)) == 1]
    return [(called[_drafters(spot)[0]] + ALONE, spot) for spot in plain if _drafters(spot)[0] in called]


def _grid(panels: list[Panel], columns: list[dict[str, Spot]], sets: dict[Drafters, str]) -> Grid:
    bootstrap = Bootstrap()
    ways = _ways(columns, sets)
    header, rows = ["Drafter"], [["target alone"], *([way] for way in ways)]
    for panel, column in zip(panels, columns, strict=True):
        header += [f"{panel.setting['task']}: {what}" for what in (panel.metric, *_SHOWN)]
        spots, noise = [column.get(way) for way in ways], significance.noise(panel)
        real = [None if spot and spot.label == ORACLE else spot for spot in spots]
        marks = significance.latency_marks(real, bootstrap, noise)
        rows[0] += _target_cells(panel)
        for row, spot, mark in zip(rows[1:], spots, marks, strict=True):
            row += _cells(spot, mark, bootstrap, noise)
    header.append("mean speed-up")
    rows[0].append("1.00")
    for row, way in zip(rows[1:], ways, strict=True):
        known = [speed for column in columns if way in column and (speed := _speed_up(column[way])) is not None]
        row.append(f"{np.mean(known):.2f}" if len(known) == len(columns) else NONE)
    return Grid(title=f"Selection: {_title(panels[0])}", header=header, rows=rows, notes=_notes(panels, sets))


_SHOWN = ("speed-up", "ms/token", "accepted", "choices")


def _notes(panels: list[Panel], sets: dict[Drafters, str]) -> list[str]:
    notes = [
        *(f"{name.removeprefix(' of ')}: {' | '.join(drafters)}." for drafters, name in sets.items() if name),
        "Speed-up: the target's time per token over the way's, each a mean over queries, however long their outputs, "
        "of runs beside each other; whole generations at batch 1, the policy's own time among them. ms/token: all time "
        "over all tokens, in which long outputs count more. Mean speed-up: over domains. Brackets: 95% intervals over "
        "examples; * better than all else in its column, ≈ not told apart from the best.",
        "Accepted: kept of all that was drafted; what stands behind a rejection counts as rejected (paper 5, A.6).",
        f"{ORACLE}: the arm that was fastest for a query in the other trials, and its time in this one.",
        *(f"{panel.setting['task']}: {panel.sizes()}." for panel in panels),
    ]
    lossy = sorted({name for panel in panels for spot in panel.spots if selects(spot) for name in _lossy(spot)})
    if lossy:
        notes.append(f"LOSSY: outputs of rows that {' or '.join(lossy)} drafted do not have the target's law.")
    return notes


def _costs(panels: list[Panel], columns: list[dict[str, Spot]], sets: dict[Drafters, str]) -> Grid | None:
    """Time per token of rows that differ in one thing: within a selection or not, among more drafters or fewer."""
    bootstrap, rows = Bootstrap(), list[list[str]]()
    ways = _ways(columns, sets)
    for way, over in _pairs(ways, list(sets.values())):
        cells = []
        for panel, column in zip(panels, columns, strict=True):
            found = None
            if way in column and over in column:
                found = significance.latency_between(
                    column[way], column[over], bootstrap, significance.self_noise(panel)
                )
            cells.append(NONE if found is None else f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]")
        rows.append([way, over, *cells])
    if all(cell == NONE for row in rows for cell in row[2:]):
        return None
    header = ["time per token of", "over that of", *(str(panel.setting["task"]) for panel in panels)]
    note = "Both relative to the target beside them, on the same resamples of queries; brackets: 95% intervals."
    return Grid(title=f"What choosing costs: {_title(panels[0])}", header=header, rows=rows, notes=[note])


def _pairs(ways: list[str], sets: list[str]) -> list[tuple[str, str]]:
    """Always a drafter over that drafter alone, and every way among a further set over the same among the first."""
    alone = [name for name in ways if name.endswith(ALONE)]
    found = [(f"always {name.removesuffix(ALONE)}{of}", name) for name in alone for of in sets]
    first, *further = sets
    for way, name in itertools.product(ways, further):
        if way.endswith(name):
            found.append((way, way.removesuffix(name) + first))
    return [(way, over) for way, over in found if way in ways and over in ways]


def _title(panel: Panel) -> str:
    return panel.title().partition(", ")[2]


def _lossy(spot: Spot) -> list[str]:
    told = spot.records[0]["selection"]
    rules = dict(zip(told["arms"], told["rules"], strict=True))
    return [f"{arm} ({rules[arm]})" for arm in told["lossy_arms"] or ()]


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
        found = significance.latency(spot, bootstrap, noise)
        shown += "" if found is None else f" [{1 / found.high:.2f}, {1 / found.low:.2f}]"
    quality = NONE if spot.label == ORACLE else f"{spot.quality.value:.2f}"
    return [quality, shown, _ms(spot), NONE if told is None else f"{told.value:.1%}", _choices(spot)]


def _speed_up(spot: Spot) -> float | None:
    found = ratio(spot)
    return None if found is None else 1 / found


def _choices(spot: Spot) -> str:
    """How often each arm was chosen; nothing where that is in the name."""
    if not selects(spot) or fixed_arm(spot) is not None:
        return NONE
    told = spot.records[0]["selection"]
    counts = np.zeros(len(told["arms"]))
    for record in spot.records:
        counts += np.bincount(record["per_example"]["arm"], minlength=len(counts))
    shares = counts / max(counts.sum(), 1)
    return ", ".join(f"{arm} {share:.0%}" for arm, share in zip(told["arms"], shares, strict=True))
