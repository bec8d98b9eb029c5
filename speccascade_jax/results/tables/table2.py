"""Paper 1's Table 2 and the list of all points, from panels: what stands in the cells, and what must be said below.

Numbers in brackets are paired bootstrap intervals against the target alone; the marks compare within a column
(`comparisons`). Needs no JAX.
"""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from speccascade_jax.results import comparisons
from speccascade_jax.results.bootstrap import Bootstrap, Interval
from speccascade_jax.results.comparisons import BEST, TIE
from speccascade_jax.results.panels import Panel, Row, Spot, Value, order, share_of, short_name, table2
from speccascade_jax.results.tables.grid import NONE, Grid


def grids(panels: Sequence[Panel], points: bool = False, tolerance: float = 0.0, margin: float = 0.0) -> list[Grid]:
    """Table 2, or with `points` the list of all points, for every setting; arguments as `panels.table2`."""
    return [points_grid(panel) for panel in panels] if points else table2_grids(panels, tolerance, margin)


def table2_grids(panels: Iterable[Panel], tolerance: float = 0.0, margin: float = 0.0) -> list[Grid]:
    """Paper 1's Table 2, one grid per sampling, block size and bonus, two columns per task and pair.

    Arguments and errors as `panels.table2`; panels without any method beside the two ends are left out.
    """
    tables: dict[tuple, list[Panel]] = defaultdict(list)
    for panel in panels:
        s = panel.setting
        if panel.curves:
            same = ("temperature", "draft_temperature", "top_p", "top_k", "block_size", "bonus", "device")
            tables[tuple(s[name] for name in same)].append(panel)
    return [_table2_grid(members, tolerance, margin) for members in tables.values()]


def _table2_grid(panels: Sequence[Panel], tolerance: float, margin: float) -> Grid:
    results, bootstrap = (
        [{row.method: row for row in table2(panel, tolerance, margin)} for panel in panels],
        Bootstrap(),
    )
    found = {name: curve[0] for panel in panels for name, curve in panel.curves.items()}
    methods = sorted(found, key=lambda name: order(found[name]))
    names = [f"{panel.setting['task']}, {short_name(panel.setting['pair'])}" for panel in panels]
    header = ["Method"] + [f"Speed-up at target's quality: {n}" for n in names]
    header += [f"Best {p.metric} no slower than target: {n}" for p, n in zip(panels, names, strict=True)]
    both = [[each.get(method) for method in methods] for each in results]
    columns = [_speed_column(rows, bootstrap) for rows in both]
    columns += [_quality_column(panel, rows, bootstrap) for panel, rows in zip(panels, both, strict=True)]
    rows = [[found[method].label, *cells] for method, *cells in zip(methods, *columns, strict=True)]
    bold = {(r, c) for r, row in enumerate(rows) for c, x in enumerate(row) if c and x.endswith(BEST)}
    for spots, speed in (([p.target for p in panels], "1.00×"), ([p.draft for p in panels], NONE)):
        if name := next((spot.label for spot in spots if spot), None):
            rows.append([name, *[speed] * len(panels), *(f"{s.quality.value:.2f}" if s else NONE for s in spots)])
    return Grid(title=_title(panels), header=header, rows=rows, notes=_notes(panels, tolerance, margin), bold=bold)


def _speed_column(rows: Sequence[Row | None], bootstrap: Bootstrap) -> list[str]:
    spots = [row.fastest if row else None for row in rows]
    cells = []
    for spot, mark in zip(spots, comparisons.latency_marks(spots, bootstrap), strict=True):
        if spot is None or spot.latency is None:
            cells.append(NONE)
        else:
            speed = _inverse(comparisons.latency(spot, bootstrap))
            cells.append(_joined(f"{1 / spot.latency.value:.2f}×{_at(spot)}", _brackets(speed), mark))
    return cells


def _quality_column(panel: Panel, rows: Sequence[Row | None], bootstrap: Bootstrap) -> list[str]:
    spots = [row.best if row else None for row in rows]
    cells = []
    for spot, mark in zip(spots, comparisons.quality_marks(spots, bootstrap), strict=True):
        if spot is None:
            cells.append(NONE)
        else:
            gain = comparisons.quality_gain(panel, spot, bootstrap)
            cells.append(_joined(f"{spot.quality.value:.2f}{_at(spot)}", _brackets(gain, "+"), mark))
    return cells


def _title(panels: Sequence[Panel]) -> str:
    first = panels[0].title().split(", ")
    return ", ".join(["Table 2", *first[2:]])


