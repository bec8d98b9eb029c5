"""Few-shot reasoning and multiple choice: GSM8K, MMLU, CommonsenseQA."""

import re
import string
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice

from speccascade_jax.data.tasks.few_shot import FewShotTask, Record, Template
from speccascade_jax.data.tasks.task import records_of, shuffled

_RESULT = "####"  # GSM8K writes a solution's number behind it
_CALCULATOR = re.compile(r"<<.*?>>")
_COMMONSENSE_POOL = 8


def _gsm8k(file: str) -> Iterator[Record]:
    """Solutions without the marks for a calculator, which no plain model fills in."""
    for number, record in records_of("gsm8k", file):
        solution = _CALCULATOR.sub("", record["answer"])
        result = solution.rpartition(_RESULT)[2].strip()
        yield Record(id=number, question=record["question"].strip(), answer=solution, reference=result)


_MMLU_FILES = {"test": "test_dev_half.jsonl.gz", "validation": "val.jsonl"}


def _mmlu(file: str) -> Iterator[Record]:
    for number, record in records_of("mmlu", file):
        yield Record(
            id=number,
            question=_choices(record["question"], record["choices"]),
            answer=record["answer"],
            reference=record["answer"],
            group=record["subject"].replace("_", " "),
        )


def _commonsense() -> Iterator[Record]:
    for number, record in records_of("commonsenseqa", "dev_half.jsonl"):
        question = _choices(record["question"], record["choices"]["text"])
        yield Record(id=number, question=question, answer=record["answerKey"], reference=record["answerKey"])


def _choices(question: str, choices: Iterable[str]) -> str:
    """The question with its choices on lines of their own, lettered from A."""
    lettered = zip(string.ascii_uppercase, choices, strict=False)
    return "\n".join([question.strip(), *(f"{letter}. {choice.strip()}" for letter, choice in lettered)])


_choice = partial(FewShotTask, metrics=("choice",), max_output_length=5, stop_strings=("\n",))

REASONING = (
    FewShotTask(
        name="gsm8k",
        splits=("test",),
        records=lambda split: _gsm8k("test_dev_half.jsonl"),
        pool=lambda: islice(_gsm8k("train.jsonl.gz"), 16),
        shots=8,
        metrics=("final_number",),
        stop_strings=("\nQuestion:",),
        max_input_length=2048,
        max_output_length=320,
    ),
    _choice(
        name="mmlu",
        splits=tuple(_MMLU_FILES),
        # one subject after the other in the files: a limit would sample two or three of 57
        records=lambda split: shuffled(list(_mmlu(_MMLU_FILES[split]))),
        pool=lambda: _mmlu("dev.jsonl"),
        shots=5,
        template=Template(header="Multiple-choice questions about {group}, each with the letter of its answer."),
        max_input_length=3072,
    ),
    _choice(
        name="commonsenseqa",
        splits=("validation",),
        records=lambda split: _commonsense(),
        pool=lambda: islice(_commonsense(), _COMMONSENSE_POOL),
        shots=7,
        max_input_length=768,
    ),
)
