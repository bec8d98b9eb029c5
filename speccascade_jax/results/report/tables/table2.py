"""Paper 1's Table 2 and the list of all points, from panels: what stands in the cells, and what must be said below.

Numbers in brackets are paired bootstrap intervals against the target alone; the marks compare within a column
(`comparisons`). Needs no JAX.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from speccascade_jax.results.analysis import baselines, provenance, significance
from speccascade_jax.results.analysis.bootstrap import Bootstrap, Interval
from speccascade_jax.results.analysis.panels import (
    LOSS,
    Panel,
    Row,
    Spot,
    Value,
    latency_of,
    order,
    share_of,
    short_name,
    table2,
)
from speccascade_jax.results.analysis.significance import BEST, TIE
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.result_store import to_csv


def grids(
    panels: Sequence[Panel], points: bool = False, tolerance: float = 0.0, margin: float = 0.0, loss: float = LOSS
) -> list[Grid]:
    """Table 2, or with `points` the list of all points, for every setting; arguments as `panels.table2`."""
    if points:  # ends without a method stand beside another panel, or are all there is
        return [points_grid(panel) for panel in panels if panel.curves] or [points_grid(panel) for panel in panels]
    return table2_grids(panels, tolerance, margin, loss)


def table2_grids(
    panels: Iterable[Panel], tolerance: float = 0.0, margin: float = 0.0, loss: float = LOSS
) -> list[Grid]:
    """Paper 1's Table 2, one grid per sampling, block size and bonus, three columns per task and pair.

    Arguments and errors as `panels.table2`; panels without any method beside the two ends are left out.
    """
    tables: dict[tuple, list[Panel]] = defaultdict(list)
    same = ("temperature", "draft_temperature", "top_p", "top_k", "block_size", "bonus", "device")
    for panel in panels:
        if panel.curves:
            tables[tuple(panel.setting[name] for name in same)].append(panel)
    return [_table2_grid(members, tolerance, margin, loss) for members in tables.values()]


def _table2_grid(panels: Sequence[Panel], tolerance: float, margin: float, loss: float) -> Grid:
    results = [{row.method: row for row in table2(panel, tolerance, margin, loss)} for panel in panels]
    found = {name: curve[0] for panel in panels for name, curve in panel.curves.items()}
    methods = sorted(found, key=lambda name: order(found[name]))
    names = [f"{panel.setting['task']}, {short_name(panel.setting['pair'])}" for panel in panels]
    header = ["Method"] + [f"Speed-up at target's quality: {n}" for n in names]
    header += [f"Speed-up at {loss:g} {p.metric} less at most: {n}" for p, n in zip(panels, names, strict=True)]
    header += [f"Best {p.metric} no slower than target: {n}" for p, n in zip(panels, names, strict=True)]
    both, bootstrap = [[each.get(method) for method in methods] for each in results], Bootstrap()
    columns = [_speed_column(panel, rows, bootstrap) for panel, rows in zip(panels, both, strict=True)]
    columns += [_near_column(panel, rows, bootstrap) for panel, rows in zip(panels, both, strict=True)]
    columns += [_quality_column(panel, rows, bootstrap) for panel, rows in zip(panels, both, strict=True)]
    rows = [[found[method].label, *cells] for method, *cells in zip(methods, *columns, strict=True)]
    bold = {(r, c) for r, row in enumerate(rows) for c, x in enumerate(row) if c and x.endswith(BEST)}
    for end, speeds in (("target", [_alone(p, bootstrap) for p in panels]), ("draft", [NONE] * len(panels))):
        spots = [getattr(panel, end) for panel in panels]
        if name := next((spot.label for spot in spots if spot), None):
            qualities = [f"{spot.quality.value:.2f}" if spot else NONE for spot in spots]
            rows.append([name, *speeds, *[NONE] * len(panels), *qualities])
    title = ", ".join(["Speed-up and quality", *panels[0].title().split(", ")[2:]])
    notes = _notes(panels, tolerance, margin, loss, bootstrap)
    return Grid(title=title, header=header, rows=rows, notes=notes, bold=bold)


def _alone(panel: Panel, bootstrap: Bootstrap) -> str:
    """The target timed against itself: what else than 1 comes out is noise."""
    if panel.target is None or panel.target.latency is None:
        return NONE
    return _joined(_times(panel.target), _brackets(_inverse(significance.latency(panel.target, bootstrap))))


def _times(spot: Spot) -> str:
    return f"{1 / latency_of(spot):.2f}×"


def _speed_column(panel: Panel, rows: Sequence[Row | None], bootstrap: Bootstrap) -> list[str]:
    spots, floor = [row.fastest if row else None for row in rows], significance.noise(panel)
    cells = [NONE] * len(rows)
    for n, (spot, mark) in enumerate(zip(spots, significance.latency_marks(spots, bootstrap, floor), strict=True)):
        if spot:
            speed = _inverse(significance.latency(spot, bootstrap, floor))
            cells[n] = _joined(f"{_times(spot)}{_at(spot)}", _brackets(speed), mark)
    return cells


def _near_column(panel: Panel, rows: Sequence[Row | None], bootstrap: Bootstrap) -> list[str]:
    """Speed-ups with their intervals, and what they cost in quality with its own; nothing here is marked."""
    cells, floor = [NONE] * len(rows), significance.noise(panel)
    for n, row in enumerate(rows):
        if row and row.near:
            speed = _inverse(significance.latency(row.near, bootstrap, floor))
            gain = significance.quality_gain(panel, row.near, bootstrap)
            cost = _joined(f"{gain.value:+.2f}", _brackets(gain, "+")) if gain else f"{row.near.quality.value:.2f}"
            cells[n] = f"{_joined(f'{_times(row.near)}{_at(row.near)}', _brackets(speed))}; {cost}"
    return cells


def _quality_column(panel: Panel, rows: Sequence[Row | None], bootstrap: Bootstrap) -> list[str]:
    spots = [row.best if row else None for row in rows]
    cells = [NONE] * len(rows)
    for n, (spot, mark) in enumerate(zip(spots, significance.quality_marks(spots, bootstrap), strict=True)):
        if spot:
            gain = significance.quality_gain(panel, spot, bootstrap)
            cells[n] = _joined(f"{spot.quality.value:.2f}{_at(spot)}", _brackets(gain, "+"), mark)
    return cells


def _notes(panels: Sequence[Panel], tolerance: float, margin: float, loss: float, bootstrap: Bootstrap) -> list[str]:
    exact = "exactly compared" if tolerance == 0 else f"within {tolerance:g} below it"
    slower = "relative latency ≤ 1" if margin == 0 else f"relative latency ≤ {1 + margin:g}"
    notes = [
        f"Speed-up: 1 / relative latency of the fastest α at the target's quality or above ({exact}); {NONE}: none.",
        f"{loss:g} less at most: the fastest α whose quality lies no further below; behind it the difference and its "
        "interval, all of which lies within that loss where it is certain.",
        f"Best quality: over the α's with {slower}. Target alone: its speed-up over itself, which noise alone causes.",
        *_explained("[low, high]: of the speed-up; of the best quality's difference to the target's"),
        "No interval allows for α having been chosen on the same examples, nor those of qualities for how many entries "
        "are compared.",
    ]
    for panel in panels:
        name = f"{panel.setting['task']}, {short_name(panel.setting['pair'])}: {panel.sizes()}"
        if panel.target:
            name += f"; target's {panel.metric} {panel.target.quality.value:.2f} ({_range(panel.target.quality)})"
        notes.append(f"{name}. Device: {panel.setting['device']}.")
        lost = [spot.name() for spot in panel.spots if spot.inconclusive]
        if lost:
            notes.append(f"Inconclusive (nothing was drafted), left out: {', '.join(lost)}.")
        notes += [*panel.asides(), *_warnings(panel, bootstrap)]
    return notes + provenance.notes(panels)


def _warnings(panel: Panel, bootstrap: Bootstrap) -> list[str]:
    """What a panel's numbers do not show by themselves."""
    notes = [*significance.uncompared(panel), *significance.noise_notes(panel), *baselines.notes(panel, bootstrap)]
    if panel.setting["temperature"] and panel.cooler:
        listed = ", ".join(f"{spot.quality.value:.2f} at T = {at:g}" for at, spot in panel.cooler.items())
        notes.append(f"The target alone at lower temperatures, which sharpen as some rules do: {listed}.")
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


