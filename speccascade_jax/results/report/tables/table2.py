"""Table 2 of Narasimhan et al. (2024) and the list of all points: cells and notes, computed from panels.

Numbers in brackets are paired bootstrap intervals of differences to the target alone. The marks compare the entries of
one column with each other (`significance`). Needs no JAX.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from speccascade_jax.results.analysis import provenance, significance
from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval
from speccascade_jax.results.analysis.panels import (
    LOSS,
    Panel,
    Row,
    Spot,
    latency_of,
    metric_name,
    share_of,
    short_name,
    table2,
)
from speccascade_jax.results.analysis.significance import BEST, TIE
from speccascade_jax.results.report.tables import predicted
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.result_store import to_csv

MEASURES = (
    ("rejected", "rejection_rate", ".1%"), ("draft wrote", "draft_share", ".1%"),
    ("block eff.", "block_efficiency", ".2f"),
)  # fmt: skip
"""Columns of the list of points, each with its header, the measure of a record, and the number format."""
_SPARE = ("seeds", "interval", "range", "ms per example", *(name for name, *_ in reversed(MEASURES)))
"""Columns of the list of points that a narrow terminal leaves out, in this order."""


def grids(panels: Sequence[Panel], points: bool = False, *limits: float, apart: bool = False) -> list[Grid]:
    """Returns Table 2 or, with `points`, the list of all points; then a table of what limits each predicted latency.

    Args:
        panels: the panels to list.
        points: whether to list all points instead of Table 2.
        limits: as in `panels.table2`.
        apart: as in `table2_grids`.
    """
    bounds = [predicted.bound_grid(panel) for panel in panels if panel.predicted]
    if points:  # panels with target and draft alone are listed only if there are no other panels
        listed = [panel for panel in panels if panel.curves] or panels
        return [points_grid(panel) for panel in listed] + bounds
    return table2_grids(panels, *limits, apart=apart) + bounds


def table2_grids(
    panels: Iterable[Panel], tolerance: float = 0.0, margin: float = 0.0, loss: float = LOSS, *, apart: bool = False
) -> list[Grid]:
    """Returns Table 2: a grid for each combination of sampling, block size and bonus, three columns per task and pair.

    Errors are those of `panels.table2`. Panels that contain only target and draft alone are left out.

    Args:
        panels: the panels to list.
        tolerance: as in `panels.table2`.
        margin: as in `panels.table2`.
        loss: as in `panels.table2`.
        apart: whether every task and pair has a grid of its own, for terminals that are too narrow for several.
    """
    tables: dict[tuple, list[Panel]] = defaultdict(list)
    same = ("temperature", "draft_temperature", "top_p", "top_k", "block_size", "bonus", "device")
    for panel in panels:
        if panel.curves:
            tables[(*(panel.setting[name] for name in same), apart and id(panel))].append(panel)
    return [_table2_grid(members, tolerance, margin, loss) for members in tables.values()]


def _table2_grid(panels: Sequence[Panel], tolerance: float, margin: float, loss: float) -> Grid:
    results = [{row.method: row for row in table2(panel, tolerance, margin, loss)} for panel in panels]
    first_spots = {name: curve[0] for panel in panels for name, curve in panel.curves.items()}
    methods, bootstrap = sorted(first_spots, key=lambda name: first_spots[name].order()), Bootstrap()
    title, names = _named(panels)
    header = ["Method", "T"] + [f"Speed-up, {_allowed(tolerance)}{name}" for name in names]
    header += [
        f"Speed-up, loss ≤ {loss:g} {metric_name(p.metric)}{name}" for p, name in zip(panels, names, strict=True)
    ]
    header += [f"Best {metric_name(p.metric)}{name}" for p, name in zip(panels, names, strict=True)]
    rows_of = [[rows_by_method.get(method) for method in methods] for rows_by_method in results]
    by_panel = [_columns(panel, rows, bootstrap) for panel, rows in zip(panels, rows_of, strict=True)]
    columns = [column for same in zip(*by_panel, strict=True) for column in same]
    temperature = _temperature(panels[0])
    rows = [[first_spots[method].label, temperature, *cells] for method, *cells in zip(methods, *columns, strict=True)]
    bold = {(r, c) for r, row in enumerate(rows) for c, x in enumerate(row) if c and x.endswith(BEST)}
    for end, speeds in (("target", [_alone(p, bootstrap) for p in panels]), ("draft", [NONE] * len(panels))):
        spots = [getattr(panel, end) for panel in panels]
        if name := next((spot.label for spot in spots if spot), None):
            qualities = [f"{spot.quality.value:.2f}" if spot else NONE for spot in spots]
            rows.append([name, temperature, *speeds, *[NONE] * len(panels), *qualities])
    notes, brief = _notes(panels, tolerance, margin, loss, bootstrap), _brief(panels, rows, "speed-up and difference")
    return Grid(title=title, header=header, rows=rows, notes=notes, bold=bold, brief=brief)


def _named(panels: Sequence[Panel]) -> tuple[str, list[str]]:
    """Returns the title of Table 2 with what all panels share, and for each panel the words that distinguish it."""
    both = [(panel.setting["task"], short_name(panel.setting["pair"])) for panel in panels]
    shared = [words[0] if len(set(words)) == 1 else "" for words in zip(*both, strict=True)]
    differing = [[name for name, common in zip(words, shared, strict=True) if not common] for words in both]
    title = ", ".join([*filter(None, shared), *panels[0].title().split(", ")[2:]])
    return title, [f": {', '.join(words)}" * bool(words) for words in differing]


def _allowed(tolerance: float) -> str:
    return f"loss ≤ {tolerance:g}" if tolerance else "no loss"


def _brief(panels: Sequence[Panel], rows: Sequence[Sequence[str]], bracketed: str) -> list[str]:
    """Returns short notes for a terminal: doubts about the numbers, what the marks mean, examples, seeds and device."""
    doubts = [text for panel in panels for text in (*significance.busy_notes(panel), *significance.uncompared(panel))]
    doubts += provenance.notes(panels)
    doubts += ["Latencies are predicted, not measured."] * any(panel.predicted for panel in panels)
    marks = {BEST: "best of its column", TIE: "tied with the best"}
    used = [
        f"{mark}: {said}" for mark, said in marks.items() if any(x.endswith(f" {mark}") for row in rows for x in row)
    ]
    brackets = f"[ ]: 95% interval of {bracketed}"
    devices = (f"Device: {panel.setting['device']}{_noise_text(panel)}." for panel in panels)
    sizes = (f"{panel.sizes()}." for panel in panels)
    return [*dict.fromkeys(doubts), f"{'; '.join([brackets, *used])}.", *dict.fromkeys((*sizes, *devices))]


def _noise_text(panel: Panel) -> str:
    floor = significance.noise(panel)
    return f"; its times of equal work differ by up to {math.expm1(floor):.1%}" if floor and not panel.predicted else ""


def _columns(panel: Panel, rows: Sequence[Row | None], bootstrap: Bootstrap) -> tuple[list[str], ...]:
    """Returns a panel's three columns of Table 2; speed-ups at a loss of quality show this loss and have no marks."""
    fast, near, best = ([getattr(row, name) if row else None for row in rows] for name in Row._fields[1:])
    floor = significance.noise(panel)

    def speed(spot: Spot) -> str:
        ratio = significance.latency(spot, bootstrap, floor)
        return _joined(f"{_times(spot)}{_at(spot)}", ratio and ratio.inverse().brackets(".2f"))

    def cost(spot: Spot) -> str:
        return _gain(panel, spot, bootstrap) or f"{spot.quality.value:.2f}"

    def quality(spot: Spot) -> str:
        gain = significance.quality_gain(panel, spot, bootstrap)
        return _joined(f"{spot.quality.value:.2f}{_at(spot)}", gain and gain.brackets("+.2f"))

    fastest = zip(fast, significance.latency_marks(fast, bootstrap, floor), strict=True)
    highest = zip(best, significance.quality_marks(best, bootstrap), strict=True)
    return (
        [_joined(speed(spot), mark) if spot else NONE for spot, mark in fastest],
        [f"{speed(spot)}; {cost(spot)}" if spot else NONE for spot in near],
        [_joined(quality(spot), mark) if spot else NONE for spot, mark in highest],
    )


