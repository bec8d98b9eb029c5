"""Tests of one training step: decoder inputs, filler rows, parts of a batch, early exits, dropped layers, meshes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core.types import BoundModel
from speccascade_jax.models.early_exit import early_exit
from speccascade_jax.models.layers import EXITS
from speccascade_jax.models.t5 import T5, T5Config, T5Module
from speccascade_jax.training.finetune import partition, steps
from speccascade_jax.training.finetune.batches import Batch
from speccascade_jax.training.finetune.distillation import Distillation
from speccascade_jax.training.finetune.objective import Objective
from speccascade_jax.training.finetune.optimizers import ScaledAdam
from tests.support import new_process, random_t5

CONFIG = T5Config(10, 12, 8, 2, 4, 8, 1, 1)
DEEP = replace(CONFIG, num_decoder_layers=3)
SOURCE = np.array([[3, 4, 1, 0], [5, 1, 0, 0]], np.int32)
TARGET = np.array([[6, 7, 8, 1], [9, 1, 0, 0]], np.int32)
BATCH = Batch(TARGET, np.array([4, 2], np.int32), np.zeros(2, np.int32), SOURCE, np.array([3, 2], np.int32))
RATE, SEED = np.float32(0.01), np.uint32(0)

PLAIN = Objective()


def _stepped(config, batch=BATCH, step=0, objective=PLAIN, accumulate=1):
    """Returns the state after one step, and its metrics."""
    take = steps.make_train_step(T5(config), ScaledAdam(), objective, accumulate=accumulate)
    state = partition.fresh_state(random_t5.parameters(config, 1), ScaledAdam(), None).replace(step=jnp.int32(step))
    return take(state, batch, RATE, SEED)


def _close(state, other):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), state.params, other.params)


def test_only_the_first_process_holds_a_copy_of_the_whole_model(monkeypatch):
    assert partition.on_host({"a": jnp.arange(2)})["a"].tolist() == [0, 1]
    monkeypatch.setattr(partition.hosts, "first", lambda: False)
    assert partition.on_host({"a": jnp.arange(2)}) == {"a": None}


def test_the_decoder_reads_the_targets_after_a_start_token():
    assert steps.shift_right(jnp.asarray(TARGET)).tolist() == [[0, 6, 7, 8], [0, 9, 1, 0]]


def test_filler_rows_and_padding_change_nothing():
    """Fills up with rows of length 0, and puts tokens where only lengths say that there are none."""
    rows = [np.concatenate([side, fill], dtype=np.int32) for side, fill in zip(
        BATCH, ([[7] * 4], [0], [0], [[5] * 4], [1]), strict=True)]  # fmt: skip
    filled = Batch(*rows)
    for side in ("tokens", "encoder_tokens"):
        padded = getattr(filled, side)
        padded[1, 2:] = 8
    (state, metrics), (other, other_metrics) = _stepped(CONFIG), _stepped(CONFIG, filled)
    assert int(metrics["tokens"]) == int(other_metrics["tokens"]) == 6
    assert float(metrics["loss"]) == pytest.approx(float(other_metrics["loss"]), rel=1e-5)
    _close(state, other)


def test_a_batch_in_parts_takes_the_step_of_the_whole_batch():
    """The parts have different numbers of tokens, so a mean of their means would be another step."""
    (state, metrics), (other, other_metrics) = _stepped(CONFIG), _stepped(CONFIG, accumulate=2)
    for name, value in metrics.items():
        assert float(other_metrics[name]) == pytest.approx(float(value), rel=1e-5), name
    _close(state, other)


def test_a_teacher_with_another_vocabulary_is_refused():
    teacher = BoundModel(params={}, model=T5(T5Config(11, 12, 8, 2, 4, 8, 1, 1)))
    teaching = {"distillation": Distillation(teacher="target"), "teacher": teacher}
    with pytest.raises(ValueError, match="the teacher has 11 tokens, but the student has 10"):
        steps.make_train_step(T5(CONFIG), ScaledAdam(), Objective(), **teaching)


def test_evaluation_counts_target_tokens():
    total, count = steps.make_eval_step(T5(CONFIG))(random_t5.parameters(CONFIG, 1), BATCH)
    assert int(count) == 6
    assert float(total) / 6 == pytest.approx(float(_stepped(CONFIG)[1]["loss"]), rel=1e-5)


@pytest.mark.laws
def test_one_exit_in_turn_adds_its_cross_entropy_weighed_by_its_depth():
    bound = BoundModel(random_t5.parameters(DEEP, 1), T5(DEEP))

    def loss_at(layer):
        exit = early_exit(bound, layer)
        total, count = steps.make_eval_step(T5(exit.model.model.config))(exit.params, BATCH)
        return float(total) / int(count)

    for step, layer in ((0, 1), (1, 2), (2, 1)):
        weight = 0.6 * layer / 3
        expected = (loss_at(3) + weight * loss_at(layer)) / (1 + weight)
        loss = float(_stepped(DEEP, step=step, objective=Objective(exit_weight=0.6))[1]["loss"])
        assert loss == pytest.approx(expected, rel=1e-5), layer
    assert float(_stepped(DEEP)[1]["loss"]) == pytest.approx(loss_at(3), rel=1e-5)


def test_higher_layers_are_dropped_more_often():
    config, rows = replace(DEEP, layer_dropout=0.9), 4000
    source, inputs = np.tile(SOURCE[:1], (rows, 1)), np.tile([[0]], (rows, 1))
    params = random_t5.parameters(config, 1)
    run = jax.jit(partial(T5Module(config).apply, deterministic=False, mutable=[EXITS]))
    _, sown = run({"params": params}, source, inputs, rngs={"dropout": jax.random.key(3)})
    hidden = [np.asarray(states)[:, 0] for states in sown[EXITS]["decoder"]["hidden"]]
    left_out = [(after == before).all(-1).mean() for before, after in zip(hidden, hidden[1:], strict=False)]
    np.testing.assert_allclose(left_out, [0.9 * (2**0.5 - 1), 0.9], atol=0.03)
    # the first layer is never dropped, and evaluation drops none
    assert len(np.unique(hidden[0].round(4), axis=0)) == 1
    plain, same = (steps.make_eval_step(T5(c))(params, BATCH)[0] for c in (DEEP, config))
    assert float(plain) == float(same)


def test_layer_dropout_does_not_change_a_models_identity_and_bad_settings_are_refused():
    assert repr(T5(DEEP)) == repr(T5(replace(DEEP, layer_dropout=0.2)))
    with pytest.raises(ValueError, match="layer_dropout is 1.0: give a probability"):
        replace(DEEP, layer_dropout=1.0)
    for name, value in (("exit_weight", -1), ("z_loss", float("inf"))):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            Objective(**{name: value})
    with pytest.raises(ValueError, match=r"smoothing=1.5 must be in \[0, 1\)"):
        Objective(smoothing=1.5)
    with pytest.raises(ValueError, match="a decoder of one layer has no early exit"):
        steps.make_train_step(T5(CONFIG), ScaledAdam(), Objective(exit_weight=1.0))


CURVES = """
import dataclasses, json
import jax, numpy as np
from speccascade_jax.models.decoder import DecoderLM, tiny
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.runtime import mesh as meshes
from speccascade_jax.training.finetune import optimizers, partition, steps
from speccascade_jax.training.finetune.batches import Batch
from speccascade_jax.training.finetune.objective import Objective
from speccascade_jax.training.finetune.trainer import random_params

