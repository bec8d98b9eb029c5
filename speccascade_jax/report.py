"""What the experiments print: progress with the time left, a record, Table 2 and the list of points. Needs no JAX."""

from __future__ import annotations

import csv
import io
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from speccascade_jax.results import Record
from speccascade_jax.summary import LABELS, Panel, Row, Spot, Value, short_name, table2, value_of

NONE = "–"


class Progress:
    """One line per finished point, with the time left; works in a terminal and in a log alike.

    Args:
        total: points of the sweep; present: those that the store held already; where: the store, for the first line.
        clock: seconds.
    """

    def __init__(self, total: int, present: int = 0, where: str = "", clock: Callable[[], float] = time.monotonic):
        self.total, self.done, self.present, self.where, self._clock = total, present, present, where, clock
        self._console = Console(soft_wrap=True, highlight=False)

    def __enter__(self) -> Progress:
        self._begin = self._clock()
        resumed = f", {self.present} of them already in" if self.present else ", results go to"
        self._console.print(f"{self.total} points{resumed} {self.where}")
        return self

    def advance(self, record: Record) -> None:
        """Count a finished point and print its line."""
        self.done += 1
        spent = self._clock() - self._begin
        left = spent / (self.done - self.present) * (self.total - self.done)
        self._console.print(
            f"[{self.done:>{len(str(self.total))}}/{self.total}] {one_line(record)}", markup=False, end=""
        )
        self._console.print(f"  ({clock_time(spent)} elapsed, {clock_time(left)} left)", style="dim")

    def __exit__(self, *_: object) -> None:
        measured = self.done - self.present
        if measured:
            self._console.print(f"{measured} points measured in {clock_time(self._clock() - self._begin)}")


def clock_time(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def one_line(record: Record) -> str:
    """A record's point and its main numbers."""
    point, quality = record["point"], record["quality"]
    alpha = "" if point["alpha"] is None else f" α={point['alpha']:g}"
    parts = [f"{point['method'] + alpha:<24}", f"{quality['metric']} {quality['value']:6.2f}"]
    if relative := record.get("relative_latency"):
        parts.append(f"latency {relative['value']:5.2f}×")
    rejection = record["measures"].get("rejection_rate")
    if rejection is not None:
        parts.append(f"rejected {rejection:4.0%}")
    if record.get("inconclusive") and point["block_size"] is not None:
        parts.append("inconclusive: nothing was drafted")
    return "  ".join(parts)


def print_record(record: Record, console: Console | None = None) -> None:
    """A record as a readable list: what was run, quality, latency, measures, counts, the device."""
    table = Table(title=one_line(record).strip(), show_header=False, title_justify="left")
    quality, machine = record["quality"], record["device"]
    table.add_row(quality["metric"], _spread(value_of(quality), quality["interval"]))
    table.add_row("examples", f"{quality['examples']}, {quality['tokens_per_example']:.1f} tokens each")
    for name, text in _latency_rows(record) if "latency" in record else ():
        table.add_row(name, text)
    for name, value in {**record["measures"], **record["counts"]}.items():
        table.add_row(name.replace("_", " "), NONE if value is None else f"{value:.6g}")
    table.add_row("device", f"{machine['kind']} × {machine['count']} ({machine['platform']}, {machine['cpus']} CPUs)")
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in record["versions"].items()))
    table.add_row("key", record["key"])
    (console or Console()).print(table)


def _latency_rows(record: Record) -> list[tuple[str, str]]:
    timed = record["latency"]
    shown = {
        "ms per example": timed["ms_per_example"],
        "ms per token": timed["ms_per_token"],
        "target's ms per example": record["target_latency"]["ms_per_example"],
        "latency / target's": record["relative_latency"],
    }
    rows = [(name, _spread(value_of(entry), "over trials")) for name, entry in shown.items()]
    return [*rows, ("timed", f"{timed['examples']} examples × {timed['trials']} trials, batch 1")]


