"""Tasks: examples of a data set, and how they become prompts and scores. The table: `data.tasks.table`.

Few-shot tasks are for decoder-only models: a prompt shows some solved records of a data set, then asks the next one.
The exemplars are fixed: the first records of a pool that the task's reader takes from the data directory. No record of
the pool is ever evaluated, even beyond the exemplars in use, so the examples are the same for every number of
exemplars. An example's `source` is the whole prompt, so the identity of a record's examples covers template and
exemplars.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from speccascade_jax.core.checks import several
from speccascade_jax.storage import readers

# The order and the joining of sentences are part of a task's definition: this number never changes.
ORDER_SEED = 0

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Example:
    """An input and its reference.

    Attributes:
        id: a number that is unique within a split and does not depend on any limit.
        source: the input's text, without `Task.prefix`.
        reference: one text, or a tuple of several; metrics that allow several take the best
            (`metrics.quality.Metric.several`).

    Examples:
        >>> from speccascade_jax.extend import Example
        >>> Example(id=0, source="Guten Tag.", reference=("Good day.", "Hello.")).reference[1]
        'Hello.'
    """

    id: int
    source: str
    reference: str | tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A data set with everything that turns it into prompts and scores.

    Attributes:
        name: its key in `TASKS`.
        splits: the names that `load` accepts, the default one first.
        read: maps a split to all of its examples, in an order of which any beginning is a fair sample. `load` takes no
            more of them than it needs, so a large split may come from a generator.
        metrics: names in `metrics.quality.METRICS`, or `module.NAME` of your own (`Metric`), the main one first.
        max_input_length: the most tokens in a prompt, EOS included.
        max_output_length: the most tokens to generate, EOS included.
        prefix: text before every source; empty for models trained on plain pairs.

    Examples:
        >>> from speccascade_jax.extend import Example, Task
        >>> def read(split):
        ...     return (Example(id=n, source=f"{n} + {n} =", reference=str(2 * n)) for n in range(1000))
        >>> task = Task(name="doubles", splits=("test",), read=read, prefix="Compute: ", max_output_length=4)
        >>> [task.build_prompt(example) for example in task.load(limit=2)]
        ['Compute: 0 + 0 =', 'Compute: 1 + 1 =']
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
        """Strings before which an output ends; few-shot tasks have some."""
        return ()

    @property
    def too_long(self) -> str:
        """The treatment of a prompt of more than `max_input_length` tokens: "cut", or "skip" for the next example."""
        return "cut"

    def load(self, split: str | None = None, limit: int | None = None) -> list[Example]:
        """Returns the first `limit` examples of `split`; all of them if it has fewer, or without a limit.

        Args:
            split: one of `splits`; by default the first.
            limit: at least 1.

        Raises:
            ValueError: an unknown split, a limit below 1, items that are no `Example`, or an id that occurs twice.
            FileNotFoundError: the data directory, or TensorFlow Datasets' folder, lacks the data.
            ImportError: the task comes through seqio, which is not installed.
        """
        split = self.splits[0] if split is None else split
        if split not in self.splits:
            raise ValueError(f"task {self.name} has no split {split!r}; its splits: {', '.join(self.splits)}")
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}: give at least 1, or None for all examples")
        examples = list(_instances(self, "read", itertools.islice(self.read(split), limit), Example))
        ids = set[int]()
        for example in examples:
            if example.id in ids:
                raise ValueError(f"task {self.name!r}: Example.id {example.id} stands twice; ids must be unique")
            ids.add(example.id)
        return examples

    def build_prompt(self, example: Example) -> str:
        """Returns the model's input text."""
        return self.prefix + example.source

    def cut(self, ids: list[int], room: int) -> list[int]:
        """Returns the part of a prompt's token ids that is kept if there are more than `room`: the beginning."""
        return ids[:room]

    def postprocess(self, text: str) -> str:
        """Returns the text that is scored, from a model's output."""
        return text.strip()


