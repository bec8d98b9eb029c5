"""What a task is: examples of a data set, and how they become prompts and scores. The table: `data.tasks.table`."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from speccascade_jax.data import directory
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


def records_of(folder: str, file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file in the data directory, numbered from 0."""
    return enumerate(json_lines(directory.require(folder, file)))


def packaged(file: str) -> list[Example]:
    """The examples of a file that lies in the package."""
    with resources.as_file(resources.files("speccascade_jax") / "assets" / file) as path:
        return [Example(**record) for record in json_lines(path)]
