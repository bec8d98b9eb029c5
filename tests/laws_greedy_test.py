"""Every form of rule at temperature 0, token by token, and a sweep of its controls as one program."""

import pytest

from tests.support import conformance

pytestmark = pytest.mark.laws

ALL = conformance.REPRESENTATIVE
# one of each form: what is traced differs between forms, not between the rules of one
FORMS = ("spec_decode", "lossy", "lossy_tuned", "lossy_greedy", "opt", "token_v3", "bild_star", "fuzzy_js_top2")


@pytest.mark.parametrize("name", FORMS)
def test_greedy_decoding_is_the_reference_token_by_token(name):
    conformance.check_greedy(ALL[name])


@pytest.mark.parametrize("name", FORMS)
def test_a_sweep_is_one_compilation(name):
    conformance.check_one_compilation(ALL[name])
