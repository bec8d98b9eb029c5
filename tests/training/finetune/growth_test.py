"""Tests of starting from a smaller model: the larger one computes the same function at first, then all parts learn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.models.t5 import T5, T5Config, teacher_forced_logits
from speccascade_jax.training.finetune import growth, partition, steps
from speccascade_jax.training.finetune import run as running
from speccascade_jax.training.finetune.batches import Batch
from speccascade_jax.training.finetune.objective import Objective
from speccascade_jax.training.finetune.optimizers import ScaledAdam
from speccascade_jax.training.finetune.schedule import Schedule
from tests.support.random_t5 import parameters as _params

SMALL = T5Config(290, 292, 16, 2, 8, 16, 1, 2)
LARGE = dataclasses.replace(SMALL, d_ff=40, num_encoder_layers=3, num_decoder_layers=5)
WIDER = dataclasses.replace(LARGE, d_model=24, num_heads=3)
SOURCE = np.array([[7, 30, 200, 5, 1, 0], [12, 9, 1, 0, 0, 0]], np.int32)
TARGET = np.array([[44, 8, 91, 3, 270, 1], [5, 77, 102, 1, 0, 0]], np.int32)


@pytest.fixture(scope="module")
def small():
    return _params(SMALL, 0)


@pytest.fixture(scope="module")
def grown(small):
    return growth.grow(small, SMALL, LARGE, _params(LARGE, 1))


@pytest.mark.parametrize(("wanted", "tied"), [(LARGE, False), (WIDER, True)])
def test_a_grown_model_has_the_logits_of_the_smaller_one(wanted, tied):
    old, new = (dataclasses.replace(config, tied=tied) for config in (SMALL, wanted))
    params = _unlike(_params(old, 0))
    grown = growth.grow(params, old, new, _params(new, 1))
    inputs = steps.shift_right(TARGET)
    logits = jax.jit(teacher_forced_logits, static_argnums=0)
    expected, logits_grown = logits(T5(old), params, SOURCE, inputs), logits(T5(new), grown, SOURCE, inputs)
    np.testing.assert_allclose(logits_grown, expected, atol=1e-5)


def _unlike(params):
    """Returns parameters whose norm scales are not all 1, as in trained models."""
    return jax.tree.map(lambda leaf: leaf * np.linspace(0.5, 1.5, len(leaf)) if leaf.ndim == 1 else leaf, params)


@pytest.mark.parametrize("wanted", [LARGE, WIDER])
def test_grown_parameters_have_the_tree_of_the_larger_model(small, wanted):
    fresh = _params(wanted, 1)
    grown = growth.grow(small, SMALL, wanted, fresh)
    assert jax.tree.map(jnp.shape, grown) == jax.tree.map(jnp.shape, fresh)


def test_new_layers_follow_the_layer_that_they_copy(small, grown):
    """Grows two layers to five: origins 0, 0, 0, 1, 1; only the first layer of each origin writes."""
    for i, origin in enumerate((0, 0, 0, 1, 1)):
        layer, origin_layer = grown["decoder"][f"layers_{i}"], small["decoder"][f"layers_{origin}"]
        kernel, wanted = (parameters["self_attention"]["query"]["kernel"] for parameters in (layer, origin_layer))
        np.testing.assert_array_equal(kernel, wanted)
        writes = [np.any(layer[part]["out"]["kernel"]) for part in ("self_attention", "encoder_decoder_attention")]
        assert [*writes, np.any(layer["mlp"]["wo"]["kernel"])] == [i in (0, 3)] * 3


@pytest.mark.laws
@pytest.mark.parametrize("wanted", [LARGE, WIDER])
def test_two_steps_change_every_added_parameter(small, wanted):
    """Checks that new zeros move."""
    optimizer = ScaledAdam(min_scale=1e-2)
    step = steps.make_train_step(T5(wanted), optimizer, Objective())
    grown = growth.grow(small, SMALL, wanted, _params(wanted, 1))
    before = jax.tree.map(np.array, grown)
    state = partition.fresh_state(grown, optimizer, None)
    sizes = [np.array([(row > 0).sum() for row in side], np.int32) for side in (TARGET, SOURCE)]
    batch = Batch(TARGET, sizes[0], np.zeros(2, np.int32), SOURCE, sizes[1])
    for _ in range(2):  # input arrays get gradients only after the output arrays leave zero
        state, _ = step(state, batch, np.float32(1e-2), np.uint32(0))
    for old, new in zip(_written(before), _written(state.params), strict=True):
        moved = np.asarray(old) != np.asarray(new)
        # every unit, head and dimension has changed
        assert np.all(np.any(moved, axis=1)) and np.all(np.any(moved, axis=0))


def _written(params):
    return [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params) if path[-2].key in growth.ENDING]


def test_growing_to_the_same_size_changes_nothing(small):
    same = growth.grow(small, SMALL, dataclasses.replace(SMALL, dropout_rate=0.1), small)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a, b), same, small)))


@pytest.mark.parametrize(
    "changes", [{"d_model": 8}, {"d_ff": 8}, {"num_decoder_layers": 1}, {"gated": False}, {"head_dim": 16}]
)
def test_impossible_growth_is_refused(small, changes):
    with pytest.raises(ValueError, match="only d_model, num_heads, d_ff, .* may differ"):
        growth.grow(small, SMALL, dataclasses.replace(SMALL, **changes), small)
    with pytest.raises(ValueError, match="a stack needs a layer to grow from"):
        growth.grow({}, dataclasses.replace(SMALL, num_decoder_layers=0), SMALL, small)


@pytest.mark.laws
def test_a_run_starts_from_a_smaller_model_and_resumes_to_the_same_weights(finished, tmp_path):
    """Checks that the first evaluation is the smaller model's, and that a killed run ends with the same bits."""
    trainer, result, exported = finished
    config = dataclasses.replace(trainer.config, d_ff=24, num_encoder_layers=2, num_decoder_layers=3)
    changes = {"run_dir": str(tmp_path / "larger"), "config": config, "init_from": str(exported), "dropout": 0.1}
    larger = dataclasses.replace(trainer, schedule=Schedule(max_steps=6), **changes)
    whole = running.Run(larger)
    assert whole.evaluate(0)["validation_loss"] == pytest.approx(result["validation_loss"], abs=1e-4)
    whole.finish()
    broken = dataclasses.replace(larger, run_dir=str(tmp_path / "broken"))
    killed = running.Run(broken)
    for step, planned in zip(range(1, 4), killed.remaining(), strict=False):
        killed.take(step, planned)
    killed.save(wait=True)
    resumed = running.Run(dataclasses.replace(broken, init_from=""))  # the saved state is used, not init_from
    resumed.finish()
    for wanted, leaf in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(wanted, leaf)
