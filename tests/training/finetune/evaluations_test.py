"""Tests of models beside the trained one: dtype, layout on a mesh, equal losses; comparison of two checkpoints."""

import dataclasses

import jax
import numpy as np
import pytest

from speccascade_jax import checkpoints
from speccascade_jax.models.t5 import T5
from speccascade_jax.training.finetune import evaluations
from tests.support import new_process, random_t5
from tests.training.conftest import CONFIG

ON_MESHES = """
import dataclasses, json, pathlib, sys, tempfile
import jax
from speccascade_jax import checkpoints
from speccascade_jax.models.t5 import T5
from speccascade_jax.training.finetune import run as running
from speccascade_jax.training.finetune.corpus import JoinedCorpus
from speccascade_jax.training.finetune.distillation import Distillation
from speccascade_jax.training.finetune.schedule import Schedule
from tests.support import random_t5
from tests.training.conftest import CONFIG, micro_trainer, write_corpus

folder = pathlib.Path(tempfile.mkdtemp())
write_corpus(folder)
checkpoints.save(folder / "teacher", T5(CONFIG), random_t5.parameters(CONFIG, seed=3))
corpus = JoinedCorpus(path=str(folder / "pairs.tsv"), max_joined=1, widths=(24,), rows=8)

def share(bound):
    leaves = jax.tree.leaves(bound.params)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    return held / sum(leaf.nbytes for leaf in leaves)

def curve(name, mesh, outputs):
    settings = {"mesh": mesh, "corpus": corpus, "validation": corpus, "schedule": Schedule(peak=1e-2, max_steps=3)}
    settings |= {"distillation": Distillation(teacher=str(folder / "teacher"), outputs=outputs), "log_every": 1, "loss_batches": 1}
    run = running.Run(micro_trainer(folder, folder / name, task="", **settings))
    result = run.finish()
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records[:3]], result["acceptance_sampled"], share(run.acceptance.target)

print(json.dumps([curve(f"{data}_{model}", (data, model), "mixed") for data, model in ((1, 1), (2, 2))]))
"""


@pytest.mark.parity
def test_a_teacher_is_spread_over_a_mesh_and_the_loss_stays():
    curves = new_process.answer(ON_MESHES, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    (wanted, rate, whole), (losses, accepted, share) = curves
    assert whole == 1 and np.ptp(wanted) > 0.01
    np.testing.assert_allclose(losses, wanted, atol=1.01e-4)  # records have four decimals
    assert accepted == pytest.approx(rate, abs=1.01e-4)
    assert share < 0.3, "a device holds a quarter, and vectors that are not split"


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Returns the folders of two random checkpoints with the configuration of the runs."""
    folder = tmp_path_factory.mktemp("others")
    for seed in (3, 4):
        checkpoints.save(folder / str(seed), T5(CONFIG), random_t5.parameters(CONFIG, seed=seed))
    return str(folder / "3"), str(folder / "4")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_teacher_has_the_dtype_of_the_run(finished, others, dtype):
    bound = evaluations.beside(dataclasses.replace(finished[0], dtype=dtype), others[0])
    assert bound.model.config.dtype == dtype
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(bound.params)} == {dtype}


def test_two_checkpoints_are_compared_over_the_same_prompts(finished, others):
    trainer = dataclasses.replace(finished[0], acceptance_of=others[0], task="", loss_batches=2)
    result = evaluations.evaluate(trainer, others[0], 1, others[1])
    assert result["acceptance_greedy"] == 1 and result["prompts"] >= 5
    alone = evaluations.evaluate(trainer, others[1], 1)
    for name in ("greedy", "sampled"):
        value, low, high = result[f"difference_{name}"]
        assert value == pytest.approx(result[f"acceptance_{name}"] - alone[f"acceptance_{name}"], abs=1.01e-4)
        assert 0 < low < value < high
    same = evaluations.evaluate(trainer, others[1], 1, others[1])
    assert same["difference_sampled"] == [0, 0, 0], "differences are paired"


def test_nothing_to_measure_is_refused(finished):
    for changes, against in (({"task": ""}, ""), ({}, "model")):
        with pytest.raises(ValueError, match="no acceptance rate can be measured: set acceptance_of"):
            evaluations.evaluate(dataclasses.replace(finished[0], **changes), str(finished[2]), 1, against)
