"""Tests of every rule's `π` against NumPy, of strict comparisons, the table of rules, and METHODS section 3."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq

from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.protocols import DraftStep
from speccascade_jax.core.types import LawPair
from speccascade_jax.rules import deferral
from speccascade_jax.rules.acceptance import Deferral, SoftRatio, Speculative
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.rules.rule import Rule, checked_alpha
from speccascade_jax.stopping.policies import Confidence
from tests.support import conformance, reference

VOCAB = 11
law = conformance.target_law

METHODS_TABLE = {
    "spec_decode": None,
    "lossy": (0.0, 1.0),
    "lossy_tuned": (0.0, 1.0),
    "lossy_greedy": (0.0, 1.0),
    "chow": (0.0, 1.0),
    "chow_log": (0.0, "lnV"),
    "diff": (-1.0, 1.0),
    "diff_log": ("-lnV", "lnV"),
    "opt": (),  # the useful range is unbounded, so no grid is checked
    "opt_log": (),
    "bild_star": (0.0, 10.0),
    "token_v1": (-1.0, 1.0),
    "token_v2": (0.0, 1.0),
    "token_v3": (0.0, 1.0),
}


def margin(rule, q, p, alpha, temperature, top_p):
    """Returns how far the float64 decision and truncation are from a tie; near a tie float32 may decide differently."""
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
        # a case is compared only if a change of α by ±1e-5 changes no decision about a token with `q̃` > 0
        same = all((np.broadcast_to(s == sides[1], q_law.shape) | (arguments[2] == 0)).all() for s in sides)
        distance = np.inf if same else 0.0
    return min(distance, edge)


@pytest.mark.parametrize("name", [n for n in RULES if n in METHODS_TABLE])
def test_distribution_equals_the_reference(name):
    rule, (q, p) = RULES[name], conformance.logit_pairs()
    low, high = (0.0, 0.0) if rule.alpha is None else rule.alpha.bounds(VOCAB)
    rng, compared, total = np.random.default_rng(1), 0, 0
    for temperature in (0.0,) if rule.greedy_only else (0.0, 0.5, 1.0):
        for top_p in (1.0, 0.8):
            alpha = (low + (high - low) * rng.random(len(q))).astype(np.float32)
            laws = law(rule, q, p, alpha, temperature, top_p)
            for a, q_row, p_row, row in zip(alpha.astype(float), q, p, laws, strict=True):
                total += 1
                if margin(name, q_row, p_row, a, temperature, top_p) < 1e-5:
                    continue
                compared += 1
                expected = reference.target_law(name, q_row, p_row, a, temperature, top_p)
                np.testing.assert_allclose(row, expected, atol=1e-5, err_msg=f"{a} {temperature} {top_p}")
    assert compared > 0.7 * total


def test_distribution_uses_the_drafts_own_temperature():
    q, p = conformance.logit_pairs(2)
    laws = law("bild_star", q, p, 1.5, 1.0, draft_temperature=0.0)
    for q_row, p_row, row in zip(q, p, laws, strict=True):
        expected = reference.target_law("bild_star", q_row, p_row, 1.5, 1.0, draft_temperature=0.0)
        np.testing.assert_allclose(row, expected, atol=1e-5)


def test_distribution_keeps_the_leading_axes():
    q, p = conformance.logit_pairs(3, count=24)
    shape = (2, 3, 4)
    alpha = np.linspace(0, 0.9, 24, dtype=np.float32)
    nested = law("token_v3", q.reshape(*shape, -1), p.reshape(*shape, -1), alpha.reshape(shape), 0.7, 0.9)
    np.testing.assert_array_equal(nested.reshape(24, -1), law("token_v3", q, p, alpha, 0.7, 0.9))
    assert nested.dtype == np.float32
    single = law("token_v3", q[5], p[5], float(alpha[5]), 0.7, 0.9)
    np.testing.assert_allclose(single, nested.reshape(24, -1)[5], atol=1e-6)


# --- comparisons


@pytest.mark.parametrize(("name", "q", "p", "alpha"), [
    ("chow", [0.5, 0.25, 0.25, 0], [1, 0, 0, 0], 0.5),
    ("diff", [0.5, 0.25, 0.25, 0], [0.75, 0.25, 0, 0], 0.25),
    ("opt", [0.5, 0.5, 0, 0], [0.75, 0.25, 0, 0], 1.0),  # the total variation is 1/4
    ("token_v1", [0.5, 0.5, 0, 0], [0.75, 0.25, 0, 0], 0.25),
    ("token_v2", [0.5, 0.5, 0, 0], [0.75, 0.25, 0, 0], 0.5),
    ("token_v3", [0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0], 0.5),
    ("lossy_greedy", [0, 1, 0, 0], [0.5, 0.25, 0.25, 0], 0.5),
])  # fmt: skip
def test_comparisons_are_strict(name, q, p, alpha):
    """Expects that the drafted token is kept at equality, and deferred at a smaller α; float32 holds all numbers."""
    q, p = jnp.asarray([q], jnp.float32), jnp.asarray([p], jnp.float32)
    pair = LawPair(q=q, p=p, q_tilde=q, p_tilde=p, greedy=jnp.zeros((1, 1), bool))
    token = 1 if name in ("token_v2", "token_v3", "lossy_greedy") else 0
    for threshold, deferred in ((alpha, False), (alpha - 1e-3, True)):
        decision = np.broadcast_to(RULES[name].deferral(pair, jnp.full((1, 1), threshold)), (1, 4))
        assert decision[0, token] == deferred


# --- the table


def test_the_table_of_rules_equals_the_documented_one():
    assert set(METHODS_TABLE) <= set(RULES)
    assert all(name == rule.name for name, rule in RULES.items())
    for name in METHODS_TABLE:
        rule = RULES[name]
        with_domain = name in ("lossy", "lossy_tuned")
        if METHODS_TABLE[name] is None:
            assert rule.alpha is None
            continue
        assert rule.alpha.domain == ((0.0, 1.0) if with_domain else (-math.inf, math.inf)), name
        if not with_domain and METHODS_TABLE[name]:
            assert rule.alpha.grid == METHODS_TABLE[name], name
        low, high = rule.alpha.bounds(8192)
        assert low <= rule.alpha.typical <= high and all(low - 1e-3 <= x <= high + 1e-3 for x in rule.alpha.usual())
    assert RULES["diff_log"].alpha.bounds(100) == (-math.log(100), math.log(100))
    # all usual α's lie inside the domain
    assert all(0 <= x < 1 for name in ("lossy", "lossy_tuned") for x in RULES[name].alpha.grid)
    assert [n for n in METHODS_TABLE if RULES[n].lossless] == ["spec_decode"]
    assert [n for n in METHODS_TABLE if not RULES[n].reads_q] == ["spec_decode"]
    assert [n for n in METHODS_TABLE if RULES[n].greedy_only] == ["lossy_greedy"]


def test_rules_without_a_domain_accept_any_finite_alpha():
    q, p = conformance.logit_pairs(13)
    unbounded = [r for r in conformance.REPRESENTATIVE.values() if r.alpha and np.isinf(r.alpha.domain[0])]
    for rule, alpha in itertools.product((r for r in unbounded if not r.greedy_only), (-100.0, 100.0)):
        np.testing.assert_allclose(law(rule, q, p, alpha).sum(-1), 1.0, atol=1e-5)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: deferral.lossy(0), "beta=0 must be positive"),
    (lambda: deferral.fuzzy("hellinger"), "unknown divergence 'hellinger': choose one of js"),
    (lambda: deferral.fuzzy("js", -1), "top_k=-1 is negative"),
    (lambda: Rule(name="neither"), "exactly one of a deferral function and a law"),
    (lambda: Rule(name="both", deferral=deferral.chow, law=RULES["lossy"].law), "exactly one of a deferral function"),
    (lambda: Deferral(RULES["lossy"]), "'lossy' is not a deferral rule"),
    (lambda: SoftRatio(RULES["lossy"]), "'soft_ratio' works only with rule 'sd_reference', got 'lossy'"),
])  # fmt: skip
def test_meaningless_rules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- numbers at the limits of float32


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bild_star_where_the_targets_distribution_is_zero_in_float32(temperature):
    """Expects `-log p` of about 100 nats, and not infinity, for a token whose logit is 100 below the largest."""
    q, p = np.float32([[-4.0, 0.0, 0.0], [9.0, 0.0, 0.0]]), np.float32([[-100.0, 0.0, 0.0], [-100.0, 0.0, 0.0]])
    pair = conformance.law_pair(q, p, temperature)
    for row in range(2):
        log_p, soft = reference.log_law(p[row], 1.0), reference.softmax(q[row])
        exact = -(soft * log_p).sum() if temperature else -log_p[np.argmax(q[row])]
        for alpha, deferred in ((exact * 0.999, True), (exact * 1.001, False)):
            decision = jax.jit(RULES["bild_star"].deferral)(pair, jnp.full((2, 1), alpha, jnp.float32))
            assert bool(decision[row, 0]) is deferred, (row, alpha)


@pytest.mark.parametrize("alpha", [-1e-9, -1e-7, 0.0, 1e-9])
@pytest.mark.parametrize("name", ["chow", "diff", "opt", "token_v1", "token_v2", "chow_log", "diff_log", "opt_log"])
def test_an_alpha_near_zero_decides_as_in_float64(name, alpha):
    """Compares with float64; in float32, 1 - α and max p - α would be 1 and max p, and the sign of α would be lost."""
    alpha = float(np.float32(alpha))
    certain, half, flat = [0.0, -200.0, -200.0, -200.0], [0.0, 0.0, -200.0, -200.0], [0.0] * 4
    laws = (certain, half, flat)
    q, p = (np.float32(x) for x in zip(*itertools.product(laws, laws), strict=True))
    pair = conformance.law_pair(q, p, 1.0)
    decisions = np.broadcast_to(jax.jit(RULES[name].deferral)(pair, jnp.full((len(q), 1), alpha, jnp.float32)), q.shape)
    for row in range(len(q)):
        # rounding to 12 digits makes these probabilities exactly 1, 1/2, 1/4 and 0
        laws = [np.round(reference.softmax(x[row]), 12) for x in (q, p)]
        expected = np.broadcast_to(reference.DECISIONS[name](*laws, *laws, alpha, False), 4)
        np.testing.assert_array_equal(decisions[row], expected, err_msg=f"{laws}")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("alpha", [-1e-9, -1e-12])
def test_chow_below_zero_is_lossless_and_its_cascade_never_drafts(alpha, temperature):
    """Expects this even of a draft that is certain; the stop policy of a token cascade must agree with the rule."""
    q, p = np.eye(5, dtype=np.float32) * 100, np.float32(np.random.default_rng(0).normal(size=(5, 5)))
    lossless = law("spec_decode", q, p, 0.0, temperature)
    np.testing.assert_allclose(law("chow", q, p, alpha, temperature), lossless, atol=1e-6)
    step = DraftStep(None, jnp.ones((1,)), None, jnp.zeros((), jnp.int32), None, None)
    decision, _ = Confidence(3)(None, (), step, make_controls(1, stop_threshold=alpha))
    assert not decision.draw[0]


@pytest.mark.parametrize("beta", [round(0.05 * n, 2) for n in range(1, 20)])
def test_the_end_of_the_domain_of_alpha_is_inside(beta):
    """Expects that α = 1 − β is allowed, although α is a float32 and 1 − β a float64."""
    edge = round(1 - beta, 2)
    assert checked_alpha(deferral.lossy(beta).alpha, "it", edge, 1) == np.float32(edge)
    with pytest.raises(ValueError, match=r"alpha=.* is outside the domain \[.*, 1\) of it"):
        checked_alpha(deferral.lossy(beta).alpha, "it", np.array([0.99, edge - 1e-3]), 2)


# --- identities between rules, and counter-examples to two identities that do not hold


DELTA = ["chow", "chow_log", "diff", "diff_log", "opt", "opt_log", "bild_star"]
TOKEN = ["token_v1", "token_v2", "token_v3"]
ANY = [0.0, 0.5, 1.0]


def scaled(logits, temperature, top_p=1.0):
    return np.stack([reference.scale(row, temperature, top_p) for row in logits])


# --- the lemmas


def root_b(qt, pt, alpha):
    """Returns `b = 1/β` of `lossy_tuned`, computed by Brent's method; 0 if no token exceeds the ceiling."""
    excess = np.maximum(qt - pt / (1 - alpha), 0).sum()
    if excess <= 0:
        return 0.0
    # at α = 0 the root is the upper end of the interval, up to float32 rounding, so the end is moved up a little
    return brentq(lambda b: np.maximum(b * pt - qt, 0).sum() - excess, 0, 1 / (1 - alpha) + 1e-6, xtol=1e-14)


