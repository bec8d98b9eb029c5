"""Few-shot data sets in the data directory: their files, and how an entry of one becomes a `Record`.

Programs (HumanEval, Chen et al. 2021; MBPP, Austin et al. 2021) are judged by a test harness (`metrics.code.harness`);
scoring runs what the models wrote, so both need `Evaluation.execute_code`. An answer of several spellings is judged by
its best.
"""

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from speccascade_jax.data import directory
from speccascade_jax.data.tasks.few_shot import Record
from speccascade_jax.data.tasks.task import json_lines, records_of, shuffled
from speccascade_jax.metrics.answers import UNANSWERABLE
from speccascade_jax.metrics.code import harness
from speccascade_jax.storage import readers

Entry = Mapping[str, Any]

POOL = 16
"""Records that are kept for exemplars, where a data set says nothing else."""
_SQUAD_PARAGRAPHS = 8
_RESULT = "####"  # GSM8K writes a solution's number behind it
_CALCULATOR = re.compile(r"<<.*?>>")
_PUBLISHED_EXEMPLARS = (2, 3, 4)  # MBPP's task ids that Austin et al. show


@dataclass(frozen=True)
class DataSet:
    """Files with one record a line, of a folder in the data directory.

    Attributes:
        folder, files: split -> file, the default split first.
        record: (number of the line, entry) -> record.
        exemplars: the file that exemplars are taken from; empty: the beginning of the default split.
        most: how many of them at most; `None`: the whole file.
        mixed: whether records are shuffled, since neighbours belong together: a limit would sample few groups.
    """

    folder: str
    files: Mapping[str, str]
    record: Callable[[int, Entry], Record]
    exemplars: str = ""
    most: int | None = POOL
    mixed: bool = False

    def records(self, split: str) -> Iterable[Record]:
        """Returns all records of a split."""
        records = self._read(self.files[split])
        return shuffled(list(records)) if self.mixed else records

    def pool(self) -> Iterable[Record]:
        """Returns the records that exemplars are taken from, in order."""
        records = self._read(self.exemplars) if self.exemplars else self.records(next(iter(self.files)))
        return islice(records, self.most)

    def _read(self, file: str) -> Iterator[Record]:
        return (self.record(number, entry) for number, entry in records_of(self.folder, file))


def _answered(number: int, question: str, answer: str, group: str = "") -> Record:
    """Returns a record whose answer is its reference."""
    return Record(id=number, question=question, answer=answer, reference=answer, group=group)


def humaneval(number: int, entry: Entry) -> Record:
    """Returns a function's head as the question, and its tests as the reference."""
    after = f"\n{entry['test']}\ncheck({entry['entry_point']})\n"
    return Record(
        id=int(entry["task_id"].rpartition("/")[2]),
        question=entry["prompt"],
        answer=entry["canonical_solution"],
        reference=harness(before=entry["prompt"], after=after),
    )


def mbpp(number: int, entry: Entry) -> Record:
    """Returns a description and its tests as the question."""
    tests = "\n".join(entry["test_list"])
    return Record(
        id=entry["task_id"],
        question=f"{entry['text'].strip()}\n{_unix(tests)}",
        answer=_unix(entry["code"]),
        reference=harness(before="", after=_unix(f"\n{entry['test_setup_code']}\n{tests}\n")),
    )


def published_first(records: Iterable[Record]) -> list[Record]:
    """Returns MBPP's exemplars with the published three first."""
    return sorted(records, key=lambda record: (record.id not in _PUBLISHED_EXEMPLARS, record.id))


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def gsm8k(number: int, entry: Entry) -> Record:
    """Returns a problem and its solution without the marks for a calculator, which no plain model fills in."""
    solution = _CALCULATOR.sub("", entry["answer"])
    result = solution.rpartition(_RESULT)[2].strip()
    return Record(id=number, question=entry["question"].strip(), answer=solution, reference=result)


def mmlu(number: int, entry: Entry) -> Record:
    """Returns a multiple-choice question; exemplars are of its subject."""
    question = _choices(entry["question"], entry["choices"])
    return _answered(number, question, entry["answer"], entry["subject"].replace("_", " "))


def commonsense(number: int, entry: Entry) -> Record:
    """Returns a multiple-choice question of CommonsenseQA."""
    return _answered(number, _choices(entry["question"], entry["choices"]["text"]), entry["answerKey"])


