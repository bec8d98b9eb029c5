"""A sweep by several processes: one writes, a kill ends all, and it goes on where it stood."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from speccascade_jax.runtime import compilation_cache, hosts
from speccascade_jax.runtime.lost_hosts import STATUS
from speccascade_jax.runtime.paths import repository_root
from tests.support import tiny_pair

pytestmark = pytest.mark.parity

ROOT = repository_root()
POINTS = 2 + 1 + 3  # the two ends, spec_decode, chow at three α's


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hosts")
    (path / "pair").mkdir()
    tiny_pair.write(path / "pair")
    return path


def start(folder, output, count, mesh):
    """The processes of one sweep, each with a device of its own."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "sweep.methods": "('spec_decode', 'chow')", "sweep.alphas": "{'chow': (0.2, 0.5, 0.8)}",
        "sweep.block_sizes": "(2,)", "sweep.output": repr(str(output)),
        "ModelPair.name": repr(str(folder / "pair")), "ModelPair.mesh": repr(mesh),
        "ModelPair.draft_dtype": "None", "Evaluation.max_new_tokens": "6", "Evaluation.quality_examples": "3",
        "Evaluation.latency_examples": "0", "Evaluation.resamples": "10",
    }  # fmt: skip
    command = [sys.executable, "-m", "experiments.sweep", "--gin_file=configs/quickstart.gin"]
    command += [f"--gin.{name}={value}" for name, value in settings.items()]
    command += [f"--coordinator_address=localhost:{port}", f"--process_count={count}"]
    own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", compilation_cache.VARIABLE: str(folder / "cache")}
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | own
    pipe = subprocess.PIPE
    return [
        subprocess.Popen(
            [*command, f"--process_index={index}"], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
        )
        for index in range(count)
    ]


def ended(processes, timeout=240):
    """Status and words of each."""
    said = [process.communicate(timeout=timeout) for process in processes]
    return [(process.returncode, *words) for process, words in zip(processes, said, strict=True)]


def records(path):
    """By key, without what hangs on the clock."""
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    for record in found:
        for name in ("started", "wall_seconds", "checksum"):
            del record[name]
    keyed = {record["key"]: record for record in found}
    assert len(keyed) == len(found)
    return keyed


@pytest.fixture(scope="module")
def unbroken(folder):
    done = ended(start(folder, folder / "unbroken.jsonl", 2, (2, 1)))
    assert [status for status, *_ in done] == [0, 0], done
    spoken = [[line for line in out.splitlines() if "[Gloo]" not in line] for _, out, _ in done]  # that is not ours
    assert "6 points measured" in done[0][1] and spoken[1] == []
    return records(folder / "unbroken.jsonl")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_all_and_the_sweep_goes_on(victim, folder, unbroken):
    output = folder / f"killed_{victim}.jsonl"
    running = start(folder, output, 2, (2, 1))
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and all(process.poll() is None for process in running):
        if output.exists() and output.read_bytes().count(b"\n") >= 2:
            break
        time.sleep(0.02)
    running[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    status, _, said = ended(running)[1 - victim]
    assert time.monotonic() - killed < hosts.HEARTBEAT + 5
    assert status == STATUS, said
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    told = "on all hosts give the same command again: what was finished stays, the rest follows"
    assert lines == [f"error: process {victim} of 2 is gone; {told}"]
    assert 2 <= output.read_bytes().count(b"\n") < POINTS
    done = ended(start(folder, output, 2, (2, 1)))
    assert [status for status, *_ in done] == [0, 0], done
    assert records(output) == unbroken


def test_four_processes_write_what_two_do(folder, unbroken):
    """Rows over two, heads over two: other keys, the same outputs."""
    done = ended(start(folder, folder / "four.jsonl", 4, (2, 2)))
    assert [status for status, *_ in done] == [0] * 4, done
    measured = [[record["counts"], record["quality"]] for record in records(folder / "four.jsonl").values()]
    assert measured == [[record["counts"], record["quality"]] for record in unbroken.values()]


def test_an_error_in_all_is_one_line_each_and_no_waiting(folder):
    done = ended(start(folder, folder / "wrong.jsonl", 2, (1, 1)), timeout=60)
    for status, _, said in done:
        assert status == 1 and "mesh=(1, 1) takes 1 devices, and the 2 processes have 2: take all of them" in said
