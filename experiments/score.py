r"""Score the stored outputs of a sweep by further metrics, without decoding, or export them for other tools.

    python -m experiments.score results/quickstart.jsonl --metrics=chrf,bleu
    python -m experiments.score results/quickstart.jsonl --hand_over=comet

The command prints a table of scores and writes it beside the results file as <results>.scores.csv. --hand_over writes
text files with one line per example: the sources, the references, and the outputs of each point (combination of
settings). COMET's command line reads such files:
comet-score -s comet/sources.txt -t comet/*.out.txt -r comet/references.txt
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from speccascade_jax.metrics import quality
from speccascade_jax.results.analysis import example_diff
from speccascade_jax.results.analysis.panels import read_points
from speccascade_jax.results.store import outputs
from speccascade_jax.results.store.outputs import Output
from speccascade_jax.results.store.result_store import Record
from speccascade_jax.runtime import arguments, interrupts
from speccascade_jax.storage.files import expanded, make_folder, rewrite, write_atomically


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser(__doc__)
    parser.add_argument("records", help="a store (JSON lines) that sweep.py or run.py wrote")
    parser.add_argument(
        "--metrics", default="chrf", help=f"one or more metrics, separated by commas: {', '.join(quality.METRICS)}"
    )
    parser.add_argument("--hand_over", help="write sources, references and outputs as text files to this folder")
    return parser


INDEX = "points.tsv"


def _line(text: str) -> str:
    return " ".join(text.split()) + "\n"


def hand_over(folder: Path, points: Sequence[tuple[Record, list[Output]]]) -> None:
    """Writes sources, references and each point's outputs as text files for other tools, one line per example.

    Raises:
        ValueError: the points were judged on different examples, or the folder holds other files.
    """
    ids = [output.id for output in points[0][1]]
    if any([output.id for output in kept] != ids for _, kept in points):
        raise ValueError("the points were judged on different examples: give a store of one task")
    make_folder(folder)
    if not (folder / INDEX).is_file() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds files that this command did not make: name another folder")
    first = points[0][1]
    # the index is written first: a later run accepts a folder that is not empty only if it holds this file
    rows = "".join(f"{record['key'][:12]}.out.txt\t{example_diff.title(record)}\n" for record, _ in points)
    rewrite(folder / INDEX, rows, start=r"[0-9a-f]{12}\.out\.txt\t")
    write_atomically(folder / "sources.txt", *(_line(output.prompt) for output in first))
    references = [output.reference if isinstance(output.reference, str) else output.reference[0] for output in first]
    write_atomically(folder / "references.txt", *map(_line, references))
    for record, kept in points:
        write_atomically(folder / f"{record['key'][:12]}.out.txt", *(_line(output.output) for output in kept))
    print(f"{len(points)} points × {len(ids)} examples: {folder}")


def main(argv: Sequence[str] | None = None) -> int:
    """Computes scores, or writes the text files; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        kept = [(record, outputs.read(args.records, record)) for record in read_points(args.records)]
        scored = [(record, record_outputs) for record, record_outputs in kept if record_outputs]
        if not scored:
            raise ValueError(
                f"{args.records} has no stored outputs: measure again into another store, with keep_outputs = True"
            )
        if args.hand_over:
            hand_over(expanded(args.hand_over), scored)
        else:
            _score(args.records, scored, args.metrics.split(","))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _score(store: str, points: Sequence[tuple[Record, list[Output]]], metrics: Sequence[str]) -> None:
    for name in metrics:
        if quality.get_metric(name).executes:
            raise ValueError(f"{name} executes generated code: make it the task's metric, with Evaluation.execute_code")
    rows = [_row(record, kept, metrics) for record, kept in points]
    table = Table("key", "point", *(Column(name, justify="right") for name in metrics))
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([["key", "point", *metrics], *rows])
    path = expanded(store).with_suffix(".scores.csv")
    rewrite(path, out.getvalue(), start="key,point,")
    print(f"written: {path}")


def _row(record: Record, kept: Sequence[Output], metrics: Sequence[str]) -> list[str]:
    scores = quality.score(metrics, [output.output for output in kept], [output.reference for output in kept])
    return [record["key"][:12], example_diff.title(record), *(f"{scores[name]:.2f}" for name in metrics)]


if __name__ == "__main__":
    with interrupts.told(interrupts.ANEW):
        sys.exit(main())
