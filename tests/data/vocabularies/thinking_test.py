"""Tests of outputs without thinking, whose marks are control pieces or plain text."""

import pytest

from speccascade_jax.data.vocabularies import thinking
from speccascade_jax.data.vocabularies.load import load_vocabulary
from tests.support import chat_families

pytest.importorskip("tokenizers", reason="tokenizer.json is read through tokenizers")


@pytest.fixture(scope="module", params=["qwen3", "gemma4", "gpt_oss"])
def vocabulary(request, tmp_path_factory):
    return load_vocabulary(chat_families.write(tmp_path_factory.mktemp(request.param), request.param))


CASES = [
    ("Guten Tag.", "Guten Tag."),
    ("a < b </thin", "a < b </thin"),
    ("<think>\nHm. ü\n</think>\n\nGuten Tag.", "\n\nGuten Tag."),
    ("Well.<think>Hm.</think> So.<think>Hm?</think> Yes.", "Well. So. Yes."),
    ("<think>\n\n</think>Yes.", "Yes."),
    ("<think>Hm. <think> Hm.</think>Yes.", "Yes."),
    ("<think>It never ends", ""),
    ("Yes.<think>It never ends", "Yes."),
    ("Hm.\n</think>\n\nYes.", "\n\nYes."),
    ("[THINK]Hm.[/THINK]Yes.", "Yes."),
    ("<|channel>thought\nHm.<channel|>Yes.", "Yes."),
    ("<|channel>thought\nIt never ends", ""),
    ("<|channel>thought\n<channel|>Yes.<turn|>", "Yes."),
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", "Yes."),
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=x <|message|>{}<|call|>", ""),
    ("<|channel|>final<|message|>Yes.", "Yes."),
    ("<|channel|>analysis<|message|>It never ends", ""),
    ("<|channel|>anal", ""),
]


@pytest.mark.parametrize(("output", "answer"), CASES)
def test_thinking_is_cut_by_the_rules(vocabulary, output, answer):
    if "<turn|>" in output and vocabulary.path.parent.name.startswith(("qwen3", "gpt_oss")):
        answer += "<turn|>"  # no piece of theirs, and so text
    prompt = vocabulary.encode("<|im_end|>\nUser: what is <think> for?\nassistant")
    for after in ((), prompt):
        assert thinking.answer(vocabulary, vocabulary.encode(output), after) == answer


@pytest.mark.parametrize(("prompt", "output", "answer"), [
    ("<think>\n", "Hm.\n</think>\nYes.", "\nYes."),
    ("<think>\n", "It never ends", ""),
    ("Hi<|im_end|>\n<think>", "It never ends", ""),
    ("<|channel>", "thought\nHm.<channel|>Yes.", "Yes."),
    ("<think>\n\n</think>\n\n", "Yes.", "Yes."),
    ("<|channel>thought\n<channel|>", "Yes.", "Yes."),
])  # fmt: skip
def test_a_prompt_may_end_within_a_channel(vocabulary, prompt, output, answer):
    assert thinking.answer(vocabulary, vocabulary.encode(output), vocabulary.encode(prompt)) == answer


def test_without_marks_the_text_is_that_of_the_vocabulary(vocabulary):
    ids = [*vocabulary.encode(" Guten Tag, ü!"), vocabulary.encode("ü")[0]]
    assert thinking.answer(vocabulary, ids, [5]) == vocabulary.decode(ids, after=[5])
