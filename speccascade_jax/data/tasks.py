"""Tasks: where examples come from, how a prompt is built, how an output is read and judged.

A new task is one reader (split -> examples) and one row of `TASKS`. Data sets other than the shipped one lie in the
data directory (`speccascade_jax.data.directory`) or come through seqio, and are read when `load` is called, never on
import. A task that somebody registered with seqio needs no row: a `SeqioTask` stands wherever a name does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from speccascade_jax import names
from speccascade_jax.data import directory
from speccascade_jax.data.batching import TextPair, group, join_texts, read_pairs

# Which sentences stand first, and which are joined, is part of a task's definition: this number never changes.
ORDER_SEED = 0


@dataclasses.dataclass(frozen=True)
class Example:
    """One input and its reference; `id` is unique within a split and stays the same under any limit."""

    id: int
    source: str
    reference: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A data set with everything that turns it into prompts and scores.

    Attributes:
        name: its key in `TASKS`.
        splits: the names `load` accepts, the default one first.
        read: split -> all of its examples, in an order of which any beginning is a fair sample. `load` takes no more
            of them than it needs, so a large split may come from a generator.
        metrics: names in `metrics.quality.METRICS`, the main one first.
        max_input_length: tokens a prompt may have, EOS included.
        max_output_length: tokens to generate at most, EOS included.
        prefix: put before every source; empty for models trained on plain pairs.
    """

    name: str
    splits: tuple[str, ...]
    read: Callable[[str], Iterable[Example]]
    metrics: tuple[str, ...] = ("bleu",)
    max_input_length: int = 64
    max_output_length: int = 64
    prefix: str = ""

    @property
    def main_metric(self) -> str:
        """The metric that tables and plots show."""
        return self.metrics[0]

    def load(self, split: str | None = None, limit: int | None = None) -> list[Example]:
        """The first `limit` examples of `split`; all of them if it has fewer, or without a limit.

        Args:
            split: one of `splits`; without it, the first of them.
            limit: at least 1.

        Raises:
            ValueError: an unknown split, or a limit below 1.
            FileNotFoundError: the data directory, or TensorFlow Datasets' folder, lacks the data.
            ImportError: the task comes through seqio, and that is not installed.
        """
        split = self.splits[0] if split is None else split
        if split not in self.splits:
            raise ValueError(f"task {self.name} has no split {split!r}; its splits: {', '.join(self.splits)}")
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}: give at least 1, or None for all examples")
        return list(itertools.islice(self.read(split), limit))

    def build_prompt(self, example: Example) -> str:
        """The text a model is given."""
        return self.prefix + example.source

    def postprocess(self, text: str) -> str:
        """The text that is scored, from what a model wrote."""
        return text.strip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqioTask(Task):
    """A Task or Mixture of seqio's registry, as a value that stands wherever a task's name does.

    All it holds are plain values, so that gin can bind it and a record can write it down: seqio has neither lengths nor
    our metrics. What prompts and references are, and in which order they come, `data.seqio_reader` says.

    Attributes:
        module: what is imported first, since importing it registers the task; empty if that has happened already.
        registered: the name in seqio's registry, where that is not `name`.
        splits: as in `Task`; whether one is registered shows when it is read.
        max_input_length, max_output_length: as in `Task`, but without a default: a prompt is cut to the former.
        prefix: what every registered input begins with, such as "summarize: ". It is taken off the source, and
            `build_prompt` puts it back; with or without it, the prompt is the registered input.

    Raises:
        ValueError: one string where a tuple of them is meant.
    """

    max_input_length: int = dataclasses.field()
    max_output_length: int = dataclasses.field()
    splits: tuple[str, ...] = ("validation", "test", "train")
    module: str = ""
    registered: str = ""
    read: Callable[[str], Iterable[Example]] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for field in ("splits", "metrics"):
            if isinstance(getattr(self, field), str):
                given = getattr(self, field)
                raise ValueError(f"{field}={given!r} is one name where a tuple is meant; write ({given!r},)")
            object.__setattr__(self, field, tuple(getattr(self, field)))
        reader = functools.partial(_read_registered, self.registered or self.name, self.module, self.prefix)
        object.__setattr__(self, "read", reader)


def _read_registered(name: str, module: str, prefix: str, split: str) -> Iterable[Example]:
    from speccascade_jax.data import seqio_reader  # imports seqio, and that TensorFlow: 860 MB

    return seqio_reader.read(name, module, prefix, split)


