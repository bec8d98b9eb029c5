"""Checks that a run's training and evaluation agree on which examples are held out."""

import warnings
from collections.abc import Iterator
from typing import Any

from speccascade_jax.data.tasks.file_task import DIVIDED, FileTask, locate
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.tasks.task import Task
from speccascade_jax.training.finetune.corpus import JoinedCorpus, MixedCorpus, TaskCorpus, training_task
from speccascade_jax.training.finetune.span_corruption import SpanCorruption


def divided_as(task: str | Task, split: str | None, corpus: Any) -> Task:
    """Returns the task to score, with its rows divided as those of the training corpus if both read one file.

    Args:
        task: the task, or its name.
        split: the split to score; the split "all" needs no division.
        corpus: the training corpus.
    """
    task = get_task(task)
    for trained, part in _trained_on(corpus, task):
        if "all" not in (split, part):
            return training_task(task, getattr(trained, "held_out", 0.0))
    return task


def check(corpus: Any, evaluated: Task, split: str | None, setting: str) -> None:
    """Checks that an evaluation uses no training example; warns in one line if it uses the training split itself.

    Args:
        corpus: the training corpus.
        evaluated: the task of the evaluation.
        split: its split; `None`: its first.
        setting: the setting that evaluates, for messages.

    Raises:
        ValueError: corpus and evaluation divide the rows of one file in different ways, so that some held-out examples
            would be training examples.
    """
    split = split or evaluated.splits[0]
    for trained, part in _trained_on(corpus, evaluated):
        if {part, split} == {*DIVIDED}:
            _check_division(trained, evaluated, setting)
        elif part == split or "all" in (part, split):
            remedy = "give the corpus and the evaluation different splits, such as 'train' and 'validation'"
            warnings.warn(
                f"{setting} uses examples that the corpus trains on ({evaluated.name}): {remedy}", stacklevel=3
            )


def _check_division(trained: Any, evaluated: Any, setting: str) -> None:
    """Raises a ValueError if held-out rows of `evaluated` may be training rows of `trained`; both are `FileTask`."""
    if not isinstance(trained, FileTask) or not trained.held_out:
        return  # the data set has its own splits, which need no division
    for name in ("source", "template"):
        values = getattr(evaluated, name), getattr(trained, name)
        if values[0] != values[1]:
            raise ValueError(
                f"{setting} has {name}={values[0]!r}, but the corpus has {values[1]!r}: give both the same, because a "
                f"row of {trained.path} is held out by its prompt"
            )
    if evaluated.held_out > trained.held_out:
        raise ValueError(
            f"{setting} holds out {evaluated.held_out:g} of {trained.path}, but the corpus {trained.held_out:g}, so "
            "some would be training examples: give both the same held_out"
        )


def parts(corpus: Any) -> Iterator[Any]:
    """Yields the corpora that a corpus consists of; only a mixture has several."""
    if isinstance(corpus, MixedCorpus):
        for part in corpus.parts:
            yield from parts(part)
    else:
        yield corpus


def _trained_on(corpus: Any, task: Task) -> Iterator[tuple[Task, str]]:
    """Yields the task and the split of every part of a corpus that reads the data of `task`."""
    for part in parts(corpus):
        if isinstance(part, JoinedCorpus):
            if isinstance(task, FileTask) and _is_one_file(part.path, task.path):
                yield task, "all"
        elif isinstance(part, TaskCorpus) or (isinstance(part, SpanCorruption) and not part.is_text_file):
            trained = part.resolved if isinstance(part, TaskCorpus) else get_task(part.text)
            if _is_same(task, trained):
                yield trained, part.split


def _is_same(task: Task, other: Task) -> bool:
    if isinstance(task, FileTask) and isinstance(other, FileTask):
        return _is_one_file(task.path, other.path)
    return type(task) is type(other) and task.name == other.name


def _is_one_file(path: str, other: str) -> bool:
    # one file has several names: links, and paths inside the data directory with and without its name
    return locate(path).resolve() == locate(other).resolve()
