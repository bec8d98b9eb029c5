"""Tests of all functions that score and choose arms (drafters), against NumPy and by sampling."""

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.drafters import chooser
from speccascade_jax.drafters.chooser import Chooser, Scores
from tests.support import conformance

ROWS, ARMS = 60_000, 3
UNIFORMS = jax.random.uniform(jax.random.key(0), (ROWS, ARMS))
MEAN = np.array([0.3, 1.0, 0.8], np.float32)


def counts(chosen):
    return np.bincount(np.asarray(chosen), minlength=ARMS)


def told(deviation=None):
    mean = jnp.broadcast_to(MEAN, (ROWS, ARMS))
    return Scores(mean, None if deviation is None else jnp.broadcast_to(jnp.asarray(deviation), mean.shape))


def test_dynamic_draws_from_the_softmax():
    law = np.exp(MEAN) / np.exp(MEAN).sum()
    assert conformance.pooled_p_value(counts(chooser.dynamic(told(), UNIFORMS)), law * ROWS) > 1e-3
    assert (np.asarray(chooser.dynamic(told(), jnp.zeros_like(UNIFORMS))) == 0).all()
    assert (np.asarray(chooser.dynamic(told(), jnp.full_like(UNIFORMS, 1 - 2.0**-24))) == ARMS - 1).all()


def test_thompson_draws_each_arm_as_often_as_it_is_the_best():
    deviation = np.array([0.9, 0.2, 0.5], np.float32)
    worlds = np.random.default_rng(1).normal(MEAN, deviation, size=(400_000, ARMS)).argmax(-1)
    law = np.bincount(worlds, minlength=ARMS) / len(worlds)
    frequencies = counts(chooser.thompson(told(deviation), UNIFORMS)) / ROWS
    np.testing.assert_allclose(frequencies, law, atol=4 * np.sqrt(0.25 / ROWS) + 4 * np.sqrt(0.25 / len(worlds)))
    for edge in (0.0, 1 - 2.0**-24):  # scores must be finite at the extreme random numbers
        assert int(chooser.thompson(told(deviation), jnp.full((1, ARMS), edge))[0]) in range(ARMS)


def test_greedy_takes_the_best_mean_and_optimistic_the_best_bound():
    assert (np.asarray(chooser.greedy(told(), UNIFORMS)) == 1).all()
    assert (np.asarray(chooser.optimistic(told(np.array([0.9, 0.1, 0.1], np.float32)), UNIFORMS)) == 0).all()
    assert int(chooser.greedy(Scores(jnp.array([[2.0, 2.0]])), jnp.zeros((1, 2)))[0]) == 0
    # the upper bounds are 2 and 1.8 in the first row, 2 and 2.2 in the second
    near = Scores(jnp.array([[0.0, 1.0], [0.0, 1.0]]), jnp.array([[1.0, 0.4], [1.0, 0.6]]))
    assert chooser.optimistic(near, jnp.zeros((2, 2))).tolist() == [0, 1]


def test_perceptron_equals_the_published_formula():
    rng = np.random.default_rng(0)
    sizes = [(7, 5), (5, 5), (5, ARMS)]
    layers = [(rng.normal(size=size).astype(np.float32), rng.normal(size=size[1]).astype(np.float32)) for size in sizes]
    features = rng.normal(size=(4, 7)).astype(np.float32)
    values = features
    for number, (kernel, bias) in enumerate(layers):
        values = (np.tanh(values) if number else values) @ kernel + bias
    params = {f"layers_{n}": {"kernel": kernel, "bias": bias} for n, (kernel, bias) in enumerate(layers)}
    np.testing.assert_allclose(chooser.perceptron(params, features).mean, values, rtol=1e-5, atol=1e-5)
    assert chooser.reads(params) == 7


def test_ridge_gives_the_moments_of_its_weights():
    rng = np.random.default_rng(2)
    root, mean = rng.normal(size=(ARMS, 5, 5)), rng.normal(size=(ARMS, 5))
    params = {"center": rng.normal(size=4), "scale": rng.uniform(1, 2, size=4), "mean": mean}
    params["covariance"] = root @ root.transpose(0, 2, 1)
    features = rng.normal(size=(6, 4))
    scores = chooser.ridge(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params), jnp.asarray(features))
    seen = np.append((features - params["center"]) * params["scale"], np.ones((6, 1)), axis=1)
    np.testing.assert_allclose(scores.mean, seen @ mean.T, rtol=1e-4, atol=1e-4)
    variance = np.stack([(seen @ (factor @ factor.T) * seen).sum(-1) for factor in root], axis=1)
    np.testing.assert_allclose(np.square(scores.deviation), variance, rtol=1e-4)
    assert chooser.reads(params) == 4


def test_a_fixed_arm_is_constant_and_random_arms_are_uniform():
    features = jnp.zeros((ROWS, 0))
    for arm in range(ARMS):
        choose, params = chooser.always(arm, ARMS)
        assert (np.asarray(choose(params, features, UNIFORMS)) == arm).all()
        assert not choose.reads_features and chooser.reads(params) is None
    choose, params = chooser.at_random(ARMS)
    assert choose == Chooser(draws="dynamic")
    drawn = counts(choose(params, features, UNIFORMS))
    assert conformance.pooled_p_value(drawn, np.full(ARMS, ROWS / ARMS)) > 1e-3
