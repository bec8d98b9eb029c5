"""Launchers for TPU slices of Google Cloud: a machine that exists already, and queued resources.

Sources: docs.cloud.google.com/tpu/docs/queued-resources (states), …/tpu/docs/spot (spot slices are requested as queued
resources and must be created again after preemption), …/tpu/docs/jax-pods, and …/sdk/gcloud/reference/compute/tpus
(queued-resources create, describe, delete; tpu-vm scp, ssh). Google develops this API no further; TPUs from tpu7x on
are on GKE only.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence

from experiments.launch import scripts
from experiments.launch.accelerators import joined, software_of
from experiments.launch.steps import Command, File, Step

CAPACITIES = {"spot": ("--spot",), "reserved": ("--reserved",), "on_demand": ()}
"""Flags of gcloud by kind of capacity."""
_LONGEST_NAME = 40
"""Largest number of characters of a name; it leaves room for the suffixes that Google's tools append."""


def tpu_vm(args: argparse.Namespace, command: Sequence[str]) -> list[Step]:
    """Copies the code to all workers of a TPU slice and starts the command there, detached, with a log on each."""
    check_name(args.name, longest=63)
    location = _location(args)
    if args.accelerator_type:
        command = joined(command, args.accelerator_type)
    script = scripts.on_tpu_vm(command, shell_folder(args.folder), args.max_restarts, as_is=args.as_is)
    file = File(f"{folder_of(args.name)}/{scripts.SCRIPT}", script)
    tool = ("gcloud", "compute", "tpus", "tpu-vm")
    code = () if args.as_is else (archive(args.name),)
    sent = [file.path, *(step.words[3].removeprefix("--output=") for step in code)]
    start = f"bash {scripts.SCRIPT}"
    if not args.attach:
        start = f"nohup {start} > /dev/null 2>&1 < /dev/null &"
    return [
        file, *code,
        Command((*tool, "scp", *sent, f"{args.name}:", *location, "--worker=all")),
        Command((*tool, "ssh", args.name, *location, "--worker=all", f"--command={start}")),
    ]  # fmt: skip


def tpu_queued(args: argparse.Namespace, command: Sequence[str]) -> list[Step]:
    """Runs the command on a queued (spot) TPU slice, which is created again after preemption, with logs in a bucket."""
    check_name(args.name)
    if not re.fullmatch(r"gs://[^/\s]+(/\S+)?", args.place.rstrip("/")):
        raise ValueError(f"place={args.place!r}: give an address in a bucket, such as gs://my-bucket/launches")
    if args.capacity not in CAPACITIES:
        raise ValueError(f"capacity={args.capacity!r}: give one of {', '.join(CAPACITIES)}")
    location, place = _location(args), f"{args.place.rstrip('/')}/{args.name}"
    software = args.runtime_version or software_of(args.accelerator_type)
    command = joined(command, args.accelerator_type)
    startup = scripts.on_queued_resource(command, args.name, location, place, args.max_restarts)
    file, code = File(f"{folder_of(args.name)}/startup.sh", startup), archive(args.name)
    create = [
        "gcloud", "compute", "tpus", "queued-resources", "create", args.name, f"--node-id={args.name}", *location,
        f"--accelerator-type={args.accelerator_type}", f"--runtime-version={software}", *CAPACITIES[args.capacity],
        f"--metadata-from-file=startup-script={file.path}", *args.create,
    ]  # fmt: skip
    upload = ("gcloud", "storage", "cp", f"{folder_of(args.name)}/{scripts.CODE}", f"{place}/{scripts.CODE}")
    loop = scripts.watching(args.name, location, place, create)
    return [file, code, Command(upload), Command(("bash",), stdin=loop)]


def archive(name: str) -> Command:
    """Returns the step that packs the committed code of the current repository."""
    return Command(("git", "archive", "--format=tar.gz", f"--output={folder_of(name)}/{scripts.CODE}", "HEAD"))


def folder_of(name: str) -> str:
    """Returns the folder, below the current one, for the files of a launch."""
    return f"launches/{name}"


def check_name(name: str, longest: int = _LONGEST_NAME) -> None:
    """Raises ValueError for a name that Google Cloud or Kubernetes would refuse."""
    if len(name) > longest or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise ValueError(
            f"name={name!r}: give at most {longest} lower-case letters, digits and hyphens, a letter first"
        )


def shell_folder(folder: str) -> str:
    """Returns a folder for a shell, which expands only an unquoted ~."""
    return folder if re.fullmatch(r"~[\w./-]*", folder) else shlex.quote(folder)


def _location(args: argparse.Namespace) -> tuple[str, ...]:
    if not re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z]", args.zone):
        raise ValueError(f"zone={args.zone!r}: give a zone, such as us-west4-a")
    return (f"--zone={args.zone}", *((f"--project={args.project}",) if args.project else ()))