def _numbered(pairs: Sequence[TextPair]) -> list[Example]:
    return [Example(number, source, reference) for number, (source, reference) in enumerate(pairs)]


def _shuffled(examples: list[Example]) -> list[Example]:
    """In a fixed random order, for files sorted by length; ids keep the line numbers."""
    order = np.random.default_rng(ORDER_SEED).permutation(len(examples))
    return [examples[index] for index in order.tolist()]


def _json_lines(path: Path) -> list[dict]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _read_tiny_translation(split: str) -> list[Example]:
    packaged = resources.files("speccascade_jax") / "assets" / "tiny_translation.jsonl"
    with resources.as_file(packaged) as path:
        return [Example(**record) for record in _json_lines(path)]


_TATOEBA_FILES = {"validation": "valid.en-de.tsv", "train": "train.en-de.tsv.gz"}
_MULTI30K_FILES = {
    "validation": "val.en-de.tsv",
    "test": "test_2016_flickr.en-de.tsv",
    "train": "train.en-de.tsv.gz",
}


def _tatoeba_pairs(split: str) -> list[TextPair]:
    return read_pairs(directory.require("tatoeba_en_de", _TATOEBA_FILES[split]))


def _read_tatoeba(split: str) -> list[Example]:
    return _shuffled(_numbered(_tatoeba_pairs(split)))


def _read_tatoeba_joined(split: str) -> list[Example]:
    pairs = _tatoeba_pairs(split)
    groups = group(pairs, max_joined=4, rng=np.random.default_rng(ORDER_SEED))
    return _numbered([join_texts(pairs, one) for one in groups])


def _read_multi30k(split: str) -> list[Example]:
    return _numbered(read_pairs(directory.require("multi30k", _MULTI30K_FILES[split])))


def _read_wmt22(split: str) -> list[Example]:
    """Half of WMT22's general test set, against its first human reference."""
    records = _json_lines(directory.require("wmt22_en_de", "dev_half.jsonl"))
    # Neighbours come from one document: without a shuffle a limit would sample one or two texts.
    return _shuffled([Example(record["id"], record["en"], record["de_refA"]) for record in records])


def get_task(name: str | SeqioTask) -> Task:
    """The task called `name`; a `SeqioTask` is one itself.

    Raises:
        ValueError: there is none; names the nearest and all of them.
    """
    if isinstance(name, SeqioTask):
        return name
    if name in TASKS:
        return TASKS[name]
    raise ValueError(
        f"unknown task {name!r}; {names.hint(name, TASKS)}All tasks: {', '.join(TASKS)}. "
        "One of seqio's registry is given as tasks.SeqioTask (gin/tasks/seqio.gin)"
    )


def _of_paper_1(name: str, prefix: str, metrics: tuple[str, ...], lengths: tuple[int, int]) -> SeqioTask:
    """A data set of paper 1's T5 experiments (§F.1, METHODS section 9); validation, as there, is the default split."""
    return SeqioTask(
        name=name,
        registered=f"speccascade_{name}",
        module="speccascade_jax.data.seqio_registry",
        prefix=prefix,
        metrics=metrics,
        max_input_length=lengths[0],
        max_output_length=lengths[1],
    )


_ROUGE = ("rouge2", "rouge1", "rougeL")  # paper 1 shows ROUGE-2

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(name="tiny_translation", splits=("test",), read=_read_tiny_translation),
        Task(name="tatoeba", splits=tuple(_TATOEBA_FILES), read=_read_tatoeba),
        Task(
            name="tatoeba_joined",
            splits=tuple(_TATOEBA_FILES),
            read=_read_tatoeba_joined,
            max_input_length=128,
            max_output_length=128,
        ),
        Task(name="multi30k", splits=tuple(_MULTI30K_FILES), read=_read_multi30k),
        Task(name="wmt22", splits=("test",), read=_read_wmt22, max_input_length=256, max_output_length=256),
        _of_paper_1("wmt14_en_de", "translate English to German: ", ("bleu",), lengths=(80, 80)),
        _of_paper_1("xsum", "summarize: ", _ROUGE, lengths=(1024, 64)),
        _of_paper_1("cnn_dailymail", "summarize: ", _ROUGE, lengths=(2048, 128)),
    )
}
