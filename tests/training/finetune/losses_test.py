"""Tests of cross-entropy per token against NumPy and against automatic differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.training.finetune import losses

VOCAB, ROWS = 7, 9
SETTINGS = [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.3, 1e-2)]


def _case() -> tuple[np.ndarray, np.ndarray]:
    """Returns logits `[2, 5, 9]`, the last two entries padding of the vocabulary, and targets."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 5, ROWS)).astype(np.float32) * 3
    logits[..., VOCAB] = -np.inf
    logits[..., VOCAB + 1] = 40.0
    return logits, rng.integers(0, VOCAB, (2, 5), dtype=np.int32)


def _by_definition(logits, targets, smoothing, z_loss):
    """Computes the same losses with one-hot targets."""
    real = logits[..., :VOCAB]
    log_z = jax.nn.logsumexp(real, axis=-1)
    wanted = smoothing / VOCAB + (1 - smoothing) * jnp.eye(VOCAB)[targets]
    return -jnp.sum(wanted * (real - log_z[..., None]), axis=-1) + z_loss * log_z**2


@pytest.mark.parametrize(("smoothing", "z_loss"), SETTINGS)
def test_losses_and_gradients_equal_the_definition(smoothing, z_loss):
    logits, targets = _case()
    weights = np.random.default_rng(1).uniform(size=(2, 5)).astype(np.float32)

    def total(function, *settings):
        return jax.value_and_grad(lambda x: jnp.sum(weights * function(x, targets, *settings)))(jnp.asarray(logits))

    (loss, gradient) = total(losses.token_losses, VOCAB, smoothing, z_loss)
    (loss_by_definition, gradient_by_definition) = total(_by_definition, smoothing, z_loss)
    np.testing.assert_allclose(loss, loss_by_definition, rtol=1e-6)
    np.testing.assert_allclose(gradient, gradient_by_definition, atol=1e-6)
    assert not np.asarray(gradient)[..., VOCAB:].any()


def test_a_loss_is_in_float32_and_its_gradient_in_the_dtype_of_the_logits():
    logits, targets = _case()
    exact = losses.token_losses(jnp.asarray(logits, jnp.bfloat16).astype(jnp.float32), targets, VOCAB)
    rough, backward = jax.vjp(lambda x: losses.token_losses(x, targets, VOCAB), jnp.asarray(logits, jnp.bfloat16))
    np.testing.assert_array_equal(rough, exact)
    assert rough.dtype == jnp.float32 and backward(jnp.ones_like(rough))[0].dtype == jnp.bfloat16


def test_no_other_array_as_large_as_the_logits_is_kept_for_the_backward_pass():
    logits, targets = _case()
    _, backward = jax.vjp(lambda x: losses.token_losses(x, targets, VOCAB, 0.1, 1e-4), jnp.asarray(logits))
    large = [leaf for leaf in jax.tree.leaves(backward) if getattr(leaf, "size", 0) >= logits.size]
    assert len(large) == 1


def test_positions_count_by_lengths_and_answers_and_not_by_tokens():
    counted = losses.counted_positions(jnp.array([4, 2, 0, 5]), jnp.array([2, 0, 0, 4]), 5)
    assert counted.astype(int).tolist() == [[0, 0, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
