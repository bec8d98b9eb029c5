"""`π` of every rule against NumPy, and the identities of METHODS section 3 with their two counter-examples."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

import speccascade_jax as sc
from speccascade_jax import rules
from speccascade_jax.accept import Speculative
from speccascade_jax.rules import RULES
from speccascade_jax.types import LawPair
from tests import conformance, reference

VOCAB = 11
DELTA = ["chow", "chow_log", "diff", "diff_log", "opt", "opt_log", "bild_star"]
TOKEN = ["token_v1", "token_v2", "token_v3"]


def random_pairs(seed=0, rows=40):
    """Random logits and the adversarial ones that the identity is tested on."""
    return conformance.logit_pairs(seed=seed, count=rows, vocab_size=VOCAB)


def law(rule, q, p, alpha=0.0, temperature=1.0, top_p=1.0, **more):
    return np.asarray(sc.target_law(rule, q, p, alpha=alpha, temperature=temperature, top_p=top_p, **more))


def scaled(logits, temperature, top_p=1.0):
    return np.stack([reference.scale(row, temperature, top_p) for row in logits])


def margin(rule, q, p, alpha, temperature, top_p):
    """How far the float64 decision and the truncation are from tipping over: smaller is no fair comparison."""
    q_law, p_law = reference.softmax(q), reference.softmax(p)
    distance = edge = np.inf
    if top_p < 1 and temperature > 0:
        edges = [np.abs(np.cumsum(np.sort(reference.scale(x, temperature))[::-1]) - top_p).min() for x in (q, p)]
        edge = min(edges)
    if rule in reference.DECISIONS:
        arguments = (q_law, p_law, reference.scale(q, temperature, top_p), reference.scale(p, temperature, top_p))
        sides = [
            np.asarray(reference.DECISIONS[rule](*arguments, alpha + shift, temperature == 0), float)
            for shift in (-1e-5, 0.0, 1e-5)
        ]
        # α moved by 1e-5 either way must not change any decision that carries mass
        same = all((np.broadcast_to(s == sides[1], q_law.shape) | (arguments[2] == 0)).all() for s in sides)
        distance = np.inf if same else 0.0
    return min(distance, edge)


@pytest.mark.parametrize("name", list(RULES))
def test_law_is_the_reference(name):
    rule, (q, p) = RULES[name], random_pairs()
    low, high = (0.0, 0.0) if rule.grid is None else rules.grid_bounds(rule, VOCAB)
    rng, compared, total = np.random.default_rng(1), 0, 0
    for temperature in (0.0,) if rule.greedy_only else (0.0, 0.5, 1.0):
        for top_p in (1.0, 0.8):
            alpha = (low + (high - low) * rng.random(len(q))).astype(np.float32)
            found = law(rule, q, p, alpha, temperature, top_p)
            for a, q_row, p_row, row in zip(alpha.astype(float), q, p, found, strict=True):
                total += 1
                if margin(name, q_row, p_row, a, temperature, top_p) < 1e-5:
                    continue
                compared += 1
                expected = reference.target_law(name, q_row, p_row, a, temperature, top_p)
                np.testing.assert_allclose(row, expected, atol=1e-5, err_msg=f"{a} {temperature} {top_p}")
    assert compared > 0.7 * total


def test_law_takes_a_temperature_of_the_drafts_own():
    q, p = random_pairs(2)
    found = law("bild_star", q, p, 1.5, 1.0, draft_temperature=0.0)
    for q_row, p_row, row in zip(q, p, found, strict=True):
        np.testing.assert_allclose(
            row, reference.target_law("bild_star", q_row, p_row, 1.5, 1.0, draft_temperature=0.0), atol=1e-5
        )


def test_law_keeps_the_leading_axes():
    q, p = random_pairs(3, rows=24)
    shape = (2, 3, 4)
    alpha = np.linspace(0, 0.9, 24, dtype=np.float32)
    nested = law("token_v3", q.reshape(*shape, -1), p.reshape(*shape, -1), alpha.reshape(shape), 0.7, 0.9)
    np.testing.assert_array_equal(nested.reshape(24, -1), law("token_v3", q, p, alpha, 0.7, 0.9))
    assert nested.dtype == np.float32
    single = law("token_v3", q[5], p[5], float(alpha[5]), 0.7, 0.9)
    np.testing.assert_allclose(single, nested.reshape(24, -1)[5], atol=1e-6)


# --- the lemmas


def root_b(qt, pt, alpha):
    """`b = 1/β` of `lossy_tuned` by Brent's method; 0 where nothing is cut off."""
    excess = np.maximum(qt - pt / (1 - alpha), 0).sum()
    if excess <= 0:
        return 0.0
    # at α = 0 the root is the upper end itself, up to rounding
    return brentq(lambda b: np.maximum(b * pt - qt, 0).sum() - excess, 0, 1 / (1 - alpha) + 1e-9, xtol=1e-14)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), alpha=st.floats(0, 0.95), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_lemma_2_tuned_lossy_is_lossy_with_its_beta(seed, alpha, temperature):
    """Speculative acceptance of `lossy_tuned`'s law keeps and replaces as lossy sampling with `β = 1/b` does."""
    q, p = random_pairs(seed)
    pair = conformance.law_pair(q, p, temperature)
    kept, replacement, _, _ = (
        np.asarray(x) for x in conformance.evaluate(Speculative(RULES["lossy_tuned"]), pair, alpha)
    )
    alpha = float(np.float32(alpha))
    for i, (qt, pt) in enumerate(zip(scaled(q, temperature), scaled(p, temperature), strict=True)):
        np.testing.assert_allclose(kept[i], np.minimum(qt, pt / (1 - alpha)), atol=1e-5)
        b = root_b(qt, pt, alpha)
        residual = np.maximum(b * pt - qt, 0)
        if residual.sum() > 1e-3:  # below, float32 has no digits left of the residual's shape
            np.testing.assert_allclose(replacement[i], residual / residual.sum(), atol=1e-3)


