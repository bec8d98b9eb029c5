"""Names of methods for readers."""

import pytest

from speccascade_jax.results.labels import label, ordered


@pytest.mark.parametrize(
    ("curve", "text"),
    [
        ("token_v3", "SpecCascade [Token]"),
        ("opt (γ = 3, bonus none)", "SpecCascade [OPT] (γ = 3, bonus none)"),
        ("fuzzy", "FSD [js]"),
        ("fuzzy[fuzzy_kl_top50]", "FSD [kl_top50]"),
        ("oracle_cascade[opt]", "Oracle [OPT]"),
        ("bild@0.3 (γ = 5)", "BiLD α_f 0.3 (γ = 5)"),
        ("bild[fuzzy_tv]@0.3", "BiLD [tv] α_f 0.3"),
        ("specdecpp@0.7", "SpecDec++ h 0.7"),
        ("specdecpp[opt]:depth3_wrej6@0.7 (γ = 20)", "SpecDec++ [OPT] depth3_wrej6 h 0.7 (γ = 20)"),
        ("a_rule_of_mine", "a_rule_of_mine"),
        ("mine[chow] (γ = 3)", "mine[chow] (γ = 3)"),
    ],
)
def test_a_curve_is_named_by_its_method_and_by_what_was_chosen_for_it(curve, text):
    assert label(curve) == text


def test_curves_come_in_the_papers_order():
    given = ["zeta", "token_v3", "fuzzy[fuzzy_kl]", "alpha", "bild@0.5", "bild@0.1", "opt (γ = 3)"]
    order = ["bild@0.1", "bild@0.5", "opt (γ = 3)", "token_v3", "fuzzy[fuzzy_kl]", "alpha", "zeta"]
    assert ordered(given) == order
