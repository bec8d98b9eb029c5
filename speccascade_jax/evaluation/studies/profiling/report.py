"""A profile as tables: the parts of a round, the parts of the models, the dearest instructions."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rich.console import Console

from speccascade_jax.evaluation.studies.profiling.scopes import OTHER, PREFILL
from speccascade_jax.results.report.tables.grid import NONE, Grid
from speccascade_jax.results.store.result_store import Record

_ORDER = ("draft", "score", "sampling", "verify", "commit", OTHER)


def show(measured: Record, top: int) -> None:
    """Print the tables; the `top` dearest instructions, none for 0."""
    console = Console()
    for grid in (phases(measured), modules(measured), *([instructions(measured, top)] if top else [])):
        console.print(grid.rich())


def phases(measured: Record) -> Grid:
    """The parts of a round: µs, share, µs traced and waited, executions; below, the prefill per generation."""
    sums = _sums(measured, lambda one: tuple(one["phase"]))
    once = sum((each for phase, each in sums.items() if phase[0] == PREFILL), np.zeros(4)) / measured["generations"]
    inside = {phase: each / measured["rounds"] for phase, each in sums.items() if phase[0] != PREFILL}
    total = sum(inside.values(), np.zeros(4))
    rows: list[list[str]] = []
    bold: set[tuple[int, int]] = set()
    for first in sorted({phase[0] for phase in inside}, key=_ORDER.index):
        parts = {phase: each for phase, each in inside.items() if phase[0] == first}
        bold |= {(len(rows), column) for column in range(6)}
        rows.append(_row(first, sum(parts.values(), np.zeros(4)), total))
        for phase in sorted(parts, key=lambda phase: -parts[phase][0]) if len(parts) > 1 else ():
            rows.append(_row(f"{first} / " + " / ".join(phase[1:] or ("rest",)), parts[phase], total))
    rows += [_row("a round", total, total), _row(f"{PREFILL}, per generation", once, None)]
    header = ["part", "µs / round", "share", "µs traced", "of it waiting", "executions"]
    title = f"Where a round's time goes: {measured['label']}, batch {measured['batch']}"
    return Grid(title=title, header=header, rows=rows, bold=bold, notes=_notes(measured))


def _row(name: str, each: np.ndarray, total: np.ndarray | None) -> list[str]:
    share = NONE if total is None else f"{each[0] / total[0]:.1%}"
    return [name, f"{each[0]:.1f}", share, *(f"{value:.1f}" for value in each[1:])]


def _sums(measured: Record, key: Callable[[Mapping[str, Any]], Any]) -> dict[Any, np.ndarray]:
    """µs, µs traced, µs of that waiting, executions: of all instructions with the same `key`."""
    sums: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(4))
    for one in measured["instructions"]:
        sums[key(one)] += [one["us"], one["traced_us"], one["waiting_us"], one["count"]]
    return sums


def _notes(measured: Record) -> list[str]:
    each, rounds = measured["generations"], measured["rounds"]
    traced, untraced = measured["traced_ms"] / each, measured["untraced_ms"] / each
    shown, placed = (sum(one[name] for one in measured["instructions"]) / 1e3 / each for name in ("us", "traced_us"))
    per_round = untraced * 1e3 * each / rounds
    notes = [
        f"{each} generations, {rounds / each:.1f} rounds each, "
        f"{measured['tokens_per_round']:.2f} tokens per round and row.",
        f"µs: traced, less {measured['tracing_us']:.2f} per execution: what tracing adds to a small instruction.",
        f"A generation: {shown:.2f} ms by this table; {untraced:.2f} ms timed without the profiler ({per_round:.0f} µs "
        f"per round, prefill included); {traced:.2f} ms traced, {placed / traced:.1%} of it in the table.",
        "Waiting: time before an instruction in which none ran, with what tracing adds.",
    ]
    starting = traced - placed  # what starting a call costs is no instruction's
    if not 0.8 < (shown + starting) / untraced < 1.25:
        notes.append("The table and the clock disagree: was the machine busy with something else? Run this again.")
    return notes


def modules(measured: Record) -> Grid:
    """The parts of the models inside the phases that run them: µs per round, of the prefill per generation."""
    sums = _sums(measured, lambda one: (" / ".join(one["phase"]), one["module"]))
    columns = sorted({phase for phase, module in sums if module})
    per = {phase: measured["generations" if phase.startswith(PREFILL) else "rounds"] for phase in columns}
    names = _sums(measured, lambda one: one["module"])
    rows = []
    for name in sorted(names.keys() - {""}, key=lambda name: -names[name][0]):
        cells = [sums[phase, name][0] / per[phase] if (phase, name) in sums else None for phase in columns]
        rows.append([name, *(NONE if cell is None else f"{cell:.1f}" for cell in cells)])
    title = "Inside the models, µs per round (prefill: per generation)"
    return Grid(title=title, header=["module", *columns], rows=rows, notes=[])


def instructions(measured: Record, top: int) -> Grid:
    """The dearest single instructions of a round; `written as`: where its name comes from, if it has one."""
    inside = [one for one in measured["instructions"] if one["phase"][0] != PREFILL]
    rounds = measured["rounds"]
    rows = [
        [
            f"{one['name']}: {one['opcode']} {one['shape'].partition('{')[0]}",
            f"{one['us'] / rounds:.1f}",
            f"{one['count'] / rounds:.1f}",
            " / ".join(one["phase"]) + (f": {one['module']}" if one["module"] else ""),
            one["op_name"].partition(";")[0].rpartition("while/body/")[2] or NONE,
        ]
        for one in sorted(inside, key=lambda one: -one["us"])[:top]
    ]
    header = ["instruction", "µs / round", "executions", "part", "written as"]
    return Grid(title=f"The {len(rows)} dearest instructions of a round", header=header, rows=rows, notes=[])