@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.5])
def test_tuned_lossy_solves_its_equation(top_p):
    """Tests Lemma 2, also for roots outside the paper's search range, `β > 10` (errata of METHODS, item 3)."""
    q, p = conformance.logit_pairs(4, count=200)
    large = 0
    for alpha in (0.0, 0.3, 0.9, 0.97):
        laws = law("lossy_tuned", q, p, alpha, 1.0, top_p).astype(float)
        for row, qt, pt in zip(laws, scaled(q, 1.0, top_p), scaled(p, 1.0, top_p), strict=True):
            np.testing.assert_allclose(row.sum(), 1.0, atol=1e-5)
            b = root_b(qt, pt, float(np.float32(alpha)))
            assert 0 <= b <= 1 / (1 - alpha) + 1e-5
            large += 0 < b < 0.1
            expected = np.maximum(np.minimum(qt, pt / (1 - np.float32(alpha))), b * pt)
            if np.abs(np.cumsum(np.sort(qt)) - top_p).min() > 1e-5 or top_p == 1:
                np.testing.assert_allclose(row, expected, atol=1e-5)
    assert top_p != 0.8 or large > 0


@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_lemma_3_rejections_are_deferral_times_distance(name, temperature):
    q, p = conformance.logit_pairs(5)
    for alpha in conformance.alphas(RULES[name], VOCAB):
        pair = conformance.law_pair(q, p, temperature)
        kept = np.asarray(conformance.evaluate(Speculative(RULES[name]), pair, alpha)[0], float)
        delta = np.asarray(RULES[name].deferral(pair, jnp.full((len(q), 1), alpha, jnp.float32)), float)[:, 0]
        distance = 0.5 * np.abs(np.asarray(pair.p_tilde, float) - np.asarray(pair.q_tilde, float)).sum(-1)
        np.testing.assert_allclose(1 - kept.sum(-1), delta * distance, atol=1e-5)


