"""Start an experiment on several devices or machines.

    python -m experiments.launch local --shards 2 -- python -m experiments.sweep --gin_file=configs/quickstart.gin
    python -m experiments.launch tpu_queued --name my-v5e-16 --zone us-west4-a --accelerator_type v5litepod-16 \\
        --place gs://my-bucket/launches -- python -m experiments.sweep …        a spot slice, created again if preempted
    python -m experiments.launch tpu_vm --name my-v5e-16 --zone us-west4-a -- python -m experiments.sweep …
    python -m experiments.launch slurm --shards 8 --sbatch=--gres=gpu:1 -- python -m experiments.sweep …
    python -m experiments.launch slurm --processes 4 --sbatch=--gres=gpu:8 -- python -m experiments.sweep …
    python -m experiments.launch gke --cluster c --tpu_type v5litepod-16 --image i -- python -m experiments.sweep …
    python -m experiments.launch skypilot --accelerators tpu-v5litepod-16 -- python -m experiments.sweep …

`--dry_run` prints the commands without running them. Before anything is created on a TPU, the programs of a sweep or of
fine-tuning are compiled for it, unless --no_preflight is given. A run that ends early resumes when the same command is
given again (docs/pods.md).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence

from experiments.launch import accelerators, preflight, steps
from experiments.launch.launchers import LAUNCHERS, Launcher, Option
from speccascade_jax.core.checks import whole
from speccascade_jax.runtime import arguments, interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the experiment, or prints the commands; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    separator = words.index("--") if "--" in words else len(words)
    args, command = _parser().parse_args(words[:separator]), words[separator + 1 :]
    launcher = LAUNCHERS[args.where]
    try:
        planned = _steps(launcher, args, command)
        if not args.dry_run:
            steps.check_programs(planned)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for line in _notes(launcher, args, command, planned):
        print(line, file=sys.stderr)
    if args.dry_run:
        sys.stdout.write(steps.shown(planned, launcher.together))
        return 0
    return steps.run(planned, launcher.together)


def _steps(launcher: Launcher, args: argparse.Namespace, command: Sequence[str]) -> list[steps.Step]:
    """Returns the steps of a launch, the preflight first.

    Raises:
        ValueError: options have no meaning, or the preflight cannot run here.
    """
    if not command:
        raise ValueError("no command: put it after --, for example -- python -m experiments.sweep --gin_file=…")
    for name, least in {"shards": 1, "processes": 1, "max_restarts": 0}.items():
        whole(name, getattr(args, name, 1), least)
    if getattr(args, "shards", 1) > 1 and args.processes > 1:
        raise ValueError(
            f"shards={args.shards} and processes={args.processes} exclude each other: give shards for independent "
            f"parts, or processes for one program over several processes"
        )
    if getattr(args, "processes", 1) > 1:
        accelerators.check_together(command)
    if not launcher.together and (broken := [word for word in command if "\n" in word]):
        raise ValueError(f"the command's word {broken[0]!r} has a line break: put such values into a gin file")
    planned = launcher.steps(args, command)
    compiled = _preflight(launcher, args, command)
    if compiled is not None and not args.dry_run:
        preflight.check_installed()
    return planned if compiled is None else [compiled, *planned]


def _preflight(launcher: Launcher, args: argparse.Namespace, command: Sequence[str]) -> steps.Command | None:
    """Returns the step that compiles the command's programs for the launch's TPU; `None` if there is none to run."""
    topology = _topology(launcher, args)
    python = "python" if args.dry_run else sys.executable
    return preflight.step_for(command, topology, python) if topology else None


def _topology(launcher: Launcher, args: argparse.Namespace) -> str:
    """Returns the topology of the launch's TPU; an empty text without a TPU, or without a preflight."""
    name = getattr(args, launcher.tpu) if launcher.tpu else ""
    if not name or args.no_preflight or (args.where == "skypilot" and not name.startswith("tpu-")):
        return ""
    return accelerators.topology_of(name.removeprefix("tpu-"))


def _notes(
    launcher: Launcher, args: argparse.Namespace, command: Sequence[str], planned: Sequence[steps.Step]
) -> Iterator[str]:
    """Yields lines about properties of a launch that its user may not have meant."""
    if _topology(launcher, args) and _preflight(launcher, args, command) is None:
        yield preflight.note(command)
    if args.where == "tpu_vm" and not args.accelerator_type and "--multiprocess" not in command:
        unknown = "without --accelerator_type, the number of hosts is unknown"
        yield f"note: {unknown}: for several, add --multiprocess to the command"
    if not launcher.keeps_disks and not any("gs://" in word for word in command):
        yield "note: no gs:// address in the command: files on the machines' disks vanish with them (docs/pods.md)"
    sends_commit = any(isinstance(step, steps.Command) and step.words[:2] == ("git", "archive") for step in planned)
    if sends_commit and not args.dry_run and _uncommitted():
        yield "note: changes that are not committed are not sent"


def _uncommitted() -> bool:
    """Returns whether the current repository has changes that `git archive` leaves out."""
    try:
        changes = subprocess.run(("git", "status", "--porcelain"), capture_output=True, text=True, check=False)
    except OSError:
        return False
    return bool(changes.stdout.strip())


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser(__doc__, prog="python -m experiments.launch")
    places = parser.add_subparsers(dest="where", required=True, metavar="WHERE")
    for name, launcher in LAUNCHERS.items():
        place = places.add_parser(name, help=launcher.steps.__doc__)
        for option in launcher.options:
            _add(place, option)
        place.add_argument("--dry_run", action="store_true", help="print the commands instead of running them")
        if launcher.tpu:
            help_text = "create TPUs without compiling the command's programs first"
            place.add_argument("--no_preflight", action="store_true", help=help_text)
    return parser


def _add(place: argparse.ArgumentParser, option: Option) -> None:
    flag, default = f"--{option.name}", option.default
    if default is False:
        place.add_argument(flag, help=option.description, action="store_true")
    elif default == ():
        place.add_argument(flag, help=option.description, action="append", default=[])
    else:
        help_text = option.description if default in (None, "") else f"{option.description} (default {default})"
        kind = int if isinstance(default, int) else str
        place.add_argument(flag, help=help_text, default=default, type=kind, required=default is None)


if __name__ == "__main__":
    with interrupts.told(interrupts.SAME):
        sys.exit(main())
