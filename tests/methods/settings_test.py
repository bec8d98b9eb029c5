"""Tests of settings: the words of other libraries lead to the names here."""

import pytest

import speccascade_jax as sc
from speccascade_jax.core import names
from speccascade_jax.methods.settings import UNSUPPORTED, Settings

MODEL = sc.FakeLM(8)
PAIR = sc.Pair(target=MODEL, draft=MODEL)


@pytest.mark.parametrize("word", names.SYNONYMS)
def test_a_synonym_of_the_field_names_the_setting(word):
    with pytest.raises(TypeError, match=f"no setting '{word}': did you mean {names.SYNONYMS[word]}\\? "):
        sc.decode(PAIR, [[1]], **{word: 4})


@pytest.mark.parametrize("word", UNSUPPORTED)
def test_a_setting_without_a_counterpart_is_refused_with_the_reason(word):
    with pytest.raises(TypeError) as error:
        sc.decode(PAIR, [[1]], **{word: 4})
    assert UNSUPPORTED[word] in str(error.value) and "did you mean" not in str(error.value)


def test_synonyms_lead_to_names_that_exist():
    known = {*Settings.__dataclass_fields__, "max_new_tokens", "seed", "stop_ids"}
    assert set(names.SYNONYMS.values()) <= known and not known & (set(names.SYNONYMS) | set(UNSUPPORTED))


def test_a_method_given_as_a_rule_is_pointed_to_method():
    with pytest.raises(ValueError, match="give method='autoregressive'"):
        sc.decode(PAIR, [[1]], rule="autoregressive")
