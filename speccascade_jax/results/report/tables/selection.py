"""Tables that compare choosing a drafter per query with fixed drafters (Huang et al., 2024 (assistant selection)).

They correspond to the paper's Tables 1 to 6 and 11 to 14. Each row is a strategy of choosing, and each group of columns
is a domain, which is a task. One table holds several sets of drafters, each with its own rows, and also drafters that
are used without a choice. An arm is one of the drafters in a set. The rows of the oracle, which uses each query's best
arm in hindsight, are computed from the rows of the single arms. Times are per token. Needs no JAX.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from speccascade_jax.results.analysis import significance
from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval
from speccascade_jax.results.analysis.panels import Panel, Spot, metric_name
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.record import TIMES, Latency, Record, Row

_APART = (
    "task", "split", "max_new_tokens", "first_example", "quality_examples", "latency_examples", "examples", "stop_ids",
)  # fmt: skip
"""Settings in which the domains of one table may differ."""
Drafters = tuple[str, ...]
ORACLE = "each query's best arm"
ALONE = " alone"
"""Suffix of the row of a drafter that is its method's only drafter, so that nothing was chosen."""


def selection_grids(panels: Sequence[Panel]) -> list[Grid]:
    """Returns for each setting a table with all domains side by side, followed by a table of the cost of choosing.

    The second table is left out if nothing was timed.

    Raises:
        ValueError: no record chose among drafters.
    """
    chosen = [panel for panel in panels if any(map(selects, panel.spots))]
    if not chosen:
        raise ValueError(
            "no record is of a method that chooses among drafters: measure one with several drafters and, for "
            "example, choose='greedy'"
        )
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
    return repr(sorted((name, value) for name, value in panel.setting.items() if name not in _APART))


def _setting_title(panels: list[Panel]) -> str:
    """Returns the title that the panels share, without the task."""
    return panels[0].title().partition(", ")[2]


def _sets(panels: list[Panel]) -> dict[Drafters, str]:
    """Returns the suffix of row names for each set of drafters, smallest set first; "" if there is one set only."""
    drafter_sets = dict.fromkeys(_drafters(spot) for panel in panels for spot in panel.spots if selects(spot))
    if len(drafter_sets) == 1:
        return dict.fromkeys(drafter_sets, "")
    return {drafters: f" of {chr(ord('A') + n)}" for n, drafters in enumerate(sorted(drafter_sets, key=len))}


def _drafters(spot: Spot) -> Drafters:
    return tuple(spot.records[0]["point"]["drafters"])


def _way(spot: Spot) -> str:
    """Returns the name of the strategy by which a point's method chose a drafter."""
    selection = spot.records[0]["selection"]
    if fixed_arm(spot) is not None:
        return f"always {selection['choose']}"
    return f"{selection['choose']} π ({selection['trained']})" if "trained" in selection else str(selection["choose"])


def _ways(columns: list[dict[str, Spot]], sets: dict[Drafters, str]) -> list[str]:
    """Returns the rows' names in order: drafters alone, fixed choices, the random choice, policies, oracles.

    Within each kind, the rows of the first set of drafters come first.
    """

    def order(way: str) -> tuple[int, int]:
        kinds = [way.endswith(ALONE), way.startswith("always "), way.startswith("random"), not way.startswith(ORACLE)]
        return [*kinds, True].index(True), [*map(way.endswith, sets.values()), True].index(True)

    return sorted(dict.fromkeys(way for column in columns for way in column), key=order)


