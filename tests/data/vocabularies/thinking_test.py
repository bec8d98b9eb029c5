"""Tests of outputs without thinking, whose marks are control pieces or plain text."""

import re

import pytest

from speccascade_jax.data.tasks.table import TASKS
from speccascade_jax.data.vocabularies import thinking
from speccascade_jax.data.vocabularies.load import load_vocabulary
from tests.support import chat_families

pytest.importorskip("tokenizers", reason="tokenizer.json is read through tokenizers")


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    names = ("qwen3", "gemma4", "gpt_oss")
    return {name: load_vocabulary(chat_families.write(tmp_path_factory.mktemp(name), name)) for name in names}


CASES = {
    "qwen3": [
        ("Guten Tag.", "Guten Tag."),
        ("a < b </thin", "a < b </thin"),
        ("<think>\nHm. ü\n</think>\n\nGuten Tag.", "Guten Tag."),
        ("<think>\nHm.\n</think> \n\n  Guten\n\nTag.", "  Guten\n\nTag."),
        ("Well.<think>Hm.</think>\nSo.<think>Hm?</think> Yes.", "Well.\nSo. Yes."),
        ("<think>\n\n</think>Yes.", "Yes."),
        ("<think>Hm. <think> Hm.</think>Yes.", "Yes."),
        ("<think>a<think>b</think>c</think>Yes.", "Yes."),
        ("<think>a</think>b</think>\nYes.", "Yes."),
        ("Well.<think>a</think>b</think></think>Yes.", "Well.Yes."),
        ("<think>It never ends", ""),
        ("Yes.<think>It never ends", "Yes."),
        ("Hm.\n</think>\n\nYes.", "Yes."),
        ("<think>Hm.</think>[THINK] and <|channel> and <|channel|>final are marks", None),
    ],
    "gemma4": [
        ("<|channel>thought\nHm.<channel|>Yes.", "Yes."),
        ("<|channel>thought\nIt never ends", ""),
        ("<|channel>thought\n<channel|>Yes.<turn|>", "Yes."),
        ("<|channel>Hm.<channel|><think> and [THINK] are marks", None),
    ],
    "gpt_oss": [
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", "Yes."),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=x <|message|>{}<|call|>",
            "",
        ),
        ("<|channel|>final<|message|>Yes.", "Yes."),
        ("<|channel|>final <|constrain|>json<|message|>{}", "{}"),
        ("<|channel|>analysis<|message|>It never ends", ""),
        ("<|channel|>anal", ""),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final", ""),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>fi", ""),
        ("<|channel|>final<|message|><think> is a mark", None),
    ],
}


@pytest.mark.parametrize(("family", "output", "answer"), [(name, *case) for name in CASES for case in CASES[name]])
def test_thinking_is_cut_by_the_rules(vocabularies, family, output, answer):
    vocabulary = vocabularies[family]
    if answer is None:  # marks of other families are words
        answer = re.split(r"</think>|<channel\|>|<\|message\|>", output)[1]
    prompt = vocabulary.encode("<|im_end|>\nUser: what is <think> for?\nassistant")
    for after in ((), prompt):
        assert thinking.answer(vocabulary, vocabulary.encode(output), after) == answer


def test_a_vocabulary_without_marks_spells_the_usual_ones(tmp_path):
    vocabulary = load_vocabulary(chat_families.write(tmp_path, "phi"))  # its <|end|> is a mark of gpt-oss too
    ids = vocabulary.encode("<think>\nHm.\n</think>\n\n[THINK]Yes.")
    assert len(ids) > 20 and thinking.answer(vocabulary, ids) == "[THINK]Yes."


def test_a_stop_string_at_a_blank_line_leaves_the_answer(vocabularies):
    ids = vocabularies["qwen3"].encode("<think>\nHm.\n</think>\n\ndef f(x):\n    return x\n")
    answer = TASKS["humaneval"].postprocess(thinking.answer(vocabularies["qwen3"], ids))
    assert answer == "def f(x):\n    return x"


@pytest.mark.parametrize(("family", "prompt", "output", "answer"), [
    ("qwen3", "<think>\n", "Hm.\n</think>\nYes.", "Yes."),
    ("qwen3", "<think>\n", "It never ends", ""),
    ("qwen3", "Hi<|im_end|>\n<think>", "It never ends", ""),
    ("gemma4", "<|channel>", "thought\nHm.<channel|>Yes.", "Yes."),
    ("gemma4", "<think>", "Yes.", "Yes."),
    ("gpt_oss", "<|channel|>analysis<|message|>", "Hm.<|end|><|start|>x<|channel|>final<|message|>Yes.", "Yes."),
    ("gpt_oss", "<|start|>assistant", "Yes.", "Yes."),
    ("qwen3", "<think>\n\n</think>\n\n", "Yes.", "Yes."),
    ("gemma4", "<|channel>thought\n<channel|>", "Yes.", "Yes."),
])  # fmt: skip
def test_a_prompt_may_end_within_a_channel(vocabularies, family, prompt, output, answer):
    vocabulary = vocabularies[family]
    assert thinking.answer(vocabulary, vocabulary.encode(output), vocabulary.encode(prompt)) == answer


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "gpt_oss"])
def test_without_marks_the_text_is_that_of_the_vocabulary(vocabularies, family):
    vocabulary = vocabularies[family]
    ids = [*vocabulary.encode(" Guten Tag, ü!"), vocabulary.encode("ü")[0]]
    assert thinking.answer(vocabulary, ids, [5]) == vocabulary.decode(ids, after=[5])
