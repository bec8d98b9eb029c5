"""Tests of divergences: comparison with a naive computation, smallest and largest values, relations between them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.methods.settings import Level
from speccascade_jax.rules import deferral
from speccascade_jax.rules.divergences import DIVERGENCES, Threshold, divergence
from speccascade_jax.rules.measures import total_variation
from tests.support import conformance, reference

NAMES = list(DIVERGENCES)


def laws(seed, vocab_size=11):
    """Returns random and adversarial pairs of distributions `(p, q)`, float32."""
    q, p = conformance.logit_pairs(seed, vocab_size=vocab_size)
    return tuple(np.stack([reference.softmax(row) for row in x]).astype(np.float32) for x in (p, q))


def found(name, p, q, top_k=0):
    return np.asarray(divergence(name, jnp.asarray(p), jnp.asarray(q), top_k))[:, 0]


@pytest.mark.parametrize("top_k", [0, 1, 3, 10, 11, 50])
@pytest.mark.parametrize("name", NAMES)
def test_divergences_equal_the_naive_sum(name, top_k):
    p, q = laws(3)
    expected = [reference.divergence(name, *map(np.float64, row), top_k) for row in zip(p, q, strict=True)]
    np.testing.assert_allclose(found(name, p, q, top_k), expected, atol=3e-6, rtol=1e-5)
    assert not top_k or top_k >= 10 or np.abs(found(name, p, q, top_k) - found(name, p, q))[10:].max() > 1e-3


def test_a_draft_is_accepted_only_below_the_threshold():
    pair = conformance.law_pair(np.float32([[0, 0, 9]]), np.float32([[0, 1, 9]]), 1.0)
    exact = divergence("tv", pair.p, pair.q)
    rule = deferral.fuzzy("tv").deferral
    assert rule(pair, exact).all() and not rule(pair, exact * 1.0001).any()
    same = conformance.law_pair(np.float32([[0, 1, 2]]), np.float32([[0, 1, 2]]), 1.0)
    assert rule(same, jnp.zeros((1, 1))).all()  # τ = 0 defers every token to the target


def test_equal_choices_share_one_function():
    assert deferral.fuzzy("js", 50) is deferral.fuzzy("js", top_k=50, scaled=False) is deferral.RULES["fuzzy_js_top50"]
    assert len([name for name in deferral.RULES if name.startswith("fuzzy_")]) == 4 * len(DIVERGENCES)


# --- probabilities that are 0 in float32, although their logs are finite


@partial(jax.jit, static_argnums=0)
def compared(threshold, pair):
    return threshold.of(pair)


def wide_logits():
    """Returns pairs of logits `(q, p)` that differ by up to 300, with entries masked in one or both."""
    rng = np.random.default_rng(5)
    q, p = rng.uniform(-150, 150, (2, 60, 11)).astype(np.float32)
    q[:20, 1:], p[:20, 1:] = 0.05 * q[:20, 1:], 0.05 * p[:20, 1:]  # the logit of token 0 is far from the others
    q[:10, 0], p[10:20, 0] = -120.0, -120.0
    q[40:50, 3] = p[40:50, 3] = -np.inf
    q[50:55, 4], p[55:, 5] = -np.inf, -np.inf
    return q, p


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.1, 1.0), (0.1, 0.9), (0.0, 1.0)])
@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_gaps_beyond_float32_have_the_float64_value(name, top_k, temperature, top_p):
    """Compares where float32 probabilities are 0: at logits 87 below the largest, or 9 below at temperature 0.1."""
    q, p = wide_logits()
    pair = conformance.law_pair(q, p, temperature, top_p)
    for scaled in (False, True):
        rows = [
            [reference.log_law(x, *(temperature, top_p) if scaled else (1.0, 1.0)) for x in row]
            for row in zip(p, q, strict=True)
        ]
        expected = np.array([reference.divergence_of_logs(name, *row, top_k) for row in rows])
        values = np.asarray(compared(Threshold(name, top_k, scaled), pair))[:, 0]
        np.testing.assert_array_equal(np.isinf(values), np.isinf(expected))
        finite = np.isfinite(expected)
        np.testing.assert_allclose(values[finite], expected[finite], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "alpha"), [("kl", 0.5), ("js_reference", 0.5)])
@pytest.mark.parametrize(
    "drafters",
    [("draft",), pytest.param((Level(model="middle", budget=2, block_size=2),), marks=pytest.mark.laws)],
)
def test_an_engine_uses_divergences_beyond_float32(name, alpha, drafters):
    """Expects a divergence of about 0.2 nats, which is infinite if computed from float32 probabilities.

    The draft gives a token the probability e^-100, and the target 0.002.
    """
    q, p = np.zeros((3, 3), np.float32), np.zeros((3, 3), np.float32)
    q[:, 2], p[:, 2] = -100.0, -6.0
    exact = reference.divergence_of_logs(name, *(reference.log_law(x[0], 1.0) for x in (p, q)))
    assert 0.01 < exact < alpha / 2
    pair = sc.Pair(target=sc.TableLM(p), draft=sc.TableLM(q), others={"middle": sc.TableLM(q)})
    sizes = {} if len(drafters) == 1 and isinstance(drafters[0], Level) else {"block_size": 2}
    settings = {"rule": f"fuzzy_{name}", "alpha": alpha, "temperature": 1.0, "drafters": drafters}
    out = sc.decode(pair, [[0]] * 8, max_new_tokens=6, **settings, **sizes)
    assert out.stats["deferral_rate"] == 0.0 and out.stats["rejected"] == 0


@pytest.mark.parametrize("vocab_size", [4, 37, 8192])
def test_distributions_without_a_common_token_have_the_largest_distance_exactly(vocab_size):
    """Expects exactly 1, so that `Div >= τ` holds at τ = 1."""
    rng = np.random.default_rng(0)
    q, p = rng.normal(size=(2, 40, vocab_size)).astype(np.float32)
    half = rng.permutation(vocab_size)[: vocab_size // 2]
    q[:, half] = -np.inf
    p[:, np.setdiff1d(np.arange(vocab_size), half)] = -np.inf
    pair = conformance.law_pair(q, p, 1.0)
    assert (np.asarray(pair.q.sum(-1)) != 1.0).any() or vocab_size < 8192  # checks that rounding occurs in this case
    for name in ("js", "tv"):
        # this top-k includes all tokens with mass under the target
        for top_k, scaled in ((0, False), (0, True), (vocab_size // 2, False)):
            rule = deferral.fuzzy(name, top_k, scaled)
            assert (np.asarray(compared(rule.deferral, pair)) >= 1.0).all(), rule.name
    np.testing.assert_array_equal(total_variation(pair.p, pair.q), 1.0)
    nearly = conformance.law_pair(np.where(np.isinf(q), -60.0, q), p, 1.0)
    assert (np.asarray(divergence("tv", nearly.p, nearly.q)) <= 1.0).all()