def test_lemma_7_token_v3_at_temperature_zero_is_lossy_greedy():
    q, p = conformance.logit_pairs(7)
    seen = set()
    for alpha in (0.0, 0.1, 0.5, 0.9, 1.0):
        laws = law("lossy_greedy", q, p, alpha, 0.0)
        np.testing.assert_array_equal(laws, law("token_v3", q, p, alpha, 0.0))
        draft, target = scaled(q, 0.0), scaled(p, 0.0)
        seen |= {bool(same) for same in (laws == target).all(-1)} | {bool((laws != draft).any())}
    assert seen == {True, False}


def test_lemma_10_opt_and_diff_at_temperature_zero_share_a_distribution_but_not_a_deferral_rate():
    q, p = conformance.logit_pairs(8)
    pair = conformance.law_pair(q, p, 0.0)
    rates = []
    for alpha in (0.05, 0.2, 0.5):
        np.testing.assert_array_equal(law("opt", q, p, alpha, 0.0), law("diff", q, p, alpha, 0.0))
        column = jnp.full((len(q), 1), alpha, jnp.float32)
        rates.append([float(RULES[name].deferral(pair, column).mean()) for name in ("opt", "diff")])
    # if both argmaxes agree, the distance is 0; there opt may defer where diff does not, which changes no token
    assert all(opt >= diff for opt, diff in rates) and any(opt > diff for opt, diff in rates)


