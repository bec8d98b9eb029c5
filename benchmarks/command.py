r"""Measure speed relative to the machine's limits: memory bandwidth, model calls, and predictions from acceptance.

    python -m benchmarks                                              everything, about half an hour on 2 cores
    python -m benchmarks --sections=bandwidth,steps
    python -m benchmarks --sections=acceptance --pair=runs/my_pair    for a model card
    python -m benchmarks --markdown results/bench.json                the tables of a run, for a page

Each section prints its tables and adds them to a JSON file. Nothing else should run meanwhile. Sections:
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import (
    acceptance,
    auto,
    bandwidth,
    batches,
    block_wise,
    calls,
    compilation,
    decoding,
    growth,
    hierarchy,
    memory,
    report,
    rounds,
    runs,
    scoring,
    selection,
    sizes,
    speedup,
    steps,
    stopping,
    trees,
    verification,
    vocabulary,
    weights,
)
from benchmarks.setting import Bench, Sizes, quick
from speccascade_jax.core.checks import whole
from speccascade_jax.core.types import DTYPES, STORED
from speccascade_jax.evaluation.environment import device, versions
from speccascade_jax.pairs.pair import load_pair
from speccascade_jax.results.report import printing
from speccascade_jax.results.store.record import Row
from speccascade_jax.runtime import arguments, compilation_cache
from speccascade_jax.runtime.progress import clock_time
from speccascade_jax.storage.files import check_replaceable, plain, write_atomically

FORMAT = 1


@dataclass(frozen=True)
class Section:
    """A benchmark: a module whose `run(bench)` returns rows, and its approximate seconds, to estimate the time left."""

    module: Any
    seconds: float

    @property
    def summary(self) -> str:
        """The text behind the first colon in the module's docstring: what the section measures, in one line."""
        return (self.module.__doc__ or "").partition(": ")[2].partition("\n")[0]


