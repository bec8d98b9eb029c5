"""Tasks, which define how examples of a data set become prompts and scores. `data.tasks.table` lists all tasks.

Few-shot tasks are for decoder-only models: a prompt shows some solved records of a data set (exemplars), then asks for
the answer to another record. The exemplars are fixed: the first records of a pool that the task's reader takes from the
data directory. No record of the pool is ever evaluated, even if it is not used as an exemplar. So the evaluated
examples are the same for every number of exemplars. An example's `source` is the whole prompt, so the identity of an
example covers the template and the exemplars.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from speccascade_jax.core.checks import several
from speccascade_jax.storage import readers

# The seed of the order of examples. It never changes, because the order is part of a task's definition.
ORDER_SEED = 0

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Example:
    """An input text and its reference output.

    Attributes:
        id: a number that is unique within a split and does not depend on how many examples are loaded.
        source: the input text, without `Task.prefix`.
        reference: one text, or a tuple of several; metrics that allow several use the best one
            (`metrics.quality.Metric.several`).
        answer: the output that a model is trained to write, if it is not the first reference. For example, HumanEval's
            reference is a test, and GSM8K's only the last number. The answer is not part of the example's identity.

    Examples:
        >>> from speccascade_jax.extend import Example
        >>> Example(id=0, source="Guten Tag.", reference=("Good day.", "Hello.")).reference[1]
        'Hello.'
    """

    id: int
    source: str
    reference: str | tuple[str, ...]
    answer: str = dataclasses.field(default="", repr=False, compare=False)

    @property
    def best_answer(self) -> str:
        """The answer, or else the first reference."""
        return self.answer or (self.reference if isinstance(self.reference, str) else self.reference[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A data set with everything that turns it into prompts and scores.

    Attributes:
        name: the task's key in `TASKS`.
        splits: the names that `load` accepts, the default one first.
        read: function from a split to all of its examples, in an order in which the first ones are a fair sample.
            `load` takes no more of them than it needs, so a large split may come from a generator.
        metrics: names in `metrics.quality.METRICS`, or `module.NAME` for a user's `Metric`, the main one first.
        max_input_length: the largest number of tokens in a prompt, EOS included.
        max_output_length: the largest number of tokens to generate, EOS included.
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
        """Strings that end an output, which is cut before them; few-shot tasks have some."""
        return ()

    @property
    def too_long(self) -> str:
        """The treatment of a prompt above `max_input_length` tokens: "cut", or "skip" (the next example is used)."""
        return "cut"

    def load(self, split: str | None = None, limit: int | None = None) -> list[Example]:
        """Returns the first `limit` examples of `split`; all examples if there are fewer, or if no limit is set.

        Args:
            split: one of `splits`; by default the first.
            limit: at least 1.

        Raises:
            ValueError: the split is unknown, the limit is below 1, an item is not an `Example`, or an id occurs twice.
            FileNotFoundError: the data directory, or the folder of TensorFlow Datasets, lacks the data.
            ImportError: the task is read through seqio, which is not installed.
        """
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}: give at least 1, or None for all examples")
        examples = list(itertools.islice(self.stream(split), limit))
        ids = set[int]()
        for example in examples:
            if example.id in ids:
                raise ValueError(f"task {self.name!r}: Example.id {example.id} occurs twice; ids must be unique")
            ids.add(example.id)
        return examples

    def stream(self, split: str | None = None) -> Iterator[Example]:
        """Returns an iterator over the examples of `split`, by default the first split.

        Millions of examples of a training split need not be in memory together.

        Raises:
            ValueError: the split is unknown, or an item is not an `Example`. Other errors are those of `load`.
        """
        split = self.splits[0] if split is None else split
        if split not in self.splits:
            raise ValueError(f"task {self.name} has no split {split!r}; its splits: {', '.join(self.splits)}")
        return _instances(self, "read", self.read(split), Example)

    def build_prompt(self, example: Example) -> str:
        """Returns the prompt of an example: the prefix and the example's source."""
        return self.prefix + example.source

    def build_answer(self, example: Example) -> str:
        """Returns the text that a model is trained to write directly after the prompt.

        A space separates it from the prompt, as in the templates of few-shot tasks.
        """
        answer, prompt = example.best_answer, self.build_prompt(example)
        return answer if prompt[-1:].isspace() or answer[:1].isspace() else f" {answer}"

    def cut(self, ids: list[int], room: int) -> list[int]:
        """Returns the first `room` token ids of a prompt that is too long."""
        return ids[:room]

    def postprocess(self, text: str) -> str:
        """Returns the text to score, extracted from a model's output."""
        return text.strip()


