"""Corpora: sources of training examples and the settings of their batches, as values that gin binds.

`TaskCorpus` trains on a task, `JoinedCorpus` on joined sentence pairs of a file, `SpanCorruption` on plain text, and
`MixedCorpus` on several of them. All of them plan their epochs in the same way (`batches`).
"""

import dataclasses
import itertools
import warnings
from collections.abc import Iterator

import numpy as np
from absl import logging

from speccascade_jax.core.checks import check_text, whole
from speccascade_jax.data.tasks.file_task import DIVIDED, FileTask
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.tasks.task import Example, Task
from speccascade_jax.data.vocabularies.vocabulary import TextVocabulary
from speccascade_jax.pairs.prompts import example_ids
from speccascade_jax.training.finetune.batches import Batching, Corpus, Data, PlannedBatch, PlannedData, Row
from speccascade_jax.training.finetune.joined import JoinedCorpus
from speccascade_jax.training.finetune.mixed import MixedCorpus
from speccascade_jax.training.finetune.ragged import Ragged
from speccascade_jax.training.finetune.span_corruption import SpanCorruption

__all__ = ["Corpus", "Data", "JoinedCorpus", "MixedCorpus", "PlannedBatch", "SpanCorruption", "TaskCorpus"]
__all__ += ["examples_of", "training_task"]


HELD_OUT = 0.05
"""Default share of the rows of a user's file that are held out from training, for validation."""


def training_task(task: str | Task, held_out: float) -> Task:
    """Returns a task with a training split.

    A user's file has one split, "all". It is divided into "validation", with the share `held_out` of the rows, and
    "train", with the others (`FileTask.held_out`). Other tasks are returned unchanged. Validation must use the returned
    task too, so that no training row is in it.
    """
    task = get_task(task)
    if isinstance(task, FileTask) and task.splits == ("all",) and held_out:
        return dataclasses.replace(task, held_out=held_out)
    return task


def examples_of(task: Task, split: str | None, limit: int, held_out: float = HELD_OUT) -> list[Example]:
    """Returns the first `limit` examples of a split, or of a part of a user's file (`training_task`).

    Args:
        task: the task.
        split: a split, or "validation" or "train" of a file that has only one; `None`: the task's first split.
        limit: largest number of examples.
        held_out: as in `training_task`.

    Raises:
        ValueError: the task has no such split, or no example in it.
    """
    divided = training_task(task, held_out) if split in DIVIDED and split not in task.splits else task
    examples = divided.load(split, limit=limit)
    if not examples:
        raise ValueError(without_examples(divided, split or divided.splits[0]))
    return examples


def without_examples(task: Task, split: str, skipped: int = 0) -> str:
    """Returns the error message for a split without usable examples, of which `skipped` have too long prompts."""
    if skipped:
        return (
            f"{task.name}, split {split} has no examples ({skipped} prompts are too long): raise max_input_length, or "
            "set too_long='cut'"
        )
    if not isinstance(task, FileTask):
        return f"{task.name}, split {split} has no examples: choose another split"
    rows = sum(1 for name in task.splits for _ in task.stream(name))
    if not rows:
        return f"{task.path} has no rows: write one row for each example, below the names of the columns"
    cause = "one row only" if rows == 1 else f"{rows} rows, which have the same prompt"
    return (
        f"{task.path} has {cause}, and it is held out: nothing is left for split {split}; add rows with other prompts"
    )


