"""Launchers: functions that turn a command into the steps that start it somewhere, with their options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.launch.clusters import gke, skypilot, slurm
from experiments.launch.steps import Command, Step
from experiments.launch.tpus import tpu_queued, tpu_vm


def local(args: argparse.Namespace, command: Sequence[str]) -> list[Step]:
    """Runs the command on this machine: as independent parts, or as one program of several processes."""
    if args.shards > 1:
        return [
            Command((*command, f"--shard_id={number}", f"--num_shards={args.shards}"), env=_device(args, number))
            for number in range(args.shards)
        ]
    if args.processes == 1:
        return [Command(tuple(command), env=_device(args, 0))]
    joined = (*command, f"--coordinator_address=localhost:{args.port}", f"--process_count={args.processes}")
    return [Command((*joined, f"--process_index={n}"), env=_device(args, n)) for n in range(args.processes)]


def _device(args: argparse.Namespace, number: int) -> dict[str, str]:
    return {args.device_variable: str(number)} if args.device_variable else {}


@dataclass(frozen=True)
class Option:
    """A command-line option of a launcher.

    Attributes:
        default: the value without the option; `None` requires the option, `False` makes it a switch, and `()` lets it
            be repeated.
    """

    name: str
    description: str
    default: str | int | tuple[()] | None = None


@dataclass(frozen=True)
class Launcher:
    """A place where experiments can run.

    Attributes:
        steps: the function that returns the steps to start one; it raises ValueError for values that have no meaning.
        together: whether the steps run at the same time; otherwise one after another.
        tpu: the option that names the type of TPU, for the preflight; empty if there are none.
        keeps_disks: whether the files that a run wrote to the machines' disks still exist afterwards.
    """

    steps: Callable[[argparse.Namespace, Sequence[str]], list[Step]]
    options: tuple[Option, ...]
    together: bool = False
    tpu: str = ""
    keeps_disks: bool = True


_SHARDS = Option("shards", "number of independent parts (--shard_id, --num_shards), each with its own store", 1)
_PROCESSES = Option("processes", "number of processes of one program, on a mesh over all of their devices", 1)
_FOLDER = Option("folder", "the repository's folder on the other machine", "speccascade_jax")
_PROJECT = Option("project", "project of Google Cloud (default: gcloud's own)", "")
_RESTARTS = Option("max_restarts", "most restarts after exit statuses 75 and 143", 100)
_ZONE = Option("zone", "its zone, such as us-west4-a")

LAUNCHERS = {
    "local": Launcher(local, (
        _SHARDS, _PROCESSES,
        Option("port", "port of the first process", 8476),
        Option("device_variable", "variable that gives each process its own device, such as CUDA_VISIBLE_DEVICES", ""),
    ), together=True),
    "tpu_vm": Launcher(tpu_vm, (
        Option("name", "name of the TPU VM"), _ZONE, _PROJECT, _FOLDER, _RESTARTS,
        Option("accelerator_type", "its type, such as v5litepod-16, for a preflight", ""),
        Option("as_is", "use the folder as it is: send no code and make no environment", False),
        Option("attach", "wait and show the output of all workers, instead of running detached", False),
    ), tpu="accelerator_type"),
    "tpu_queued": Launcher(tpu_queued, (
        Option("name", "name of the queued resource, its node and its folder in the bucket"), _ZONE,
        Option("accelerator_type", "type of TPU, such as v5litepod-16"),
        Option("place", "address in a bucket for the code and the logs, such as gs://my-bucket/launches"),
        Option("capacity", "spot, reserved or on_demand", "spot"),
        Option("runtime_version", "software of the machines (default: that of the type of TPU)", ""),
        Option("create", "a further option of gcloud … create (--service-account=…)", ()),
        _PROJECT, _RESTARTS,
    ), tpu="accelerator_type", keeps_disks=False),
    "slurm": Launcher(slurm, (
        _SHARDS, _PROCESSES,
        Option("name", "name of the job", "speccascade"),
        Option("time", "time limit of the job", "04:00:00"),
        Option("folder", "the repository's folder, seen from where sbatch is called", "."),
        Option("sbatch", "a further option of sbatch (--gres=gpu:1)", ()),
        _RESTARTS,
    )),
    "gke": Launcher(gke, (
        Option("cluster", "cluster that xpk has created"),
        Option("tpu_type", "type of TPU, such as v5litepod-16"),
        Option("image", "Docker image of the repository's Dockerfile"),
        Option("name", "name of the workload", "speccascade"),
        Option("zone", "zone of the cluster (default: gcloud's own)", ""),
        _PROJECT,
        Option("folder", "the repository's folder in the image", "/speccascade_jax"),
        Option("xpk", "a further option of xpk (--spot)", ()),
        _RESTARTS,
    ), tpu="tpu_type", keeps_disks=False),
    "skypilot": Launcher(skypilot, (
        Option("accelerators", "accelerators of each node, such as tpu-v5litepod-16 or H100:8"),
        _PROCESSES,
        Option("name", "name of the job", "speccascade"),
        Option("infra", "CLOUD/REGION/ZONE (default: the cheapest)", ""),
        Option("on_demand", "use no spot machines", False),
    ), tpu="accelerators", keeps_disks=False),
}  # fmt: skip
