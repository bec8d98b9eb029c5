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
import dataclasses, json, pathlib, tempfile
import jax, numpy as np
from speccascade_jax import checkpoints
from speccascade_jax.core.types import BoundModel
from speccascade_jax.models.t5 import T5
from speccascade_jax.training.finetune import acceptance, decoding, evaluations, optimizers, partition, steps
from speccascade_jax.training.finetune.batches import Batch
from speccascade_jax.training.finetune.distillation import Distillation
from speccascade_jax.training.finetune.objective import Objective
from tests.support import random_t5
from tests.training.conftest import CONFIG, micro_trainer, write_corpus

folder = pathlib.Path(tempfile.mkdtemp())
write_corpus(folder)
checkpoints.save(folder / "teacher", T5(CONFIG), random_t5.parameters(CONFIG, seed=3))
rng = np.random.default_rng(0)
tokens, source = (rng.integers(2, 290, (8, width), dtype=np.int32) for width in (6, 5))
lengths = np.array([6, 5, 4, 3, 2, 6, 6, 0], np.int32)
BATCH = Batch(tokens, lengths, np.zeros(8, np.int32), source, np.full(8, 5, np.int32))
optimizer = optimizers.Adafactor()

def measured(mesh):
    trainer = micro_trainer(folder, folder / "run", mesh=mesh)
    teacher = evaluations.beside(trainer, str(folder / "teacher"))
    named = evaluations.model_of(trainer, str(folder / "teacher"))
    assert named.model.mesh == trainer.devices
    decoding.decode(named, trainer.text, [[3, 4, 1], [5, 1]], 4, batch_size=2)
    leaves = jax.tree.leaves(teacher.params)
    share = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / sum(leaf.nbytes for leaf in leaves)
    params = random_t5.parameters(CONFIG, seed=5)
    layout = None if trainer.devices is None else partition.state_layout(params, optimizer, trainer.devices)
    take = steps.make_train_step(
        trainer.model, optimizer, Objective(), teacher=teacher, distillation=Distillation(teacher="teacher"),
        layout=layout)
    state, losses = partition.fresh_state(params, optimizer, trainer.devices), []
    placed = partition.on_mesh(BATCH, 8, trainer.devices)
    for _ in range(3):
        state, metrics = take(state, placed, np.float32(1e-2), np.uint32(0))
        losses.append(float(metrics["loss"]))
    draft = BoundModel(params=state.params, model=trainer.model)
    agreed, _ = acceptance._agreement(teacher, draft, placed, greedy=False)
    return losses, np.asarray(agreed).tolist(), share

print(json.dumps([measured(mesh) for mesh in ((1, 1), (2, 2))]))
"""


@pytest.mark.parity
def test_a_teacher_is_spread_over_a_mesh_and_the_loss_stays():
    curves = new_process.answer(ON_MESHES, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    (wanted, rates, whole), (losses, agreed, share) = curves
    assert whole == 1 and np.ptp(wanted) > 0.01
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(agreed, rates, rtol=1e-4)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_named_checkpoint_computes_as_the_state_of_the_run(finished, dtype):
    trainer = dataclasses.replace(finished[0], dtype=dtype)
    state, named = (evaluations.model_of(trainer, checkpoint) for checkpoint in ("", str(finished[2])))
    assert named.model == state.model and named.model.config.dtype == dtype
    jax.tree.map(np.testing.assert_array_equal, named.params, state.params)


def test_two_checkpoints_are_compared_over_the_same_prompts(finished, others):
    trainer = dataclasses.replace(finished[0], acceptance_of=others[0], task="", loss_batches=4)
    result = evaluations.evaluate(trainer, others[0], 1, others[1])
    assert result["acceptance_greedy"] == 1 and result["prompts"] >= 8
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
