"""The table of tasks, and the readers of those that are plain pairs of texts; what a task is, `data.tasks.task` says.

A new task is one reader (split -> examples) and one row of `TASKS`; one for decoder-only models, whose prompt shows
solved examples first, is a reader in `few_shot_records.py` and a row of `few_shot_table.py`. Data sets other than the
shipped one lie in the data directory (`speccascade_jax.data.directory`) or come through seqio, and are read when `load`
is called, never on import. A task that somebody registered with seqio needs no row: a `SeqioTask` stands wherever a
name does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from speccascade_jax.core import names
from speccascade_jax.data import directory
from speccascade_jax.data.sentence_pairs import TextPair, group, join_texts, read_pairs
from speccascade_jax.data.tasks.few_shot import with_shots
from speccascade_jax.data.tasks.few_shot_table import FEW_SHOT
from speccascade_jax.data.tasks.file_task import ENDINGS, FileTask, is_file
from speccascade_jax.data.tasks.seqio_task import SeqioTask
from speccascade_jax.data.tasks.task import ORDER_SEED, Example, Task, packaged, records_of, shuffled


def _numbered(pairs: Sequence[TextPair]) -> list[Example]:
    return [Example(number, source, reference) for number, (source, reference) in enumerate(pairs)]


_TATOEBA = ("tatoeba_en_de", {"validation": "valid.en-de.tsv", "train": "train.en-de.tsv.gz"})
_MULTI30K = (
    "multi30k",
    {"validation": "val.en-de.tsv", "test": "test_2016_flickr.en-de.tsv", "train": "train.en-de.tsv.gz"},
)
_DIALOGSUM = {"validation": "dev.jsonl", "train": "train.jsonl.gz"}


def _pairs(folder: str, files: Mapping[str, str], split: str) -> list[TextPair]:
    return read_pairs(directory.require(folder, files[split]))


def _read_joined(split: str) -> list[Example]:
    return _joined(_pairs(*_TATOEBA, split), ORDER_SEED)


def _read_joined_de_en(split: str) -> list[Example]:
    """Returns the other direction; groups have another seed, so that no text is the other task's answer, whole."""
    return _joined([(german, english) for english, german in _pairs(*_TATOEBA, split)], ORDER_SEED + 1)


def _joined(pairs: list[TextPair], seed: int) -> list[Example]:
    groups = group(pairs, max_joined=4, rng=np.random.default_rng(seed))
    return _numbered([join_texts(pairs, indices) for indices in groups])


def _read_tiny_de_en(split: str) -> list[Example]:
    examples = packaged("tiny_translation.jsonl")
    return [Example(example.id, str(example.reference), example.source) for example in examples]


def _read_dialogsum(split: str) -> list[Example]:
    """Returns dialogues and their summaries without exemplars, for models trained on such pairs."""
    entries = records_of("dialogsum", _DIALOGSUM[split])
    return shuffled([Example(number, entry["dialogue"], entry["summary"]) for number, entry in entries])


def _read_wmt22(split: str) -> list[Example]:
    """Returns half of WMT22's general test set, against its first human reference.

    Neighbours come from one document: without a shuffle a limit would sample one or two texts.
    """
    entries = records_of("wmt22_en_de", "dev_half.jsonl")
    return shuffled([Example(entry["id"], entry["en"], entry["de_refA"]) for _, entry in entries])


def get_task(name: str | Task) -> Task:
    """The task called `name`, of the table or `module.NAME`, one of your own; a `Task` is one itself.

    "gsm8k:4" is the task "gsm8k" with 4 exemplars; "news.csv" is a `FileTask` of that file's columns source and
    reference.

    Raises:
        ValueError: there is none (names the nearest), or it has no exemplars.
    """
    if isinstance(name, Task):
        return name
    if is_file(name):
        return FileTask(path=name)
    plain, colon, shots = name.partition(":") if isinstance(name, str) else (name, "", "")
    also = (
        f"; a file of yours is a path that ends in {', '.join(ENDINGS)} (gin/tasks/file.gin), or "
        f"the folder, './folder', of a data set that datasets saved; one of seqio's registry "
        f"is a SeqioTask (gin/tasks/seqio.gin)"
    )
    task: Task = names.look_up("task", plain, TASKS, Task, "speccascade_jax.data.tasks.table.TASKS", also)
    return with_shots(task, shots) if colon else task


def _of_paper_1(name: str, prefix: str, metrics: tuple[str, ...], lengths: tuple[int, int]) -> SeqioTask:
    """Returns a data set of paper 1's T5 experiments (§F.1, METHODS section 9); as there, validation is the default."""
    return SeqioTask(
        name=name, registered=f"speccascade_{name}", module="speccascade_jax.data.tasks.seqio_registry", prefix=prefix,
        metrics=metrics, max_input_length=lengths[0], max_output_length=lengths[1],
    )  # fmt: skip


_ROUGE = ("rouge2", "rouge1", "rougeL")  # paper 1 shows ROUGE-2
_LONG: dict[str, Any] = {"max_input_length": 128, "max_output_length": 128}
_ROWS: tuple[Task, ...] = (
    Task(name="tiny_translation", splits=("test",), read=lambda split: packaged("tiny_translation.jsonl")),
    Task(name="tiny_translation_de_en", splits=("test",), read=_read_tiny_de_en),
    Task(
        name="tatoeba", splits=tuple(_TATOEBA[1]), read=lambda split: shuffled(_numbered(_pairs(*_TATOEBA, split)))
    ),
    Task(name="tatoeba_joined", splits=tuple(_TATOEBA[1]), read=_read_joined, **_LONG),
    Task(name="tatoeba_joined_de_en", splits=tuple(_TATOEBA[1]), read=_read_joined_de_en, **_LONG),
    Task(
        name="dialogsum_plain", splits=tuple(_DIALOGSUM), read=_read_dialogsum, metrics=_ROUGE,
        max_input_length=128, max_output_length=64,
    ),
    Task(name="multi30k", splits=tuple(_MULTI30K[1]), read=lambda split: _numbered(_pairs(*_MULTI30K, split))),
    Task(name="wmt22", splits=("test",), read=_read_wmt22, max_input_length=256, max_output_length=256),
    # openings written for this project, each with one way to go on
    Task(name="stories", splits=("test",), read=lambda split: packaged("stories.jsonl"), metrics=("rougeL",), **_LONG),
    _of_paper_1("wmt14_en_de", "translate English to German: ", ("bleu",), lengths=(80, 80)),
    _of_paper_1("xsum", "summarize: ", _ROUGE, lengths=(1024, 64)),
    _of_paper_1("cnn_dailymail", "summarize: ", _ROUGE, lengths=(2048, 128)),
    *FEW_SHOT,
)  # fmt: skip
TASKS: dict[str, Task] = {task.name: task for task in _ROWS}
