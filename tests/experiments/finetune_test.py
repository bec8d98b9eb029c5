"""Tests of fine-tuning runs that are killed repeatedly, on one process or two, on a disk and in a bucket.

Results equal those without kills.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from speccascade_jax.runtime import compilation_cache, hosts, interrupts
from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.training import runs
from speccascade_jax.training.bucket_states import open_states
from speccascade_jax.training.finetune.optimizers import Adafactor
from tests.training import conftest as micro

ROOT = repository_root()
SECONDS = 400
KILLS = int(os.environ.get("SPECCASCADE_KILLS", "2")) // 2
"""Number of kills, on one process and again on two."""
PER_RUN, MOST = 5, 10
"""Number of kills of a run, and the most steps that it takes before each."""
STEPS = 20 + MOST * min(KILLS, PER_RUN)
GIN = f"""
from __gin__ import dynamic_registration
from speccascade_jax.models import t5
from speccascade_jax.training.finetune import corpus
from speccascade_jax.training.finetune import objective
from speccascade_jax.training.finetune import schedule
from speccascade_jax.training.finetune import trainer

trainer.Trainer:
    config = @t5.T5Config()
    dropout = 0.1
    corpus = @corpus.JoinedCorpus()
    validation = @corpus.JoinedCorpus()
    schedule = @schedule.Schedule()
    objective = @objective.Objective()
    log_every = 1
    evaluate_every = 1000
    save_every_minutes = 0.002
corpus.JoinedCorpus:
    max_joined = 2
    widths = (64,)
    tokens_per_batch = 256
schedule.Schedule:
    peak = 1e-2
    warmup_steps = 5
    max_steps = {STEPS}
objective.Objective.z_loss = 1e-4
t5.T5Config:
    vocab_size = 290
    num_embeddings = 292
    d_model = 16
    num_heads = 2
    head_dim = 8
    d_ff = 16
    num_encoder_layers = 1
    num_decoder_layers = 1
"""
UNEQUAL = {"minutes", "tokens_per_second", "mfu"}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Returns `start(run_dir, count)`, which starts the processes of a run; each has a device of its own."""
    folder = tmp_path_factory.mktemp("finetune")
    micro.write_corpus(folder)
    (folder / "micro.gin").write_text(GIN)
    # a lease outlives a killed process for half a minute, which tests should not wait
    (folder / "short_leases.py").write_text("from speccascade_jax.storage import leases\nleases.SECONDS = 1.0\n")

    def start(run_dir, count=1):
        settings = {
            "trainer.Trainer.run_dir": repr(str(run_dir)),
            "trainer.Trainer.vocabulary": repr(str(folder / "vocabulary.model")),
            "corpus.JoinedCorpus.path": repr(str(folder / "pairs.tsv")), "trainer.Trainer.mesh": repr((count, 1)),
        }  # fmt: skip
        command = [sys.executable, "-m", "experiments.finetune", f"--gin_file={folder / 'micro.gin'}"]
        command += [f"--gin.{name}={value}" for name, value in settings.items()]
        command.append(f"--import={folder / 'short_leases.py'}")
        env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        env[compilation_cache.VARIABLE] = str(folder / "cache")
        pipes = {"cwd": ROOT, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        if count == 1:
            return [subprocess.Popen(command, **pipes)]
        with socket.create_server(("localhost", 0)) as free:
            command += [f"--coordinator_address=localhost:{free.getsockname()[1]}", f"--process_count={count}"]
        return [subprocess.Popen([*command, f"--process_index={index}"], **pipes) for index in range(count)]

    return start


def _ended(processes):
    try:
        said = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *words) for process, words in zip(processes, said, strict=True)]


def _logged(run_dir):
    path = run_dir / runs.METRICS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def finished(start, run_dir, count):
    """Lets a run go on to its end; returns the bits of its state, and its records without the clock's."""
    done = _ended(start(run_dir, count))
    assert [status for status, *_ in done] == [0] * count, done
    lines = [json.loads(line) for line in (run_dir / runs.METRICS_FILE).read_text().splitlines()]
    records = [{name: value for name, value in line.items() if name not in UNEQUAL} for line in lines]
    assert [record["step"] for record in records] == [*range(1, STEPS + 1), STEPS]
    like = micro.micro_trainer(run_dir, run_dir, optimizer=Adafactor(), dropout=0.1).layout()
    state, _ = open_states(run_dir).latest(like)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)], records


@pytest.fixture(scope="module")
def unbroken(start, tmp_path_factory):
    """Returns a function from the number of processes to the result of a run without kills."""
    results = {}

    def unbroken(count):
        if count not in results:
            results[count] = finished(start, tmp_path_factory.mktemp("unbroken") / "run", count)
        return results[count]

    return unbroken


def killed(start, run_dir, count, draws):
    """Starts or resumes a run, and ends it at a random moment of its training; returns whether it was ended."""
    number, victim = draws.choice((signal.SIGKILL, signal.SIGTERM)), draws.randrange(count)
    before, steps, running = _logged(run_dir), draws.randint(1, MOST), start(run_dir, count)
    # a resumed run drops the records after its state before it begins
    while all(process.poll() is None for process in running) and not 0 < _logged(run_dir) != before:
        time.sleep(0.01)
    begun = _logged(run_dir)
    while all(process.poll() is None for process in running) and _logged(run_dir) < begun + steps:
        time.sleep(0.001)
    time.sleep(draws.uniform(0, 0.05))
    running[victim].send_signal(number)
    done = _ended(running)
    statuses = [status for status, *_ in done]
    assert not any("damaged" in said for *_, said in done), done
    if statuses == [0] * count:
        return False
    if number == signal.SIGTERM:
        assert statuses == [143] * count, done
        assert f"stopped: {interrupts.SAVED}" in done[0][2]
        assert open_states(run_dir)._steps()[-1] == _logged(run_dir)
    else:
        assert statuses[victim] == -9 and {*statuses} <= {-9, hosts.STATUS}, done
    return True


COUNTS = [pytest.param(1, marks=pytest.mark.laws), pytest.param(2, marks=pytest.mark.parity)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", ["disk", "bucket"])
@pytest.mark.parametrize("count", COUNTS)
def test_killed_runs_give_the_result_of_uninterrupted_runs(count, place, start, unbroken, tmp_path, request):
    if place == "bucket":
        request.getfixturevalue("bucket")
    draws, kills, run = random.Random(count), 0, 0
    while kills < KILLS:
        folder = BucketPath("gs://bucket/runs") if place == "bucket" else tmp_path
        run_dir, run = folder / f"run_{run}", run + 1
        kills += sum(killed(start, run_dir, count, draws) for _ in range(min(PER_RUN, KILLS - kills)))
        assert finished(start, run_dir, count) == unbroken(count)
    print(f"{kills} kills of {run} runs on {count} processes")


@pytest.mark.parity
def test_two_processes_give_the_training_result_of_one_process(unbroken):
    (_, alone), (_, together) = unbroken(1), unbroken(2)
    for name in ("loss", "gradient_norm", "validation_loss"):
        wanted, curve = ([record[name] for record in records[:20] + records[-1:] if name in record]
                         for records in (alone, together))  # fmt: skip
        # records are rounded to four decimals, and small differences grow from step to step
        np.testing.assert_allclose(curve[:20], wanted[:20], atol=1.01e-4)
