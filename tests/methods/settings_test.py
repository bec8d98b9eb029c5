"""Tests of settings: the words of other libraries lead to the names here."""

import jax.numpy as jnp
import numpy as np
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


@pytest.mark.parametrize(("settings", "text"), [
    (Settings(), "Settings()"),
    (Settings(temperature=1.0, alpha=0.5), "Settings(alpha=0.5, temperature=1.0)"),
    (Settings(alpha=np.float32(0.5), top_k=np.int64(3)), "Settings(alpha=0.5, top_k=3)"),
    (Settings(drafters=(sc.Level(model="middle", budget=3, rule="chow", alpha=0.5),)),
     "Settings(drafters=(Level(rule='chow', alpha=0.5, model='middle', budget=3),))"),
    (Settings(method="bild", drafters=(sc.Arm(drafter="draft", block_size=3), "autoregressive"), choose="random"),
     "Settings(drafters=(Arm(drafter='draft', block_size=3), 'autoregressive'), method='bild', choose='random')"),
])  # fmt: skip
def test_settings_print_as_an_expression_without_the_defaults(settings, text):
    assert repr(settings) == text
    assert eval(text, {"Settings": Settings, "Level": sc.Level, "Arm": sc.Arm}) == settings


def test_settings_print_arrays_as_lists_and_a_known_rule_by_its_name():
    settings = Settings(alpha=jnp.asarray([0.0, 0.5]), rule=sc.RULES["opt"])
    assert repr(settings) == "Settings(rule='opt', alpha=[0.0, 0.5])"
    assert len(repr(Settings(alpha=np.zeros(100_000)))) < 200


def test_a_method_given_as_a_rule_is_pointed_to_method():
    with pytest.raises(ValueError, match="give method='autoregressive'"):
        sc.decode(PAIR, [[1]], rule="autoregressive")