STEPS, ROWS = 20, 16

def batches(encoder_decoder):
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        tokens, lengths = (rng.integers(*span).astype(np.int32) for span in ((1, 96, (ROWS, 12)), (4, 13, ROWS)))
        lengths[-1] = 0
        if encoder_decoder:
            source = rng.integers(1, 96, (ROWS, 10)).astype(np.int32)
            yield Batch(tokens, lengths, np.zeros(ROWS, np.int32), source, rng.integers(4, 11, ROWS).astype(np.int32))
        else:
            yield Batch(tokens, lengths, np.minimum(lengths, rng.integers(1, 4, ROWS)).astype(np.int32))

def curve(model, params, shape, accumulate=1):
    optimizer, mesh = optimizers.Adafactor(), meshes.make(shape)
    layout = partition.state_layout(params, optimizer, mesh)
    model = dataclasses.replace(model, mesh=mesh)
    take = steps.make_train_step(
        model, optimizer, Objective(z_loss=1e-4), accumulate=accumulate, layout=None if mesh is None else layout)
    state, losses = partition.fresh_state(params, optimizer, mesh), []
    for batch in batches(model.is_encoder_decoder):
        placed = partition.on_mesh(batch, ROWS, mesh)
        state, metrics = take(state, placed, np.float32(1e-2), np.uint32(3))
        losses.append([float(metrics[name]) for name in ("loss", "tokens", "gradient_norm")])
    largest = max(jax.tree.leaves(state), key=lambda leaf: leaf.size)
    return losses, largest.size // largest.addressable_shards[0].data.size

curves = {}
t5 = T5(T5Config(96, 96, 32, 4, 8, 64, 1, 1, dropout_rate=0.1))
decoder = DecoderLM(dataclasses.replace(tiny("llama2_7b", vocab_size=96), num_heads=4))
for name, model, runs in (
    ("t5", t5, [((1, 1), 1), ((2, 4), 1), ((8, 1), 1)]), ("parts", t5, [((1, 1), 2), ((2, 4), 2)]),
    ("decoder", decoder, [((1, 1), 1), ((2, 4), 1)]),
):
    params = random_params(model, jax.random.key(0))
    curves[name] = [curve(model, params, *run) for run in runs]
print(json.dumps(curves))
"""


@pytest.mark.parity
def test_every_mesh_gives_the_loss_curve_of_one_device():
    """Compares 20 steps of Adafactor with dropout, on (2, 4) and (8, 1) devices; parameters are spread over all."""
    curves = new_process.answer(CURVES, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    for name, runs in curves.items():
        (wanted, whole), *others = runs
        assert whole == 1 and np.array(wanted)[-1, 0] < np.array(wanted)[0, 0], name
        for curve, parts in others:
            np.testing.assert_allclose(curve, wanted, rtol=1e-5, err_msg=name)
            assert parts == 8, name
    # another number of parts has other masks of dropout, so the comparison above is no comparison with itself
    assert curves["t5"][0][0] != curves["parts"][0][0]