def _column(panel: Panel, sets: dict[Drafters, str]) -> dict[str, Spot]:
    """Returns a panel's points by row name, with times per token, and an oracle per drafter set with enough trials."""
    named_spots = [(_way(spot) + sets[_drafters(spot)], per_token(spot)) for spot in panel.spots if selects(spot)]
    # points by drafter set, method, rule and α: an oracle chooses among drafters (arms) that agree in all of these
    arms = defaultdict[tuple[str, ...], list[Spot]](list)
    for _, spot in named_spots:
        point = spot.records[0]["point"]
        arms[sets[_drafters(spot)], point["method"], str(point["rule"]), str(point["alpha"])].append(spot)
    for (name, *_), spots in sorted(arms.items()):
        if best := oracle(spots):
            named_spots.append((ORACLE + name, best))
    named_spots += [(name, per_token(spot)) for name, spot in _alone(panel)]
    names = [name for name, _ in named_spots]
    return {name if names.count(name) == 1 else f"{name}, {spot.name()}": spot for name, spot in named_spots}


def _alone(panel: Panel) -> list[tuple[str, Spot]]:
    """Returns the points of methods whose only drafter is also in a set, with the drafter's name in that set."""
    called: dict[str, str] = {}
    for selection in (spot.records[0]["selection"] for spot in panel.spots if selects(spot)):
        drafts = selection["drafts"] if "drafts" in selection else selection["arms"]
        called |= dict(zip(drafts, selection["arms"], strict=True))
    plain = [spot for spot in panel.spots if not selects(spot) and len(_drafters(spot)) == 1]
    return [(called[_drafters(spot)[0]] + ALONE, spot) for spot in plain if _drafters(spot)[0] in called]


def _grid(panels: list[Panel], columns: list[dict[str, Spot]], sets: dict[Drafters, str]) -> Grid:
    bootstrap = Bootstrap()
    ways = _ways(columns, sets)
    header, rows = ["Drafter"], [["target alone"], *([way] for way in ways)]
    for panel, column in zip(panels, columns, strict=True):
        header += [f"{panel.setting['task']}: {heading}" for heading in (metric_name(panel.metric), *_SHOWN)]
        spots, noise = [column.get(way) for way in ways], significance.noise(panel)
        real = [None if spot and spot.label == ORACLE else spot for spot in spots]
        marks = significance.latency_marks(real, bootstrap, noise)
        target = panel.target
        rows[0] += [f"{target.quality.value:.2f}", "1.00", _ms(target), NONE, NONE] if target else [NONE] * 5
        for row, spot, mark in zip(rows[1:], spots, marks, strict=True):
            row += _cells(spot, mark, bootstrap, noise)
    header.append("mean speed-up")
    rows[0].append("1.00")
    for row, way in zip(rows[1:], ways, strict=True):
        known = [speed for column in columns if way in column and (speed := _speed_up(column[way])) is not None]
        row.append(f"{np.mean(known):.2f}" if len(known) == len(columns) else NONE)
    return Grid(title=f"Selection: {_setting_title(panels)}", header=header, rows=rows, notes=_notes(panels, sets))


_SHOWN = ("speed-up", "ms/token", "accepted", "choices")


def _notes(panels: list[Panel], sets: dict[Drafters, str]) -> list[str]:
    notes = [
        *(f"{name.removeprefix(' of ')}: {' | '.join(drafters)}." for drafters, name in sets.items() if name),
        "Speed-up: the target's mean time per token, divided by the row's; each query counts equally, however long its "
        "output is. The runs of both alternate; they are whole generations at batch 1 and include the policy's time. "
        "ms/token: total time over total tokens, so that long outputs count more. Mean speed-up: over domains. "
        "Brackets: 95% confidence intervals over examples; * better than all other entries of its column, ≈ tied with "
        "the best.",
        "Accepted: share of all drafted tokens that were kept; tokens after a rejection count as rejected (Huang et "
        "al., 2024 (assistant selection), A.6).",
        f"{ORACLE}: for each query, the arm that was fastest in the other trials, and its time in this trial.",
        *(f"{panel.setting['task']}: {panel.sizes()}." for panel in panels),
    ]
    lossy = set[str]()
    for selection in (spot.records[0]["selection"] for panel in panels for spot in panel.spots if selects(spot)):
        rules = dict(zip(selection["arms"], selection["rules"], strict=True))
        lossy |= {f"{arm} ({rules[arm]})" for arm in selection["lossy_arms"] or ()}
    if lossy:
        notes.append(
            f"LOSSY: outputs of rows that {' or '.join(sorted(lossy))} drafted do not have the target's distribution."
        )
    return notes


