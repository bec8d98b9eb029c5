"""Losses against NumPy, and the limits that define distillation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.training.t5 import losses

VOCAB, ROWS = 7, 9


def _case(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[2, 5, 9]` whose last two entries are vocabulary padding, targets with padding."""
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
    found = losses.smoothed_cross_entropy(jnp.asarray(logits), jnp.asarray(targets), VOCAB, smoothing)
    np.testing.assert_allclose(found, losses_by_hand, rtol=1e-5)


def test_gradients_are_finite_and_vanish_at_padding():
    logits, targets = _case()
    gradient = jax.grad(losses.smoothed_cross_entropy)(jnp.asarray(logits), jnp.asarray(targets), VOCAB, 0.1)
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient)[targets == 0].any()
    assert not np.asarray(gradient)[..., VOCAB:].any()


def test_distillation_is_zero_for_the_teacher_itself_and_has_no_gradient_there():
    logits, targets = map(jnp.asarray, _case())
    assert float(losses.distillation(logits, logits, targets, VOCAB)) == pytest.approx(0.0, abs=1e-6)
    gradient = jax.grad(losses.distillation)(logits, logits, targets, VOCAB)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-6)


def test_distillation_is_the_kl_divergence_from_the_teacher():
    (student, targets), (teacher, _) = _case(0), _case(1)
    softmax = [np.exp(x[..., :VOCAB]) / np.exp(x[..., :VOCAB]).sum(-1, keepdims=True) for x in (student, teacher)]
    wanted = (softmax[1] * np.log(softmax[1] / softmax[0])).sum(-1)[targets > 0].sum()
    found = losses.distillation(jnp.asarray(student), jnp.asarray(teacher), jnp.asarray(targets), VOCAB)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
