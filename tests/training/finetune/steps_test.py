"""Tests of one training step: updates of arrays of different size, decoder inputs, losses against NumPy."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from speccascade_jax.training.t5 import steps

from speccascade_jax.core.types import BoundModel
from speccascade_jax.models.early_exit import early_exit
from speccascade_jax.models.t5 import EXITS, T5, T5Config, T5Module
from tests.support import random_t5

CONFIG = T5Config(10, 12, 8, 2, 4, 8, 1, 1)
SOURCE = np.array([[3, 4, 1, 0], [5, 1, 0, 0]], np.int32)
TARGET = np.array([[6, 7, 8, 1], [9, 1, 0, 0]], np.int32)
VOCAB, ROWS = 7, 9


def test_the_decoder_reads_the_targets_after_a_start_token():
    assert steps.shift_right(jnp.asarray(TARGET)).tolist() == [[0, 6, 7, 8], [0, 9, 1, 0]]


def test_the_first_update_is_relative_to_each_array():
    params = {"small": jnp.full((3,), 0.02), "large": jnp.full((3,), -5.0), "zero": jnp.zeros((3,))}
    transformation = steps.Optimizer(min_scale=1e-3).transformation()
    gradients = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.1), params)
    updates, _ = transformation.update(gradients, transformation.init(params), params)
    for name, scale in (("small", 0.02), ("large", 5.0), ("zero", 1e-3)):
        np.testing.assert_allclose(updates[name], scale, rtol=1e-3)


def test_filler_rows_change_nothing():
    step = steps.make_train_step(CONFIG, steps.Optimizer(), steps.Objective())
    rate, key = np.float32(0.01), jax.random.key(0)
    start = steps.init_state(CONFIG, steps.Optimizer(), jax.random.key(1))
    copy = jax.tree.map(jnp.copy, start)
    filled = [np.concatenate([tokens, row]) for tokens, row in ((SOURCE, [[1, 0, 0, 0]]), (TARGET, [[0] * 4]))]
    _, metrics = step(start, SOURCE, TARGET, rate, key)
    _, metrics_padded = step(copy, *filled, rate, key)
    assert int(metrics["tokens"]) == int(metrics_padded["tokens"]) == 6
    assert float(metrics["loss"]) == pytest.approx(float(metrics_padded["loss"]), rel=1e-5)


def test_a_teacher_with_another_vocabulary_is_refused():
    teacher = BoundModel(params={}, model=T5(T5Config(11, 12, 8, 2, 4, 8, 1, 1)))
    with pytest.raises(ValueError, match="the teacher has 11 tokens, but the student has 10"):
        steps.make_train_step(CONFIG, steps.Optimizer(), steps.Objective(), teacher)


def test_evaluation_counts_target_tokens():
    state = steps.init_state(CONFIG, steps.Optimizer(), jax.random.key(0))
    total, count = steps.make_eval_step(CONFIG)(state.params, SOURCE, TARGET)
    assert int(count) == 6
    assert 0 < float(total) < 6 * 20


def _case(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits `[2, 5, 9]`, the last two entries vocabulary padding, and targets with padding."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, 5, ROWS)).astype(np.float32) * 3
    logits[..., VOCAB:] = -np.inf
    return logits, np.array([[3, 6, 1, 0, 0], [2, 2, 5, 4, 1]], np.int32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_smoothed_cross_entropy_equals_a_cross_entropy_with_smoothed_targets(smoothing):
    logits, targets = _case()
    real = logits[..., :VOCAB].astype(np.float64)
    log_probabilities = real - np.log(np.exp(real).sum(-1, keepdims=True))
    wanted = smoothing / VOCAB + (1 - smoothing) * np.eye(VOCAB)[targets]
    losses_by_hand = -(wanted * log_probabilities).sum(-1)[targets > 0].sum()
    losses = steps.smoothed_cross_entropy(jnp.asarray(logits), jnp.asarray(targets), VOCAB, smoothing)
    np.testing.assert_allclose(losses, losses_by_hand, rtol=1e-5)


def test_gradients_are_finite_and_vanish_at_padding():
    logits, targets = _case()
    gradient = jax.grad(steps.smoothed_cross_entropy)(jnp.asarray(logits), jnp.asarray(targets), VOCAB, 0.1)
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient)[targets == 0].any()
    assert not np.asarray(gradient)[..., VOCAB:].any()


def test_distillation_is_zero_for_the_teacher_itself_and_has_no_gradient_there():
    logits, targets = map(jnp.asarray, _case())
    assert float(steps.distillation(logits, logits, targets, VOCAB)) == pytest.approx(0.0, abs=1e-6)
    gradient = jax.grad(steps.distillation)(logits, logits, targets, VOCAB)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-6)


def test_distillation_is_the_kl_divergence_from_the_teacher():
    (student, targets), (teacher, _) = _case(0), _case(1)
    softmax = [np.exp(x[..., :VOCAB]) / np.exp(x[..., :VOCAB]).sum(-1, keepdims=True) for x in (student, teacher)]
    wanted = (softmax[1] * np.log(softmax[1] / softmax[0])).sum(-1)[targets > 0].sum()
    divergence = steps.distillation(jnp.asarray(student), jnp.asarray(teacher), jnp.asarray(targets), VOCAB)
    np.testing.assert_allclose(divergence, wanted, rtol=1e-4)


DEEP = T5Config(10, 12, 8, 2, 4, 8, 1, 3)


def _loss(objective, step):
    """Returns the loss of one step with the weights of `DEEP`."""
    start = steps.init_state(DEEP, steps.Optimizer(), jax.random.key(1)).replace(step=jnp.int32(step))
    train = steps.make_train_step(DEEP, steps.Optimizer(), objective)
    return float(train(start, SOURCE, TARGET, np.float32(0.01), jax.random.key(0))[1]["loss"])


@pytest.mark.laws
def test_one_exit_in_turn_adds_its_cross_entropy_weighed_by_its_depth():
    params = steps.init_state(DEEP, steps.Optimizer(), jax.random.key(1)).params
    bound = BoundModel(params, T5(DEEP))
    plain = steps.Objective(smoothing=0.0)

    def loss_at(layer):
        exit = early_exit(bound, layer)
        total, count = steps.make_eval_step(exit.model.model.config)(exit.params, SOURCE, TARGET)
        return float(total) / int(count)

    for step, layer in ((0, 1), (1, 2), (2, 1)):
        weight = 0.6 * layer / 3
        expected = (loss_at(3) + weight * loss_at(layer)) / (1 + weight)
        loss = _loss(steps.Objective(smoothing=0.0, exit_weight=0.6), step)
        assert loss == pytest.approx(expected, rel=1e-5), layer
    assert _loss(plain, 0) == pytest.approx(loss_at(3), rel=1e-5)


def test_higher_layers_are_dropped_more_often():
    config = replace(DEEP, layer_dropout=0.9)
    rows = 4000
    source, inputs = np.tile(SOURCE[:1], (rows, 1)), np.tile([[0]], (rows, 1))
    params = random_t5.parameters(config, 1)
    run = jax.jit(partial(T5Module(config).apply, deterministic=False, mutable=[EXITS]))
    _, sown = run({"params": params}, source, inputs, rngs={"dropout": jax.random.key(3)})
    hidden = [np.asarray(states)[:, 0] for states in sown[EXITS]["decoder"]["hidden"]]
    left_out = [(after == before).all(-1).mean() for before, after in zip(hidden, hidden[1:], strict=False)]
    np.testing.assert_allclose(left_out, [0.9 * (2**0.5 - 1), 0.9], atol=0.03)
    # the first layer is never dropped, and evaluation drops none
    assert len(np.unique(hidden[0].round(4), axis=0)) == 1
    plain, same = (steps.make_eval_step(c)(params, SOURCE, TARGET)[0] for c in (DEEP, config))
    assert float(plain) == float(same)


def test_layer_dropout_does_not_change_a_models_identity_and_bad_settings_are_refused():
    assert repr(T5(DEEP)) == repr(T5(replace(DEEP, layer_dropout=0.2)))
    with pytest.raises(ValueError, match="layer_dropout is 1.0: give a share"):
        replace(DEEP, layer_dropout=1.0)
    with pytest.raises(ValueError, match="exit_weight is -1"):
        steps.Objective(exit_weight=-1)
    with pytest.raises(ValueError, match="a decoder of one layer has no early exit"):
        steps.make_train_step(CONFIG, steps.Optimizer(), steps.Objective(exit_weight=1.0))


def test_warm_up_is_linear_in_steps():
    schedule = steps.Schedule(peak=1.0, warmup_steps=10, max_steps=10**9)
    assert schedule.rate(0, 0.0) == pytest.approx(0.1)
    assert schedule.rate(4, 0.0) == pytest.approx(0.5)
    assert schedule.rate(10, 0.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_decay_reaches_the_final_fraction_at_the_planned_end(decay, middle):
    schedule = steps.Schedule(peak=2.0, warmup_steps=1, max_steps=100, decay=decay, final=0.1)
    assert schedule.rate(50, 0.0) == pytest.approx(2.0 * middle)
    assert schedule.rate(100, 0.0) == schedule.rate(150, 0.0) == pytest.approx(0.2)


def test_a_run_ends_at_its_limit_of_minutes_or_steps_whichever_comes_first():
    by_time = steps.Schedule(peak=1.0, warmup_steps=1, max_minutes=20)
    by_steps = steps.Schedule(peak=1.0, warmup_steps=1, max_steps=200)
    assert by_time.rate(3, 5.0) == pytest.approx(by_steps.rate(50, 99.0))
    by_first = steps.Schedule(max_steps=200, max_minutes=20)
    assert by_first.progress(200, 1.0) == by_first.progress(1, 20.0) == 1.0


def test_rsqrt_keeps_falling_without_a_planned_end():
    schedule = steps.Schedule(peak=1.0, warmup_steps=100, max_steps=10**6, decay="rsqrt")
    assert schedule.rate(99, 0.0) == pytest.approx(1.0)
    assert schedule.rate(399, 0.0) == pytest.approx(0.5)
    assert schedule.rate(9999, 0.0) == pytest.approx(math.sqrt(0.01))


def test_schedules_without_an_end_or_with_an_unknown_decay_are_refused():
    with pytest.raises(ValueError, match="max_steps or max_minutes"):
        steps.Schedule()
    with pytest.raises(ValueError, match="'exponential' is not one of"):
        steps.Schedule(max_steps=1, decay="exponential")