def _instances(task: Task, reader: str, items: Iterable[Any], kind: type[T]) -> Iterator[T]:
    """Yields the items from a task's reader; raises a ValueError for an item of another class, such as a tuple."""
    for number, item in enumerate(items):
        if not isinstance(item, kind):
            fault = f"item {number} is a {type(item).__name__}"
            raise ValueError(f"task {task.name!r}: {reader} must yield {kind.__name__}s; {fault}")
        yield item


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One record of a data set as texts, for use as an exemplar or for evaluation.

    Attributes:
        id: as `Example.id`.
        question: the question, with all context that an answer depends on.
        answer: the text after the question in an exemplar; records to evaluate need none.
        reference: the reference of an output, as `Example.reference`.
        group: a label such as the subject in MMLU; a prompt shows exemplars of the record's own group only.
    """

    id: int
    question: str
    answer: str = ""
    reference: str | tuple[str, ...] = ""
    group: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """The texts around the questions and answers of a few-shot prompt.

    Attributes:
        question: the text of a record up to the model's output; `{question}` is replaced by the record's question.
        answer: the text after the question in an exemplar; `{answer}` is replaced by the exemplar's answer.
        separator: the text between exemplars.
        header: the beginning of the prompt; `{group}` is replaced by the record's group. Empty: no header.
    """

    question: str = "Question: {question}\nAnswer:"
    answer: str = " {answer}"
    separator: str = "\n\n"
    header: str = ""

    def prompt(self, exemplars: Sequence[Record], record: Record) -> str:
        """Returns the whole prompt for `record`: the header, the exemplars and the question."""
        parts = [self.header.format(group=record.group)] if self.header else []
        for exemplar in exemplars:
            parts.append(self.question.format(question=exemplar.question) + self.answer.format(answer=exemplar.answer))
        return self.separator.join([*parts, self.question.format(question=record.question)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShotTask(Task):
    r"""A task whose prompts consist of exemplars and a question.

    Attributes:
        records: function from a split to all records, in an order in which the first ones are a fair sample. Records of
            the pool may be among them.
        pool: function `() -> records` from which exemplars are taken, in order.
        shots: the number of exemplars in a prompt; the name "name:shots" selects another number.
        template: the form of the prompt.
        stop_strings: the scored text ends before the first of these strings, because models go on and write further
            questions. Generation in a `Session` also ends there if the vocabulary has the string as one token
            (`prompts.stop_ids`). If this token is the first of an output, the answer is empty. Generation goes on after
            a string of several tokens. It may also go on after strings like "\n\n", which vocabularies with merges
            often join with the text before them.
        clean: function that is applied to an output before it is cut at a stop string.

    Raises:
        ValueError: the number of exemplars is negative, or a string is given in place of a tuple of strings. `load`
            raises it if the pool is too small.
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

    def build_answer(self, example: Example) -> str:
        """Returns the text after the question, in the form that the exemplars have."""
        return self.template.answer.format(answer=example.best_answer)

    def cut(self, ids: list[int], room: int) -> list[int]:
        """Returns the end of a prompt that is too long, because the question is at the end; exemplars are cut first."""
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
                yield Example(record.id, self.template.prompt(shown, record), record.reference, record.answer)


def _spelt(question: str) -> str:
    """Returns a question in lower case with single spaces, so that different spellings are recognised as equal."""
    return " ".join(question.casefold().split())


def shuffled(records: list[T]) -> list[T]:
    """Returns records in a fixed random order, for files that are sorted by length or whose neighbours are related."""
    order = np.random.default_rng(ORDER_SEED).permutation(len(records))
    return [records[index] for index in order.tolist()]


class Entry(dict[str, Any]):
    """A line of a file as a dictionary; access to a missing field raises an error that names the line."""

    def __init__(self, location: str, fields: dict[str, Any]):
        super().__init__(fields)
        self._location = location

    def __missing__(self, name: str) -> Any:
        raise ValueError(
            f"{self._location} has no field {name!r} (it has {', '.join(self)}): use a file in the task's format"
        )


def json_lines(path: Path) -> Iterator[Entry]:
    """Yields the JSON objects of a file with one object per line; skips blank lines.

    A file whose name ends in `.gz` is decompressed.

    Raises:
        ValueError: a line has no JSON object, or lacks a field that is accessed; the message names the file and the
            line.
    """
    for number, line in readers.lines(path):
        if not line.strip():
            continue
        location = f"{path}:{number}"
        yield Entry(location, readers.parsed(line, location, "correct the line", unique=True))
