"""Print Table 2 of Narasimhan et al. (2024), or tables of other studies, from the records of one or more sweeps.

Table 2 has three columns for each method: the speed-up of its fastest α that reaches the target's quality, the speed-up
of its fastest α that loses at most --loss of that quality, and the best quality among its α's that are no slower than
the target. Several tasks or pairs stand side by side. Brackets are 95% intervals of the comparison with the target
alone, paired over examples. * marks an entry that is better than all others in its column; ≈ marks an entry that does
not differ significantly from the best.

At most four lines of notes follow a table; --notes prints all. A table is as wide as the terminal or the variable
COLUMNS, 120 characters in a pipe, and 160 in a file of --output, which has all notes. Where it is too narrow, interval
and value stand on two lines, and the list of points leaves out columns.

    python -m experiments.tables results/quickstart.jsonl
    python -m experiments.tables results/quickstart.jsonl --notes      all notes on how to read the numbers
    python -m experiments.tables results/a.jsonl results/b.jsonl --format markdown --output results/table2.md
    python -m experiments.tables results/quickstart.jsonl --format latex      booktabs, for a paper
    python -m experiments.tables results/quickstart.jsonl --points      every point: quality, latency, rejection rate
    python -m experiments.tables results/quickstart.jsonl --format csv --points      the records themselves as CSV
    python -m experiments.tables results/paper2_figure6.jsonl --beside random_accept      for equal shares of drafts
    python -m experiments.tables results/quickstart.jsonl --predict=v5e,h100      latencies predicted for other devices

Tables of Huang et al., 2024 (SpecDec++), for sweeps over fixed block sizes and stop thresholds:

    python -m experiments.tables results/paper3.jsonl --measures forward_times      its Table 2: t_draft, t_target, R²
    python -m experiments.tables results/paper3.jsonl --measures throughput         its Table 1, and theorem 3.1's h
    python -m experiments.tables results/paper3.jsonl --measures dominance          its Figure 4, with verdicts

Tokens per target call with token-wise and with block verification, for sweeps that used both:

    python -m experiments.tables results/block_verification.jsonl --measures verification

Calls and accepted drafts of every level, for hierarchies of drafts (Globerson et al., 2025):

    python -m experiments.tables results/stacks.jsonl --measures levels

Tokens per second, model FLOPs utilisation (MFU) and peak memory of every timed point, where the device tells:

    python -m experiments.tables results/quickstart.jsonl --measures speed

Policies that choose a drafter for each query, with domains side by side (Huang et al., 2024, assistant selection):

    python -m experiments.tables results/paper5_table1.jsonl --measures selection
"""

from __future__ import annotations

import argparse
import io
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TextIO

from speccascade_jax.results.analysis import families, panels, prediction
from speccascade_jax.results.report import predicting, printing
from speccascade_jax.results.report.tables import levels, selection, speed, stopping, table2
from speccascade_jax.results.report.tables.grid import Grid
from speccascade_jax.results.store import result_store
from speccascade_jax.runtime import arguments, interrupts
from speccascade_jax.storage import files

LEVELS, SELECTION, SPEED = "levels", "selection", "speed"
"""Values of --measures: hierarchies of drafts, methods that choose among drafters, and tokens per second."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints or writes the table; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        hardware = predicting.of_arguments(args)
        if hardware and args.measures:
            raise ValueError("--predict has no effect on --measures, whose tables are of measured times: leave one out")
        records = panels.read_points(*args.records)
        records += predicting.predicted(records, args.records[0], hardware, _complete)
        shown = panels.panels(records, args.together)
        if args.format == "terminal" and args.output is None:
            _print(records, shown, args, None if args.notes else "add --notes")
            return 0
        text = _text(records, shown, args)
        if args.output is not None:
            files.rewrite(args.output, text, start=_start(text, args.format))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.output is None:
        sys.stdout.write(text)
    else:
        print(f"written: {args.output}")
    return 0


def _complete(*arguments: Any) -> dict[str, Any]:
    """Compiles the programs whose costs lack; JAX and the compilers are imported only here."""
    from speccascade_jax.preflight import costs

    return costs.complete(*arguments)


def _text(records: Sequence[result_store.Record], shown: Sequence[panels.Panel], args: argparse.Namespace) -> str:
    if args.format == "csv" and not args.measures:
        return (
            result_store.to_csv(list(map(prediction.plain, records)))
            if args.points
            else table2.table2_csv(shown, *_limits(args))
        )
    if args.format != "terminal":
        return "\n".join(getattr(grid, args.format)() for grid in _grids(records, shown, args))
    text = io.StringIO()
    _print(records, shown, args, file=text)
    return text.getvalue()


def _print(
    records: Sequence[result_store.Record],
    shown: Sequence[panels.Panel],
    args: argparse.Namespace,
    more: str | None = None,
    file: TextIO | None = None,
) -> None:
    """Prints the tables that the arguments ask for; `more` and `file` as in `printing.print_grids`."""
    apart = partial(table2.grids, shown, args.points, *_limits(args), apart=True)
    printing.print_grids(_grids(records, shown, args), more, file, None if args.measures or args.beside else apart)


def _grids(
    records: Sequence[result_store.Record], shown: Sequence[panels.Panel], args: argparse.Namespace
) -> list[Grid]:
    """Returns the tables that the arguments ask for."""
    if args.measures:
        return _measured(records, shown, args.measures)
    if args.beside:
        return [table2.beside_grid(panel, args.beside, args.share) for panel in shown if panel.curves]
    return table2.grids(shown, args.points, *_limits(args))


_STARTS = {
    "markdown": r"\*\*[^\n]+\*\*\n\n\| ",
    "latex": re.escape("% \\usepackage{booktabs}\n\\begin{table}"),
    "terminal": r"[^\n]*\n(┏━|([^\n]+\n){1,9}──)",
}
"""Format -> regular expression of a table's first characters; --output overwrites only files that match it."""