def _costs(panels: list[Panel], columns: list[dict[str, Spot]], sets: dict[Drafters, str]) -> Grid | None:
    """Returns a table of ratios of times per token, which shows the cost of choosing; `None` if nothing was timed.

    `_pairs` describes which rows are compared.
    """
    bootstrap, rows = Bootstrap(), list[list[str]]()
    ways = _ways(columns, sets)
    for way, over in _pairs(ways, list(sets.values())):
        cells = []
        for panel, column in zip(panels, columns, strict=True):
            between = None
            if way in column and over in column:
                noise = significance.self_noise(panel)
                between = significance.latency(column[way], bootstrap, noise, over=column[over])
            cells.append(between.text(".3f") if between else NONE)
        rows.append([way, over, *cells])
    if all(cell == NONE for row in rows for cell in row[2:]):
        return None
    header = ["time per token of", "relative to", *(str(panel.setting["task"]) for panel in panels)]
    note = (
        "Both times are relative to the target's, on the same resamples of queries; brackets: 95% confidence intervals."
    )
    return Grid(title=f"Cost of choosing: {_setting_title(panels)}", header=header, rows=rows, notes=[note])


def _pairs(ways: list[str], sets: list[str]) -> list[tuple[str, str]]:
    """Returns the pairs of rows whose times are compared.

    A pair is either a drafter that is always chosen and the same drafter alone, or a strategy with a further set of
    drafters and the same strategy with the first set.
    """
    alone = [name for name in ways if name.endswith(ALONE)]
    candidates = [(f"always {name.removesuffix(ALONE)}{of}", name) for name in alone for of in sets]
    first, *further = sets
    for way, name in itertools.product(ways, further):
        if way.endswith(name):
            candidates.append((way, way.removesuffix(name) + first))
    return [(way, over) for way, over in candidates if way in ways and over in ways]


def _ms(spot: Spot) -> str:
    times = [record["latency"]["ms_per_token"]["value"] for record in spot.records if record.get("latency")]
    return f"{np.mean(times):.3f}" if times else NONE


def _cells(spot: Spot | None, mark: str, bootstrap: Bootstrap, noise: float) -> list[str]:
    if spot is None:
        return [NONE] * 5
    speed, utilisation, shown = _speed_up(spot), spot.measures.get("draft_utilisation"), NONE
    if speed is not None:
        latency = significance.latency(spot, bootstrap, noise)
        shown = f"{speed:.2f}{mark}" + (f" {latency.inverse().brackets('.2f')}" if latency else "")
    quality = NONE if spot.label == ORACLE else f"{spot.quality.value:.2f}"
    return [quality, shown, _ms(spot), NONE if utilisation is None else f"{utilisation.value:.1%}", _choices(spot)]


def _speed_up(spot: Spot) -> float | None:
    latency = ratio(spot)
    return None if latency is None else 1 / latency


def _choices(spot: Spot) -> str:
    """Returns how often each arm was chosen, as text; `NONE` if the row's name says which arm it is."""
    if not selects(spot) or fixed_arm(spot) is not None:
        return NONE
    selection = spot.records[0]["selection"]
    counts = np.zeros(len(selection["arms"]))
    for record in spot.records:
        counts += np.bincount(record["per_example"]["arm"], minlength=len(counts))
    shares = counts / max(counts.sum(), 1)
    return ", ".join(f"{arm} {share:.0%}" for arm, share in zip(selection["arms"], shares, strict=True))


def selects(spot: Spot) -> bool:
    """Returns whether a point's method chose a drafter for each query."""
    return "selection" in spot.records[0]


def fixed_arm(spot: Spot) -> int | None:
    """Returns the index of the arm that is chosen for every query, or `None` if the choice is not fixed."""
    selection: Row = spot.records[0].get("selection", {"choose": None, "arms": ()})
    return selection["arms"].index(selection["choose"]) if selection["choose"] in selection["arms"] else None