# --- where a rule is lossless, and where it never defers


@pytest.mark.parametrize(("name", "alphas", "temperatures"), [
    ("lossy", [0.0], ANY),
    ("lossy", [0.3, 0.8], [0.0]),  # by lemma 6
    ("lossy_tuned", [0.0, 0.3, 0.8], [0.0]),
    ("diff", [-1.0], ANY),
    ("chow", [-1e-3, -1.0, -7.0], ANY),
    *[(name, [-1.0], ANY) for name in TOKEN],
])  # fmt: skip
def test_lossless_ends(name, alphas, temperatures):
    q, p = conformance.logit_pairs(9)
    for sampling in itertools.product(temperatures, (1.0, 0.8)):
        for alpha in alphas:
            lossless = law("spec_decode", q, p, 0.0, *sampling)
            np.testing.assert_allclose(law(name, q, p, alpha, *sampling), lossless, atol=1e-6)


NEVER_DEFERS = dict.fromkeys(("chow", "diff", *TOKEN), 1.0) | dict.fromkeys(("opt", "opt_log", "bild_star"), 1e9)
NEVER_DEFERS |= {"chow_log": math.log(VOCAB) + 1e-5, "diff_log": math.log(VOCAB)}


@pytest.mark.parametrize(("name", "alpha"), NEVER_DEFERS.items())
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_draft_ends(name, alpha, temperature):
    """Expects `π = q̃` at values of α at which a rule never defers."""
    q, p = conformance.logit_pairs(10)
    # left out: equal pairs, where TV = 0 makes every α ineffective, and pairs with infinite divergences
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
    """Gives a counter-example: the target's top token is never deferred, so the draft's excess mass on it stays."""
    q, p = np.log([0.8, 0.1, 0.1]), np.log([0.5, 0.3, 0.2])
    token_law = law("token_v3", q, p, 0.0, temperature)
    target = law("spec_decode", q, p, 0.0, temperature)
    assert np.abs(token_law - target).max() > 0.1
    pair = conformance.law_pair(q[None], p[None], temperature)
    deferred = np.asarray(RULES["token_v3"].deferral(pair, jnp.zeros((1, 1))))[0]
    np.testing.assert_array_equal(deferred, [False, True, True])
    # at temperature 0 token_v3 is lossless
    np.testing.assert_array_equal(law("token_v3", q, p, 0.0, 0.0), law("spec_decode", q, p, 0.0, 0.0))


