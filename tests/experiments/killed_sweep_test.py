"""A real sweep, killed with SIGKILL after its first records and started again: nothing lost, doubled or torn."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from speccascade_jax.runtime import compilation_cache
from speccascade_jax.runtime.paths import repository_root
from tests.support import tiny_pair

pytestmark = pytest.mark.laws

ROOT = repository_root()
POINTS = 2 + 1 + 3  # the two ends, spec_decode, chow at three α's


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))


def start(pair, output):
    """A sweep of six points in a process of its own."""
    settings = {
        "sweep.methods": "('spec_decode', 'chow')", "sweep.alphas": "{'chow': (0.2, 0.5, 0.8)}",
        "sweep.block_sizes": "(2,)",
        "sweep.output": repr(str(output)), "ModelPair.name": repr(str(pair)), "Evaluation.max_new_tokens": "6",
        "Evaluation.quality_examples": "3", "Evaluation.latency_examples": "0", "Evaluation.resamples": "10",
    }  # fmt: skip
    command = [sys.executable, "-m", "experiments.sweep", "--gin_file=configs/quickstart.gin"]
    command += [f"--gin.{name}={value}" for name, value in settings.items()]
    cache = {compilation_cache.VARIABLE: str(output.parent / "cache")}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | cache
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def test_a_killed_sweep_goes_on_where_it_stood(pair, tmp_path):
    output = tmp_path / "sweep.jsonl"
    running = start(pair, output)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and running.poll() is None:
        if output.exists() and output.read_bytes().count(b"\n") >= 2:
            break
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    said = running.communicate()[0]
    before = output.read_bytes()
    assert 2 <= before.count(b"\n") < POINTS, said
    again = start(pair, output)
    said = again.communicate(timeout=280)[0]
    assert again.returncode == 0, said
    assert output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    records = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert len(records) == len({record["key"] for record in records}) == POINTS
