r"""Further metrics of outputs that a sweep kept, without decoding again; and files for metrics of others.

    python -m experiments.score results/quickstart.jsonl --metrics=chrf,bleu
    python -m experiments.score results/quickstart.jsonl --hand_over=comet

A table is printed, and written beside the store as <store>.scores.csv. Handed over are a file of sources, one of
references and one of each point's outputs, a line an example, as COMET's command line and others take them:
comet-score -s comet/sources.txt -t comet/*.out.txt -r comet/references.txt
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.table import Table

from speccascade_jax.core.files import expanded, write_atomically
from speccascade_jax.metrics import quality
from speccascade_jax.results import comparing, outputs
from speccascade_jax.results.outputs import Output
from speccascade_jax.results.store import Record, read_records
from speccascade_jax.runtime import gin_flags, interrupts

METRICS = flags.DEFINE_list("metrics", ["chrf"], f"Any of {', '.join(quality.METRICS)}.")
HAND_OVER = flags.DEFINE_string("hand_over", None, "A folder for sources, references and outputs as text files.")


def _line(text: str) -> str:
    return " ".join(text.split()) + "\n"


def _reference(each: Output) -> str:
    return each.reference if isinstance(each.reference, str) else each.reference[0]


def hand_over(folder: Path, found: Sequence[tuple[Record, list[Output]]]) -> None:
    """Write the text files; all points must have been judged on the same examples."""
    ids = [each.id for each in found[0][1]]
    if any([each.id for each in kept] != ids for _, kept in found):
        raise ValueError("the points were judged on different examples: hand over a store of one task")
    first = found[0][1]
    write_atomically(folder / "sources.txt", *(_line(each.prompt) for each in first))
    write_atomically(folder / "references.txt", *(_line(_reference(each)) for each in first))
    for record, kept in found:
        write_atomically(folder / f"{record['key'][:12]}.out.txt", *(_line(each.output) for each in kept))
    rows = "".join(f"{record['key'][:12]}.out.txt\t{comparing.title(record)}\n" for record, _ in found)
    write_atomically(folder / "points.tsv", rows)
    print(f"{len(found)} points × {len(ids)} examples: {folder}")


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError("give one store: results/quickstart.jsonl")
    with gin_flags.one_line_errors():
        for name in METRICS.value:
            if quality.get_metric(name).executes:
                raise ValueError(
                    f"{name} runs what models wrote: name it in the task, and allow Evaluation.execute_code"
                )
        records = [record for record in read_records(argv[1]) if "point" in record]
        found = [(record, kept) for record in records if (kept := outputs.read(argv[1], record))]
        if not found:
            raise ValueError(f"{argv[1]} has no outputs beside it: measure with Evaluation.keep_outputs = True")
        if HAND_OVER.value:
            return hand_over(expanded(HAND_OVER.value), found)
        rows = [_row(record, kept) for record, kept in found]
        _print(rows)
        path = expanded(argv[1]).with_suffix(".scores.csv")
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([["key", "point", *METRICS.value], *rows])
        write_atomically(path, out.getvalue())
        print(f"written to {path}")


def _row(record: Record, kept: Sequence[Output]) -> list[str]:
    scores = quality.score(METRICS.value, [each.output for each in kept], [each.reference for each in kept])
    return [record["key"][:12], comparing.title(record), *(f"{scores[name]:.2f}" for name in METRICS.value)]


def _print(rows: Sequence[Sequence[str]]) -> None:
    table = Table()
    for name in ("key", "point"):
        table.add_column(name)
    for name in METRICS.value:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    gin_flags.run_app(main, interrupts.ANEW)