def _alone(panel: Panel, bootstrap: Bootstrap) -> str:
    """Returns the speed-up of the target over a second timing of itself; its difference from 1 is noise."""
    if panel.target is None or panel.target.latency is None:
        return NONE
    ratio = significance.latency(panel.target, bootstrap)
    return _joined(_times(panel.target), ratio and ratio.inverse().brackets(".2f"))


def _times(spot: Spot) -> str:
    return f"{1 / latency_of(spot):.2f}×"


def _gain(panel: Panel, spot: Spot, bootstrap: Bootstrap, over: Spot | None = None) -> str:
    """Returns a point's quality minus that of `over` (default: target), with its interval; "" if there is none."""
    gain = significance.quality_gain(panel, spot, bootstrap, over)
    return gain.text("+.2f") if gain else ""


_ALONE = " Target alone: its measured speed-up over itself, which is noise."


def _notes(panels: Sequence[Panel], tolerance: float, margin: float, loss: float, bootstrap: Bootstrap) -> list[str]:
    exact = "exactly compared" if tolerance == 0 else f"within {tolerance:g} below it"
    slower = "relative latency ≤ 1" if margin == 0 else f"relative latency ≤ {1 + margin:g}"
    alone = "" if any(panel.predicted for panel in panels) else _ALONE
    notes = [
        f"Speed-up, {_allowed(tolerance)}: 1 / relative latency of the fastest α of at least the target's quality "
        f"({exact}); {NONE}: no such α.",
        f"Loss ≤ {loss:g}: the fastest α whose quality is at most this much below the target's, then the "
        "quality difference with its interval. The loss is certain to be this small if the whole interval lies within "
        "it.",
        f"Best {metric_name(panels[0].metric)}: the highest quality of all α's with {slower}.{alone}",
        *_explained("[low, high]: intervals of the speed-up, and of the best quality minus the target's"),
        "No interval accounts for the choice of α on the same examples; those of qualities do not account for the "
        "number of compared entries either.",
    ]
    for panel in panels:
        name = f"{panel.setting['task']}, {short_name(panel.setting['pair'])}: {panel.sizes()}"
        if panel.target:
            quality = panel.target.quality
            name += f"; target's {metric_name(panel.metric)} {quality.value:.2f} ({_range(quality)})"
        notes.append(f"{name}. Device: {panel.setting['device']}.")
        lost = [spot.name() for spot in panel.spots if spot.inconclusive]
        if lost:
            notes.append(f"Inconclusive (nothing was drafted), left out: {', '.join(lost)}.")
        notes += [*panel.asides(), *_warnings(panel, bootstrap)]
    return notes + provenance.notes(panels)


