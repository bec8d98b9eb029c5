"""Spec-Bench's questions and the texts that conversations become."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from speccascade_jax.data import directory
from speccascade_jax.data.tasks import table
from speccascade_jax.evaluation.studies.spec_bench import questions as spec_bench
from speccascade_jax.evaluation.studies.spec_bench.questions import CONVERSATIONS, Question, get_conversation


def test_half_of_the_questions_are_40_in_each_of_six_categories():
    try:
        questions = spec_bench.read()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert Counter(question.group for question in questions) == dict.fromkeys(spec_bench.CATEGORIES, 40)
    assert {(question.group, len(question.turns)) for question in questions} == {
        (group, 2 if group == "mt_bench" else 1) for group in spec_bench.CATEGORIES
    }


def test_sub_categories_count_as_one():
    assert {Question(1, name, ("x",)).group for name in spec_bench.MT_BENCH} == {"mt_bench"}
    assert Question(1, "math_reasoning", ("x",)).group == "math_reasoning" and len(spec_bench.MT_BENCH) == 8


@pytest.mark.parametrize(("category", "turns"), [("cooking", ["x"]), ("qa", [])])
def test_a_question_without_category_or_turn_is_refused(category, turns, tmp_path, monkeypatch):
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    (tmp_path / "q.jsonl").write_text(json.dumps({"question_id": 7, "category": category, "turns": turns}) + "\n")
    with pytest.raises(ValueError, match=f"question 7 has category '{category}' and {len(turns)} turns.*mt_bench"):
        spec_bench.read("q.jsonl")


def test_a_missing_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="q.jsonl does not exist"):
        spec_bench.read("q.jsonl")
    with pytest.raises(FileNotFoundError, match="^/no/such/q.jsonl does not exist"):
        spec_bench.read("/no/such/q.jsonl")


SAID = {
    "plain": "User: Hi\nAssistant: Hello\nUser: Bye\nAssistant:",
    "vicuna": "USER: Hi ASSISTANT: Hello</s>USER: Bye ASSISTANT:",
    "llama2": "[INST] Hi [/INST] Hello </s><s>[INST] Bye [/INST]",
    "gemma": "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "chatml": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_second_turn_contains_the_first_answer(name):
    assert get_conversation(name).prompt(["Hi", "Bye"], ["Hello"]) == SAID[name]


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("plain", "Be {kind}.\n\nUser: Hi"),
        ("vicuna", "Be {kind}. USER: Hi ASSISTANT:"),
        ("llama2", "[INST] <<SYS>>\nBe {kind}.\n<</SYS>>\n\nHi [/INST]"),
        ("gemma", "<start_of_turn>user\nBe {kind}.\n\nHi<end_of_turn>"),
        ("chatml", "<|im_start|>system\nBe {kind}.<|im_end|>\n<|im_start|>user\nHi<|im_end|>"),
    ],
)
def test_an_instruction_stands_once_where_the_model_expects_it(name, begin):
    text = get_conversation(name).prompt(["Hi", "Bye"], ["Hello"], "Be {kind}.")
    assert text.startswith(begin) and text.count("Be {kind}.") == 1


def test_an_answer_ends_where_the_next_turn_begins():
    assert get_conversation("plain").postprocess(" Hello there. \nUser: more") == "Hello there."
    assert get_conversation("chatml").postprocess("Hello<|im_end|>\n<|im_start|>") == "Hello"
    assert get_conversation("gemma").postprocess("\nHello ") == "Hello"


def test_turns_and_answers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="2 turns and 2 answers"):
        get_conversation("plain").prompt(["a", "b"], ["c", "d"])
    with pytest.raises(ValueError, match="unknown conversation 'vicuña'; .*there are plain, vicuna"):
        get_conversation("vicuña")


def test_it_is_no_task():
    assert "spec_bench" not in table.TASKS
