"""Tables of a benchmark run for a terminal and as Markdown, in the layouts of `benchmarks.layouts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.columns import Column, Layout
from benchmarks.layouts import LAYOUTS
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.record import Row


def grid(name: str, rows: Sequence[Row]) -> Grid:
    """Returns the table `name` of a section's rows."""
    layout = LAYOUTS[name]
    if layout.across is not None:
        return _across(layout, rows, layout.across)
    return Grid(
        title=layout.title,
        header=[column.header for column in layout.columns],
        rows=[[_cell(column, row) for column in layout.columns] for row in rows],
        notes=list(layout.notes),
    )


def _cell(column: Column, row: Row) -> str:
    return column.form(row[column.key]) if column.key in row else NONE


def _across(layout: Layout, rows: Sequence[Row], key: str) -> Grid:
    names, values = layout.columns[: layout.fixed], layout.columns[layout.fixed :]
    groups = list(dict.fromkeys(row[key] for row in rows))
    lines: dict[tuple[str, ...], dict[Any, Row]] = {}
    for row in rows:
        lines.setdefault(tuple(_cell(column, row) for column in names), {})[row[key]] = row
    return Grid(
        title=layout.title,
        header=[column.header for column in names] + [f"{c.header}, {_short(g)}" for g in groups for c in values],
        rows=[[*line, *(_cell(c, cells.get(g, {})) for g in groups for c in values)] for line, cells in lines.items()],
        notes=list(layout.notes),
    )


def _short(size: int) -> str:
    return f"{size // 1024}k" if size >= 1024 and size % 1024 == 0 else str(size)


def grids(record: Row) -> list[Grid]:
    """Returns all tables of a run, in the order of their measurement."""
    return [grid(name, rows) for section in record["sections"].values() for name, rows in section["tables"].items()]


def header(record: Row) -> str:
    """Returns one paragraph: the pair, the task, the date and the machine."""
    machine, settings = record["device"], record["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"Pair {record['pair']}, task {settings['task']}, {record['date']}; {machine['processor']}, {machine['cpus']} "
        f"CPUs, {machine['kind']} × {machine['count']}, {machine['system']}; {versions}. Every number is the median of "
        f"{settings['repeats']} or more turns, in brackets the lowest and the highest."
    )


def markdown(record: Row) -> str:
    """Returns the tables of a run as Markdown."""
    return "\n".join([header(record) + "\n", *(table.markdown() for table in grids(record))])
