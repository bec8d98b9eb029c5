"""Launchers: functions that turn a command into the shell commands that start it on a machine or a cluster."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """A command to run, with its input and environment.

    Attributes:
        words: the program and its arguments; stdin: text for its standard input, such as a script.
        env: additional environment variables.
    """

    words: tuple[str, ...]
    stdin: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Returns the step as a shell command."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        line = " ".join([*variables, shlex.join(self.words)])
        return line if self.stdin is None else f"{line} <<'END'\n{self.stdin}END"


def shown(steps: Sequence[Step]) -> str:
    """Returns the steps as lines for a shell; several steps run at the same time (`&`, then `wait`)."""
    return "".join(f"{step}{' &' * (len(steps) > 1)}\n" for step in steps) + "wait\n" * (len(steps) > 1)


def run(steps: Sequence[Step]) -> int:
    """Runs all steps at the same time; returns the first exit status that is not 0, or 0."""
    running = [
        subprocess.Popen(
            step.words, env=os.environ | dict(step.env), text=True,
            stdin=None if step.stdin is None else subprocess.PIPE,
        )
        for step in steps
    ]  # fmt: skip
    try:
        for step, process in zip(steps, running, strict=True):
            if step.stdin is not None:
                process.communicate(step.stdin)
        statuses = [process.wait() for process in running]
    finally:
        for process in running:  # after an interrupt, no process may keep running
            process.terminate()
    for step, status in zip(steps, statuses, strict=True):
        if status:
            print(f"error: exit status {status} of {step}", file=sys.stderr)
    return next((status for status in statuses if status), 0)


Arguments = argparse.Namespace


def local(args: Arguments, command: Sequence[str]) -> list[Step]:
    """Runs the command on this machine: as independent parts, or as one program of several processes."""
    if args.shards > 1:
        return [
            Step((*command, f"--shard_id={number}", f"--num_shards={args.shards}"), env=_device(args, number))
            for number in range(args.shards)
        ]
    if args.processes == 1:
        return [Step(tuple(command), env=_device(args, 0))]
    joined = (*command, f"--coordinator_address=localhost:{args.port}", f"--process_count={args.processes}")
    return [Step((*joined, f"--process_index={n}"), env=_device(args, n)) for n in range(args.processes)]


def _cd(folder: str) -> str:
    return f"cd {folder if folder.startswith('~') else shlex.quote(folder)}"  # a shell expands only an unquoted ~


def _device(args: Arguments, number: int) -> dict[str, str]:
    return {args.device_variable: str(number)} if args.device_variable else {}


def tpu_vm(args: Arguments, command: Sequence[str]) -> list[Step]:
    """Runs the command on all workers of a TPU slice at once; the workers find each other by their environment."""
    ssh = ("gcloud", "compute", "tpus", "tpu-vm", "ssh", args.name, f"--zone={args.zone}")
    project = (f"--project={args.project}",) if args.project else ()
    remote_command = f"{_cd(args.folder)} && {shlex.join(command)}"
    return [Step((*ssh, *project, "--worker=all", f"--command={remote_command}"))]


def slurm(args: Arguments, command: Sequence[str]) -> list[Step]:
    """Submits the command to SLURM: as an array of independent parts, or as one program on several nodes."""
    options = [f"--job-name={args.name}", f"--time={args.time}", "--requeue", *args.sbatch]
    if args.shards > 1:
        options += [f"--array=0-{args.shards - 1}", "--ntasks=1"]
        line = f"{shlex.join(command)} --shard_id=$SLURM_ARRAY_TASK_ID --num_shards={args.shards}"
    else:
        options += [f"--nodes={args.processes}", "--ntasks-per-node=1"]
        line = f"srun --kill-on-bad-exit=1 {shlex.join(command)}"
    head = "".join(f"#SBATCH {option}\n" for option in options)
    return [Step(("sbatch",), stdin=f"#!/bin/bash\n{head}{_cd(args.folder)} || exit 1\n{line}\n")]


def gke(args: Arguments, command: Sequence[str]) -> list[Step]:
    """Creates a workload for the command on a GKE cluster that xpk has created."""
    words = ["xpk", "workload", "create", f"--workload={args.name}", f"--cluster={args.cluster}"]
    words += [f"--tpu-type={args.tpu_type}", f"--docker-image={args.image}"]
    words += [f"--zone={args.zone}"] if args.zone else []
    words += [f"--project={args.project}"] if args.project else []
    return [Step((*words, f"--command={_cd(args.folder)} && {shlex.join(command)}"))]


@dataclass(frozen=True)
class Option:
    """A command-line option of a launcher; an option without a default is required."""

    name: str
    description: str
    default: str | int | None = None


@dataclass(frozen=True)
class Launcher:
    """A place where experiments can run: the function that returns the steps to start one, and the options."""

    steps: Callable[[Arguments, Sequence[str]], list[Step]]
    options: tuple[Option, ...]


_SHARDS = Option("shards", "number of independent parts (--shard_id, --num_shards), each with its own store", 1)
_PROCESSES = Option("processes", "number of processes of one program, on a mesh over all of their devices", 1)
_FOLDER = Option("folder", "the repository's folder on the other machine", "speccascade_jax")
_PROJECT = Option("project", "project of Google Cloud (default: gcloud's own)", "")

LAUNCHERS = {
    "local": Launcher(local, (
        _SHARDS, _PROCESSES,
        Option("port", "port of the first process", 8476),
        Option("device_variable", "variable that gives each process its own device, such as CUDA_VISIBLE_DEVICES", ""),
    )),
    "tpu_vm": Launcher(tpu_vm, (
        Option("name", "name of the TPU VM"), Option("zone", "its zone, such as us-west4-a"), _PROJECT, _FOLDER,
    )),
    "slurm": Launcher(slurm, (
        _SHARDS, _PROCESSES,
        Option("name", "name of the job", "speccascade"),
        Option("time", "time limit of the job", "04:00:00"),
        Option("folder", "the repository's folder, seen from where sbatch is called", "."),
    )),
    "gke": Launcher(gke, (
        Option("cluster", "cluster that xpk has created"),
        Option("tpu_type", "type of TPU, such as v5litepod-16"),
        Option("image", "Docker image with the package installed"),
        Option("name", "name of the workload", "speccascade"),
        Option("zone", "zone of the cluster (default: gcloud's own)", ""),
        _PROJECT, _FOLDER,
    )),
}  # fmt: skip