def points_grid(panel: Panel) -> Grid:
    """Every point of a panel: quality, relative latency where it was measured, what was rejected and who wrote."""
    ends, spots, bootstrap = panel.ends, panel.spots, Bootstrap()
    # The ends are what the points are compared with; an inconclusive point is no result.
    ranked = [None if spot.inconclusive else spot for spot in spots]
    floor = significance.noise(panel)
    quality, speed = significance.quality_marks(ranked, bootstrap), significance.latency_marks(ranked, bootstrap, floor)
    marks = [("", "")] * len(ends) + list(zip(quality, speed, strict=True))
    timed = any(spot.latency for spot in (*ends, *spots))
    rows = [_cells(panel, spot, both, bootstrap, timed) for spot, both in zip([*ends, *spots], marks, strict=True)]
    brackets = "[low, high]: of the difference to the target's" + ("; of the relative latency" if timed else "")
    notes = [
        panel.sizes(),
        *panel.asides(),
        *_explained(brackets),
        *_warnings(panel, bootstrap),
        *provenance.notes([panel]),
    ]
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
    for own, spot in _placed([spot for spot in panel.spots if spot.method != method], share):
        at, other = others[int(np.argmin([abs(each - own) for each, _ in others]))]
        gain = significance.quality_gain(panel, spot, bootstrap, other)
        row = [spot.label, _number(spot.alpha), f"{own:.1%}", f"{spot.quality.value:.2f}"]
        row += [_number(other.alpha), f"{at:.1%}", f"{other.quality.value:.2f}"]
        rows.append([*row, _joined(f"{gain.value:+.2f}", _brackets(gain, "+")) if gain else NONE])
    words = share.replace("_", " ")
    header = ["Method", "α", words, panel.metric, f"{others[0][1].label}: α", "its share", panel.metric, "difference"]
    notes = [panel.sizes(), _explained(f"Beside the nearest {words}. [low, high]: of the difference")[0]]
    notes += provenance.notes([panel])
    return Grid(title=panel.title(), header=header, rows=rows, notes=notes)