SECTIONS = {
    "bandwidth": Section(bandwidth, 5),
    "steps": Section(steps, 15),
    "scoring": Section(scoring, 20),
    "rounds": Section(rounds, 60),
    "sizes": Section(sizes, 90),
    "weights": Section(weights, 40),
    "verification": Section(verification, 60),
    "block_wise": Section(block_wise, 40),
    "stopping": Section(stopping, 40),
    "speedup": Section(speedup, 60),
    "trees": Section(trees, 240),
    "decode": Section(decoding, 420),
    "batches": Section(batches, 20),
    "calls": Section(calls, 20),
    "selection": Section(selection, 150),
    "auto": Section(auto, 480),
    "compilation": Section(compilation, 30),
    "memory": Section(memory, 20),
    "vocabulary": Section(vocabulary, 120),
    "growth": Section(growth, 90),
    "hierarchy": Section(hierarchy, 40),
    "acceptance": Section(acceptance, 40),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, or prints stored measurements; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        if args.markdown:
            sys.stdout.write(report.markdown(runs.read(Path(args.markdown), FORMAT, "sections", "the benchmarks")))
            return 0
        names = runs.picked("section", args.sections, SECTIONS)
        settings = _settings(args)
        output = Path(args.output or default_output(names, args.quick))
        check_replaceable(output, '"sections":', '"settings":')
        measure_all(names, settings, output)
    except (ValueError, ArithmeticError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def measure_all(names: Sequence[str], settings: Sizes, output: Path) -> Row:
    """Runs sections one after the other; prints each one's tables and rewrites `output` after each."""
    compilation_cache.switch_on()
    console = printing.console()
    pair = load_pair(settings.pair)
    record: Row = describe(settings, pair.name) | {"sections": {}}
    with _Steps(console, names) as steps:
        bench = Bench(settings, pair, steps.track)
        for name in names:
            begin = steps.begin(name)
            tables = SECTIONS[name].module.run(bench)
            record["sections"][name] = plain({"seconds": time.monotonic() - begin, "tables": tables})
            write_atomically(output, json.dumps(record, indent=1, allow_nan=False) + "\n")
            for table, rows in tables.items():
                console.print(report.grid(table, rows).rich())
                _draw(SECTIONS[name].module, rows, output.with_name(f"{output.stem}_{table}.png"), console)
            steps.end()
    console.print(f"results: {output}")
    return record


class _Steps:
    """A display of progress over sections and their items: a bar in a terminal, and one line per finished section."""

    def __init__(self, console: Console, names: Sequence[str]):
        self._console, self._left = console, [SECTIONS[name].seconds for name in names]
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self._task = self._bar.add_task("", total=sum(self._left))
        self._name, self._begin, self._spent = "", time.monotonic(), 0.0

    def __enter__(self) -> _Steps:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, name: str) -> float:
        """Shows a section's name in the bar; returns the section's start time in seconds."""
        self._name = name
        self._bar.update(self._task, description=name)
        return time.monotonic()

    def track(self, items: Sequence[Any]) -> Iterator[Any]:
        """Yields a section's items and counts each as an equal step."""
        for item in items:
            yield item
            self._bar.advance(self._task, self._left[0] / len(items))

    def end(self) -> None:
        """Prints the section's line, with the remaining time estimated from the duration of the sections so far."""
        self._spent += self._left.pop(0)
        elapsed = time.monotonic() - self._begin
        remaining = sum(self._left) * elapsed / self._spent
        self._console.print(f"{self._name} done, {clock_time(elapsed)} elapsed, about {clock_time(remaining)} left\n")


def _draw(module: Any, rows: Sequence[Row], path: Path, console: Console) -> None:
    """Draws a section's picture, if its module has a function `draw`."""
    if hasattr(module, "draw"):
        module.draw(rows, path)
        console.print(f"plot: {path}")


def describe(settings: Sizes, pair: str) -> Row:
    """Returns everything about the run but its measurements: settings, date, machine and versions."""
    return {
        "format": FORMAT,
        "pair": pair,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device(),
        "versions": versions(),
        "load_at_start": os.getloadavg()[0],
        "settings": plain(dataclasses.asdict(settings)),
    }


def _settings(args: argparse.Namespace) -> Sizes:
    examples = whole("examples", args.examples, 1)
    settings = Sizes(
        pair=args.pair, task=args.task or Sizes().task, acceptance_task=args.task, acceptance_examples=examples,
        draft_dtypes=tuple(runs.picked("draft dtype", args.draft_dtype, (STORED, *DTYPES))),
    )  # fmt: skip
    if args.thorough:
        settings = dataclasses.replace(settings, lossy_block_sizes=settings.block_sizes)
    return quick(settings) if args.quick else settings


def default_output(names: Sequence[str], fast: bool) -> str:
    """Returns the default path of the results; quick runs and runs of only some sections go to separate files."""
    parts = [] if list(names) == list(SECTIONS) else list(names)
    return "results/" + "_".join(["bench", *(["quick"] if fast else []), *parts]) + ".json"


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"    {name:<14}{section.summary}" for name, section in SECTIONS.items())
    parser = arguments.parser(f"{__doc__}\n{listed}", prog="python -m benchmarks")
    defaults = Sizes()
    parser.add_argument("--sections", default="", help="sections, separated by commas (default: all)")
    parser.add_argument("--pair", default=defaults.pair, help="a shipped pair, or a folder (default %(default)s)")
    help_text = f"task of the prompts (default {defaults.task}; `acceptance`: tatoeba_joined if its data are present)"
    parser.add_argument("--task", help=help_text)
    parser.add_argument(
        "--examples",
        type=int,
        default=defaults.acceptance_examples,
        help="examples for `acceptance` (default %(default)s)",
    )
    help_text = "dtypes of the draft's matrices in `decode`, timed in turns (default %(default)s, which load_pair has)"
    parser.add_argument("--draft_dtype", default=STORED, help=help_text)
    parser.add_argument(
        "--thorough", action="store_true", help="also measure lossy rules with every γ: takes twice the time"
    )
    parser.add_argument(
        "--quick", action="store_true", help="run everything once with small sizes, as a check that it works"
    )
    parser.add_argument(
        "--output", help="JSON file (default results/bench.json, with the sections' names if --sections is set)"
    )
    parser.add_argument(
        "--markdown", metavar="JSON", help="print the tables of a stored run as Markdown without measuring"
    )
    return parser