def print_points(labels: Sequence[str]) -> None:
    """The points of a sweep, numbered."""
    for number, label in enumerate(labels, start=1):
        print(f"{number:4d}  {label}")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table before it has a form: strings, the winners of each column, and what must be said below it."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str]
    bold: set[tuple[int, int]] = field(default_factory=set)

    def rich(self) -> Table:
        """For a terminal."""
        table = Table(title=self.title, caption="\n".join(self.notes), title_justify="left", caption_justify="left")
        for n, name in enumerate(self.header):
            table.add_column(name, justify="left" if n == 0 else "right", overflow="fold")
        for r, row in enumerate(self.rows):
            table.add_row(
                *(f"[bold]{_plain(x)}[/bold]" if (r, c) in self.bold else _plain(x) for c, x in enumerate(row))
            )
        return table

    def markdown(self) -> str:
        """For a page; the notes follow as a list."""
        lines = [f"**{self.title}**", "", _pipes(self.header), _pipes(["---"] + ["---:"] * (len(self.header) - 1))]
        for r, row in enumerate(self.rows):
            lines.append(_pipes([f"**{x}**" if (r, c) in self.bold else x for c, x in enumerate(row)]))
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]) + "\n"


def table2_grids(panels: Iterable[Panel], tolerance: float = 0.0, margin: float = 0.0) -> list[Grid]:
    """Paper 1's Table 2, one grid per sampling, block size and bonus, two columns per task and pair.

    Arguments and errors as `summary.table2`; panels without any method beside the two ends are left out.
    """
    tables: dict[tuple, list[Panel]] = defaultdict(list)
    for panel in panels:
        s = panel.setting
        if panel.curves:
            same = ("temperature", "draft_temperature", "top_p", "top_k", "block_size", "bonus", "device")
            tables[tuple(s[name] for name in same)].append(panel)
    return [_table2_grid(members, tolerance, margin) for members in tables.values()]


def _table2_grid(panels: Sequence[Panel], tolerance: float, margin: float) -> Grid:
    results = [{row.method: row for row in table2(panel, tolerance, margin)} for panel in panels]
    known = [name for name in LABELS if any(name in each for each in results)]
    methods = known + sorted({name for each in results for name in each} - set(known))
    names = [f"{panel.setting['task']}, {short_name(panel.setting['pair'])}" for panel in panels]
    header = ["Method"] + [f"Speed-up at target's quality: {n}" for n in names]
    header += [f"Best {p.metric} no slower than target: {n}" for p, n in zip(panels, names, strict=True)]
    rows = [[label(method), *_cells([each.get(method) for each in results])] for method in methods]
    bold = _winners(methods, results)
    ends = [("Target alone", [p.target for p in panels], "1.00×"), ("Draft alone", [p.draft for p in panels], NONE)]
    for name, spots, speed in ends:
        rows.append([name, *[speed] * len(panels), *(f"{s.quality.value:.2f}" if s else NONE for s in spots)])
    return Grid(title=_title(panels), header=header, rows=rows, notes=_notes(panels, tolerance, margin), bold=bold)


def _cells(rows: Sequence[Row | None]) -> list[str]:
    fastest = [row.fastest if row else None for row in rows]
    best = [row.best if row else None for row in rows]
    speeds = [f"{1 / s.latency.value:.2f}×{_at(s)}" if s and s.latency else NONE for s in fastest]
    return speeds + [f"{s.quality.value:.2f}{_at(s)}" if s else NONE for s in best]


def _winners(methods: Sequence[str], results: Sequence[dict[str, Row]]) -> set[tuple[int, int]]:
    """(row, column) of the best entry of every column."""
    bold = set()
    for n, each in enumerate(results):
        speeds = {m: 1 / r.fastest.latency.value for m, r in each.items() if r.fastest and r.fastest.latency}
        best = {m: r.best.quality.value for m, r in each.items() if r.best}
        for column, values in ((1 + n, speeds), (1 + len(results) + n, best)):
            bold |= {(methods.index(m), column) for m in values if values[m] == max(values.values())}
    return bold


def _title(panels: Sequence[Panel]) -> str:
    first = panels[0].title().split(", ")
    return ", ".join(["Table 2", *first[2:]])