def _placed(spots: Iterable[Spot], share: str) -> list[tuple[float, Spot]]:
    """The spots that have the share, each behind it."""
    return [(found.value, spot) for spot in spots if (found := share_of(spot, share))]


def _number(alpha: float | None) -> str:
    return NONE if alpha is None else f"{alpha:g}"


def _cells(panel: Panel, spot: Spot, marks: tuple[str, str], bootstrap: Bootstrap, timed: bool) -> dict[str, str]:
    """A row of the list of points: column -> cell; those of latency only where `timed`."""
    gain = significance.quality_gain(panel, spot, bootstrap)
    cells = {
        "Method": spot.label + (" (inconclusive)" if spot.inconclusive else ""),
        "α": _number(spot.alpha) if spot.axis == "α" else f"{spot.axis} {_number(spot.alpha)}",
        panel.metric: _joined(f"{spot.quality.value:.2f}", marks[0]),
        "spread": _range(spot.quality),
        f"{panel.metric} − target's": _joined(f"{gain.value:+.2f}", _brackets(gain, "+")) if gain else NONE,
    }
    if timed:
        cells |= dict.fromkeys(("rel. latency", "its spread", "ms per example"), NONE)
    if spot.latency:
        ratio = significance.latency(spot, bootstrap, 0.0 if spot is panel.target else significance.noise(panel))
        cells["rel. latency"] = _joined(f"{spot.latency.value:.3f}", _brackets(ratio, digits=3), marks[1])
        cells["its spread"] = _range(spot.latency, 3)
    if timed and spot.ms_per_example is not None:
        cells["ms per example"] = f"{spot.ms_per_example:.1f}"
    for column, name, form in (
        ("rejected", "rejection_rate", ".1%"),
        ("draft wrote", "draft_share", ".1%"),
        ("block efficiency", "block_efficiency", ".2f"),
    ):
        cells[column] = f"{spot.measures[name].value:{form}}" if name in spot.measures else NONE
    return cells | {"seeds": str(spot.seeds)}


def table2_csv(panels: Iterable[Panel], tolerance: float = 0.0, margin: float = 0.0, loss: float = LOSS) -> str:
    """Table 2 as CSV, one line per panel and method, for further computation."""
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
    """Both summaries with their spreads, and with the intervals that stand in brackets in the other forms."""
    fast, near, best = row.fastest, row.near, row.best
    floor = significance.noise(panel)
    paired = _inverse(significance.latency(fast, bootstrap, floor)) if fast else None
    return {
        **_spread("speed_up", _inverse(fast.latency) if fast else None),
        "speed_up_alpha": fast.alpha if fast else None,
        **_spread("near_speed_up", _inverse(significance.latency(near, bootstrap, floor)) if near else None),
        "near_alpha": near.alpha if near else None,
        **_spread("near_quality_gain", significance.quality_gain(panel, near, bootstrap) if near else None),
        **_spread("best_quality", best.quality if best else None),
        "best_quality_alpha": best.alpha if best else None,
        "seeds": max((spot.seeds for spot in (fast, best) if spot), default=None),
        "speed_up_paired_low": paired.low if paired else None,
        "speed_up_paired_high": paired.high if paired else None,
        **_spread("best_quality_gain", significance.quality_gain(panel, best, bootstrap) if best else None),
    }


def _spread(name: str, entry: Value | Interval | None) -> dict[str, float | None]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), entry or (None,) * 3, strict=True))


def _inverse(ratio: Value | Interval | None) -> Interval | None:
    return Interval(1 / ratio.value, 1 / ratio.high, 1 / ratio.low) if ratio else None


def _at(spot: Spot) -> str:
    return spot.name().removeprefix(spot.label)


def _range(value: Value, digits: int = 2) -> str:
    return f"{value.low:.{digits}f}–{value.high:.{digits}f}"


def _brackets(interval: Interval | None, sign: str = "", digits: int = 2) -> str:
    return f"[{interval.low:{sign}.{digits}f}, {interval.high:{sign}.{digits}f}]" if interval else ""


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
