r"""Compare the outputs of two points of a sweep: show the examples on which the second point is worse or better.

    python -m experiments.compare results/quickstart.jsonl autoregressive diff@0.25
    python -m experiments.compare results/quickstart.jsonl KEY KEY2 --most=10

A point is one measured combination of settings. Name a point by its method, with @ and its α, or by the first digits of
its record's key. Words that occur in only one of the two outputs are coloured. The sweep must have stored its outputs
beside its results file (Evaluation.keep_outputs, the default).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from speccascade_jax.core.checks import whole
from speccascade_jax.results.analysis import example_diff
from speccascade_jax.results.analysis.panels import read_points
from speccascade_jax.results.store.result_store import Record
from speccascade_jax.runtime import arguments, interrupts


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser(__doc__)
    parser.add_argument("records", help="a store (JSON lines) that sweep.py or run.py wrote")
    parser.add_argument("first", help="a point: method, method@α, or the beginning of its key")
    parser.add_argument("second", help="the point to compare with it")
    parser.add_argument(
        "--most",
        type=int,
        default=5,
        help="how many examples to show where the second point is worse, and how many where it is better (default 5)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the differing outputs of the two points; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        whole("most", args.most, 1)
        records = read_points(args.records)
        first, second = (example_diff.find(records, name) for name in (args.first, args.second))
        _print(first, second, example_diff.pairs(args.records, first, second), args.most)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _print(first: Record, second: Record, pairs: Sequence[example_diff.Pair], most: int) -> None:
    console, same = Console(highlight=False), sum(pair.first.output == pair.second.output for pair in pairs)
    console.print(f"1: {example_diff.title(first)}\n2: {example_diff.title(second)}", markup=False)
    console.print(
        f"{len(pairs)} examples, {same} with equal outputs; sorted by {first['quality']['metric']} per example:"
    )
    worst = [pair for pair in pairs if pair.gain < 0][:most]
    best = [pair for pair in pairs[::-1] if pair.gain > 0][:most]
    for name, some in (("worse", worst), ("better", best)):
        console.print(f"\nwhere 2 is {name}:" if some else f"\n2 is {name} on no example", style="underline")
        for line in example_diff.shown(first, second, some):
            console.print(line)


if __name__ == "__main__":
    with interrupts.told(interrupts.ANEW):
        sys.exit(main())