def _warnings(panel: Panel, bootstrap: Bootstrap) -> list[str]:
    """Returns notes on how reliable a panel's numbers are, and on its baselines."""
    notes = [*predicted.notes(panel), *significance.uncompared(panel), *significance.noise_notes(panel)]
    notes += significance.random_notes(panel, bootstrap)
    if panel.setting["temperature"] and panel.cooler:
        listed = ", ".join(
            f"{spot.quality.value:.2f} at T = {temperature:g}" for temperature, spot in panel.cooler.items()
        )
        notes.append(
            f"The target alone at lower temperatures, which sharpen its distribution as some rules do: {listed}."
        )
    return notes


def _explained(brackets: str) -> list[str]:
    """Returns notes that explain the numbers in brackets and the marks of a table."""
    samples = Bootstrap().samples
    return [
        f"{brackets}; 95% paired bootstrap over examples, {samples:,} resamples (seeds are averaged, not resampled; "
        "latencies resample trials too).",
        f"{BEST}: better than every other entry of its column; no paired interval of these comparisons includes "
        f"equality. {TIE}: tied with the best entry of its column; their paired interval includes equality.",
    ]


def points_grid(panel: Panel) -> Grid:
    """Returns the table of a panel's points: quality, relative latency if measured, rejected share, draft share."""
    ends, spots, bootstrap = panel.ends, panel.spots, Bootstrap()
    # no marks for target and draft alone, which are baselines, nor for inconclusive points, which are no results
    ranked = [None if spot.inconclusive else spot for spot in spots]
    floor = significance.noise(panel)
    quality, speed = significance.quality_marks(ranked, bootstrap), significance.latency_marks(ranked, bootstrap, floor)
    marks = [("", "")] * len(ends) + list(zip(quality, speed, strict=True))
    timed = any(spot.latency for spot in (*ends, *spots))
    rows = [
        _cells(panel, spot, spot_marks, bootstrap, timed)
        for spot, spot_marks in zip([*ends, *spots], marks, strict=True)
    ]
    brackets = "[low, high]: intervals of the difference to the target's" + (
        ", and of the relative latency" if timed else ""
    )
    columns = f"Δ {metric_name(panel.metric)}: the difference to the target's. Interval: of the quality itself."
    if timed:
        columns += " Latency: relative to the target's. Range: its lowest and highest value over trials or seeds."
    columns += " Block eff.: tokens per target call."
    notes = [panel.sizes(), columns, *panel.asides(), *_explained(brackets), *_warnings(panel, bootstrap)]
    notes += provenance.notes([panel])
    bold = {
        (r, c) for r, spot_marks in enumerate(marks) for c, mark in zip((3, 6), spot_marks, strict=True) if mark == BEST
    }
    cells = [list(row.values()) for row in rows]
    brief = _brief([panel], cells, "differences and latencies" if timed else "differences")
    title, header = panel.title(), list(rows[0])
    spare = tuple(name for name in _SPARE if name in header)
    return Grid(title=title, header=header, rows=cells, notes=notes, bold=bold, brief=brief, spare=spare)


