"""Tests of metrics for short answers: numbers, SQuAD's normalisation, letters, and the best of several references."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccascade_jax.metrics import answers, quality


@pytest.mark.parametrize(("text", "number"), [
    ("#### 18", "18"), ("She makes $1,234.50.", "1234.5"), ("so 16-3=13", "13"), ("the answer is -7", "-7"),
    ("-$5", "-5"), ("5-3", "3"), ("x = .5", "0.5"), ("1, 2,3", "3"), ("1,000,000 people.", "1000000"), ("1,0000", "0"),
    ("50%", "50"), ("18.00", "18"), ("\u22124", "-4"),
])  # fmt: skip
def test_the_last_number_is_returned(text, number):
    assert answers.last_number(text) == Decimal(number)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9))
def test_a_number_is_recognised_in_every_spelling(value):
    for text in (f"It is {value}.", f"12 and ${value:,}", f"#### {value:f}\n"):
        assert answers.final_number(text, str(value)) == [100.0]
        assert answers.final_number(text + " Then 0.001", str(value)) == [0.0]


def test_an_output_without_a_number_is_wrong_and_a_reference_without_one_is_rejected():
    assert answers.final_number("none", "3") == [0.0]
    with pytest.raises(ValueError, match="reference 'none' holds no number"):
        answers.final_number("3", "none")


@pytest.mark.parametrize(("text", "normal"), [
    ("The  Beatles!", "beatles"), ("an apple, a pear", "apple pear"), ("U.S.", "us"),
    ("Theatre of the Absurd", "theatre of absurd"),
    ("rock-and-roll", "rockandroll"), ("a", ""),
])  # fmt: skip
def test_normalisation_equals_that_of_squad(text, normal):
    assert answers.normalise(text) == normal


@given(st.text())
def test_normalisation_is_idempotent(text):
    assert answers.answer_exact_match(text, text) == answers.answer_f1(text, text) == [100.0]


@pytest.mark.parametrize(("said", "reference", "exact", "f1"), [
    ("The cat", "cat", 100, 100), ("black cat", "cat", 0, 200 / 3), ("cat cat", "cat", 0, 200 / 3),
    ("dog", "cat", 0, 0), ("", "cat", 0, 0), ("Unanswerable.", "unanswerable", 100, 100),
    ("it is unanswerable", "unanswerable", 0, 0),
    ("unanswerable", "it is unanswerable by law", 0, 0),
    ("the", "a", 100, 100),
])  # fmt: skip
def test_exact_match_and_f1_have_known_scores(said, reference, exact, f1):
    assert answers.answer_exact_match(said, reference) == [exact]
    assert answers.answer_f1(said, reference) == [pytest.approx(f1)]


@pytest.mark.parametrize(("said", "right"), [
    ("B", 1), ("(B)", 1), ("B. Berlin", 1), ("The answer is B", 1), ("A or B", 0), ("Berlin", 0), ("b", 0), ("", 0),
    ("答案是B", 1), ("答えはBです", 1), ("Ответ:B", 1), ("Bézier or B", 1), ("Bézier", 0), ("B2", 0), ("_B", 0),
])  # fmt: skip
def test_choice_compares_the_first_letter_that_stands_alone(said, right):
    assert answers.choice(said, "B") == [100.0 * right]


def test_the_best_of_several_references_counts():
    references = [("green", "red", "a red car"), "blue"]
    scores = quality.score(["answer_exact_match", "answer_f1", "rougeL"], ["Red car", "blue"], references)
    assert scores == pytest.approx({"answer_exact_match": 100.0, "answer_f1": 100.0, "rougeL": 90.0})
    measured = quality.measure(["answer_exact_match"], [0, 1], ["green", "red"], [("red", "green"), ("blue", "green")])
    assert measured["per_example"]["statistics"]["answer_exact_match"] == [100, 0]
    measured = quality.measure(["answer_f1"], [5, 9], ["red", "blue"], [("red", "green"), "black"])
    assert measured["value"] == 50.0 and measured["per_example"]["statistics"] == {"answer_f1": [100, 0]}


def test_a_tuple_with_one_reference_equals_the_reference():
    assert quality.score(["bleu"], ["a b c d"], [("a b c d",)]) == quality.score(["bleu"], ["a b c d"], ["a b c d"])


@pytest.mark.parametrize("name", ["bleu", "pass_at_1"])
def test_metrics_with_one_reference_reject_several(name):
    with pytest.raises(ValueError, match=f"{name} compares with one reference per example, not with 2.*answer_f1"):
        quality.score([name], ["a"], [("a", "b")])
    with pytest.raises(ValueError, match="not with 0"):
        quality.score(["exact_match"], ["a"], [()])
