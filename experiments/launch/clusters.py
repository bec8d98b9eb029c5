"""Launchers for clusters with their own scheduler: SLURM, GKE by xpk, and SkyPilot.

Sources:
    SLURM: slurm.schedmd.com (sbatch, srun, scontrol). `--signal` without `B:` signals the job's steps. With `B:` the
        script would have to pass the signal on, but `srun` kills its tasks at once when it gets SIGTERM itself.
    xpk: github.com/AI-Hypercomputer/xpk, src/xpk/parser/workload.py (1.16). Besides the statuses of
        --restart-on-exit-codes, it always restarts after 42 and 127 to 255.
    SkyPilot: docs.skypilot.co, YAML specification (resources.job_recovery), Cloud TPU, and distributed jobs.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import textwrap
from collections.abc import Sequence

from experiments.launch import scripts
from experiments.launch.accelerators import joined, multiprocess, software_of
from experiments.launch.steps import Command, File, Step
from experiments.launch.tpus import check_name, folder_of, shell_folder

GRACE = 120
"""Seconds before a job's time limit at which SLURM sends SIGTERM; it may come a minute earlier."""
_PORT = 8476


def slurm(args: argparse.Namespace, command: Sequence[str]) -> list[Step]:
    """Submits the command to SLURM, which queues it again when it must restart or reaches the time limit."""
    options = [
        f"--job-name={args.name}", f"--time={args.time}", "--requeue", "--open-mode=append", f"--signal=TERM@{GRACE}",
    ]  # fmt: skip
    if args.shards > 1:
        options += ["--output=%x-%A_%a.log", f"--array=0-{args.shards - 1}", "--ntasks=1"]
        line = f"srun {shlex.join(command)} --shard_id=$SLURM_ARRAY_TASK_ID --num_shards={args.shards}"
        job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else:
        options += ["--output=%x-%j.log", f"--nodes={args.processes}", "--ntasks-per-node=1"]
        each_host = "--output=%x-%j.host-%n.log --open-mode=append "
        line, job = f"srun {shlex.join(command)}", "$SLURM_JOB_ID"
        if args.processes > 1:
            words = shlex.join(multiprocess(command))
            line = f'{_TASK}srun --kill-on-bad-exit=0 {each_host}bash -c "$task" task {words}'
    head = "".join(f"#SBATCH {option}\n" for option in (*options, *args.sbatch))
    script = f"#!/bin/bash\n{head}cd {shell_folder(args.folder)} || exit 1\n{line}\n{_requeue(job, args.max_restarts)}"
    return [Command(("sbatch",), stdin=script)]


_TASK = """\
# srun's status is the largest one of its tasks: a killed task must not hide the 75 of all others, nor a 75 an error
task='
  trap : TERM
  "$@"; status=$?
  case $status in
    0|75|143) ;;
    137) status=75 ;;
    *) test "$status" -ge 128 || status=$((status + 128)) ;;
  esac
  exit "$status"'
"""
"""Shell lines that define `task`, a script that runs the command and translates its exit status; each process runs it.

The trap lets the shell wait for the command, which gets SIGTERM too. Without a cluster's `KillOnBadExit`, tasks end by
themselves when one of them has died (`runtime.hosts`).
"""


def _requeue(job: str, max_restarts: int) -> str:
    return f"""\
status=$?
case $status in
  {"|".join(map(str, scripts.RESTARTED))})
    test "${{SLURM_RESTART_COUNT:-0}}" -ge {max_restarts} || scontrol requeue "{job}" ;;
esac
exit "$status"
"""


def gke(args: argparse.Namespace, command: Sequence[str]) -> list[Step]:
    """Creates a workload for the command on a GKE cluster that xpk has created; it restarts after preemption."""
    check_name(args.name)
    check_name(args.cluster)
    command = joined(command, args.tpu_type, gke=True)
    words = ["xpk", "workload", "create", f"--workload={args.name}", f"--cluster={args.cluster}"]
    words += [f"--tpu-type={args.tpu_type}", f"--docker-image={args.image}"]
    words += [f"--zone={args.zone}"] if args.zone else []
    words += [f"--project={args.project}"] if args.project else []
    words += [f"--max-restarts={args.max_restarts}"]
    words += [f"--restart-on-exit-codes={','.join(map(str, scripts.RESTARTED))}", *args.xpk]
    # xpk sends signals to the shell; `exec` replaces the shell by the command, which then saves its state
    return [Command((*words, f"--command=cd {shell_folder(args.folder)} && exec {shlex.join(command)}"))]


def skypilot(args: argparse.Namespace, command: Sequence[str]) -> list[Step]:
    """Starts the command as a managed job of SkyPilot, which finds (spot) machines, on any cloud, and recovers."""
    check_name(args.name)
    if not re.fullmatch(r"[\w.-]+(:\d+)?", args.accelerators):
        raise ValueError(f"accelerators={args.accelerators!r}: give a name, such as tpu-v5litepod-16 or H100:8")
    if not re.fullmatch(r"[\w./*-]*", args.infra):
        raise ValueError(f"infra={args.infra!r}: give CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE, such as gcp/us-west4")
    file = File(f"{folder_of(args.name)}/task.yaml", _task(args, command))
    return [file, Command(("sky", "jobs", "launch", "--yes", f"--name={args.name}", file.path))]


def _task(args: argparse.Namespace, command: Sequence[str]) -> str:
    """Returns a task of SkyPilot as YAML; JSON's texts are YAML's, too."""
    if _is_tpu(args) and args.processes == 1:
        command = joined(command, args.accelerators.removeprefix("tpu-"))
    line = shlex.join(command)
    if args.processes > 1:
        line += f' --coordinator_address="$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):{_PORT}"'
        line += " --process_count=$SKYPILOT_NUM_NODES --process_index=$SKYPILOT_NODE_RANK"
    return f"""\
name: {args.name}
workdir: .
num_nodes: {args.processes}
resources:
{_hardware(args)}\
  use_spot: {"false" if args.on_demand else "true"}
  job_recovery:
    max_restarts_on_errors: 0
    recover_on_exit_codes: {list(scripts.RESTARTED)}
setup: |
{textwrap.indent(scripts.environment("tpu" if _is_tpu(args) else "cuda12"), "  ")}
run: |
  {scripts.ACTIVATE}
  {line}
"""


def _hardware(args: argparse.Namespace) -> str:
    infra = f"  infra: {json.dumps(args.infra)}\n" if args.infra else ""
    lines = f"{infra}  accelerators: {json.dumps(args.accelerators)}\n"
    if _is_tpu(args):  # SkyPilot 0.14 takes v2-alpha-tpuv5 for v5litepod, which is the software of v5p
        software = software_of(args.accelerators.removeprefix("tpu-"))
        lines += f"  accelerator_args:\n    runtime_version: {software}\n"
    return lines


def _is_tpu(args: argparse.Namespace) -> bool:
    return args.accelerators.startswith("tpu-")
