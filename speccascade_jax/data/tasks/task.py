"""What a task is: examples of a data set, and how they become prompts and scores. The table: `data.tasks.table`.

Few-shot tasks are for decoder-only models: a prompt shows some solved records of a data set, then asks the next one.
Which records are shown is fixed: the first of a pool that its reader takes from the data directory. Whatever stands in
the pool is never evaluated, also beyond the exemplars in use, so that the examples are the same for every number of
them. An example's `source` is the whole prompt: what identifies the examples of a record covers template and exemplars.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from speccascade_jax.core.checks import several
from speccascade_jax.storage import readers

# Which sentences stand first, and which are joined, is part of a task's definition: this number never changes.
ORDER_SEED = 0

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Example:
    """One input and its reference; `id` is unique within a split and stays the same under any limit.

    Several references are a tuple; metrics that allow several take the best (`metrics.quality.Metric.several`).
    """

    id: int
    source: str
    reference: str | tuple[str, ...]


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

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """What an output ends before; few-shot tasks have some."""
        return ()

    @property
    def too_long(self) -> str:
        """What happens to a prompt of more than `max_input_length` tokens: "cut", or "skip", and the next is taken."""
        return "cut"

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

    def cut(self, ids: list[int], room: int) -> list[int]:
        """What of a prompt's token ids is kept where it has more than `room` of them: the beginning."""
        return ids[:room]

    def postprocess(self, text: str) -> str:
        """The text that is scored, from what a model wrote."""
        return text.strip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One record of a data set as texts: an exemplar, or what is evaluated.

    Attributes:
        id: as `Example.id`.
        question: what is asked, everything included that an answer depends on.
        answer: what is written behind it in an exemplar; evaluated records need none.
        reference: what an output is judged against, as `Example.reference`.
        group: records are shown exemplars of their own group only (the subject in MMLU).
    """

    id: int
    question: str
    answer: str = ""
    reference: str | tuple[str, ...] = ""
    group: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """How a prompt is written.

    Attributes:
        question: the text of a record up to where the model goes on; `{question}` stands for the record's.
        answer: what follows in an exemplar, with `{answer}`.
        separator: between exemplars.
        header: the prompt's beginning; `{group}` stands for the record's group. Empty: none.
    """

    question: str = "Question: {question}\nAnswer:"
    answer: str = " {answer}"
    separator: str = "\n\n"
    header: str = ""

    def prompt(self, exemplars: Sequence[Record], record: Record) -> str:
        """The whole text that a model is given for `record`."""
        parts = [self.header.format(group=record.group)] if self.header else []
        for exemplar in exemplars:
            parts.append(self.question.format(question=exemplar.question) + self.answer.format(answer=exemplar.answer))
        return self.separator.join([*parts, self.question.format(question=record.question)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShotTask(Task):
    """A task whose prompts are made of exemplars and a question.

    Attributes:
        records: split -> all records, in an order of which any beginning is a fair sample. Those of the pool may be
            among them.
        pool: () -> the records that exemplars are taken from, in order.
        shots: how many exemplars a prompt shows; "name:shots" is the task with another number.
        template: how they are written.
        stop_strings: the scored text ends before the first of them; a model that goes on writes further questions.
            A `Session`'s generation ends there too where the vocabulary has the string as one token
            (`prompts.stop_ids`), at the beginning of an output as well: that answer is empty. It is not sure to end
            there for "\\n\\n" and the like, which vocabularies with merges also have in tokens with the text before
            it, nor for a string of several tokens.
        clean: what is done to an output before that.

    Raises:
        ValueError: a negative number of exemplars; one string where a tuple is meant. `load`: the pool is too small.
    """

    records: Callable[[str], Iterable[Record]]
    pool: Callable[[], Iterable[Record]] = tuple
    shots: int = 0
    template: Template = Template()
    stop_strings: tuple[str, ...] = ()
    clean: Callable[[str], str] = str.strip
    read: Callable[[str], Iterable[Example]] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.shots < 0:
            raise ValueError(f"task {self.name}: shots={self.shots}; give 0 or more exemplars")
        several("stop_strings", self.stop_strings)
        object.__setattr__(self, "read", self._read)

    def cut(self, ids: list[int], room: int) -> list[int]:
        """The end of a prompt that is too long, since the question stands there: exemplars go first."""
        return ids[max(0, len(ids) - room) :]

    def postprocess(self, text: str) -> str:
        """The output up to the first stop string."""
        text = self.clean(text)
        ends = [at for stop in self.stop_strings if (at := text.find(stop)) >= 0]
        return text[: min(ends, default=len(text))].rstrip()

    def _read(self, split: str) -> Iterator[Example]:
        exemplars = list(self.pool())
        reserved = {_spelt(exemplar.question) for exemplar in exemplars}
        for record in self.records(split):
            if _spelt(record.question) not in reserved:
                shown = [exemplar for exemplar in exemplars if exemplar.group == record.group][: self.shots]
                if len(shown) < self.shots:
                    counted = f"{len(shown)} exemplars{record.group and f' of {record.group}'}"
                    raise ValueError(f"task {self.name} has {counted}, not the {self.shots} asked for; ask for fewer")
                yield Example(record.id, self.template.prompt(shown, record), record.reference)


def _spelt(question: str) -> str:
    """Two questions that differ in case or spaces only are one."""
    return " ".join(question.casefold().split())


def shuffled(records: list[T]) -> list[T]:
    """In a fixed random order, for files sorted by length or in which neighbours belong together."""
    order = np.random.default_rng(ORDER_SEED).permutation(len(records))
    return [records[index] for index in order.tolist()]


class Entry(dict[str, Any]):
    """A line of a file; asked for what it lacks it says which line that is."""

    def __init__(self, where: str, found: dict[str, Any]):
        super().__init__(found)
        self._where = where

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"{self._where} has no {name!r} (it has {', '.join(self)}): give a file of the task's format")


def json_lines(path: Path) -> Iterator[Entry]:
    """The objects of a file with one a line, gzipped if its name ends in `.gz`.

    Raises:
        ValueError: a line that holds none, or lacks what it is asked for; names file and line.
    """
    for number, line in readers.lines(path):
        where = f"{path}:{number}"
        yield Entry(where, readers.parsed(line, where, "copy the file again"))