def _notes(panels: Sequence[Panel], tolerance: float, margin: float) -> list[str]:
    exact = "exactly compared" if tolerance == 0 else f"within {tolerance:g} below it"
    slower = "relative latency ≤ 1" if margin == 0 else f"relative latency ≤ {1 + margin:g}"
    notes = [
        f"Speed-up: 1 / relative latency of the fastest α at the target's quality or above ({exact}); {NONE}: none.",
        f"Best quality: over the α's with {slower}.",
        *_explained("[low, high]: of the speed-up; of the best quality's difference to the target's"),
        "No interval allows for α having been chosen on the same examples, nor for how many entries are compared.",
    ]
    for panel in panels:
        name = f"{panel.setting['task']}, {short_name(panel.setting['pair'])}: {panel.sizes()}"
        if panel.target:
            name += f"; target's {panel.metric} {panel.target.quality.value:.2f} ({_range(panel.target.quality)})"
        notes.append(f"{name}. Device: {panel.setting['device']}.")
        lost = [f"{spot.label}{_at(spot)}" for curve in panel.curves.values() for spot in curve if spot.inconclusive]
        if lost:
            notes.append(f"Inconclusive (nothing was drafted), left out: {', '.join(lost)}.")
        notes += [*panel.asides(), *_uncompared(panel)]
    return notes


def _explained(brackets: str) -> list[str]:
    """What brackets and marks mean."""
    samples = Bootstrap().samples
    return [
        f"{brackets}; 95% paired bootstrap over examples, {samples:,} resamples (seeds averaged, not resampled; "
        "latencies over trials too).",
        f"{BEST}: better than every other entry of its column: none of their intervals of this kind includes equality. "
        f"{TIE}: a tie, the interval against the best of its column includes equality.",
    ]


def _uncompared(panel: Panel) -> list[str]:
    said = comparisons.uncompared(panel)
    return [f"{said}."] if said else []


def points_grid(panel: Panel) -> Grid:
    """Every point of a panel: quality, relative latency where it was measured, what was rejected and who wrote."""
    ends, bootstrap = [end for end in (panel.target, panel.draft) if end], Bootstrap()
    spots = [spot for curve in panel.curves.values() for spot in curve]
    # The ends are what the points are compared with; an inconclusive point is no result.
    ranked = [None if spot.inconclusive else spot for spot in spots]
    quality, speed = comparisons.quality_marks(ranked, bootstrap), comparisons.latency_marks(ranked, bootstrap)
    marks = [("", "")] * len(ends) + list(zip(quality, speed, strict=True))
    columns = [_quality_cells, *([_latency_cells] if any(s.latency for s in [*ends, *spots]) else []), _share_cells]
    rows = [
        {name: cell for cells in columns for name, cell in cells(panel, spot, both, bootstrap).items()}
        for spot, both in zip([*ends, *spots], marks, strict=True)
    ]
    brackets = "[low, high]: of the difference to the target's" + (
        "; of the relative latency" if len(columns) > 2 else ""
    )
    notes = [panel.sizes(), *panel.asides(), *_explained(brackets), *_uncompared(panel)]
    bold = {(r, c) for r, both in enumerate(marks) for c, mark in zip((2, 5), both, strict=True) if mark == BEST}
    cells = [list(row.values()) for row in rows]
    return Grid(title=panel.title(), header=list(rows[0]), rows=cells, notes=notes, bold=bold)


def beside_grid(panel: Panel, method: str, share: str = "draft_share") -> Grid:
    """Every point of a panel against the point of one method whose share is nearest: is it better at equal share?

    Args:
        panel: whose points; method: a curve of it, say "random_accept".
        share: a name in `labels.SHARES`.

    Raises:
        ValueError: the panel has no such curve, or it has no such share.
    """
    others = _placed(panel.curves.get(method, ()), share)
    if not others:
        raise ValueError(
            f"{panel.title()} has no points of {method!r} with a {share}: choose one of {', '.join(panel.curves)}"
        )
    rows, bootstrap = list[list[str]](), Bootstrap()
    spots = [spot for name, curve in panel.curves.items() if name != method for spot in curve]
    for own, spot in _placed(spots, share):
        at, other = others[int(np.argmin([abs(each - own) for each, _ in others]))]
        gain = comparisons.quality_gain(panel, spot, bootstrap, other)
        row = [spot.label, _number(spot.alpha), f"{own:.1%}", f"{spot.quality.value:.2f}"]
        row += [_number(other.alpha), f"{at:.1%}", f"{other.quality.value:.2f}"]
        rows.append([*row, _joined(f"{gain.value:+.2f}", _brackets(gain, "+")) if gain else NONE])
    words = share.replace("_", " ")
    header = ["Method", "α", words, panel.metric, f"{others[0][1].label}: α", "its share", panel.metric, "difference"]
    notes = [panel.sizes(), _explained(f"Beside the nearest {words}. [low, high]: of the difference")[0]]
    return Grid(title=panel.title(), header=header, rows=rows, notes=notes)


def _placed(spots: Iterable[Spot], share: str) -> list[tuple[float, Spot]]:
    """The spots that have the share, each behind it."""
    return [(found.value, spot) for spot in spots if (found := share_of(spot, share))]


def _number(alpha: float | None) -> str:
    return NONE if alpha is None else f"{alpha:g}"


