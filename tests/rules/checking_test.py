"""Tests that a user's rule is checked before its first use, and that errors name the rule and its invalid result."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.rules import checking
from speccascade_jax.rules.deferral import RULES, get
from speccascade_jax.rules.rule import Alpha, Rule
from tests.support import conformance

WRONG = {
    "nan": ({"deferral": lambda pair, a: pair.q / 0.0 * 0.0}, "its deferral returned nan at alpha=0: expected a"),
    "three": ({"deferral": lambda pair, a: 0.0 * pair.q + 3.0}, "its deferral returned 3 at alpha=0: expected a"),
    "minus one": ({"deferral": lambda pair, a: -jnp.ones_like(pair.q)}, "its deferral returned -1 at alpha=0"),
    "only at a large alpha": ({"deferral": lambda pair, a: a * 2 + 0 * pair.q}, "its deferral returned 2 at alpha=1"),
    "a scalar": ({"deferral": lambda pair, a: 3.0}, r"its deferral returned shape \(\) for .* \(2, 64\)"),
    "no last axis": ({"deferral": lambda pair, a: pair.q.max(-1) < 0.5}, r"its deferral returned shape \(2,\) for"),
    "fixed axis number": ({"deferral": lambda pair, a: pair.q.max(1, keepdims=True) < a}, "depends on other positions"),
    "nothing": ({"deferral": lambda pair, a: None}, "its deferral fails on distributions of shape .*: AttributeError"),
    "its own error": ({"deferral": lambda pair, a: pair.r < a}, "its deferral fails on .* 'LawPair' .* 'r'"),
    "a sum of three": ({"law": lambda pair, a: 3.0 * pair.p_tilde}, r"its law returned 3 at alpha=0: .* add up to 1"),
    "a sum of nan": ({"law": lambda pair, a: pair.p_tilde * jnp.nan}, "its law returned nan at alpha=0: .* probabilit"),
    "below zero": ({"law": lambda pair, a: 2 * pair.p_tilde - pair.q_tilde}, "its law returned -1 .* probab"),
    "a thin axis": ({"law": lambda pair, a: pair.p_tilde.max(-1, keepdims=True)}, r"returned shape \(2, 1\) for"),
    "logs of zeros": ({"deferral": lambda pair, a: pair.q * jnp.log(pair.q) + 1}, "its deferral returned nan"),
    "kept of another distribution": (
        {"law": lambda pair, a: pair.p_tilde, "kept": lambda pair, a: pair.q_tilde}, "its kept returned .* min"),
    "kept that sums the vocabulary": (
        {"law": lambda pair, a: pair.p_tilde,
         "kept": lambda pair, a: jnp.minimum(pair.q_tilde, pair.p_tilde / pair.p_tilde.sum(-1, keepdims=True))},
        "its kept returned .* of the same token"),
    "a bound below its distribution": (
        {"law": lambda pair, a: pair.p_tilde, "at_most": lambda pair, a: jnp.minimum(pair.q_tilde, pair.p_tilde)},
        "its at_most returned .* at least π"),
    "not lossless": ({"deferral": lambda pair, a: pair.q.max(-1, keepdims=True) < a, "lossless": True}, "lossless"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_wrong_output_of_a_users_rule(name):
    parts, message = WRONG[name]
    rule = Rule(name="mine", **parts)
    with pytest.raises(ValueError, match=f"^rule 'mine': .*{message}"):
        get(rule)


def test_decode_and_target_law_refuse_a_wrong_rule():
    q, p = conformance.tables(5, seed=0)
    rule = Rule(name="mine", deferral=lambda pair, alpha: 0.0 * pair.q + 3.0)
    with pytest.raises(ValueError, match="rule 'mine': its deferral returned 3"):
        sc.decode(sc.Pair(sc.TableLM(p), sc.TableLM(q)), [[1]], rule=rule, alpha=0.5, max_new_tokens=4)
    with pytest.raises(ValueError, match="rule 'mine': its deferral returned 3"):
        sc.target_law(rule, q, p, alpha=0.5)


@pytest.mark.laws
def test_the_packages_rules_and_their_variants_pass():
    for rule in RULES.values():
        checking.check(rule)
    for rule in (sc.fuzzy("kl", 7), sc.lossy(2.0), sc.lossy(0.8)):
        assert get(rule) is rule
    whole = Rule(name="mine", deferral=lambda pair, alpha: (pair.q.max(-1, keepdims=True) < alpha).astype(np.int32))
    assert get(whole) is whole


def test_a_rule_with_an_array_of_its_vocabularys_size_is_not_checked():
    """Uses a rule with one bias per token, which cannot be added to the test distributions of another size."""
    bias = jnp.linspace(-1.0, 1.0, 30)
    biased = Rule(name="biased", deferral=lambda pair, alpha: pair.q + bias < alpha, alpha=Alpha(domain=(0.0, 1.0)))
    checking.check(biased)
    with pytest.raises(ValueError, match="its deferral fails on distributions of shape .*: NameError"):
        checking.check(dataclasses.replace(biased, deferral=lambda pair, alpha: pair.q < not_there))  # noqa: F821