def warn_of_cuts(name: str, task: Task, counts: dict[str, int]) -> None:
    """Warns in one line of the prompts and answers of a split that are cut or skipped."""
    texts = {
        "prompts_cut": f"prompts cut to max_input_length={task.max_input_length} tokens",
        "prompts_skipped": f"prompts of more than max_input_length={task.max_input_length} tokens left out",
        "answers_cut": f"answers cut to max_output_length={task.max_output_length} tokens",
    }
    if parts := [f"{text}: {counts[count]}" for count, text in texts.items() if counts[count]]:
        warnings.warn(f"{name}: {', '.join(parts)} (examples: {counts['examples']})", stacklevel=3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskCorpus(Batching):
    """Training corpus of a task; prompts are encoded exactly as for decoding (`pairs.prompts.example_ids`).

    An encoder-decoder reads the prompt and is trained on the answer and EOS. A decoder-only model is trained on the
    answer and EOS after the prompt; the prompt does not count in the loss. `Task.build_answer` gives the answer.

    Prompts of more than `max_input_length` tokens are cut or skipped, as decoding does. Answers are cut to
    `max_output_length` tokens, EOS included. A warning counts both.

    Attributes:
        task: a name of `data.tasks.table`, a path of a file, or a `Task`.
        split: the split to train on.
        held_out: for a user's file with one split, the share of its rows that go to "validation" instead of "train"
            (`training_task`). The split "all" has all rows. Other tasks ignore this setting.
        limit: number of examples to use, from the first on; 0 uses all. every: use only every `every`-th example.
        Other attributes are those of `Batching`; the task determines the largest lengths.

    Raises:
        ValueError: the task or the split is unknown (names the splits that exist), or a value is invalid.
    """

    task: str | Task
    split: str = "train"
    held_out: float = HELD_OUT
    limit: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("limit", self.limit, 0)
        whole("every", self.every, 1)
        task = self.resolved
        if self.split not in task.splits:
            raise ValueError(
                f"task {task.name} has no training split {self.split!r}; its splits: {', '.join(task.splits)}: name "
                f"one of them as split, or give a file of your own as the task"
            )

    @property
    def resolved(self) -> Task:
        """The task, with a training split if it is a user's file (`training_task`)."""
        return training_task(self.task, 0 if self.split == "all" else self.held_out)

    def source(self, vocabulary: TextVocabulary, encoder_decoder: bool) -> "TaskSource":
        """Reads and encodes the examples of the split; a warning says how many were cut.

        Raises:
            ValueError: the split has no example that fits.
            FileNotFoundError: the data are not on this machine.
        """
        task = self.resolved
        chosen = itertools.islice(task.stream(self.split), 0, self.limit or None, self.every)
        source = encode_task(task, chosen, vocabulary, encoder_decoder)
        name, counts = f"{task.name}, split {self.split}", source.counts
        if not source.size:
            raise ValueError(without_examples(task, self.split, counts["prompts_skipped"]))
        if source.answers.lengths.max() == 1:
            raise ValueError(f"{name}: all answers are empty, so there is nothing to learn: choose another column")
        warn_of_cuts(name, task, counts)
        logging.info("%s: %s", name, ", ".join(f"{number} {what.replace('_', ' ')}" for what, number in counts.items()))
        return source

    def tokens(self, vocabulary: TextVocabulary, encoder_decoder: bool) -> PlannedData:
        """Reads and encodes the corpus; raises the errors of `source`, or ValueError if an example fits no bucket."""
        return self.planned(self.source(vocabulary, encoder_decoder), vocabulary.eos_id)


@dataclasses.dataclass(frozen=True, eq=False)
class TaskSource:
    """Encoded examples of a task, which are the same in every epoch.

    Attributes:
        prompts, answers: token ids of each example, with the special ids of the model.
        encoder_decoder: whether an encoder reads the prompts.
        limits, counts: as in `Source`.
    """

    prompts: Ragged
    answers: Ragged
    encoder_decoder: bool
    limits: tuple[int, int]
    counts: dict[str, int]

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(self.prompts)

    @property
    def longest(self) -> tuple[int, int]:
        """The largest lengths."""
        encoder, width = self.lengths.max(axis=0).tolist()
        return encoder, width

    @property
    def lengths(self) -> np.ndarray:
        """The lengths of all examples, as in `Examples`."""
        prompts, answers = self.prompts.lengths, self.answers.lengths
        if self.encoder_decoder:
            return np.stack([prompts, answers], axis=1)
        return np.stack([np.zeros_like(prompts), prompts + answers], axis=1)

    def examples(self, seed: int, number: int) -> "TaskSource":
        """Returns the examples, which are the same in every pass."""
        return self

    def row(self, index: int) -> Row:
        """Returns one example."""
        prompt, answer = self.prompts[index], self.answers[index]
        if self.encoder_decoder:
            return Row(answer, 0, prompt)
        return Row(np.concatenate([prompt, answer]), len(prompt))


def encode_task(
    task: Task, examples: Iterator[Example], vocabulary: TextVocabulary, encoder_decoder: bool
) -> TaskSource:
    """Returns the encoded examples of a task, without those whose prompts the task skips."""
    counts = dict.fromkeys(("examples", "prompts_cut", "prompts_skipped", "answers_cut"), 0)
    skip = task.too_long == "skip"

    def encoded() -> Iterator[tuple[list[int], list[int]]]:
        for example in examples:
            prompt, too_long = example_ids(vocabulary, encoder_decoder, task, example)
            counts["prompts_skipped" if skip else "prompts_cut"] += too_long
            if skip and too_long:
                continue
            answer = answer_ids(vocabulary, encoder_decoder, task, example)
            room = task.max_output_length - 1
            counts["answers_cut"] += len(answer) > room
            counts["examples"] += 1
            yield prompt, [*answer[:room], vocabulary.eos_id]

    prompts, answers = Ragged.columns(2, encoded())
    inside = task.max_input_length
    limits = (inside, task.max_output_length) if encoder_decoder else (0, inside + task.max_output_length)
    return TaskSource(prompts, answers, encoder_decoder, limits, counts)


def answer_ids(vocabulary: TextVocabulary, encoder_decoder: bool, task: Task, example: Example) -> list[int]:
    """Returns the token ids of the answer that a model is trained to write, without EOS.

    The answer of a decoder-only model is encoded together with its prompt, because many vocabularies encode the
    beginning of a text differently. If one token then covers the end of the prompt and the beginning of the answer, the
    answer is encoded after a single letter instead, because decoding continues from the whole prompt and could never
    produce that token.
    """
    answer = task.build_answer(example)
    check_text(f"{task.name}: the answer of example {example.id}", answer)
    if encoder_decoder:
        return vocabulary.encode(answer.strip())
    for before in (task.build_prompt(example), "a", ""):
        alone, joint = vocabulary.encode(before), vocabulary.encode(before + answer)
        if joint[: len(alone)] == alone:
            break
    return joint[len(alone) :]
