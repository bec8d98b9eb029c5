r"""Two points of a store side by side: where the second wrote worse than the first, and where better.

    python -m experiments.compare results/quickstart.jsonl autoregressive diff@0.25
    python -m experiments.compare results/quickstart.jsonl 4a8c21f0 91c2d3e4 --most=10

A point is named by its method, with @ and its α, or by the first digits of its record's key. Words that the other lacks
are coloured. Outputs are those that the sweep kept beside its store (Evaluation.keep_outputs).
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import app, flags
from rich.console import Console

from speccascade_jax.results import comparing
from speccascade_jax.results.store import read_records
from speccascade_jax.runtime import gin_flags, interrupts

MOST = flags.DEFINE_integer("most", 5, "Examples shown at either end.", 1)


def main(argv: Sequence[str]) -> None:
    if len(argv) != 4:
        raise app.UsageError("give a store and two points: results/quickstart.jsonl autoregressive diff@0.25")
    with gin_flags.one_line_errors():
        records = [record for record in read_records(argv[1]) if "point" in record]
        first, second = (comparing.find(records, name) for name in argv[2:])
        found = comparing.pairs(argv[1], first, second)
        console, same = Console(highlight=False), sum(each.first.output == each.second.output for each in found)
        console.print(f"1: {comparing.title(first)}\n2: {comparing.title(second)}", markup=False)
        console.print(f"{len(found)} examples, {same} written alike; by {first['quality']['metric']} of each alone:")
        apart = [each for each in found if each.first.output != each.second.output]
        worst = [each for each in apart if each.gain < 0][: MOST.value]
        best = [each for each in apart[::-1] if each.gain > 0][: MOST.value]
        for name, some in (("worse", worst), ("better", best)):
            console.print(f"\nwhere 2 is {name}:" if some else f"\n2 is {name} nowhere", style="underline")
            for line in comparing.shown(first, second, some):
                console.print(line)


if __name__ == "__main__":
    gin_flags.run_app(main, interrupts.ANEW)