def _notes(panels: Sequence[Panel], tolerance: float, margin: float) -> list[str]:
    exact = "exactly compared" if tolerance == 0 else f"within {tolerance:g} below it"
    slower = "relative latency ≤ 1" if margin == 0 else f"relative latency ≤ {1 + margin:g}"
    notes = [
        f"Speed-up: 1 / relative latency of the fastest α at the target's quality or above ({exact}); {NONE}: none.",
        f"Best quality: over the α's with {slower}.",
    ]
    for panel in panels:
        name = f"{panel.setting['task']}, {short_name(panel.setting['pair'])}: {panel.sizes()}"
        if panel.target:
            noise = _spread(panel.target.quality, "differences inside this range may be noise")
            name += f"; target's {panel.metric} {noise}"
        notes.append(f"{name}. Device: {panel.setting['device']}.")
        lost = [f"{spot.method}{_at(spot)}" for curve in panel.curves.values() for spot in curve if spot.inconclusive]
        if lost:
            notes.append(f"Inconclusive (nothing was drafted), left out: {', '.join(lost)}.")
    return notes


def points_grid(panel: Panel) -> Grid:
    """Every point of a panel: quality, relative latency, rejection and acceptance, and how many seeds."""
    header = [
        "Method",
        "α",
        panel.metric,
        "spread",
        "rel. latency",
        "spread",
        "ms/example",
        "rejected",
        "block efficiency",
        "seeds",
    ]
    ends = [end for end in (panel.target, panel.draft) if end]
    rows = []
    for spot in [*ends, *(spot for curve in panel.curves.values() for spot in curve)]:
        rejected, efficiency = (spot.measures.get(name) for name in ("rejection_rate", "block_efficiency"))
        name = label(spot.method) + (" (inconclusive)" if spot.inconclusive else "")
        alpha = NONE if spot.alpha is None else f"{spot.alpha:g}"
        row = [name, alpha, f"{spot.quality.value:.2f}", _range(spot.quality)]
        row += [f"{spot.latency.value:.3f}", _range(spot.latency, 3)] if spot.latency else [NONE, NONE]
        row += [NONE if spot.ms_per_example is None else f"{spot.ms_per_example:.1f}"]
        row += [f"{rejected.value:.1%}" if rejected else NONE, f"{efficiency.value:.2f}" if efficiency else NONE]
        rows.append([*row, str(spot.seeds)])
    return Grid(title=panel.title(), header=header, rows=rows, notes=[panel.sizes()])


def grids(panels: Sequence[Panel], points: bool = False, tolerance: float = 0.0, margin: float = 0.0) -> list[Grid]:
    """Table 2, or with `points` the list of all points, for every setting; arguments as `summary.table2`."""
    return [points_grid(panel) for panel in panels] if points else table2_grids(panels, tolerance, margin)


def show(panels: Sequence[Panel], points: bool = False, tolerance: float = 0.0, margin: float = 0.0) -> None:
    """Print `grids` to the terminal; 160 columns wide where there is none."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    for grid in grids(panels, points, tolerance, margin):
        console.print(grid.rich())


def table2_csv(panels: Iterable[Panel], tolerance: float = 0.0, margin: float = 0.0) -> str:
    """Table 2 as CSV, one line per panel and method, for further computation."""
    lines: list[dict[str, Any]] = []
    for panel in panels:
        assert panel.curves is not None
        for row in table2(panel, tolerance, margin) if panel.curves else ():
            line = {**panel.setting, "metric": panel.metric, "tolerance": tolerance, "margin": margin}
            line |= {"target_quality": panel.target.quality.value if panel.target else None, "method": row.method}
            lines.append(line | _csv_columns(row))
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


def label(method: str) -> str:
    """A method's name in tables and legends: paper 1's, else its own."""
    return LABELS.get(method, method)


def _at(spot: Spot) -> str:
    return "" if spot.alpha is None else f" (α {spot.alpha:g})"


def _range(value: Value, digits: int = 2) -> str:
    return f"{value.low:.{digits}f} to {value.high:.{digits}f}"


def _spread(value: Value, what: str) -> str:
    return f"{value.value:.2f} ({_range(value)}: {what})"


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
