"""Tests of sweeps that are killed with SIGKILL after some records and restarted: no record is lost, doubled or torn.

One sweep has a single process. The others have several: one process writes, and killing one ends all.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from speccascade_jax.runtime import compilation_cache, hosts, interrupts
from speccascade_jax.runtime.paths import repository_root
from tests.support import tiny_pair

ROOT = repository_root()
POINTS = 2 + 1 + 3  # target and draft alone, spec_decode, and chow at three α's


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hosts")
    (path / "pair").mkdir()
    tiny_pair.write(path / "pair")
    return path


def start(folder, output, count=1, mesh=(1, 1), *flags):
    """Starts the processes of one sweep of six points, each with a device of its own."""
    settings = {
        "sweep.methods": "('spec_decode', 'chow')", "sweep.alphas": "{'chow': (0.2, 0.5, 0.8)}",
        "sweep.block_sizes": "(2,)", "sweep.output": repr(str(output)),
        "ModelPair.name": repr(str(folder / "pair")), "ModelPair.mesh": repr(mesh),
        "ModelPair.draft_dtype": "None", "Evaluation.max_new_tokens": "6", "Evaluation.quality_examples": "3",
        "Evaluation.latency_examples": "0", "Evaluation.resamples": "10",
    }  # fmt: skip
    command = [sys.executable, "-m", "experiments.sweep", "--gin_file=configs/quickstart.gin", *flags]
    command += [f"--gin.{name}={value}" for name, value in settings.items()]
    env = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", compilation_cache.VARIABLE: str(folder / "cache")}
    kwargs = {"cwd": ROOT, "env": os.environ | env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if count == 1:
        return [subprocess.Popen(command, **kwargs)]
    with socket.create_server(("localhost", 0)) as free:
        command += [f"--coordinator_address=localhost:{free.getsockname()[1]}", f"--process_count={count}"]
    return [subprocess.Popen([*command, f"--process_index={index}"], **kwargs) for index in range(count)]


def kill(victim, running, output, sent=signal.SIGKILL):
    """Sends a signal to a process after two records are stored, by default one without warning; returns the time."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and all(process.poll() is None for process in running):
        if output.exists() and output.read_bytes().count(b"\n") >= 2:
            break
        time.sleep(0.02)
    victim.send_signal(sent)
    return time.monotonic()


def ended(processes, timeout=240):
    """Returns the status and the output of each process."""
    said = [process.communicate(timeout=timeout) for process in processes]
    return [(process.returncode, *words) for process, words in zip(processes, said, strict=True)]


def records(path):
    """Returns a store's records by key, without the entries that depend on the clock."""
    all_records = [json.loads(line) for line in path.read_bytes().splitlines()]
    for record in all_records:
        for name in ("started", "wall_seconds", "checksum"):
            del record[name]
    keyed = {record["key"]: record for record in all_records}
    assert len(keyed) == len(all_records)
    return keyed


@pytest.mark.laws
def test_a_killed_sweep_resumes(folder):
    output = folder / "sweep.jsonl"
    running = start(folder, output)
    kill(running[0], running, output)
    ((_, *said),) = ended(running)
    before = output.read_bytes()
    assert 2 <= before.count(b"\n") < POINTS, said
    ((status, *said),) = ended(start(folder, output), timeout=280)
    assert status == 0, said
    assert output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert len(records(output)) == POINTS


@pytest.fixture(scope="module")
def unbroken(folder):
    done = ended(start(folder, folder / "unbroken.jsonl", 2, (2, 1)))
    assert [status for status, *_ in done] == [0, 0], done
    spoken = [
        [line for line in out.splitlines() if "[Gloo]" not in line] for _, out, _ in done
    ]  # lines that the library Gloo prints do not count
    assert "6 points measured" in done[0][1] and spoken[1] == []
    return records(folder / "unbroken.jsonl")


@pytest.mark.sample(1)
@pytest.mark.parity
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_all_and_the_sweep_resumes(victim, folder, unbroken):
    output = folder / f"killed_{victim}.jsonl"
    running = start(folder, output, 2, (2, 1))
    killed = kill(running[victim], running, output)
    status, _, said = ended(running)[1 - victim]
    assert time.monotonic() - killed < hosts.HEARTBEAT + 5
    assert status == hosts.STATUS, said
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    advice = "on all hosts, run the same command again: finished parts are kept, and the rest follows"
    assert lines == [f"error: process {victim} of 2 has ended; {advice}"]
    assert 2 <= output.read_bytes().count(b"\n") < POINTS
    count = 1 + victim  # the second restart keeps the number of processes
    done = ended(start(folder, output, count, (count, 1)))
    assert [status for status, *_ in done] == [0] * count, done
    resumed = records(output)
    assert {key: _measured(record) for key, record in resumed.items()} == {
        key: _measured(record) for key, record in unbroken.items()
    }
    assert (resumed == unbroken) is (count == 2)


def _measured(record):
    """Returns the entries of a record that the mesh and the number of devices do not change."""
    return {name: record[name] for name in ("judged_key", "counts", "quality", "per_example")}


@pytest.mark.sample(1)
@pytest.mark.parity
@pytest.mark.parametrize("preempted", [0, 1])
def test_sigterm_to_one_process_ends_all_at_the_same_point_and_the_sweep_goes_on(preempted, folder, unbroken):
    output = folder / f"preempted_{preempted}.jsonl"
    running = start(folder, output, 2, (2, 1))
    sent = kill(running[preempted], running, output, signal.SIGTERM)
    for status, _, said in ended(running):
        assert status == 128 + signal.SIGTERM, said
        lines = [line for line in said.splitlines() if line.startswith(("stopped:", "error:"))]
        assert lines == [f"stopped: {interrupts.SAME}"]
    assert time.monotonic() - sent < 60
    assert 2 <= output.read_bytes().count(b"\n") < POINTS
    done = ended(start(folder, output, 2, (2, 1)))
    assert [status for status, *_ in done] == [0, 0], done
    assert records(output) == unbroken


@pytest.mark.sample(0)
@pytest.mark.parity
def test_four_processes_write_the_outputs_of_two(folder, unbroken):
    """Splits rows over two and heads over two: the keys differ, the outputs do not."""
    flags = [f"--host_logs={folder / 'logs'}", f"--profile_at={folder / 'traces'}"]
    done = ended(start(folder, folder / "four.jsonl", 4, (2, 2), *flags))
    assert [status for status, *_ in done] == [0] * 4, done
    logs = {path.name: path.read_text() for path in (folder / "logs").iterdir()}
    assert sorted(logs) == ["host-1.log", "host-2.log", "host-3.log"]
    assert all("6 points measured" in text for text in logs.values())
    traces = [sorted((folder / "traces" / f"host-{n}").rglob("*.xplane.pb")) for n in range(4)]
    assert [len(files) for files in traces] == [1] * 4
    measured = [[record["counts"], record["quality"]] for record in records(folder / "four.jsonl").values()]
    assert measured == [[record["counts"], record["quality"]] for record in unbroken.values()]


@pytest.mark.parity
def test_an_error_in_all_processes_is_one_line_each_without_waiting(folder):
    done = ended(start(folder, folder / "wrong.jsonl", 2, (1, 1)), timeout=60)
    for status, _, said in done:
        lines = [line for line in said.splitlines() if line.startswith("error:")]
        assert (status, len(lines)) == (1, 1), said
        assert "mesh=(1, 1) needs 1 devices, but the 2 processes have 2: use all of them" in lines[0]