@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.5])
def test_tuned_lossy_solves_its_equation(top_p):
    """Also where the root lies beyond the paper's search range, `β > 10` (errata of METHODS, 3)."""
    q, p = random_pairs(4, rows=200)
    large = 0
    for alpha in (0.0, 0.3, 0.9, 0.97):
        found = law("lossy_tuned", q, p, alpha, 1.0, top_p).astype(float)
        for row, qt, pt in zip(found, scaled(q, 1.0, top_p), scaled(p, 1.0, top_p), strict=True):
            np.testing.assert_allclose(row.sum(), 1.0, atol=1e-5)
            b = root_b(qt, pt, float(np.float32(alpha)))
            assert 0 <= b <= 1 / (1 - alpha) + 1e-5
            large += 0 < b < 0.1
            expected = np.maximum(np.minimum(qt, pt / (1 - np.float32(alpha))), b * pt)
            if np.abs(np.cumsum(np.sort(qt)) - top_p).min() > 1e-5 or top_p == 1:
                np.testing.assert_allclose(row, expected, atol=1e-5)
    assert top_p != 0.8 or large > 0


def test_tuned_lossy_with_disjoint_supports_and_a_beta_beyond_ten():
    q, p = np.log([0.9, 0.1, 1e-30]), np.log([1e-30, 0.09, 0.91])
    found = law("lossy_tuned", q, p, 0.5, 1.0, 0.95)
    np.testing.assert_allclose(found, reference.target_law("lossy_tuned", q, p, 0.5, 1.0, 0.95), atol=1e-5)
    # q̃ is cut by a hair only: b is tiny, β far beyond 10
    q = np.log([0.5 + 1e-3, 0.5 - 2e-3, 1e-3])
    p = np.log([0.25, 0.25, 0.5])
    qt, pt = reference.softmax(q), reference.softmax(p)
    b = root_b(qt, pt, 0.5)
    assert 0 < b < 0.1
    found = law("lossy_tuned", q, p, 0.5)
    np.testing.assert_allclose(found, reference.lossy_tuned(qt, pt, 0.5), atol=1e-6)


@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_lemma_3_rejections_are_deferral_times_distance(name, temperature):
    q, p = random_pairs(5)
    for alpha in conformance.alphas(RULES[name], VOCAB):
        pair = conformance.law_pair(q, p, temperature)
        kept = np.asarray(conformance.evaluate(Speculative(RULES[name]), pair, alpha)[0], float)
        delta = np.asarray(RULES[name].deferral(pair, jnp.full((len(q), 1), alpha, jnp.float32)), float)[:, 0]
        distance = 0.5 * np.abs(np.asarray(pair.p_tilde, float) - np.asarray(pair.q_tilde, float)).sum(-1)
        np.testing.assert_allclose(1 - kept.sum(-1), delta * distance, atol=1e-5)