def _instances(task: Task, reader: str, items: Iterable[Any], kind: type[T]) -> Iterator[T]:
    """Yields what a task's reader gives; refuses items of another kind, such as tuples, with a ValueError."""
    for number, item in enumerate(items):
        if not isinstance(item, kind):
            fault = f"item {number} is a {type(item).__name__}"
            raise ValueError(f"task {task.name!r}: {reader} must give {kind.__name__}s; {fault}")
        yield item


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A record of a data set as texts: an exemplar, or a record to evaluate.

    Attributes:
        id: as `Example.id`.
        question: the question, with everything that an answer depends on.
        answer: the text after it in an exemplar; records to evaluate need none.
        reference: the reference of an output, as `Example.reference`.
        group: records are shown exemplars of their own group only (the subject in MMLU).
    """

    id: int
    question: str
    answer: str = ""
    reference: str | tuple[str, ...] = ""
    group: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """The texts around a few-shot prompt's questions and answers.

    Attributes:
        question: the text of a record up to the model's output; `{question}` stands for the record's question.
        answer: the text after it in an exemplar, with `{answer}`.
        separator: the text between exemplars.
        header: the prompt's beginning; `{group}` stands for the record's group. Empty: none.
    """

    question: str = "Question: {question}\nAnswer:"
    answer: str = " {answer}"
    separator: str = "\n\n"
    header: str = ""

    def prompt(self, exemplars: Sequence[Record], record: Record) -> str:
        """Returns the model's whole input for `record`."""
        parts = [self.header.format(group=record.group)] if self.header else []
        for exemplar in exemplars:
            parts.append(self.question.format(question=exemplar.question) + self.answer.format(answer=exemplar.answer))
        return self.separator.join([*parts, self.question.format(question=record.question)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShotTask(Task):
    r"""A task whose prompts consist of exemplars and a question.

    Attributes:
        records: maps a split to all records, in an order of which any beginning is a fair sample. Records of the pool
            may be among them.
        pool: () -> the records that exemplars are taken from, in order.
        shots: the number of exemplars in a prompt; "name:shots" is the task with another number.
        template: the form of the prompt.
        stop_strings: the scored text ends before the first of them; a model that goes on writes further questions. A
            `Session`'s generation ends there too if the vocabulary has the string as one token (`prompts.stop_ids`),
            also at the beginning of an output: that answer is empty. Generation may go on for "\n\n" and the like,
            which vocabularies with merges also have in tokens with the text before it, and for a string of several
            tokens.
        clean: applied to an output before that.

    Raises:
        ValueError: a negative number of exemplars; one string in place of a tuple. `load`: the pool is too small.
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
        """Returns the end of a prompt that is too long: the question comes last, so exemplars are cut first."""
        return ids[max(0, len(ids) - room) :]

    def postprocess(self, text: str) -> str:
        """Returns the output up to the first stop string."""
        text = self.clean(text)
        ends = [position for stop in self.stop_strings if (position := text.find(stop)) >= 0]
        return text[: min(ends, default=len(text))].rstrip()

    def _read(self, split: str) -> Iterator[Example]:
        exemplars = list(_instances(self, "pool", self.pool(), Record))
        reserved = {_spelt(exemplar.question) for exemplar in exemplars}
        for record in _instances(self, "records", self.records(split), Record):
            if _spelt(record.question) not in reserved:
                shown = [exemplar for exemplar in exemplars if exemplar.group == record.group][: self.shots]
                if len(shown) < self.shots:
                    counted = f"{len(shown)} exemplars{record.group and f' of {record.group}'}"
                    raise ValueError(f"task {self.name} has {counted}, but shots={self.shots}; lower shots")
                yield Example(record.id, self.template.prompt(shown, record), record.reference)


def _spelt(question: str) -> str:
    """Returns a question without differences in case and spaces."""
    return " ".join(question.casefold().split())


def shuffled(records: list[T]) -> list[T]:
    """Returns records in a fixed random order, for files that are sorted by length or have related neighbours."""
    order = np.random.default_rng(ORDER_SEED).permutation(len(records))
    return [records[index] for index in order.tolist()]


class Entry(dict[str, Any]):
    """A line of a file; a missing field raises an error that names the line."""

    def __init__(self, location: str, fields: dict[str, Any]):
        super().__init__(fields)
        self._location = location

    def __missing__(self, name: str) -> Any:
        raise ValueError(
            f"{self._location} has no field {name!r} (it has {', '.join(self)}): use a file in the task's format"
        )


def json_lines(path: Path) -> Iterator[Entry]:
    """Yields the objects of a file with one object per line, gzipped if its name ends in `.gz`; skips blank lines.

    Raises:
        ValueError: a line without an object, or without a requested field; names file and line.
    """
    for number, line in readers.lines(path):
        if not line.strip():
            continue
        location = f"{path}:{number}"
        yield Entry(location, readers.parsed(line, location, "correct the line", unique=True))
