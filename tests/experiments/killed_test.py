"""Tests of jobs that are killed at random disk operations and restarted: results equal those without kills."""

import multiprocessing
import os
import random
import shutil

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints.infer import expected_shapes
from speccascade_jax.models.t5 import T5, T5Config
from tests.support import killed_jobs, tiny_pair
from tests.training.conftest import write_corpus

pytestmark = pytest.mark.laws
KILLS = int(os.environ.get("SPECCASCADE_KILLS", "4"))
"""Number of killed processes, over all jobs."""
SECONDS = 240


@pytest.fixture(scope="module")
def start():
    """Returns `start(job, shared, folder, dies_at)`, which runs a job in a fork and returns the exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.killed_jobs"])

    def start(*args):
        process = context.Process(target=killed_jobs.run, args=args)
        process.start()
        process.join(SECONDS)
        process.kill()
        process.join()
        return process.exitcode

    return start


@pytest.fixture(scope="module")
def shared(tmp_path_factory, start):
    """Returns the folder that the jobs read: a pair, a corpus, acceptance data, two checkpoints of one shape."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "pair").mkdir()
    tiny_pair.write(folder / "pair")
    (folder / "corpus").mkdir()
    write_corpus(folder / "corpus")
    config = T5Config(24, 24, 8, 2, 4, 8, 1, 1)
    for seed, name in enumerate(("old", "new")):
        draws = np.random.default_rng(seed)
        flat = {name: draws.normal(size=shape) for name, shape in expected_shapes(config).items()}
        checkpoints.save(folder / name, T5(config), unflatten_dict(flat, sep="/"))
    assert start("data", folder, folder, 0) == 0
    return folder


@pytest.mark.parametrize("job", killed_jobs.JOBS)
def test_a_killed_job_gives_the_result_of_an_uninterrupted_one(job, shared, start, tmp_path):
    whole = killed_jobs.prepare(tmp_path / f"{job}-whole", shared)
    assert start(job, shared, whole, 0) == 0
    expected, count = killed_jobs.outcome(whole), int(whole.with_suffix(".count").read_text())
    if job == "conversion":
        ends = [killed_jobs.model(shared / name) for name in ("old", "new")]
        assert expected == {"out": ends[1]}
    draws = random.Random(job)
    for kill in range(max(1, KILLS // len(killed_jobs.JOBS))):
        folder = killed_jobs.prepare(tmp_path / f"{job}-{kill}", shared)
        while (code := start(job, shared, folder, draws.randint(1, count))) != 0:
            assert code == -9, code
            if job == "conversion":
                assert killed_jobs.model(folder / "out") in ends  # after every kill, the old or the new one
            if draws.random() < 0.5:
                assert start(job, shared, folder, 0) == 0
                break
        assert killed_jobs.outcome(folder) == expected
        shutil.rmtree(folder)
