"""Distributions that stay logits, against those that are computed at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core import logit_laws, sampling
from speccascade_jax.core.logit_laws import LogitPair
from speccascade_jax.core.types import Controls, Sampling
from speccascade_jax.rules import laws
from speccascade_jax.rules.verification import at_position

PADDING, POSITIONS = 6, 3
ROWS = {
    "temperature": [0.0, 1.0, 0.5, 1.0, 2.0, 0.0, 1.0, 1.0],
    "top_p": [1.0, 0.9, 1.0, 1.0, 0.5, 0.5, 1.0, 0.7],
    "top_k": [0.0, 0.0, 3.0, 4.0, 0.0, 3.0, 0.0, 9.0],
}
MIXED = Sampling(**{name: np.float32(values) for name, values in ROWS.items()})
SETTINGS = {
    "mixed": MIXED,
    "identity": Sampling(np.ones(8, np.float32), np.ones(8, np.float32), np.zeros(8, np.float32)),
    "greedy": Sampling(np.zeros(8, np.float32), np.ones(8, np.float32), np.zeros(8, np.float32)),
    "top-k": Sampling(np.ones(8, np.float32), np.ones(8, np.float32), np.arange(8, dtype=np.float32) % 5),
    "warm": Sampling(np.full(8, 0.7, np.float32), np.ones(8, np.float32), np.zeros(8, np.float32)),
}


def logits(*shape, seed=0):
    """Returns padded logits with many ties, as bfloat16 gives them."""
    drawn = np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 3
    drawn = np.array(jnp.asarray(drawn, jnp.bfloat16).astype(jnp.float32))
    drawn[..., -PADDING:] = -np.inf
    return drawn


@jax.jit
def pairs(draft, target, controls, tokens, positions):
    """Returns all distributions, those of tokens and those at positions: from logits, and computed at once."""
    size = target.shape[-1] - PADDING
    buffers = logit_laws.of_logits(draft, controls.draft)
    kept = LogitPair.of(buffers.replace(logits=buffers.logits[..., :size]), target, controls, size)
    draft, target = draft[..., :size], target[..., :size]
    q, q_tilde, _ = sampling.raw_and_scaled(draft, controls.draft)
    whole = sampling.make_law_pair(q, q_tilde, controls.draft.temperature <= 0, target, controls.target)
    parts = [(pair, laws.at_tokens(pair, tokens), at_position(pair, positions)) for pair in (kept, whole)]
    return [[(pair, logs(pair)) for pair in map(logit_laws.as_law_pair, part)] for part in parts]


def logs(pair):
    return {name: pair.log(name) for name in ("q", "p", "q_tilde", "p_tilde")}


def controls(draft, target):
    none = np.zeros(8, np.float32)
    return Controls(none, none, SETTINGS[draft], SETTINGS[target])


@pytest.mark.parametrize(("draft", "target"), [
    ("mixed", "mixed"), ("identity", "greedy"), ("greedy", "warm"), ("top-k", "top-k"),
])  # fmt: skip
def test_a_pair_of_logits_has_the_distributions_of_a_pair_of_laws(draft, target):
    shape = 8, POSITIONS, 256
    tokens = np.random.default_rng(2).integers(0, shape[-1] - PADDING, shape[:2])
    of_both = pairs(
        logits(*shape),
        logits(*shape, seed=1),
        controls(draft, target),
        tokens,
        np.arange(8, dtype=np.int32) % POSITIONS,
    )
    for (pair, logs), (expected, expected_logs) in zip(*of_both, strict=True):
        assert pair.q.shape == expected.q.shape  # a rule sees no padding
        for name in ("q", "p", "q_tilde", "p_tilde", "greedy"):
            np.testing.assert_allclose(getattr(pair, name), getattr(expected, name), rtol=2e-6, atol=1e-9, err_msg=name)
        for name, log in logs.items():
            np.testing.assert_allclose(log, expected_logs[name], rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(("settings", "rows", "size"), [
    ("mixed", 8, 600), ("mixed", 8, 384), ("identity", 8, 512), ("top-k", 8, 384),
])  # fmt: skip
def test_tokens_are_those_of_a_sample(settings, rows, size):
    x, rule = logits(rows, size), SETTINGS[settings]
    uniform = np.random.default_rng(3).random((40, rows)).astype(np.float32)
    uniform[0], uniform[1] = 0.0, np.nextafter(np.float32(1), np.float32(0))
    law = sampling.transform(x, rule)
    expected = jax.jit(jax.vmap(lambda u: sampling.sample(law, u)))(uniform)
    drawn = jax.jit(jax.vmap(lambda u: logit_laws.drawn(x, rule, u)[1]))(uniform)
    np.testing.assert_array_equal(drawn, expected)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda u: logit_laws.draw(law, u)))(uniform), expected)


def test_a_row_with_nan_has_no_probabilities():
    x = logits(8, 128)
    x[3, 7], x[4, 9] = np.nan, np.inf
    scaled = np.asarray(jax.jit(lambda x: logit_laws.scaled(logit_laws.of_logits(x, SETTINGS["warm"])))(x))
    assert np.isnan(scaled[3]).all() and np.isnan(scaled[4]).any() and np.isfinite(scaled[:3]).all()
