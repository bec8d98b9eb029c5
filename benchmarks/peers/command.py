r"""Comparison of this package with transformers 4 and 5, CTranslate2 and llama.cpp: same weights, prompts and lengths.

    make bench-peers                                                        environments, then everything
    python -m benchmarks.peers --libraries=ours,CTranslate2 --pairs=tatoeba_en_de --batches=1
    python -m benchmarks.peers --resume                                     the missing parts of an interrupted run
    python -m benchmarks.peers --markdown results/peers.json                the tables of a run, for a page

Every library has its own process, which waits while another library is timed. The settings of all libraries run in
turns. Nothing else should run meanwhile. Libraries and pairs that cannot run here are left out, and the reason is
printed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import runs
from benchmarks.peers import measuring, report
from benchmarks.peers.contenders import LIBRARIES
from benchmarks.peers.pairs import PAIRS
from benchmarks.peers.protocol import Worker, WorkerError
from speccascade_jax.core.checks import whole
from speccascade_jax.evaluation.environment import device
from speccascade_jax.results.store.record import Row
from speccascade_jax.runtime import arguments
from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.runtime.progress import clock_time
from speccascade_jax.storage.files import check_replaceable, plain, write_atomically

FORMAT = 1
BATCHES = (1, 8, 32)
TURNS, BATCH_TURNS, EXAMPLES = 5, 3, 200


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, or prints stored measurements; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        if args.markdown:
            sys.stdout.write(report.markdown(runs.read(Path(args.markdown), FORMAT, "pairs", "make bench-peers")))
            return 0
        settings = {
            "libraries": runs.picked("library", args.libraries, LIBRARIES),
            "pairs": runs.picked("pair", args.pairs, PAIRS),
            "batches": [int(size) for size in runs.picked("batch size", args.batches, list(map(str, BATCHES)))],
            "turns": 1 if args.quick else whole("turns", args.turns, 1),
            "batch_turns": 1 if args.quick else min(BATCH_TURNS, args.turns),
            "examples": 25 if args.quick else EXAMPLES,
        }
        output = Path(args.output)
        check_replaceable(output, '"pairs":', '"versions":')
        check_replaceable(output.with_suffix(".md"), "number is the median of")
        if output.suffix != ".json":
            raise ValueError(f"--output={output} must end in .json: the tables have the same name with .md")
        measure_all(settings, output, resume=args.resume)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def measure_all(settings: Row, output: Path, resume: bool = False) -> Row:
    """Measures the chosen pairs; after each pair, writes `output` and a file of tables beside it (`.md`).

    Args:
        resume: whether to keep the measurements of pairs that `output` already holds, if the file exists.

    Raises:
        RuntimeError: no library could be started.
        ValueError: the stored pairs were measured with other settings, see `continued`.
    """
    begin = time.monotonic()
    record: Row = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device(),
        "load_at_start": os.getloadavg()[0],
        "settings": settings,
        "versions": {},
        "left_out": {},
        "pairs": {},
    }
    with ExitStack() as stack:
        workers = started(settings["libraries"], record, stack, output.parent / "peers_logs")
        if resume and output.exists():
            record = continued(record, runs.read(output, FORMAT, "pairs", "make bench-peers"), str(output))
        for name in [name for name in settings["pairs"] if name not in record["pairs"]]:
            with tempfile.TemporaryDirectory(prefix="peers_") as folder:
                try:
                    prepared = PAIRS[name](Path(folder))
                except FileNotFoundError as error:
                    record["left_out"][name] = str(error)
                    _say(f"{name} left out: {error}", begin)
                else:
                    measured = measuring.measure(workers, prepared, settings, lambda text: _say(text, begin))
                    pairs = record["pairs"] | {name: {"parameters": prepared.parameters, **measured}}
                    record["pairs"] = {known: pairs[known] for known in PAIRS if known in pairs}
            write_atomically(output, json.dumps(plain(record), indent=1, allow_nan=False) + "\n")
            write_atomically(output.with_suffix(".md"), report.markdown(record))
    print(report.markdown(record))
    _say(f"results: {output}, tables: {output.with_suffix('.md')}", begin)
    return record


def continued(record: Row, stored: Row, where: str) -> Row:
    """Returns the stored run, ready for more pairs, if it has this run's settings, versions and machine.

    Raises:
        ValueError: the stored run was measured with other settings or versions, or on another machine.
    """
    settings = {name: value for name, value in record["settings"].items() if name != "pairs"}
    wanted = plain(settings | {part: record[part] for part in ("device", "versions")})
    kept = stored["settings"] | {part: stored[part] for part in ("device", "versions")}
    for name, value in wanted.items():
        if kept.get(name) != value:
            raise ValueError(
                f"{where} was measured with {name} {kept.get(name)}, but this run has {value}: measure again without "
                f"--resume, or into another --output"
            )
    return stored | {"settings": record["settings"], "left_out": record["left_out"]}


def started(names: Sequence[str], record: Row, stack: ExitStack, logs: Path) -> dict[str, Worker]:
    """Starts a worker per library; records the versions, and the reason for each library that does not start."""
    workers: dict[str, Worker] = {}
    for name in names:
        library = LIBRARIES[name]
        try:
            if library.missing:
                raise WorkerError(library.missing)
            command = [str(library.python), "-m", f"benchmarks.peers.workers.{library.module}"]
            worker = Worker(command, logs / f"{name.replace(' ', '_')}.log", {"PYTHONPATH": str(repository_root())})
            stack.callback(worker.close)
            record["versions"][name] = worker.ask("versions")
        except WorkerError as error:
            record["left_out"][name] = str(error)
            print(f"{name} left out: {error}", flush=True)
        else:
            workers[name] = worker
    if not workers:
        raise RuntimeError(f"none of {', '.join(names)} could be started: run make bench-peers")
    return workers


def _say(text: str, begin: float) -> None:
    print(f"{clock_time(time.monotonic() - begin)}  {text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser(__doc__, prog="python -m benchmarks.peers")
    for name, known in (("libraries", LIBRARIES), ("pairs", PAIRS), ("batches", BATCHES)):
        parser.add_argument(
            f"--{name}", default="", help=f"{', '.join(map(str, known))}, separated by commas (default: all)"
        )
    parser.add_argument(
        "--turns", type=int, default=TURNS, help="number of times that everything is timed (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="run everything once, as a check that it works")
    parser.add_argument("--resume", action="store_true", help="keep the pairs in the output file and add the others")
    parser.add_argument("--output", default="results/peers.json", help="JSON file (default %(default)s)")
    parser.add_argument("--markdown", metavar="JSON", help="print the tables of a stored run without measuring")
    return parser