def _choices(question: str, choices: Iterable[str]) -> str:
    """Returns the question with its choices on lines of their own, lettered from A."""
    lettered = zip(string.ascii_uppercase, choices, strict=False)
    return "\n".join([question.strip(), *(f"{letter}. {choice.strip()}" for letter, choice in lettered)])


def wmt22(number: int, entry: Entry) -> Record:
    """Returns an English text, with the first human reference as its answer."""
    return _answered(entry["id"], entry["en"].strip(), entry["de_refA"])


def article(words: int) -> Callable[[int, Entry], Record]:
    """Returns a reader of articles that are cut to their first `words`, so that a prompt keeps all its exemplars."""

    def record(number: int, entry: Entry) -> Record:
        question, summary = " ".join(entry["document"].split()[:words]), entry["summary"]
        return Record(id=number, question=question, answer=" ".join(summary.split()), reference=summary)

    return record


def dialogue(number: int, entry: Entry) -> Record:
    """Returns a dialogue and its summary."""
    summary = entry["summary"]
    return Record(id=number, question=entry["dialogue"].strip(), answer=summary.strip(), reference=summary)


def web_question(number: int, entry: Entry) -> Record:
    """Returns a question of WebQuestions."""
    return _open_question(number, entry["qText"], entry["answers"])


def nq_question(number: int, entry: Entry) -> Record:
    """Returns a question of NQ-open."""
    return _open_question(number, entry["question"], entry["answer"])


def _open_question(number: int, question: str, answers: list[str]) -> Record:
    """Returns a question with exactly one question mark at the end: NQ-open has none, WebQuestions has one."""
    spellings = tuple(dict.fromkeys(answers))
    return Record(id=number, question=question.strip().rstrip("?") + "?", answer=spellings[0], reference=spellings)


def _squad_paragraphs() -> Iterator[tuple[Entry, Record]]:
    """Returns the entries of SQuAD 2, and each as a record."""
    for number, entry in records_of("squad2", "dev_articles_even.jsonl.gz"):
        answers = tuple(dict.fromkeys(entry["answers"])) or (UNANSWERABLE,)
        question = f"{entry['context'].strip()}\nQuestion: {entry['question'].strip()}"
        yield entry, Record(id=number, question=question, answer=answers[0], reference=answers)


def squad_exemplars() -> dict[str, Record]:
    """Returns paragraph -> its exemplar; questions with and without an answer take turns."""
    exemplars: dict[str, Record] = {}
    for entry, record in _squad_paragraphs():
        is_wanted = entry["is_impossible"] == bool(len(exemplars) % 2)
        if is_wanted and entry["context"] not in exemplars:
            exemplars[entry["context"]] = record
        if len(exemplars) == _SQUAD_PARAGRAPHS:
            break
    return exemplars


def squad_records() -> list[Record]:
    """Returns all but the exemplars' paragraphs; shuffled, since neighbours share paragraph and article."""
    shown = squad_exemplars()
    return shuffled([record for entry, record in _squad_paragraphs() if entry["context"] not in shown])


def trivia_records(split: str) -> Iterator[Record]:
    """Reads TriviaQA: `triviaqa/<split>.json` as published, or `.jsonl`, one entry of its `Data` a line."""
    path = directory.data_directory() / "triviaqa" / f"{split}.jsonl"
    if not path.exists():
        path = directory.require("triviaqa", f"{split}.json")
    for number, entry in enumerate(_trivia_data(path) if path.suffix == ".json" else json_lines(path)):
        if "Answer" not in entry:
            raise ValueError(
                f"question {number} of triviaqa's split {split!r} ({path}) has no answer, and the published test split "
                "has none at all: set Evaluation.split = 'validation', or put a file with answers there"
            )
        answer = entry["Answer"]
        spellings = [answer["Value"], *answer.get("Aliases", ()), *answer.get("NormalizedAliases", ())]
        yield _open_question(number, entry["Question"], spellings)


def _trivia_data(path: Path) -> list[dict[str, Any]]:
    again = "copy it again"
    data = readers.json_object(path, again).get("Data")
    if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
        raise ValueError(f"{path} is damaged (Data is {data!r:.80}): {again}")
    return data
