"""Few-shot translation and summaries, and the continuation of stories.

Articles are cut to their first words, in exemplars too, so that a prompt keeps all of its exemplars.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice

from speccascade_jax.data.tasks.few_shot import FewShotTask, Record, Template
from speccascade_jax.data.tasks.task import Task, packaged, records_of, shuffled

_WMT_POOL = 8
_SUMMARY_POOL = 4


def _wmt22() -> list[Record]:
    """Against the first human reference; shuffled, since neighbours come from one document."""
    records = (record for _, record in records_of("wmt22_en_de", "dev_half.jsonl"))
    return shuffled(
        [Record(id=r["id"], question=r["en"].strip(), answer=r["de_refA"], reference=r["de_refA"]) for r in records]
    )


def _articles(folder: str, file: str, words: int) -> Iterator[Record]:
    for number, record in records_of(folder, file):
        question, summary = " ".join(record["document"].split()[:words]), record["summary"]
        yield Record(id=number, question=question, answer=" ".join(summary.split()), reference=summary)


def _dialogues(file: str) -> Iterator[Record]:
    for number, record in records_of("dialogsum", file):
        dialogue, summary = record["dialogue"].strip(), record["summary"]
        yield Record(id=number, question=dialogue, answer=summary.strip(), reference=summary)


_cnn_dailymail = partial(_articles, "cnn_dailymail_100", "train_sample.jsonl", words=512)
_xsum = partial(_articles, "xsum_1000", "dev_half.jsonl", words=384)
_summary = partial(FewShotTask, metrics=("rouge2", "rouge1", "rougeL"))  # paper 1 shows ROUGE-2
_article = partial(_summary, splits=("test",), shots=1, template=Template(question="Article: {question}\nSummary:"))

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
    _article(
        name="cnn_dailymail_few_shot",
        records=lambda split: _cnn_dailymail(),
        pool=lambda: islice(_cnn_dailymail(), _SUMMARY_POOL),
        stop_strings=("\n\n", "\nArticle:"),
        max_input_length=2048,
        max_output_length=128,
    ),
    _article(
        name="xsum_few_shot",
        records=lambda split: _xsum(),
        pool=lambda: islice(_xsum(), _SUMMARY_POOL),
        stop_strings=("\n",),
        max_input_length=1536,
        max_output_length=64,
    ),
    _summary(
        name="dialogsum",
        splits=("validation",),
        records=lambda split: _dialogues("dev.jsonl"),
        pool=lambda: islice(_dialogues("train.jsonl.gz"), 16),
        shots=2,
        template=Template(question="Dialogue:\n{question}\nSummary:"),
        stop_strings=("\n",),
        max_input_length=2048,
        max_output_length=128,
    ),
    Task(
        name="stories",
        splits=("test",),
        # openings written for this project, each with one way to go on
        read=lambda split: packaged("stories.jsonl"),
        metrics=("rougeL",),
        max_input_length=128,
        max_output_length=128,
    ),
)
