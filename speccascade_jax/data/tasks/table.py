"""The table of tasks, and the readers of those that are plain pairs of texts; what a task is, `data.tasks.task` says.

A new task is one reader (split -> examples) and one row of `TASKS`; one for decoder-only models, whose prompt shows
solved examples first, is a reader and a row of a `data/few_shot_*.py`. Data sets other than the shipped one lie in the
data directory (`speccascade_jax.data.directory`) or come through seqio, and are read when `load` is called, never on
import. A task that somebody registered with seqio needs no row: a `SeqioTask` stands wherever a name does.
"""

from collections.abc import Sequence

import numpy as np

from speccascade_jax.core import names
from speccascade_jax.data import directory
from speccascade_jax.data.sentence_pairs import TextPair, group, join_texts, read_pairs
from speccascade_jax.data.tasks.few_shot import with_shots
from speccascade_jax.data.tasks.few_shot_code import CODE
from speccascade_jax.data.tasks.few_shot_qa import QUESTION_ANSWERING
from speccascade_jax.data.tasks.few_shot_reasoning import REASONING
from speccascade_jax.data.tasks.few_shot_text import TEXT
from speccascade_jax.data.tasks.file_task import ENDINGS, FileTask, is_file
from speccascade_jax.data.tasks.seqio_task import SeqioTask
from speccascade_jax.data.tasks.task import ORDER_SEED, Example, Task, packaged, records_of, shuffled


def _numbered(pairs: Sequence[TextPair]) -> list[Example]:
    return [Example(number, source, reference) for number, (source, reference) in enumerate(pairs)]


_TATOEBA_FILES = {"validation": "valid.en-de.tsv", "train": "train.en-de.tsv.gz"}
_MULTI30K_FILES = {"validation": "val.en-de.tsv", "test": "test_2016_flickr.en-de.tsv", "train": "train.en-de.tsv.gz"}


def _tatoeba_pairs(split: str) -> list[TextPair]:
    return read_pairs(directory.require("tatoeba_en_de", _TATOEBA_FILES[split]))


def _read_tatoeba(split: str) -> list[Example]:
    return shuffled(_numbered(_tatoeba_pairs(split)))


def _read_tatoeba_joined(split: str) -> list[Example]:
    return _joined(_tatoeba_pairs(split))


def _read_tiny_de_en(split: str) -> list[Example]:
    return [Example(each.id, str(each.reference), each.source) for each in packaged("tiny_translation.jsonl")]


def _read_tatoeba_joined_de_en(split: str) -> list[Example]:
    """The other direction; groups are drawn by another seed, so that no text is the other task's answer, whole."""
    return _joined([(german, english) for english, german in _tatoeba_pairs(split)], ORDER_SEED + 1)


def _joined(pairs: list[TextPair], seed: int = ORDER_SEED) -> list[Example]:
    groups = group(pairs, max_joined=4, rng=np.random.default_rng(seed))
    return _numbered([join_texts(pairs, one) for one in groups])


def _read_dialogsum(split: str) -> list[Example]:
    """Dialogues and their summaries without exemplars, for models trained on such pairs."""
    file = "dev.jsonl" if split == "validation" else "train.jsonl.gz"
    return shuffled([Example(n, each["dialogue"], each["summary"]) for n, each in records_of("dialogsum", file)])


def _read_multi30k(split: str) -> list[Example]:
    return _numbered(read_pairs(directory.require("multi30k", _MULTI30K_FILES[split])))


def _read_wmt22(split: str) -> list[Example]:
    """Half of WMT22's general test set, against its first human reference."""
    records = records_of("wmt22_en_de", "dev_half.jsonl")
    # Neighbours come from one document: without a shuffle a limit would sample one or two texts.
    return shuffled([Example(record["id"], record["en"], record["de_refA"]) for _, record in records])


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
    found: Task = names.look_up("task", plain, TASKS, Task, "speccascade_jax.data.tasks.table.TASKS", also)
    return with_shots(found, shots) if colon else found


def _of_paper_1(name: str, prefix: str, metrics: tuple[str, ...], lengths: tuple[int, int]) -> SeqioTask:
    """A data set of paper 1's T5 experiments (§F.1, METHODS section 9); validation, as there, is the default split."""
    return SeqioTask(
        name=name,
        registered=f"speccascade_{name}",
        module="speccascade_jax.data.tasks.seqio_registry",
        prefix=prefix,
        metrics=metrics,
        max_input_length=lengths[0],
        max_output_length=lengths[1],
    )


_ROUGE = ("rouge2", "rouge1", "rougeL")  # paper 1 shows ROUGE-2

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(name="tiny_translation", splits=("test",), read=lambda split: packaged("tiny_translation.jsonl")),
        Task(name="tiny_translation_de_en", splits=("test",), read=_read_tiny_de_en),
        Task(name="tatoeba", splits=tuple(_TATOEBA_FILES), read=_read_tatoeba),
        Task(
            name="tatoeba_joined",
            splits=tuple(_TATOEBA_FILES),
            read=_read_tatoeba_joined,
            max_input_length=128,
            max_output_length=128,
        ),
        Task(
            name="tatoeba_joined_de_en",
            splits=tuple(_TATOEBA_FILES),
            read=_read_tatoeba_joined_de_en,
            max_input_length=128,
            max_output_length=128,
        ),
        Task(
            name="dialogsum_plain",
            splits=("validation", "train"),
            read=_read_dialogsum,
            metrics=_ROUGE,
            max_input_length=128,
            max_output_length=64,
        ),
        Task(name="multi30k", splits=tuple(_MULTI30K_FILES), read=_read_multi30k),
        Task(name="wmt22", splits=("test",), read=_read_wmt22, max_input_length=256, max_output_length=256),
        _of_paper_1("wmt14_en_de", "translate English to German: ", ("bleu",), lengths=(80, 80)),
        _of_paper_1("xsum", "summarize: ", _ROUGE, lengths=(1024, 64)),
        _of_paper_1("cnn_dailymail", "summarize: ", _ROUGE, lengths=(2048, 128)),
        *QUESTION_ANSWERING,
        *REASONING,
        *CODE,
        *TEXT,
    )
}
