"""Fetch the public data sets that few-shot tasks and Spec-Bench read into the data directory.

    python -m experiments.fetch_data                      every data set
    python -m experiments.fetch_data gsm8k nq_open        only these
    python -m experiments.fetch_data --list               names, licences and sources; fetches nothing
    python -m experiments.fetch_data --to data            into this folder; set SPECCASCADE_DATA to it

Without --to, the folder is that of the variable SPECCASCADE_DATA. fetched.json in it records the SHA-256 of each file
(unpacked) and the hub's commits at the first fetch. From then on, a file that has changed is refused by this command
and by the tasks, and so is a source that would give another file. Files that the command did not make are kept as they
are. The same command continues after an interruption. mbpp, mmlu, commonsenseqa and triviaqa come from the hub
(pip install 'speccascade_jax[hub]').

A file with "half" in its name holds every second row. The files from GitHub equal, byte for byte, those with which this
project's results were measured; of wmt22_en_de, only the fields that tasks read are equal. The sets on the hub were not
compared. The command was tested with servers on the same machine only, never over the internet.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from speccascade_jax.core.names import hint
from speccascade_jax.data import directory, fetching
from speccascade_jax.data.public_sources import DATA_SETS
from speccascade_jax.runtime import arguments, interrupts
from speccascade_jax.storage import locks
from speccascade_jax.storage.files import expanded


def main(argv: Sequence[str] | None = None) -> int:
    """Fetches data sets, or lists them; returns the exit status."""
    args = _arguments(argv)
    try:
        names = _chosen(args.names)
        if args.list:
            _list(names)
        else:
            _fetch(names, directory.data_directory() if args.to is None else _folder(args.to), args.github)
    except (ValueError, OSError, ImportError, locks.LockedError) as error:
        print(f"error: {'; '.join(line.strip() for line in str(error).splitlines())}", file=sys.stderr)
        return 1
    return 0


def _chosen(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in DATA_SETS:
            raise ValueError(f"{hint(name, DATA_SETS)}{name!r} is no data set: give some of {', '.join(DATA_SETS)}")
    return [name for name in DATA_SETS if name in names or not names]


def _folder(named: str) -> Path:
    if not named:  # such as an unset variable of a shell, which must not stand for another folder
        raise ValueError("--to is empty: give a folder, or leave it out")
    return expanded(named)


def _list(names: Sequence[str]) -> None:
    for name in names:
        terms, files = DATA_SETS[name]
        print(f"{name} (licence: {terms})")
        for file in files:
            print(f"  {file.name}  from  {', '.join(file.sources)}")


def _fetch(names: Sequence[str], folder: Path, github: str) -> None:
    files = [(f"{name}/{file.name}", file) for name in names for file in DATA_SETS[name][1]]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    fetcher = fetching.Fetcher(folder, github)
    print(f"data directory: {folder}")
    with (
        locks.held(folder / f"{directory.RECORD}.lock", folder, "wait for it, or end it"),
        Progress(*columns, TextColumn("left"), console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task("", total=len(files))
        for name, file in files:
            progress.update(task, description=name)
            print(f"{name}: {fetcher.fetch(name, file)}", flush=True)
            progress.advance(task)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.parser(__doc__, prog="python -m experiments.fetch_data")
    parser.add_argument("names", metavar="NAME", nargs="*", help="a data set (default: all)")
    parser.add_argument("--to", metavar="FOLDER", help="the data directory (default: that of SPECCASCADE_DATA)")
    parser.add_argument("--list", action="store_true", help="list the data sets, and stop")
    parser.add_argument(
        "--github", metavar="URL", default=fetching.GITHUB, help="a mirror of GitHub's raw files (default: %(default)s)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    with interrupts.told(interrupts.SAME):
        sys.exit(main())
