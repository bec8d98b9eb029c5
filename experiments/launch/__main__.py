"""Start an experiment on several devices or machines.

    python -m experiments.launch local --shards 2 -- python -m experiments.sweep --gin_file=configs/quickstart.gin
    python -m experiments.launch tpu_vm --name my-v5e-16 --zone us-west4-a -- python -m experiments.sweep …
    python -m experiments.launch slurm --shards 8 --sbatch=--gres=gpu:1 -- python -m experiments.sweep …
    python -m experiments.launch slurm --processes 4 --sbatch=--gres=gpu:8 -- python -m experiments.sweep …
    python -m experiments.launch gke --cluster c --tpu_type v5litepod-16 --image i -- python -m experiments.sweep …

`--dry_run` prints the commands without running them. A run that ends early resumes when the same command is given again
(docs/pods.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from experiments.launch import launchers
from experiments.launch.launchers import LAUNCHERS, Launcher
from speccascade_jax.core.checks import whole
from speccascade_jax.runtime import interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the experiment, or prints the commands; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    separator = words.index("--") if "--" in words else len(words)
    args, command = _parser().parse_args(words[:separator]), words[separator + 1 :]
    try:
        steps = _steps(args, command)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.dry_run:
        sys.stdout.write(launchers.shown(steps))
        return 0
    try:
        return launchers.run(steps)
    except FileNotFoundError as error:
        print(f"error: {error.filename} is not installed here: --dry_run prints what to run elsewhere", file=sys.stderr)
        return 1


def _steps(args: argparse.Namespace, command: Sequence[str]) -> list[launchers.Step]:
    if not command:
        raise ValueError("no command: put it after --, for example -- python -m experiments.sweep --gin_file=…")
    for name in ("shards", "processes"):
        whole(name, getattr(args, name, 1), 1)
    if getattr(args, "shards", 1) > 1 and args.processes > 1:
        raise ValueError(
            f"shards={args.shards} and processes={args.processes} exclude each other: give shards for independent "
            f"parts, or processes for one program over several processes"
        )
    return LAUNCHERS[args.where].steps(args, command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    places = parser.add_subparsers(dest="where", required=True, metavar="WHERE")
    for name, launcher in LAUNCHERS.items():
        _add(places.add_parser(name, help=launcher.steps.__doc__), launcher, name)
    return parser


def _add(place: argparse.ArgumentParser, launcher: Launcher, name: str) -> None:
    for option in launcher.options:
        default = option.default
        help_text = option.description if default in (None, "") else f"{option.description} (default {default})"
        kind = int if isinstance(default, int) else str
        place.add_argument(f"--{option.name}", help=help_text, default=default, type=kind, required=default is None)
    if name == "slurm":
        place.add_argument("--sbatch", action="append", default=[], help="a further option of sbatch (--gres=gpu:1)")
    place.add_argument("--dry_run", action="store_true", help="print the commands instead of running them")


if __name__ == "__main__":
    with interrupts.told(interrupts.SAME):
        sys.exit(main())