def _start(text: str, form: str) -> str:
    """Returns the regular expression that a file must match before --output overwrites it.

    A CSV file must begin with the same three columns as the new table.
    """
    return _STARTS.get(form) or re.escape(",".join(text.split("\n", 1)[0].split(",")[:3]))


def _limits(args: argparse.Namespace) -> tuple[float, float, float]:
    return args.tolerance, args.margin, args.loss


def _measured(
    records: Sequence[result_store.Record], shown: Sequence[panels.Panel], measures: Sequence[str]
) -> list[Grid]:
    """Returns the tables of --measures for every panel (points of one task, pair and setting).

    Prints on stderr which tables cannot be made, and why.

    Raises:
        ValueError: none of the tables can be made from the records.
    """
    grids, missing = list[Grid](), list[str]()
    asked: list[tuple[str, panels.Panel, Callable[[], list[Grid]]]] = []
    if paper3 := [measure for measure in measures if measure in stopping.GRIDS]:
        family_measures = itertools.product(families.of_records(records), paper3)
        asked += [
            (measure, panel_families.panel, partial(stopping.GRIDS[measure], panel_families))
            for panel_families, measure in family_measures
        ]
    if LEVELS in measures:
        asked += [(LEVELS, panel, partial(levels.level_grids, panel)) for panel in shown]
    if SPEED in measures:
        asked += [(SPEED, panel, partial(speed.speed_grids, panel)) for panel in shown]
    if SELECTION in measures and shown:
        asked.append((SELECTION, shown[0], partial(selection.selection_grids, shown)))
    for measure, panel, make in asked:
        try:
            grids += make()
        except ValueError as error:
            missing.append(f"{measure}, {panel.title()}: {error}")
    if not grids:
        raise ValueError("\nerror: ".join(missing) or "the files hold no records")
    for reason in missing:
        print(f"left out: {reason}", file=sys.stderr)
    return grids


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser(__doc__)
    parser.add_argument("records", nargs="+", help="result files (JSON lines) that sweep.py or run.py wrote")
    parser.add_argument("--format", choices=("terminal", "markdown", "latex", "csv"), default="terminal")
    parser.add_argument("--output", help="write to this file instead of printing")
    parser.add_argument("--points", action="store_true", help="list every point, not Table 2 (csv: whole records)")
    parser.add_argument("--notes", action="store_true", help=printing.NOTES["notes"])
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="largest quality loss that still counts as the target's quality, in units of the metric (default 0)",
    )
    parser.add_argument(
        "--margin",
        type=float,
        default=0.0,
        help="'no slower' means a relative latency of at most 1 + this (default 0)",
    )
    parser.add_argument(
        "--loss",
        type=float,
        default=panels.LOSS,
        help="largest quality loss of the second speed-up, in units of the metric (default %(default)g)",
    )
    parser.add_argument(
        "--measures",
        nargs="+",
        choices=(*stopping.GRIDS, LEVELS, SELECTION, SPEED),
        help="print these tables instead of Table 2",
    )
    parser.add_argument("--beside", help="compare every point with this method's point of the nearest --share")
    parser.add_argument("--share", choices=tuple(panels.SHARES), default="draft_share")
    parser.add_argument("--together", nargs="+", default=(), choices=tuple(panels.MIXABLE), help=panels.TOGETHER)
    predicting.add_flags(parser)
    return parser


if __name__ == "__main__":
    with interrupts.told(interrupts.ANEW):
        sys.exit(main())
