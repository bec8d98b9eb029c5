"""Terminal output of the commands: progress with the remaining time, records and tables. Needs no JAX."""

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from speccascade_jax.results.analysis import provenance
from speccascade_jax.results.analysis.bootstrap import Interval
from speccascade_jax.results.analysis.panels import Panel, value_of
from speccascade_jax.results.report.tables import table2
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.record import hardware_text, one_line, speed_text
from speccascade_jax.results.store.result_store import Record
from speccascade_jax.runtime.paths import command, interpreter
from speccascade_jax.runtime.progress import clock_time, working_time
from speccascade_jax.storage.buckets import BucketPath


class Progress:
    """Progress of a sweep: one line per finished point, with an estimate of the remaining time.

    The estimate does not count time for tracing and compiling, because later points reuse the programs of earlier ones.
    It appears from the second finished point on.

    Args:
        total: number of points in the sweep; present: number of points that the store already holds.
        store: path of the store, which the first line shows.
        clock: returns seconds.
    """

    def __init__(self, total: int, present: int = 0, store: str = "", clock: Callable[[], float] = time.monotonic):
        self.total, self.done, self.present, self.store, self._clock = total, present, present, store, clock
        self._console = Console(soft_wrap=True, highlight=False)

    def __enter__(self) -> "Progress":
        self._begin = self._clock()
        self._begin_work = working_time(self._begin)
        resumed = f", {self.present} of them already in" if self.present else ", results go to"
        self._console.print(f"{self.total} points{resumed} {self.store}")
        return self

    def advance(self, record: Record) -> None:
        """Counts a finished point and prints a line about its record."""
        self.done += 1
        now = self._clock()
        times = f"{clock_time(now - self._begin)} elapsed{self._left(now)}"
        count = f"[{self.done:>{len(str(self.total))}}/{self.total}]"
        self._console.print(f"{count} {one_line(record)}", markup=False, end="")
        self._console.print(f"  ({times})", style="dim")

    def _left(self, now: float) -> str:
        """Returns the remaining time as a clause; empty after the first point."""
        measured, worked = self.done - self.present, working_time(now) - self._begin_work
        if measured < 2 <= self.total - self.present:
            return ""
        remaining = clock_time(worked / measured * (self.total - self.done))
        compiled = now - self._begin - worked > worked / 10 and self.done < self.total
        return f", about {remaining} left{' without compiling' if compiled else ''}"

    def __exit__(self, *_: object) -> None:
        if measured := self.done - self.present:
            self._console.print(f"{measured} points measured in {clock_time(self._clock() - self._begin)}")


def print_record(record: Record) -> None:
    """Prints a record as a list: the point, quality, latency, measures, counts, the device."""
    table = Table(title=one_line(record).strip(), show_header=False, title_justify="left")
    quality = record["quality"]
    table.add_row(quality["metric"], _spread(value_of(quality), quality["interval"]))
    table.add_row("examples", f"{quality['examples']}, {quality['tokens_per_example']:.1f} tokens each")
    if timed := record.get("latency"):
        shown = {"ms per example": timed["ms_per_example"], "ms per token": timed["ms_per_token"]}
        shown["target's ms per example"] = record["target_latency"]["ms_per_example"]
        shown["latency / target's"] = record["relative_latency"]
        for name, entry in shown.items():
            table.add_row(name, _spread(value_of(entry), "over trials"))
        for prefix, speed in (("", timed), ("target's ", record["target_latency"])):
            if "tokens_per_second" in speed:  # records of older versions lack it
                table.add_row(f"{prefix}tokens per second", speed_text(speed))
        table.add_row("timed", f"{timed['examples']} examples × {timed['trials']} trials, batch 1")
    for name, value in {**record["measures"], **record["counts"]}.items():
        table.add_row(name.replace("_", " "), NONE if value is None else f"{value:.6g}")
    if peak := record.get("peak_memory"):
        room = f" of {peak['limit'] / 1e9:.1f}" if peak["limit"] else ""
        table.add_row("peak memory of a device", f"{(peak['bytes'] or 0) / 1e9:.1f}{room} GB")
    table.add_row("device", hardware_text(record["device"]))
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in record["versions"].items()))
    table.add_row("package", provenance.package(record) or NONE)
    for name, commit in record.get("revisions", {}).items():
        table.add_row(name, f"commit {commit} on the hub")
    table.add_row("key", record["key"])
    console().print(table)