@pytest.mark.parametrize("name", ["lossy", "lossy_tuned"])
def test_lemma_6_lossy_at_temperature_zero_is_the_target(name):
    q, p = random_pairs(6)
    expected = scaled(p, 0.0)
    for alpha in (0.0, 0.3, 0.8):
        np.testing.assert_allclose(law("lossy", q, p, alpha, 0.0), expected, atol=1e-6)


def test_lemma_7_token_v3_at_temperature_zero_is_lossy_greedy():
    q, p = random_pairs(7)
    seen = set()
    for alpha in (0.0, 0.1, 0.5, 0.9, 1.0):
        found = law("lossy_greedy", q, p, alpha, 0.0)
        np.testing.assert_array_equal(found, law("token_v3", q, p, alpha, 0.0))
        draft, target = scaled(q, 0.0), scaled(p, 0.0)
        seen |= {bool(same) for same in (found == target).all(-1)} | {bool((found != draft).any())}
    assert seen == {True, False}


def test_lemma_10_opt_and_diff_at_temperature_zero_have_one_law_but_not_one_deferral_rate():
    q, p = random_pairs(8)
    pair = conformance.law_pair(q, p, 0.0)
    rates = []
    for alpha in (0.05, 0.2, 0.5):
        np.testing.assert_array_equal(law("opt", q, p, alpha, 0.0), law("diff", q, p, alpha, 0.0))
        column = jnp.full((len(q), 1), alpha, jnp.float32)
        rates.append([float(RULES[name].deferral(pair, column).mean()) for name in ("opt", "diff")])
    # where both argmaxes agree the distance is 0: opt may defer there, diff not, and nothing changes
    assert all(opt >= diff for opt, diff in rates) and any(opt > diff for opt, diff in rates)


# --- where a rule is lossless, and where it never defers


