"""A real sweep, killed with SIGKILL after its first records and started again: nothing lost, doubled or torn."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from speccascade_jax import checkpoints, compilation_cache
from speccascade_jax.data import vocabularies
from speccascade_jax.data.directory import repository_root
from speccascade_jax.data.tasks import get_task
from speccascade_jax.models.t5 import T5, T5Config, T5Module

ROOT = repository_root()
POINTS = 2 + 1 + 3  # the two ends, spec_decode, chow at three α's


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with a pair of random, very small T5s."""
    folder = tmp_path_factory.mktemp("pair")
    texts = [
        text for example in get_task("tiny_translation").load(limit=40) for text in (example.source, example.reference)
    ]
    (folder / "vocabulary.model").write_bytes(vocabularies.train(texts, 320))
    token = jnp.ones((1, 2), jnp.int32)
    for seed, part in enumerate(("target", "draft")):
        config = T5Config(320, 320, 16, 2, 8, 16, 1, 1)
        params = T5Module(config).init(jax.random.key(seed), token, token)["params"]
        checkpoints.save(folder / part, T5(config), params)
    return folder


def start(pair, output):
    """A sweep of six points in a process of its own."""
    settings = {
        "sweep.rules": "('spec_decode', 'chow')", "sweep.alphas": "{'chow': (0.2, 0.5, 0.8)}",
        "sweep.block_sizes": "(2,)",
        "sweep.output": repr(str(output)), "ModelPair.name": repr(str(pair)), "Evaluation.max_new_tokens": "6",
        "Evaluation.quality_examples": "3", "Evaluation.latency_examples": "2", "Evaluation.resamples": "10",
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
