"""Block-wise beside token-wise verification: tokens per call of the target, method by method (METHODS section 10).

Brackets hold 95% bootstrap intervals over examples, both ways on the same resamples. Needs no JAX.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from speccascade_jax.results.analysis import curve_labels, panels, provenance
from speccascade_jax.results.analysis.bootstrap import Bootstrap
from speccascade_jax.results.analysis.curve_labels import label, place
from speccascade_jax.results.analysis.families import Families
from speccascade_jax.results.analysis.panels import Spot
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.result_store import Record

VERIFICATION = "verification"
"""The measure of sweeps that verify both ways."""

_TOKEN_WISE = "token"
_NO_PART = ("verify", "curve", "family", "details")
"""What of a point says no more than how it is verified."""


class _Both(NamedTuple):
    """A point verified token by token, and jointly; `at` is γ or h."""

    at: float
    token_wise: Spot
    jointly: Spot


def verification_grids(families: Families) -> list[Grid]:
    """Block efficiency both ways: a column per block size, and per stop threshold in a table of its own.

    Raises:
        ValueError: no method was verified both ways; records without counts of single examples.
    """
    rows = sorted(_rows(families.panel.spots), key=lambda row: place(row[0].token_wise.records[0], _name(row[0])))
    if not rows:
        raise ValueError("no method was verified both ways: sweep it with verify = ('token', 'block')")
    symbols = {_symbol(row[0].token_wise.records[0]): None for row in rows}
    return [
        _grid(families, symbol, [row for row in rows if _symbol(row[0].token_wise.records[0]) == symbol])
        for symbol in symbols
    ]


def _grid(families: Families, symbol: str, rows: list[list[_Both]]) -> Grid:
    """The rows that run along γ, or along one stop threshold."""
    panel, bootstrap = families.panel, Bootstrap()
    columns, lower, cells = sorted({each.at for row in rows for each in row}), 0, list[list[str]]()
    for row in rows:
        found = dict.fromkeys(columns, NONE)
        for each in row:
            found[each.at], falls = _cell(each, bootstrap)
            lower += falls
        cells.append([_name(row[0]), *found.values()])
    notes = [
        "Committed tokens per call of the target, token-wise → block-wise, and the gain [95% bootstrap over examples, "
        f"{bootstrap.samples:,} resamples, both ways on the same ones]; seeds are averaged, not resampled.",
        f"Block-wise lower, beyond the interval: {lower} of {sum(map(len, rows))}.",
        f"{panel.sizes()}.",
        *provenance.notes([panel]),
    ]
    header = ["Method", *(f"{symbol} = {at:g}" for at in columns)]
    return Grid(title=f"Verification: {panel.title()}", header=header, rows=cells, notes=notes)


def _rows(spots: list[Spot]) -> list[list[_Both]]:
    """Points that were verified both ways, those together that differ in γ or h alone."""
    alike = defaultdict[str, dict[str, Spot]](dict)
    for spot in spots:
        record = spot.records[0]
        weights = [curve_labels.setting(record, name) for name in (curve_labels.HEAD, curve_labels.POLICY)]
        alike[f"{_same(record['point'])} {weights}"][record["point"].get("verify", _TOKEN_WISE)] = spot
    rows = defaultdict[str, list[_Both]](list)
    for ways in alike.values():
        if _TOKEN_WISE in ways and len(ways) > 1:
            token_wise, jointly = ways.pop(_TOKEN_WISE), next(iter(ways.values()))
            record = token_wise.records[0]
            number = "block_size" if _symbol(record) == "γ" else "stop_threshold"
            point = {name: value for name, value in record["point"].items() if name != number}
            if record["point"][number] is not None:  # neither γ nor h: no column
                rows[_same(point)].append(_Both(record["point"][number], token_wise, jointly))
    return list(rows.values())


def _same(point: dict[str, Any]) -> str:
    return repr({name: value for name, value in sorted(point.items()) if name not in (*_NO_PART, "seed")})


def _symbol(record: Record) -> str:
    return "γ" if panels.is_swept(record) else str(record["point"]["symbol"])


def _name(both: _Both) -> str:
    record = both.token_wise.records[0]
    alpha = record["point"]["alpha"]
    return label(record, threshold=False) + ("" if alpha is None else f" α {alpha:g}")


def _cell(both: _Both, bootstrap: Bootstrap) -> tuple[str, bool]:
    """Both efficiencies and the gain, and whether it is a loss beyond its interval."""
    before, after = (_efficiency(spot, bootstrap) for spot in both[1:])
    gain = bootstrap.interval(after / before - 1)
    text = f"{before[0]:.2f} → {after[0]:.2f} {gain.value:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}]"
    return text, gain.high < 0


def _efficiency(spot: Spot, bootstrap: Bootstrap) -> np.ndarray:
    """Committed tokens per call of the target, `[1 + samples]`: all examples, then resamples."""
    counts = bootstrap.counts(spot.records)
    return counts["committed"] / counts["target_calls"]
