"""Columns, layouts and number formats of the benchmarks' tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from speccascade_jax.results.report.tables.grid import NONE


@dataclass(frozen=True)
class Column:
    """A column of a table: its header, the key of its value in a row, and the function that formats the value."""

    header: str
    key: str
    form: Callable[[Any], str] = str


@dataclass(frozen=True)
class Layout:
    """The layout of one table.

    Attributes:
        title: text above the table; notes: texts below the table.
        columns: from left to right.
        across: a key of the rows; the table then has a group of columns for every value of this key. `None`: one line
            per row.
        fixed: with `across`, the number of columns at the left that identify a line and are not repeated.
    """

    title: str
    columns: tuple[Column, ...]
    notes: tuple[str, ...] = ()
    across: str | None = None
    fixed: int = 1


def number(digits: int) -> Callable[[Any], str]:
    """Returns a function that formats a number, or the median of a spread, with `digits` decimals."""
    return lambda x: NONE if x is None else f"{x['value'] if isinstance(x, dict) else x:,.{digits}f}"


def spread(digits: int) -> Callable[[Any], str]:
    """Returns a function that formats a spread as its median, and its lowest and highest value in brackets."""
    return lambda x: f"{x['value']:,.{digits}f} ({x['low']:,.{digits}f} to {x['high']:,.{digits}f})"


def percent(x: float | None) -> str:
    """Formats a share in percent, or `None` as a dash."""
    return NONE if x is None else f"{x:.1%}"


def optional(x: Any) -> str:
    """Formats a number as briefly as possible, or `None` as a dash."""
    return NONE if x is None else f"{x:g}" if isinstance(x, float) else str(x)