@pytest.mark.parametrize(
    ("name", "alpha"),
    [
        ("lossy", 0.0),
        *[(name, -1.0) for name in TOKEN],
        ("diff", -1.0),
        ("chow", -1e-3),
        ("chow", -1.0),
        ("chow", -7.0),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_lossless_ends(name, alpha, temperature):
    q, p = random_pairs(9)
    for top_p in (1.0, 0.8):
        np.testing.assert_allclose(
            law(name, q, p, alpha, temperature, top_p), law("spec_decode", q, p, 0.0, temperature, top_p), atol=1e-6
        )


@pytest.mark.parametrize(
    ("name", "alpha"),
    [
        ("chow", 1.0),
        ("chow_log", math.log(VOCAB) + 1e-5),
        ("diff", 1.0),
        ("diff_log", math.log(VOCAB)),
        ("opt", 1e9),
        ("opt_log", 1e9),
        ("token_v1", 1.0),
        ("token_v2", 1.0),
        ("token_v3", 1.0),
        ("bild_star", 1e9),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_draft_ends(name, alpha, temperature):
    """Where a rule never defers, `π = q̃`."""
    q, p = random_pairs(10)
    # without equal pairs (TV = 0 defeats any α) and infinite divergences
    finite = np.isfinite(q).all(-1) & np.isfinite(p).all(-1)
    finite[[0, 4]] = False
    q, p = q[finite], p[finite]
    pair = conformance.law_pair(q, p, temperature)
    deferred = np.asarray(RULES[name].deferral(pair, jnp.full((len(q), 1), alpha, jnp.float32)))
    never = ~(np.broadcast_to(deferred, q.shape) & (np.asarray(pair.q_tilde) > 0)).any(-1)
    if name not in ("opt", "opt_log"):
        assert never.all()
    assert never.any()
    np.testing.assert_array_equal(law(name, q, p, alpha, temperature)[never], np.asarray(pair.q_tilde)[never])


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_not_an_identity_token_v3_at_zero_is_not_lossless(temperature):
    """Counter-example: the target's top token is never deferred, so the draft's excess on it stays."""
    q, p = np.log([0.8, 0.1, 0.1]), np.log([0.5, 0.3, 0.2])
    found = law("token_v3", q, p, 0.0, temperature)
    target = law("spec_decode", q, p, 0.0, temperature)
    assert np.abs(found - target).max() > 0.1
    pair = conformance.law_pair(q[None], p[None], temperature)
    deferred = np.asarray(RULES["token_v3"].deferral(pair, jnp.zeros((1, 1))))[0]
    np.testing.assert_array_equal(deferred, [False, True, True])
    # at temperature 0 it is
    np.testing.assert_array_equal(law("token_v3", q, p, 0.0, 0.0), law("spec_decode", q, p, 0.0, 0.0))


def test_not_an_identity_acceptance_does_not_rise_with_alpha():
    """Counter-example: fewer tokens are deferred as α grows, and yet more of the draft is rejected."""
    rng, falls = np.random.default_rng(11), 0
    for name in TOKEN:
        q, p = rng.normal(size=(60, 5)) * 2, rng.normal(size=(60, 5)) * 2
        pair = conformance.law_pair(q, p, 1.0)
        kept, sets = [], []
        for alpha in np.linspace(-0.5, 1, 13):
            column = jnp.full((60, 1), alpha, jnp.float32)
            kept.append(np.asarray(conformance.evaluate(Speculative(RULES[name]), pair, alpha)[0], float).sum(-1))
            sets.append(np.broadcast_to(np.asarray(RULES[name].deferral(pair, column)), q.shape))
        assert all((later <= before).all() for before, later in zip(sets, sets[1:], strict=False)), name
        falls += (np.diff(np.stack(kept), axis=0) < -1e-3).sum()
    assert falls > 0


@pytest.mark.parametrize("name", [n for n in DELTA if not n.startswith("opt")] + TOKEN)
def test_the_deferred_set_shrinks_with_alpha(name):
    q, p = random_pairs(12)
    pair = conformance.law_pair(q, p, 1.0)
    low, high = rules.grid_bounds(RULES[name], VOCAB)
    before = None
    for alpha in np.linspace(low - 0.5, high + 0.5, 9):
        deferred = np.asarray(RULES[name].deferral(pair, jnp.full((len(q), 1), alpha, jnp.float32)))
        assert before is None or (deferred <= before).all()
        before = deferred


# --- comparisons


def exact_pair(q, p, *, greedy=False):
    """A pair whose scaled laws are its raw ones, in exactly these float32 numbers."""
    q, p = jnp.asarray([q], jnp.float32), jnp.asarray([p], jnp.float32)
    return LawPair(q=q, p=p, q_tilde=q, p_tilde=p, greedy=jnp.full((1, 1), greedy))


@pytest.mark.parametrize(
    ("name", "q", "p", "alpha"),
    [
        ("chow", [0.5, 0.25, 0.25, 0], [1, 0, 0, 0], 0.5),
        ("diff", [0.5, 0.25, 0.25, 0], [0.75, 0.25, 0, 0], 0.25),
        ("opt", [0.5, 0.5, 0, 0], [0.75, 0.25, 0, 0], 1.0),  # TV = 1/4
        ("token_v1", [0.5, 0.5, 0, 0], [0.75, 0.25, 0, 0], 0.25),
        ("token_v2", [0.5, 0.5, 0, 0], [0.75, 0.25, 0, 0], 0.5),
        ("token_v3", [0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0], 0.5),
        ("lossy_greedy", [0, 1, 0, 0], [0.5, 0.25, 0.25, 0], 0.5),
    ],
)
def test_comparisons_are_strict(name, q, p, alpha):
    """At equality the drafted token is kept; a hair below it is deferred."""
    pair, token = exact_pair(q, p), 1 if name in ("token_v2", "token_v3", "lossy_greedy") else 0
    at_equality = np.broadcast_to(RULES[name].deferral(pair, jnp.full((1, 1), alpha)), (1, 4))
    assert not at_equality[0, token]
    below = np.broadcast_to(RULES[name].deferral(pair, jnp.full((1, 1), alpha - 1e-3)), (1, 4))
    assert below[0, token]


def test_entropy_rules_at_equality():
    pair = exact_pair([0.5, 0.5], [0.5, 0.5])
    entropy = rules.entropy(pair.q)
    assert not RULES["chow_log"].deferral(pair, entropy)[0, 0]
    for name in ("diff_log", "opt_log"):
        assert not RULES[name].deferral(pair, jnp.zeros((1, 1)))[0, 0]
    surprise = -(pair.q * jnp.log(pair.p)).sum(-1, keepdims=True)
    assert not RULES["bild_star"].deferral(pair, surprise)[0, 0]


@pytest.mark.parametrize("name", ["opt", "opt_log"])
def test_more_disagreement_defers_less(name):
    near, far = [0.6, 0.2, 0.2, 0.0], [0.0, 0.2, 0.2, 0.6]  # the same maximum and entropy
    p = [0.7, 0.15, 0.15, 0.0]
    alpha = jnp.full((1, 1), 0.3)
    assert bool(RULES[name].deferral(exact_pair(near, p), alpha)[0, 0])
    assert not bool(RULES[name].deferral(exact_pair(far, p), alpha)[0, 0])


def test_bild_star_reads_the_divergence_that_fits_the_draft():
    q, p = [0.6, 0.4, 0, 0], [0.5, 0.1, 0.4, 0]
    sampled, greedy = -(0.6 * math.log(0.5) + 0.4 * math.log(0.1)), -math.log(0.5)
    soft = exact_pair(q, p)
    cold = LawPair(soft.q, soft.p, jnp.asarray([[1.0, 0, 0, 0]]), soft.p, jnp.ones((1, 1), bool))
    for pair, value in ((soft, sampled), (cold, greedy)):
        decide = RULES["bild_star"].deferral
        assert bool(decide(pair, jnp.full((1, 1), value - 1e-3))[0, 0])
        assert not bool(decide(pair, jnp.full((1, 1), value + 1e-3))[0, 0])
    impossible = exact_pair(q, [1, 0, 0, 0])
    assert bool(RULES["bild_star"].deferral(impossible, jnp.full((1, 1), 1e9))[0, 0])  # q > 0 = p: infinite


# --- the table

METHODS_TABLE = {
    "spec_decode": None,
    "lossy": (0.0, 1.0),
    "lossy_tuned": (0.0, 1.0),
    "lossy_greedy": (0.0, 1.0),
    "chow": (0.0, 1.0),
    "chow_log": (0.0, "lnV"),
    "diff": (-1.0, 1.0),
    "diff_log": ("-lnV", "lnV"),
    "opt": None,  # unbounded: any finite grid will do
    "opt_log": None,
    "bild_star": (0.0, 10.0),
    "token_v1": (-1.0, 1.0),
    "token_v2": (0.0, 1.0),
    "token_v3": (0.0, 1.0),
}


def test_the_table_is_that_of_the_methods():
    assert set(RULES) == set(METHODS_TABLE)
    assert all(name == rule.name for name, rule in RULES.items())
    for name, rule in RULES.items():
        with_domain = name in ("lossy", "lossy_tuned")
        assert rule.domain == ((0.0, 1.0) if with_domain else (-math.inf, math.inf)), name
        if METHODS_TABLE[name] is not None and not with_domain:
            assert rule.grid == METHODS_TABLE[name], name
    assert RULES["spec_decode"].grid is None
    assert all(0 <= x < 1 for name in ("lossy", "lossy_tuned") for x in RULES[name].grid)  # inside the domain
    assert [n for n, r in RULES.items() if r.lossless] == ["spec_decode"]
    assert [n for n, r in RULES.items() if not r.reads_q] == ["spec_decode"]
    assert [n for n, r in RULES.items() if r.greedy_only] == ["lossy_greedy"]
    assert {n for n, r in RULES.items() if r.reads_max_q} == {"chow", "diff", "opt"}


def test_grid_bounds_resolve_the_vocabulary():
    assert rules.grid_bounds(RULES["diff_log"], 100) == (-math.log(100), math.log(100))
    assert rules.grid_bounds(RULES["bild_star"], 100) == (0.0, 10.0)
    with pytest.raises(ValueError, match="rule 'spec_decode' has no alpha"):
        rules.grid_bounds(RULES["spec_decode"], 100)


def test_any_finite_alpha_is_legal_where_there_is_no_domain():
    q, p = random_pairs(13)
    finite = [n for n, r in RULES.items() if np.isinf(r.domain[0]) and not r.greedy_only]
    for name in finite:
        for alpha in (-100.0, 100.0):
            found = law(name, q, p, alpha)
            np.testing.assert_allclose(found.sum(-1), 1.0, atol=1e-5)


def test_lossy_refuses_a_beta_below_one_minus_alpha():
    rules.check_alpha(rules.lossy(0.6), np.array([0.4, 0.9]))
    with pytest.raises(ValueError, match=r"alpha=0.3 is outside the domain \[0.4, 1\)"):
        rules.check_alpha(rules.lossy(0.6), np.array([0.5, 0.3]))
    with pytest.raises(ValueError, match="beta=0 must be positive"):
        rules.lossy(0)


def test_a_rule_needs_exactly_one_of_deferral_and_law():
    with pytest.raises(ValueError, match="either a deferral function or a law"):
        rules.Rule(name="neither")
    with pytest.raises(ValueError, match="either a deferral function or a law"):
        rules.Rule(name="both", deferral=rules.chow, law=RULES["lossy"].law)