def per_token(spot: Spot) -> Spot:
    """Returns a point with each query's time per token instead of its time, because output lengths differ."""

    def divided(timed: Latency) -> Latency:
        ms_per_token = np.asarray(timed["per_example_ms"]) / np.maximum(timed["per_example_tokens"], 1)
        return {**timed, "per_example_ms": ms_per_token.tolist()}

    def of(record: Record) -> Record:
        if not record.get("latency"):
            return record
        return record | {"latency": divided(record["latency"]), "target_latency": divided(record["target_latency"])}

    return _with_ratio(spot, [of(record) for record in spot.records])


def ratio(spot: Spot) -> float | None:
    """Returns the time per token of a point from `per_token`, relative to the target's and averaged over seeds."""
    timed = [record for record in spot.records if record.get("latency")]
    times = [[np.sum(record[name]["per_example_ms"]) for name in TIMES] for record in timed]
    return float(np.mean([method_ms / target_ms for method_ms, target_ms in times])) if times else None


def _with_ratio(spot: Spot, records: Sequence[Record]) -> Spot:
    """Returns a copy of the point with the given records, and with the relative latency computed from them."""
    spot = replace(spot, records=tuple(records))
    latency = ratio(spot)
    return spot if latency is None else replace(spot, latency=Interval(latency, latency, latency))


def oracle(spots: Sequence[Spot]) -> Spot | None:
    """Returns a point that uses each query's best arm, from points of `per_token`; `None` without enough trials.

    The best arm is the fastest one in the other trials, relative to the target's interleaved run. The fastest arm of
    the same trial would count luck as speed.

    Args:
        spots: points of one method with one set of drafters; the best arm is taken from those with a fixed choice.
    """
    always = [spot for spot in spots if fixed_arm(spot) is not None]
    by_seed = [{record["point"]["seed"]: record for record in spot.records if _tried(record)} for spot in always]
    if len(always) < 2 or not (seeds := set.intersection(*map(set, by_seed))):
        return None
    places = np.asarray([fixed_arm(spot) for spot in always])
    records = [_best_of([seed_records[seed] for seed_records in by_seed], places) for seed in sorted(seeds)]
    like = replace(always[0], method=ORACLE, label=ORACLE, ms_per_example=None, measures={}, seeds=len(seeds))
    return _with_ratio(replace(like, inconclusive=False), records)


def _tried(record: Record) -> bool:
    return bool(record.get("latency")) and len(record["latency"]["per_example_ms"]) > 1


def _best_of(timed: list[Record], places: np.ndarray) -> Record:
    """Returns a record of each query's best arm, from one record per arm; `places` are the indices of these arms."""
    arm_ms, target_ms = (np.asarray([record[name]["per_example_ms"] for record in timed]) for name in TIMES)
    ratios = arm_ms / target_ms  # [arms, trials, examples]
    best = (ratios.sum(1, keepdims=True) - ratios).argmin(0)[None]

    def picked(values: np.ndarray) -> np.ndarray:
        chosen: np.ndarray = np.take_along_axis(values, best, axis=0)[0]
        return chosen

    tokens = np.maximum(picked(np.asarray([record["latency"]["per_example_tokens"] for record in timed])), 1)
    # `total` is the time of all queries over all tokens, as in other records
    like, total = timed[0], (picked(arm_ms) * tokens).sum(1) / tokens.sum(1)
    latency = {"per_example_ms": picked(arm_ms).tolist(), "per_example_tokens": tokens.tolist()}
    best_arms: Row = {
        **like,
        "key": ORACLE,
        "latency": {**like["latency"], **latency, "ms_per_token": {"value": float(np.median(total))}},
        "target_latency": {**like["target_latency"], "per_example_ms": picked(target_ms).tolist()},
        "selection": {**like["selection"], "choose": ORACLE},
        "per_example": {"arm": places[best].ravel().tolist()},
    }
    return cast(Record, best_arms)