def beside_grid(panel: Panel, method: str, share: str = "draft_share") -> Grid:
    """Returns a table that compares every point of a panel with one point of a reference method.

    The chosen point of the reference method is the one with the nearest share, such as the share of tokens that the
    draft wrote. So the table shows whether a point is better than the reference method at an equal share.

    Args:
        panel: the panel of the points.
        method: a curve of the panel, for example "random_accept".
        share: the compared measure, a name in `panels.SHARES`.

    Raises:
        ValueError: the panel has no such curve, or the curve has no such share.
    """
    references = _placed(panel.curves.get(method, ()), share)
    if not references:
        raise ValueError(
            f"{panel.title()} has no points of {method!r} with a {share}: choose one of {', '.join(panel.curves)}"
        )
    rows, bootstrap = list[list[str]](), Bootstrap()
    for spot_share, spot in _placed([spot for spot in panel.spots if spot.method != method], share):
        nearest_share, nearest = references[
            int(np.argmin([abs(candidate_share - spot_share) for candidate_share, _ in references]))
        ]
        row = [spot.label, _temperature(panel), _number(spot.alpha), f"{spot_share:.1%}", f"{spot.quality.value:.2f}"]
        row += [_number(nearest.alpha), f"{nearest_share:.1%}", f"{nearest.quality.value:.2f}"]
        rows.append([*row, _gain(panel, spot, bootstrap, nearest) or NONE])
    words = share.replace("_", " ")
    metric, label = metric_name(panel.metric), references[0][1].label
    header = ["Method", "T", "α", words, metric, "its α", "its share", f"its {metric}", f"Δ {metric}"]
    notes = [
        panel.sizes(),
        _explained(
            f"Every point is compared with the point of {label} of the nearest {words} (its α, share and {metric}). "
            "[low, high]: intervals of the difference"
        )[0],
    ]
    notes += provenance.notes([panel])
    return Grid(title=f"{panel.title()}, beside {label}", header=header, rows=rows, notes=notes)


def _placed(spots: Iterable[Spot], share: str) -> list[tuple[float, Spot]]:
    """Returns every point for which this share was measured, as a pair (share, point)."""
    return [(interval.value, spot) for spot in spots if (interval := share_of(spot, share))]


def _temperature(panel: Panel) -> str:
    return f"{panel.setting['temperature']:g}"


def _number(alpha: float | None) -> str:
    return NONE if alpha is None else f"{alpha:g}"