def print_points(labels: Sequence[str]) -> None:
    """Prints the points of a sweep, numbered."""
    for number, label in enumerate(labels, start=1):
        print(f"{number:4d}  {label}")


def print_next(panels: Sequence[Panel], store: Path, report: Path) -> None:
    """Prints commands for the next steps after a sweep."""
    spots = [spot for panel in panels for spot in (*panel.spots, *panel.ends)]
    keys = [spot.records[0]["key"][:8] for spot in spots]
    ends = [panel.target.records[0]["key"][:8] for panel in panels if panel.target]
    print("\nnext:")
    store_words, python = shlex.quote(str(store)), interpreter()
    if isinstance(report, BucketPath):
        print(f"  gcloud storage cp {shlex.quote(str(report))} .     copies the report")
        report = Path(report.name)
    print(f"  open {report} in a browser to see every point's outputs, and where draft tokens were rejected")
    if len(keys) > 1:
        print(f"  {command('compare', python)} {store_words} {ends[0]} {keys[0]}     compare two points")
    print(f"  {command('run', python)} --from_record={keys[0]} --store={store_words}     run one point again")
    if not any(_uses_own(spot.records[0]) for spot in spots):
        flags = "--task=mine.csv --methods=spec_decode,my_rules.FAVOURITE"
        print(f"  use your own data and rule (docs/extending.md): {flags}")


def _uses_own(record: Record) -> bool:
    """Returns whether a record uses the user's own data, rule or method."""
    named = re.compile(r"^  (task = (@|'[^']*\.)|(method|rule|stop) = '[^']*\.)", re.MULTILINE)
    return bool(record.get("imports") or named.search(record.get("configuration", "")))


WIDTH, FILE_WIDTH = 120, 160
"""Widths of tables that are printed without a terminal, for instance into a pipe, and of tables in files."""
NOTES = {"notes": "print all notes below the tables, instead of at most four lines"}
"""Flag of the commands that print results, with its help text."""


def console() -> Console:
    """Returns a console as wide as the terminal or the variable COLUMNS, or `WIDTH` wide if there is neither."""
    return Console(width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else WIDTH)


def show(panels: Sequence[Panel], points: bool = False, *limits: float, more: str | None = None) -> None:
    """Prints the tables of `table2.grids`; `more` as in `Grid.rich`."""
    apart = partial(table2.grids, panels, points, *limits, apart=True)
    print_grids(table2.grids(panels, points, *limits), more, apart=apart)


def notes_command(store: str | Path | BucketPath, *words: str) -> str:
    """Returns the command that prints the tables of a store with all notes."""
    return " ".join([command("tables", interpreter()), shlex.quote(str(store)), *words, "--notes"])


def print_grids(
    grids: Sequence[Grid],
    more: str | None = None,
    file: TextIO | None = None,
    apart: Callable[[], Sequence[Grid]] | None = None,
) -> None:
    """Prints tables as wide as `console` says.

    Args:
        grids: the tables.
        more: as in `Grid.rich`.
        file: the file to write, `FILE_WIDTH` characters wide; `None`: the standard output.
        apart: returns more tables of fewer columns, which are printed if one of `grids` is too wide.
    """
    page = Console(width=FILE_WIDTH, file=file) if file else console()
    if apart and not all(grid.fits(page.width) for grid in grids):
        grids = apart()
    for number, grid in enumerate(grids):
        page.print(*[""] * bool(number), grid.rich(more), sep="\n")


def _spread(value: Interval, basis: str) -> str:
    return f"{value.value:.2f} ({value.low:.2f} to {value.high:.2f}: {basis})"
