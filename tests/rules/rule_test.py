"""Tests of the text of a rule: its name, its meaning, the values of α and its source."""

import functools

import pytest

import speccascade_jax as sc
from speccascade_jax.extend import Alpha
from speccascade_jax.rules.deferral import RULES


def below(pair, alpha):
    """Defers tokens of which `p` is below α.

    This line is not shown.
    """
    return pair.p < alpha


def silent(pair, alpha, scale=1.0):
    return pair.p < scale * alpha


def test_a_rule_prints_its_name_its_meaning_and_its_source():
    rule = sc.Rule(name="below", deferral=below, alpha=Alpha(grid=(0.0, "lnV"), typical=0.25))
    text = (
        "Defers tokens of which `p` is below α. α from 0 to lnV, for example 0.25. Source: tests.rules.rule_test.below"
    )
    assert repr(rule) == f"Rule('below': {text})"


def test_a_function_without_a_docstring_is_named():
    rule = sc.Rule(name="silent", deferral=silent, alpha=None)
    assert repr(rule) == "Rule('silent': No α. Source: tests.rules.rule_test.silent)"
    partial = sc.Rule(name="half", deferral=functools.partial(silent, scale=0.5), alpha=None)
    assert repr(partial).endswith("Source: tests.rules.rule_test.silent)")


@pytest.mark.parametrize("name", RULES)
def test_the_packages_rules_explain_themselves(name):
    text = repr(RULES[name])
    assert len(text) < 300 and " at 0x" not in text and "\n" not in text
    assert ("No α" in text) == (RULES[name].alpha is None)
    assert len(text.split(". Source: ")[0].split(": ", 1)[1]) > 40, "the function has no docstring"
