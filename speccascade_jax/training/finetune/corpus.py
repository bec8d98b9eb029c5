"""Corpora, from which training takes its batches: tasks, files of sentence pairs, mixtures, and text with gaps.

Training encodes a task's prompts as decoding does (`pairs.prompts.encoded`), so a model meets the same ids in both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from speccascade_jax.core.checks import whole
from speccascade_jax.data import directory
from speccascade_jax.data.sentence_pairs import Columns, TokenPair, group, read_tokens
from speccascade_jax.data.tasks import table
from speccascade_jax.data.tasks.task import Example, Task
from speccascade_jax.data.vocabularies.load import FileVocabulary
from speccascade_jax.pairs.prompts import encoded
from speccascade_jax.storage import readers
from speccascade_jax.training.finetune import gaps
from speccascade_jax.training.finetune.batches import Buckets, Examples, PlannedBatch, Ragged, default_widths

HELD_OUT = 20
"""One in so many examples of a task with a single split is held out of training, for validation."""


class Data(Protocol):
    """Encoded data of a corpus."""

    def epoch(self, seed: int, number: int) -> Sequence[PlannedBatch]:
        """Returns the batches of an epoch, which depend on nothing but `seed` and `number`."""


@runtime_checkable
class Corpus(Protocol):
    """Description of training data, which gin binds."""

    def tokens(self, vocabulary: FileVocabulary, encoder_decoder: bool) -> Any:
        """Reads and encodes the data.

        Raises:
            ValueError: there are no data that fit.
        """


@dataclass(frozen=True, eq=False)
class Pairs:
    """Encoded pairs, without ends; it implements `batches.Examples`.

    Attributes:
        prompts, answers: the ids of each pair's two sides.
        encoder_decoder: whether the prompts are an encoder's input, which ends with EOS.
        eos_id: the id of the end.
    """

    prompts: Ragged
    answers: Ragged
    encoder_decoder: bool
    eos_id: int

    def lengths(self, groups: Ragged) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of tokens of each group's prompt and of its answer, ends included."""
        return groups.sums(self.prompts.lengths) + int(self.encoder_decoder), groups.sums(self.answers.lengths) + 1

    def row(self, members: np.ndarray, key: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Returns a group's joined prompts and answers, ends included."""
        prompt, answer = (
            [token for member in members for token in side[member].tolist()] for side in (self.prompts, self.answers)
        )
        return prompt + [self.eos_id] * self.encoder_decoder, [*answer, self.eos_id]


@dataclass(frozen=True, eq=False)
class Planned:
    """Examples with their buckets; each epoch takes every example once, alone or joined with others.

    Attributes:
        examples: the encoded examples; count: their number.
        buckets: the shapes of batches.
        max_joined: largest number of examples in a row, which must then be `Pairs`.
    """

    examples: Examples
    count: int
    buckets: Buckets
    max_joined: int = 1

    def epoch(self, seed: int, number: int) -> Sequence[PlannedBatch]:
        """Returns the batches of an epoch."""
        return self.buckets.plan(self.examples, self.groups(seed, number), seed, number)

    def groups(self, seed: int, number: int) -> Ragged:
        """Returns the members of every row of an epoch, in random order."""
        rng = np.random.default_rng((seed, number))
        if self.max_joined == 1 or not isinstance(self.examples, Pairs):
            return Ragged(rng.permutation(self.count).astype(np.int32), np.arange(self.count + 1))
        sides = zip(self.examples.prompts.lengths, self.examples.answers.lengths, strict=True)
        sized = [(range(prompt), range(answer)) for prompt, answer in sides]
        return Ragged.of(group(sized, self.max_joined, rng, self.buckets.widths[-1] - 1))


@dataclass(frozen=True, kw_only=True)
class TaskCorpus(Buckets):
    """Training corpus of a task: a name in `data.tasks.table`, a user's file, a `SeqioTask` or another `Task`.

    Prompts that are longer than the task's `max_input_length` are cut or skipped as in decoding, and answers are cut to
    `max_output_length`; a warning counts both. A task with a single split, such as a file, is divided: of every
    `HELD_OUT` examples the last is for "validation", and the others for "train".

    Attributes:
        task: the task or its name.
        split: "train", or another split of the task.
        limit: number of examples to read, from the first on; 0 reads all.
        widths: as in `Buckets`; by default doubling widths up to the task's lengths.
    """

    task: str | Task
    split: str = "train"
    limit: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("limit", self.limit, 0)

    def tokens(self, vocabulary: FileVocabulary, encoder_decoder: bool) -> Planned:
        """Reads and encodes the examples of the split.

        Raises:
            ValueError: the task has no such split, or no example.
        """
        task = table.get_task(self.task)
        pairs = _encoded(task, self.examples(), vocabulary, encoder_decoder)
        longest = max(task.max_input_length, task.max_output_length)
        longest = longest if encoder_decoder else task.max_input_length + task.max_output_length
        buckets = replace(self, widths=self.widths or default_widths(longest))
        return Planned(pairs, len(pairs.prompts), buckets)

    def examples(self) -> list[Example]:
        """Returns the examples of the split.

        Raises:
            ValueError: the task has no such split, or no example.
        """
        task = table.get_task(self.task)
        divided = len(task.splits) == 1 and self.split in ("train", "validation") and self.split not in task.splits
        if self.split not in task.splits and not divided:
            raise ValueError(
                f"task {task.name} has no split {self.split!r} to train on; its splits: {', '.join(task.splits)}"
            )
        examples = task.load(None if divided else self.split, self.limit or None)
        if divided:
            held_out = self.split == "validation"
            examples = [one for place, one in enumerate(examples) if (place % HELD_OUT == HELD_OUT - 1) == held_out]
        if not examples:
            raise ValueError(f"task {task.name} has no examples in split {self.split!r}: check the data")
        return examples


def _encoded(task: Task, examples: Sequence[Example], vocabulary: FileVocabulary, encoder_decoder: bool) -> Pairs:
    """Returns the ids of a task's prompts and answers, and warns of those that were cut or skipped."""
    prompts, answers, cuts = list[list[int]](), list[list[int]](), [0, 0]
    for example in examples:
        too_long = list[bool]()

        def cut(ids: list[int], room: int, too_long: list[bool] = too_long) -> list[int]:
            too_long += [True] * (len(ids) > room)
            return task.cut(ids, room)

        prompt = encoded(vocabulary, encoder_decoder, task.build_prompt(example), task.max_input_length, cut)
        answer = vocabulary.encode(example.written)
        cuts[0] += bool(too_long)
        if too_long and task.too_long == "skip":
            continue
        cuts[1] += len(answer) >= task.max_output_length
        prompts.append(prompt[:-1] if encoder_decoder else prompt)
        answers.append(answer[: task.max_output_length - 1])
    if any(cuts):
        warnings.warn(
            f"{task.name}: of {len(examples)} examples, {cuts[0]} prompts of more than {task.max_input_length} tokens "
            f"and {cuts[1]} answers of more than {task.max_output_length} were {task.too_long} and cut",
            stacklevel=3,
        )
    return Pairs(Ragged.of(prompts), Ragged.of(answers), encoder_decoder, vocabulary.eos_id)


@dataclass(frozen=True, kw_only=True)
class JoinedCorpus(Buckets):
    """Training corpus of sentence pairs, of which several are joined into one example.

    Attributes:
        path: path of a file that `read_pairs` can read, with text, or with token pieces if its name says so
            (`holds_pieces`).
        columns: the columns of source and target (`read_pairs`).
        max_joined: largest number of pairs that are joined into one example.
        widths: as in `Buckets`; pairs that do not fit the last width are left out.
        limit: number of pairs to use, from the first on; 0 uses all. every: use only one pair in `every`, because files
            are often sorted.
        cut: number of tokens that sources are truncated to, as a task does; 0 truncates nothing, so too long pairs are
            left out.
    """

    path: str
    columns: Columns = (0, 1)
    max_joined: int = 4
    widths: tuple[int, ...] = (16, 24, 32, 48, 64)
    limit: int = 0
    every: int = 1
    cut: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", tuple(self.columns))
        if not self.widths:
            raise ValueError("widths is empty: give increasing widths")
        for name, least in (("max_joined", 1), ("every", 1), ("cut", 0), ("limit", 0)):
            whole(name, getattr(self, name), least)

    def tokens(self, vocabulary: FileVocabulary, encoder_decoder: bool = True) -> Planned:
        """Reads and encodes the pairs that fit the widest bucket.

        Raises:
            ValueError: no pair fits, or the model has no encoder.
        """
        if not encoder_decoder:
            raise ValueError("a JoinedCorpus holds sources and targets for an encoder-decoder: use a TaskCorpus")
        pairs = read_tokens(self.path, vocabulary, self.limit or None, self.columns)[:: self.every]
        if self.cut:
            pairs = [TokenPair(pair.source[: self.cut], pair.target) for pair in pairs]
        fitting = [pair for pair in pairs if max(map(len, pair)) < self.widths[-1]]
        if not fitting:
            raise ValueError(
                f"no pair of {self.path} fits into {self.widths[-1]} tokens: check the file, or raise widths"
            )
        sources, targets = (Ragged.of([pair[side] for pair in fitting]) for side in (0, 1))
        return Planned(Pairs(sources, targets, True, vocabulary.eos_id), len(fitting), self, self.max_joined)


@dataclass(frozen=True, kw_only=True)
class SpanCorruption(Buckets):
    """Text with gaps, for further pre-training: Raffel et al. (2020), section 3.1.4, with T5's published settings.

    The text is encoded, joined with EOS after every line, and cut into pieces of the same number of tokens. In each
    piece, random spans are replaced by sentinels; the target holds each sentinel and its span. The spans of a piece
    differ from epoch to epoch. A decoder-only model learns the piece itself, token by token, without gaps.

    Attributes:
        path: a text file (`.txt` or `.txt.gz`), of which each line is a text; or the name of a task, of which the
            sources and the answers of the split "train" are texts.
        length: number of slots of a piece with its gaps, EOS included.
        density: share of the tokens that are removed; mean_span: mean number of tokens in a span.
        limit: number of lines or examples to read; 0 reads all.
    """

    path: str
    length: int = 512
    density: float = 0.15
    mean_span: float = 3.0
    limit: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("length", 8), ("limit", 0)):
            whole(name, getattr(self, name), least)
        if not 0 < self.density < 1 or not self.mean_span >= 1:
            raise ValueError(f"density={self.density} must be in (0, 1), and mean_span={self.mean_span} at least 1")

    def tokens(self, vocabulary: FileVocabulary, encoder_decoder: bool) -> Planned:
        """Reads and encodes the text, and cuts it into pieces.

        Raises:
            ValueError: the text is shorter than one piece, or the vocabulary has too few sentinels.
        """
        stream = [token for text in self._texts() for token in (*vocabulary.encode(text), vocabulary.eos_id)]
        size = gaps.piece_size(self.length, self.density, self.mean_span) if encoder_decoder else self.length - 1
        if len(stream) < size:
            raise ValueError(f"{self.path} has {len(stream)} tokens, fewer than a piece of {size}: lower length")
        pieces = np.array(stream[: len(stream) // size * size], np.int32).reshape(-1, size)
        if not encoder_decoder:
            answers = Ragged(pieces.reshape(-1), np.arange(len(pieces) + 1) * size)
            nothing = Ragged(np.empty(0, np.int32), np.zeros(len(pieces) + 1, np.int64))
            examples: Examples = Pairs(nothing, answers, False, vocabulary.eos_id)
        else:
            sentinels = gaps.sentinels(vocabulary, size, self.density, self.mean_span)
            examples = gaps.Gaps(pieces, sentinels, vocabulary.eos_id, self.density, self.mean_span)
        widths: dict[str, Any] = {"widths": self.widths or (self.length,)}
        if encoder_decoder and not self.target_widths:
            widths["target_widths"] = (gaps.sizes(size, self.density, self.mean_span)[1],)
        return Planned(examples, len(pieces), replace(self, **widths))

    def _texts(self) -> Iterator[str]:
        if self.path.removesuffix(".gz").endswith(".txt"):
            for number, line in readers.lines(directory.located(self.path)):
                if self.limit and number > self.limit:
                    return
                yield line
            return
        for example in TaskCorpus(task=self.path, limit=self.limit).examples():
            yield from (example.source, example.written)


@dataclass(frozen=True, kw_only=True)
class MixedCorpus(Buckets):
    """Corpus of several parts, whose examples are shuffled together; no example joins pairs of two parts.

    Attributes:
        parts: the corpora; their own widths and numbers of rows are ignored, except for what does not fit into them.
        rates: for each part, its share of the examples; an epoch has as many examples as all parts together, a part
            with a higher rate is repeated, and one with a lower rate continues in the next epoch. Empty: an epoch holds
            one epoch of each part.
        widths: as in `Buckets`; by default those of the parts.
    """

    parts: tuple[TaskCorpus | JoinedCorpus | SpanCorruption, ...]
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("parts", "rates"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.parts:
            raise ValueError("a MixedCorpus needs parts: give at least one corpus")
        if self.rates and (len(self.rates) != len(self.parts) or not min(self.rates) > 0):
            raise ValueError(f"rates={self.rates}: give a number above 0 for each of the {len(self.parts)} parts")

    def tokens(self, vocabulary: FileVocabulary, encoder_decoder: bool) -> Mixture:
        """Reads and encodes all parts."""
        parts = tuple(part.tokens(vocabulary, encoder_decoder) for part in self.parts)
        inside = sorted({width for part in parts for width in part.buckets.widths})
        widths = self.widths or tuple(inside)
        if inside[-1] > widths[-1]:
            raise ValueError(f"a part has a bucket of {inside[-1]}, wider than widths={widths}: raise the last width")
        return Mixture(parts, replace(self, widths=widths), self.rates)


@dataclass(frozen=True, eq=False)
class Mixture:
    """Encoded parts of a `MixedCorpus`; it implements `batches.Examples`, in which the parts follow each other.

    Attributes:
        parts: the encoded parts; buckets: the shapes of batches; rates: as in `MixedCorpus`.
    """

    parts: tuple[Planned, ...]
    buckets: Buckets
    rates: tuple[float, ...] = ()

    @property
    def encoder_decoder(self) -> bool:
        """Whether prompts are an encoder's input."""
        return self.parts[0].examples.encoder_decoder

    @property
    def first(self) -> np.ndarray:
        """The number of the first example of each part, and at the end the number of all examples."""
        return np.cumsum([0, *(part.count for part in self.parts)])

    def epoch(self, seed: int, number: int) -> Sequence[PlannedBatch]:
        """Returns the batches of an epoch."""
        groups = [self._groups(place, seed, number) for place in range(len(self.parts))]
        rows = [group for part in groups for group in part]
        order = np.random.default_rng((seed, number, 2)).permutation(len(rows))
        return self.buckets.plan(self, Ragged.of([rows[place] for place in order]), seed, number)

    def _groups(self, place: int, seed: int, number: int) -> list[np.ndarray]:
        """Returns the rows that a part contributes to an epoch, as numbers of the mixture's examples."""
        part, first = self.parts[place], self.first
        if not self.rates:
            groups = part.groups(seed, number)
            return [groups[row] + first[place] for row in range(len(groups))]
        # differences of rounded sums, so that the shares are right over many epochs
        per_epoch = first[-1] * self.rates[place] / sum(self.rates)
        begin, end = (round(per_epoch * times) for times in (number, number + 1))
        rows, epoch = list[np.ndarray](), 0
        while end > 0:
            groups = part.groups(seed, epoch)
            rows += [groups[row] + first[place] for row in range(max(0, begin), min(end, len(groups)))]
            begin, end, epoch = begin - len(groups), end - len(groups), epoch + 1
        return rows

    def lengths(self, groups: Ragged) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of tokens of each group's prompt and of its answer, ends included."""
        prompts, answers = (np.zeros(len(groups), np.int64) for _ in range(2))
        owner = np.searchsorted(self.first, groups.values[groups.offsets[:-1]], side="right") - 1
        for place, part in enumerate(self.parts):
            rows = np.flatnonzero(owner == place)
            if len(rows):
                own_groups = Ragged.of([groups[row] - self.first[place] for row in rows])
                prompts[rows], answers[rows] = part.examples.lengths(own_groups)
        return prompts, answers

    def row(self, members: np.ndarray, key: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Returns a group's prompt and answer, ends included."""
        place = int(np.searchsorted(self.first, members[0], side="right")) - 1
        return self.parts[place].examples.row(members - self.first[place], key)
