"""Few-shot translation and summaries, and the continuation of stories.

Articles are cut to their first words, in exemplars too, so that a prompt keeps all of its exemplars.
"""

import json
from collections.abc import Iterator
from importlib import resources
from itertools import islice
from typing import Any

from speccascade_jax.data import directory
from speccascade_jax.data.tasks.few_shot import FewShotTask, Record, Template
from speccascade_jax.data.tasks.task import Example, Task, json_lines, shuffled

_WMT_POOL = 8
_SUMMARY_POOL = 4


def _wmt22() -> list[Record]:
    """Against the first human reference; shuffled, since neighbours come from one document."""
    records = json_lines(directory.require("wmt22_en_de", "dev_half.jsonl"))
    return shuffled(
        [Record(id=r["id"], question=r["en"].strip(), answer=r["de_refA"], reference=r["de_refA"]) for r in records]
    )


def _articles(folder: str, file: str, words: int) -> Iterator[Record]:
    for number, record in enumerate(json_lines(directory.require(folder, file))):
        yield _summarised(number, record["document"], record["summary"], words)


def _dialogues(file: str) -> Iterator[Record]:
    for number, record in enumerate(json_lines(directory.require("dialogsum", file))):
        yield Record(
            id=number,
            question=record["dialogue"].strip(),
            answer=record["summary"].strip(),
            reference=record["summary"],
        )


def _summarised(number: int, document: str, summary: str, words: int) -> Record:
    question = " ".join(document.split()[:words])
    return Record(id=number, question=question, answer=" ".join(summary.split()), reference=summary)


def _cnn_dailymail() -> Iterator[Record]:
    return _articles("cnn_dailymail_100", "train_sample.jsonl", words=512)


def _xsum() -> Iterator[Record]:
    return _articles("xsum_1000", "dev_half.jsonl", words=384)


def _stories(split: str) -> Iterator[Example]:
    """Openings written for this project, each with one way to go on."""
    packaged = resources.files("speccascade_jax") / "assets" / "stories.jsonl"
    return (Example(**json.loads(line)) for line in packaged.read_text(encoding="utf-8").splitlines())


_ARTICLE = Template(question="Article: {question}\nSummary:")
_SUMMARY: dict[str, Any] = {"metrics": ("rouge2", "rouge1", "rougeL")}  # paper 1 shows ROUGE-2

TEXT = (
    FewShotTask(
        name="wmt22_few_shot",
        splits=("test",),
        records=lambda split: _wmt22(),
        pool=lambda: _wmt22()[:_WMT_POOL],
        shots=5,
        template=Template(question="English: {question}\nGerman:"),
        stop_strings=("\n",),
        max_input_length=768,
        max_output_length=80,
    ),
    FewShotTask(
        name="cnn_dailymail_few_shot",
        splits=("test",),
        records=lambda split: _cnn_dailymail(),
        pool=lambda: islice(_cnn_dailymail(), _SUMMARY_POOL),
        shots=1,
        template=_ARTICLE,
        stop_strings=("\n\n", "\nArticle:"),
        max_input_length=2048,
        max_output_length=128,
        **_SUMMARY,
    ),
    FewShotTask(
        name="xsum_few_shot",
        splits=("test",),
        records=lambda split: _xsum(),
        pool=lambda: islice(_xsum(), _SUMMARY_POOL),
        shots=1,
        template=_ARTICLE,
        stop_strings=("\n",),
        max_input_length=1536,
        max_output_length=64,
        **_SUMMARY,
    ),
    FewShotTask(
        name="dialogsum",
        splits=("validation",),
        records=lambda split: _dialogues("dev.jsonl"),
        pool=lambda: islice(_dialogues("train.jsonl.gz"), 16),
        shots=2,
        template=Template(question="Dialogue:\n{question}\nSummary:"),
        stop_strings=("\n",),
        max_input_length=2048,
        max_output_length=128,
        **_SUMMARY,
    ),
    Task(
        name="stories",
        splits=("test",),
        read=_stories,
        metrics=("rougeL",),
        max_input_length=128,
        max_output_length=128,
    ),
)