def test_not_an_identity_acceptance_does_not_rise_with_alpha():
    """Gives a counter-example: fewer tokens are deferred as α grows, but more draft tokens are rejected."""
    rng, falls = np.random.default_rng(11), 0
    for name in TOKEN:
        q, p = rng.normal(size=(60, 5)) * 2, rng.normal(size=(60, 5)) * 2
        pair = conformance.law_pair(q, p, 1.0)
        accept = Speculative(RULES[name])
        kept = [np.asarray(conformance.evaluate(accept, pair, a)[0], float).sum(-1) for a in np.linspace(-0.5, 1, 13)]
        falls += (np.diff(np.stack(kept), axis=0) < -1e-3).sum()
    assert falls > 0


@pytest.mark.parametrize("name", [n for n in DELTA if not n.startswith("opt")] + TOKEN)
def test_the_deferred_set_shrinks_with_alpha(name):
    q, p = conformance.logit_pairs(12)
    pair = conformance.law_pair(q, p, 1.0)
    low, high = RULES[name].alpha.bounds(VOCAB)
    before = None
    for alpha in np.linspace(low - 0.5, high + 0.5, 9):
        deferred = np.asarray(RULES[name].deferral(pair, jnp.full((len(q), 1), alpha, jnp.float32)))
        assert before is None or (deferred <= before).all()
        before = deferred
