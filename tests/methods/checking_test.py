"""Tests of `sc.check_rule`: the package's rules pass in one line, and each kind of mistake is found."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import pytest

import speccascade_jax as sc


@pytest.mark.laws
@pytest.mark.parametrize("name", ["token_v3", "spec_decode", "lossy_greedy"])
def test_the_packages_rules_pass_in_one_line(name):
    said = sc.check_rule(name)
    assert said.startswith(name) and "\n" not in said
    assert "shapes correct, identity within" in said and "tokens (p = " in said


@pytest.mark.laws
def test_a_users_rule_is_checked_at_the_given_alphas():
    rule = sc.Rule(name="mine", deferral=lambda pair, alpha: pair.q.max(-1, keepdims=True) < alpha)
    assert sc.check_rule(rule, alphas=(0.5,)).startswith("mine at alpha 0.5: ")


def kept_a_little_less(pair, alpha):
    return jnp.minimum(pair.q_tilde, pair.p_tilde) * 0.9995


def by_position(pair, alpha):
    """Returns a distribution that depends on the position: at every other one it is the draft's."""
    even = jnp.arange(pair.p_tilde.shape[-2])[:, None] % 2 == 0
    return jnp.where(even, pair.p_tilde, pair.q_tilde)


@pytest.mark.parametrize(("rule", "said"), [
    (sc.Rule(name="bad", deferral=lambda pair, alpha: pair.q.max(-1, keepdims=True) * 1.5), "deferral returned 1"),
    (sc.Rule(name="bad", law=lambda pair, alpha: pair.p_tilde * 1.01), "law returned 1.01"),
    (sc.Rule(name="bad", law=lambda pair, alpha: pair.p_tilde[..., :1]), "returned shape"),
    (sc.Rule(name="bad", law=lambda pair, alpha: pair.p_tilde, kept=kept_a_little_less),
     r"kept of single tokens, is up to .* away from what π requires under Speculative"),
    (sc.Rule(name="bad", law=by_position), "of single tokens, is up to"),
    ("no_such_rule", "unknown rule"),
], ids=["deferral", "distribution", "shape", "kept", "positions", "name"])  # fmt: skip
def test_mistakes_in_rules_are_found(rule, said):
    with pytest.raises(ValueError, match=said):
        sc.check_rule(rule)


def test_a_rule_that_keeps_every_draft_gives_a_warning(monkeypatch):
    from speccascade_jax.methods import checking

    monkeypatch.setattr(checking, "_p_values", lambda *_: [1.0])
    rules = [sc.Rule(name="r", deferral=lambda pair, alpha, n=n: pair.q.max(-1, keepdims=True) < n) for n in (0.0, 0.9)]
    with pytest.warns(UserWarning, match=r"rule 'r' keeps every draft \(π = q̃\) on tables of 6 tokens"):
        checking.check_rule(rules[0], alphas=(0.5,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checking.check_rule(rules[1], alphas=(0.5,))


@pytest.mark.laws
def test_tokens_of_another_distribution_are_found(monkeypatch):
    """The planted error replaces a rejected token from the draft's distribution."""
    from speccascade_jax.methods import checking
    from speccascade_jax.rules import deferral

    wrong = sc.Rule(name="wrong", law=lambda pair, alpha: pair.p_tilde)
    assemble, chow = checking.assemble, deferral.get("chow")
    monkeypatch.setattr(checking, "assemble", lambda pair, rule, **more: assemble(pair, rule=chow, **more))
    with pytest.raises(ValueError, match=r"generated tokens do not follow .* π \(p-value .* in 6 chi"):
        checking.check_rule(wrong, alphas=(0.5,))