def _quality_cells(panel: Panel, spot: Spot, marks: tuple[str, str], bootstrap: Bootstrap) -> dict[str, str]:
    gain = comparisons.quality_gain(panel, spot, bootstrap)
    return {
        "Method": spot.label + (" (inconclusive)" if spot.inconclusive else ""),
        "α": _number(spot.alpha) if spot.axis == "α" else f"{spot.axis} {_number(spot.alpha)}",
        panel.metric: _joined(f"{spot.quality.value:.2f}", marks[0]),
        "spread": _range(spot.quality),
        f"{panel.metric} − target's": _joined(f"{gain.value:+.2f}", _brackets(gain, "+")) if gain else NONE,
    }


def _latency_cells(panel: Panel, spot: Spot, marks: tuple[str, str], bootstrap: Bootstrap) -> dict[str, str]:
    cells = dict.fromkeys(("rel. latency", "its spread", "ms per example"), NONE)
    if spot.latency:
        ratio = comparisons.latency(spot, bootstrap)
        cells["rel. latency"] = _joined(f"{spot.latency.value:.3f}", _brackets(ratio, digits=3), marks[1])
        cells["its spread"] = _range(spot.latency, 3)
    if spot.ms_per_example is not None:
        cells["ms per example"] = f"{spot.ms_per_example:.1f}"
    return cells


def _share_cells(panel: Panel, spot: Spot, marks: tuple[str, str], bootstrap: Bootstrap) -> dict[str, str]:
    rejected, drafted, efficiency = (
        spot.measures.get(name) for name in ("rejection_rate", "draft_share", "block_efficiency")
    )
    return {
        "rejected": f"{rejected.value:.1%}" if rejected else NONE,
        "draft wrote": f"{drafted.value:.1%}" if drafted else NONE,
        "block efficiency": f"{efficiency.value:.2f}" if efficiency else NONE,
        "seeds": str(spot.seeds),
    }


def table2_csv(panels: Iterable[Panel], tolerance: float = 0.0, margin: float = 0.0) -> str:
    """Table 2 as CSV, one line per panel and method, for further computation."""
    lines: list[dict[str, Any]] = []
    for panel in panels:
        rows, bootstrap = table2(panel, tolerance, margin) if panel.curves else [], Bootstrap()
        speed = comparisons.latency_marks([row.fastest for row in rows], bootstrap)
        quality = comparisons.quality_marks([row.best for row in rows], bootstrap)
        for row, *marks in zip(rows, speed, quality, strict=True):
            line = {**panel.setting, "metric": panel.metric, "tolerance": tolerance, "margin": margin}
            line |= {"target_quality": panel.target.quality.value if panel.target else None, "method": row.method}
            line |= _csv_columns(row) | _csv_comparisons(panel, row, bootstrap)
            lines.append(line | {"speed_up_mark": marks[0], "best_quality_mark": marks[1]})
    out = io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]) if lines else ["method"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _csv_columns(row: Row) -> dict[str, Any]:
    fast, best = row.fastest, row.best
    latency = fast.latency if fast else None
    return {
        "speed_up": 1 / latency.value if latency else None,
        "speed_up_low": 1 / latency.high if latency else None,
        "speed_up_high": 1 / latency.low if latency else None,
        "speed_up_alpha": fast.alpha if fast else None,
        "best_quality": best.quality.value if best else None,
        "best_quality_low": best.quality.low if best else None,
        "best_quality_high": best.quality.high if best else None,
        "best_quality_alpha": best.alpha if best else None,
        "seeds": max((spot.seeds for spot in (fast, best) if spot), default=None),
    }


def _csv_comparisons(panel: Panel, row: Row, bootstrap: Bootstrap) -> dict[str, Any]:
    """The intervals that stand in brackets in the other forms."""
    speed = _inverse(comparisons.latency(row.fastest, bootstrap)) if row.fastest else None
    gain = comparisons.quality_gain(panel, row.best, bootstrap) if row.best else None
    return {
        "speed_up_paired_low": speed.low if speed else None,
        "speed_up_paired_high": speed.high if speed else None,
        "best_quality_gain": gain.value if gain else None,
        "best_quality_gain_low": gain.low if gain else None,
        "best_quality_gain_high": gain.high if gain else None,
    }


def _inverse(ratio: Interval | None) -> Interval | None:
    return Interval(1 / ratio.value, 1 / ratio.high, 1 / ratio.low) if ratio else None


def _at(spot: Spot) -> str:
    return "" if spot.alpha is None else f" ({spot.axis} {spot.alpha:g})"


def _range(value: Value, digits: int = 2) -> str:
    return f"{value.low:.{digits}f}–{value.high:.{digits}f}"


def _brackets(interval: Interval | None, sign: str = "", digits: int = 2) -> str:
    return f"[{interval.low:{sign}.{digits}f}, {interval.high:{sign}.{digits}f}]" if interval else ""


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
