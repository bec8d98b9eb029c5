"""What policies are trained by: the estimate against what it estimates, and by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.drafters import chooser
from speccascade_jax.drafters.chooser import Scores
from speccascade_jax.selection import objectives
from speccascade_jax.selection.train import initial

QUERIES, ARMS, DRAWS = 8, 4, 20_000
RNG = np.random.default_rng(0)
FEATURES = jnp.asarray(RNG.normal(size=(QUERIES, 6)), jnp.float32)
REWARDS = jnp.asarray(RNG.uniform(size=(QUERIES, ARMS)), jnp.float32)
PARAMS = jax.tree.map(lambda x: 2 * x, initial(6, (5, 5), ARMS, 1))


def gradient(objective, uniforms):
    def loss(params):
        scores = chooser.perceptron(params, FEATURES)
        return objective(scores.mean, REWARDS, chooser.dynamic(scores, uniforms)).mean()

    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(jax.grad(loss)(PARAMS))])


def test_reinforce_is_the_exact_gradient_within_sampling_error():
    """Of every parameter; and a bug, rewards of the arm beside the drawn one, is found."""
    uniforms = jax.random.uniform(jax.random.key(3), (DRAWS, QUERIES, ARMS))
    exact = np.asarray(gradient(objectives.expected, uniforms[0]))

    def wrong(scores, rewards, drawn):
        at = drawn[:, None]
        log_policy = jax.nn.log_softmax(scores, -1)
        beside = jnp.take_along_axis(jnp.roll(rewards, 1, axis=1), at, axis=1)
        return -(beside * jnp.take_along_axis(log_policy, at, axis=1))[:, 0]

    def largest(objective):
        found = np.asarray(jax.lax.map(lambda bits: gradient(objective, bits), uniforms, batch_size=500), np.float64)
        error = found.std(0) / np.sqrt(DRAWS)
        return (np.abs(found.mean(0) - exact) / np.maximum(error, 1e-9)).max()

    assert np.abs(exact).max() > 1e-2
    assert largest(objectives.reinforce) < 4.5  # of some 90 coordinates
    assert largest(wrong) > 20


def test_losses_by_hand():
    scores, rewards = jnp.log(jnp.array([[0.5, 0.25, 0.25]])), jnp.array([[1.0, 0.2, 1.0]])
    drawn = jnp.array([1])
    np.testing.assert_allclose(objectives.reinforce(scores, rewards, drawn), [-0.2 * np.log(0.25)], rtol=1e-6)
    np.testing.assert_allclose(objectives.expected(scores, rewards, drawn), [-(0.5 + 0.05 + 0.25)], rtol=1e-6)
    both = -(np.log(0.5) + np.log(0.25)) / 2  # two best arms share the weight
    np.testing.assert_allclose(objectives.best_arm(scores, rewards, drawn), [both], rtol=1e-6)


def test_scores_start_small_and_every_arm_likely():
    law = jax.nn.softmax(chooser.perceptron(initial(6, (512, 512), ARMS, 0), FEATURES).mean, -1)
    assert float(law.min()) > 0.1 and isinstance(chooser.perceptron(PARAMS, FEATURES), Scores)