def _cells(panel: Panel, spot: Spot, marks: tuple[str, str], bootstrap: Bootstrap, timed: bool) -> dict[str, str]:
    """Returns a row of the list of points, by column; latency columns are included only if `timed`."""
    cells = {
        "Method": spot.label + (" (inconclusive)" if spot.inconclusive else ""),
        "T": _temperature(panel),
        "α": _number(spot.alpha) if spot.axis == "α" else f"{spot.axis} {_number(spot.alpha)}",
        metric_name(panel.metric): _joined(f"{spot.quality.value:.2f}", marks[0]),
        "interval": _range(spot.quality),
        f"Δ {metric_name(panel.metric)}": _gain(panel, spot, bootstrap) or NONE,
    }
    if timed:
        cells |= dict.fromkeys(("latency", "range", "ms per example"), NONE)
    if spot.latency:
        ratio = significance.latency(spot, bootstrap, 0.0 if spot is panel.target else significance.noise(panel))
        cells["latency"] = _joined(f"{spot.latency.value:.2f}", ratio and ratio.brackets(".2f"), marks[1])
        cells["range"] = _range(spot.latency)
    if timed and spot.ms_per_example is not None:
        cells["ms per example"] = f"{spot.ms_per_example:.1f}"
    for column, name, form in MEASURES:
        cells[column] = f"{spot.measures[name].value:{form}}" if name in spot.measures else NONE
    return cells | {"seeds": str(spot.seeds)}


def table2_csv(panels: Iterable[Panel], tolerance: float = 0.0, margin: float = 0.0, loss: float = LOSS) -> str:
    """Returns Table 2 as CSV, one line per panel and method, for further computation."""
    lines: list[dict[str, Any]] = []
    for panel in panels:
        rows, bootstrap = table2(panel, tolerance, margin, loss) if panel.curves else [], Bootstrap()
        speed = significance.latency_marks([row.fastest for row in rows], bootstrap, significance.noise(panel))
        quality = significance.quality_marks([row.best for row in rows], bootstrap)
        for row, *marks in zip(rows, speed, quality, strict=True):
            line = {**panel.setting, "metric": panel.metric, "tolerance": tolerance, "margin": margin}
            line |= {"loss": loss, "noise_floor": significance.noise(panel)}
            line |= {"target_quality": panel.target.quality.value if panel.target else None, "method": row.method}
            line |= _csv_columns(panel, row, bootstrap)
            lines.append(line | {"speed_up_mark": marks[0], "best_quality_mark": marks[1]})
    return to_csv(lines) if lines else "method\n"


def _csv_columns(panel: Panel, row: Row, bootstrap: Bootstrap) -> dict[str, Any]:
    """Returns the CSV columns of one row of Table 2, with the intervals that other formats show in brackets."""
    fast, near, best = row.fastest, row.near, row.best
    floor = significance.noise(panel)

    def paired(spot: Spot | None) -> Interval | None:
        ratio = significance.latency(spot, bootstrap, floor) if spot else None
        return ratio.inverse() if ratio else None

    def gain(spot: Spot | None) -> Interval | None:
        return significance.quality_gain(panel, spot, bootstrap) if spot else None

    _, low, high = paired(fast) or (None,) * 3
    return {
        **_spread("speed_up", fast.latency.inverse() if fast and fast.latency else None),
        "speed_up_alpha": fast.alpha if fast else None,
        **_spread("near_speed_up", paired(near)),
        "near_alpha": near.alpha if near else None,
        **_spread("near_quality_gain", gain(near)),
        **_spread("best_quality", best.quality if best else None),
        "best_quality_alpha": best.alpha if best else None,
        "seeds": max((spot.seeds for spot in (fast, best) if spot), default=None),
        "speed_up_paired_low": low,
        "speed_up_paired_high": high,
        **_spread("best_quality_gain", gain(best)),
    }


def _spread(name: str, entry: Interval | None) -> dict[str, float | None]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), entry or (None,) * 3, strict=True))


def _at(spot: Spot) -> str:
    return spot.name().removeprefix(spot.label)


def _range(value: Interval) -> str:
    return f"{value.low:.2f}–{value.high:.2f}"


def _joined(*parts: str | None) -> str:
    return " ".join(part for part in parts if part)
