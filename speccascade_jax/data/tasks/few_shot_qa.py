"""Few-shot question answering, in the open or about a paragraph: SQuAD 2, WebQuestions, NQ-open, TriviaQA.

Outputs have the 5 tokens of METHODS section 9; an answer of several spellings is judged by its best.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from speccascade_jax.data import directory
from speccascade_jax.data.tasks.few_shot import FewShotTask, Record, Template
from speccascade_jax.data.tasks.task import json_lines, records_of, shuffled
from speccascade_jax.metrics.answers import UNANSWERABLE
from speccascade_jax.storage import readers

POOL = 16
"""Records that are kept for exemplars."""

_SQUAD_PARAGRAPHS = 8


def _squad2() -> Iterator[tuple[int, dict[str, Any]]]:
    return records_of("squad2", "dev_articles_even.jsonl.gz")


def _squad_record(number: int, record: dict[str, Any]) -> Record:
    answers = tuple(dict.fromkeys(record["answers"])) or (UNANSWERABLE,)
    question = f"{record['context'].strip()}\nQuestion: {record['question'].strip()}"
    return Record(id=number, question=question, answer=answers[0], reference=answers)


def _squad_exemplars() -> dict[str, Record]:
    """Paragraph -> its exemplar; questions with and without an answer take turns."""
    found: dict[str, Record] = {}
    for number, record in _squad2():
        wanted = record["is_impossible"] == bool(len(found) % 2)
        if wanted and record["context"] not in found:
            found[record["context"]] = _squad_record(number, record)
        if len(found) == _SQUAD_PARAGRAPHS:
            break
    return found


def _read_squad2(split: str) -> list[Record]:
    """Without any question about an exemplar's paragraph; shuffled, since neighbours share paragraph and article."""
    shown = _squad_exemplars()
    return shuffled([_squad_record(*pair) for pair in _squad2() if pair[1]["context"] not in shown])


_WEBQUESTIONS_FILES = {"test": "test_dev_half.jsonl", "validation": "val.jsonl", "devtest": "devtest.jsonl"}


def _web_questions(file: str) -> Iterator[Record]:
    return (_open_question(n, record["qText"], record["answers"]) for n, record in records_of("webquestions", file))


def _nq_open(file: str) -> Iterator[Record]:
    return (_open_question(n, record["question"], record["answer"]) for n, record in records_of("nq_open", file))


def _open_question(number: int, question: str, answers: list[str]) -> Record:
    """With exactly one question mark at the end: NQ-open has none, WebQuestions has one."""
    spelt = tuple(dict.fromkeys(answers))
    return Record(id=number, question=question.strip().rstrip("?") + "?", answer=spelt[0], reference=spelt)


def _trivia_file(split: str) -> Path:
    """`triviaqa/<split>.json`, as TriviaQA's authors publish it, or `.jsonl` with one entry of its `Data` a line."""
    lines = directory.data_directory() / "triviaqa" / f"{split}.jsonl"
    return lines if lines.exists() else directory.require("triviaqa", f"{split}.json")


def _trivia_data(path: Path) -> list[dict[str, Any]]:
    again = "copy it again"
    found = readers.json_object(path, again).get("Data")
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ValueError(f"{path} is damaged (Data is {found!r:.80}): {again}")
    return found


def _trivia_questions(split: str) -> Iterator[Record]:
    path = _trivia_file(split)
    whole = path.suffix == ".json"
    for number, entry in enumerate(_trivia_data(path) if whole else json_lines(path)):
        if "Answer" not in entry:
            raise ValueError(
                f"question {number} of triviaqa's split {split!r} ({path}) has no answer, and the published test split "
                "has none at all: set Evaluation.split = 'validation', or put a file with answers there"
            )
        answer = entry["Answer"]
        names = [answer["Value"], *answer.get("Aliases", ()), *answer.get("NormalizedAliases", ())]
        yield _open_question(number, entry["Question"], names)


_qa = partial(
    FewShotTask, metrics=("answer_exact_match", "answer_f1"), max_output_length=5, stop_strings=("\n",), shots=5
)
_open = partial(_qa, template=Template(question="Q: {question}\nA:", separator="\n"), max_input_length=256)

QUESTION_ANSWERING = (
    _qa(
        name="squad2",
        splits=("validation",),
        records=_read_squad2,
        pool=lambda: _squad_exemplars().values(),
        shots=4,
        template=Template(
            header=f'Answer with words of the paragraph, or with "{UNANSWERABLE}" if it does not say.',
            question="Paragraph: {question}\nAnswer:",
        ),
        max_input_length=2048,
    ),
    _open(
        name="webquestions",
        splits=tuple(_WEBQUESTIONS_FILES),
        records=lambda split: _web_questions(_WEBQUESTIONS_FILES[split]),
        pool=lambda: islice(_web_questions("trainmodel.jsonl"), POOL),
    ),
    _open(
        name="nq_open",
        splits=("validation",),
        records=lambda split: _nq_open("dev_half.jsonl"),
        pool=lambda: islice(_nq_open("efficientqa_dev_1.1.jsonl"), POOL),
    ),
    _open(
        name="triviaqa",
        splits=("validation", "test"),
        records=_trivia_questions,
        pool=lambda: islice(_trivia_questions("validation"), POOL),
        max_input_length=512,
    ),
)
