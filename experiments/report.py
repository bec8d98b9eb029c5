r"""One HTML file of a store: plot, tables, what every point wrote, where drafts were rejected, how it was made.

    python -m experiments.report results/quickstart.jsonl
    python -m experiments.report results/quickstart.jsonl --output=for_anna.html --most=20

The file needs no network and no server; a sweep writes it at its end, beside its store.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import app, flags

from speccascade_jax.core.files import expanded
from speccascade_jax.results.panels import panels
from speccascade_jax.results.report import page
from speccascade_jax.results.store import read_records
from speccascade_jax.runtime import gin_flags, interrupts

OUTPUT = flags.DEFINE_string("output", None, "The file to write; by default <store>.html beside the store.")
MOST = flags.DEFINE_integer("most", page.MOST, "Outputs of each point.", 0)
TOGETHER = flags.DEFINE_list("together", [], "What is put side by side, as of experiments.tables.")


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError("give one store: results/quickstart.jsonl")
    with gin_flags.one_line_errors():
        found = panels([record for record in read_records(argv[1]) if "point" in record], TOGETHER.value)
        if not found:
            raise ValueError(f"{argv[1]} holds no record of a point: experiments.sweep writes them")
        path = None if OUTPUT.value is None else expanded(OUTPUT.value)
        print(page.write(found, argv[1], path, most=MOST.value))


if __name__ == "__main__":
    gin_flags.run_app(main, interrupts.ANEW)
