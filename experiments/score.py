r"""Further metrics of outputs that a sweep kept, without decoding again; and files for metrics of others.

    python -m experiments.score results/quickstart.jsonl --metrics=chrf,bleu
    python -m experiments.score results/quickstart.jsonl --hand_over=comet

A table is printed, and written beside the store as <store>.scores.csv. Handed over are a file of sources, one of
references and one of each point's outputs, a line an example, as COMET's command line and others take them:
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
from speccascade_jax.runtime import interrupts
from speccascade_jax.storage.files import expanded, write_atomically


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", help="a store (JSON lines) that sweep.py or run.py wrote")
    parser.add_argument("--metrics", default="chrf", help=f"one or more, with commas: {', '.join(quality.METRICS)}")
    parser.add_argument("--hand_over", help="a folder for sources, references and outputs as text files")
    return parser


def _line(text: str) -> str:
    return " ".join(text.split()) + "\n"


def hand_over(folder: Path, found: Sequence[tuple[Record, list[Output]]]) -> None:
    """Write the text files; all points must have been judged on the same examples."""
    ids = [each.id for each in found[0][1]]
    if any([each.id for each in kept] != ids for _, kept in found):
        raise ValueError("the points were judged on different examples: hand over a store of one task")
    first = found[0][1]
    write_atomically(folder / "sources.txt", *(_line(each.prompt) for each in first))
    references = [each.reference if isinstance(each.reference, str) else each.reference[0] for each in first]
    write_atomically(folder / "references.txt", *map(_line, references))
    for record, kept in found:
        write_atomically(folder / f"{record['key'][:12]}.out.txt", *(_line(each.output) for each in kept))
    rows = "".join(f"{record['key'][:12]}.out.txt\t{example_diff.title(record)}\n" for record, _ in found)
    write_atomically(folder / "points.tsv", rows)
    print(f"{len(found)} points × {len(ids)} examples: {folder}")


def main(argv: Sequence[str] | None = None) -> int:
    """Score, or hand over; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        kept = [(record, outputs.read(args.records, record)) for record in read_points(args.records)]
        found = [(record, each) for record, each in kept if each]
        if not found:
            raise ValueError(
                f"{args.records} has no outputs beside it: measure into another store, with keep_outputs = True"
            )
        if args.hand_over:
            hand_over(expanded(args.hand_over), found)
        else:
            _score(args.records, found, args.metrics.split(","))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _score(store: str, found: Sequence[tuple[Record, list[Output]]], metrics: Sequence[str]) -> None:
    for name in metrics:
        if quality.get_metric(name).executes:
            raise ValueError(f"{name} runs what models wrote: name it in the task, with Evaluation.execute_code")
    rows = [_row(record, kept, metrics) for record, kept in found]
    table = Table("key", "point", *(Column(name, justify="right") for name in metrics))
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([["key", "point", *metrics], *rows])
    path = expanded(store).with_suffix(".scores.csv")
    write_atomically(path, out.getvalue())
    print(f"written: {path}")


def _row(record: Record, kept: Sequence[Output], metrics: Sequence[str]) -> list[str]:
    scores = quality.score(metrics, [each.output for each in kept], [each.reference for each in kept])
    return [record["key"][:12], example_diff.title(record), *(f"{scores[name]:.2f}" for name in metrics)]


if __name__ == "__main__":
    with interrupts.told(interrupts.ANEW):
        sys.exit(main())
