"""Agreement of a run's training and evaluation on which examples are held out."""

import warnings
from collections.abc import Iterator
from typing import Any

from speccascade_jax.data.tasks.file_task import DIVIDED, FileTask
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.tasks.task import Task
from speccascade_jax.storage.files import expanded
from speccascade_jax.training.finetune.corpus import JoinedCorpus, MixedCorpus, TaskCorpus, training_task


def divided_as(task: str | Task, split: str | None, corpus: Any) -> Task:
    """Returns the task to score, with its rows divided as those of the training corpus if both read one file.

    Args:
        task: the task, or its name.
        split: the split to score; the split "all" needs no division.
        corpus: the training corpus.
    """
    task = get_task(task)
    for part in _parts(corpus):
        if isinstance(part, TaskCorpus) and split != "all" and part.split != "all" and _same(task, part.resolved):
            return training_task(task, part.held_out)
    return task


def check(corpus: Any, evaluated: Task, split: str | None, setting: str) -> None:
    """Checks that an evaluation uses no training example; warns in one line if it uses the training split itself.

    Args:
        corpus: the training corpus.
        evaluated: the task of the evaluation.
        split: its split; `None`: its first.
        setting: the setting that evaluates, for messages.

    Raises:
        ValueError: both divide the rows of one file, but in two ways, so held-out examples would be training examples.
    """
    split = split or evaluated.splits[0]
    for part in _parts(corpus):
        if not _reads(part, evaluated):
            continue
        trained = part.split if isinstance(part, TaskCorpus) else "all"
        if {trained, split} == {*DIVIDED}:
            _check_division(part.resolved, evaluated, setting)
        elif trained == split or "all" in (trained, split):
            remedy = "give the corpus and the evaluation different splits, such as 'train' and 'validation'"
            warnings.warn(
                f"{setting} uses examples that the corpus trains on ({evaluated.name}): {remedy}", stacklevel=3
            )


def _check_division(trained: Any, evaluated: Any, setting: str) -> None:
    """Raises a ValueError if held-out rows of `evaluated` may be training rows of `trained`; both are `FileTask`."""
    if not isinstance(trained, FileTask) or not trained.held_out:
        return  # the splits are the data set's own
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


def _parts(corpus: Any) -> Iterator[Any]:
    if isinstance(corpus, MixedCorpus):
        for part in corpus.parts:
            yield from _parts(part)
    else:
        yield corpus


def _reads(part: Any, task: Task) -> bool:
    """Returns whether a corpus reads the data of a task."""
    if isinstance(part, JoinedCorpus):
        return isinstance(task, FileTask) and expanded(part.path) == expanded(task.path)
    return isinstance(part, TaskCorpus) and _same(task, part.resolved)


def _same(task: Task, other: Task) -> bool:
    if isinstance(task, FileTask) and isinstance(other, FileTask):
        return expanded(task.path) == expanded(other.path)
    return type(task) is type(other) and task.name == other.name
