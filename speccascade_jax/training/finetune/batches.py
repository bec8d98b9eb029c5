"""Batches of fixed shapes, planned from lengths alone: every epoch, every host and every resumed run agrees on them.

An *epoch* depends only on the seed and the epoch's number. Its examples are shuffled, sorted into buckets by length and
cut into global batches, and the batches are shuffled. A position in the data is therefore an epoch and the number of a
batch in it. A resumed run plans its epoch again and skips the batches that it has used, and each host builds only its
own rows of each batch.

Grain, the usual reader for JAX, is not used: it has no length buckets, and it divides the examples among the hosts
before it makes batches, so another number of hosts would give other batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from speccascade_jax.core.arrays import right_pad
from speccascade_jax.core.checks import whole

SHORTEST_WIDTH = 32
"""The narrowest bucket of `default_widths`, in tokens."""


class Batch(NamedTuple):
    """Token ids of a batch; arrays of NumPy on a host, and of JAX in a training step.

    Padding is recognised by lengths, never by the value of an id. A row of length 0 only fills the batch up.

    Attributes:
        tokens: int32 `[B, T]`, right-padded: the target of an encoder-decoder; prompt and answer of a decoder-only
            model. Both end with EOS.
        lengths: int32 `[B]`, number of real tokens in each row of `tokens`.
        answers: int32 `[B]`, index in `tokens` of the first token that counts in the loss; 0 for an encoder-decoder.
        encoder_tokens: int32 `[B, S]`, the encoder's input, which ends with EOS; `None` for a decoder-only model.
        encoder_lengths: int32 `[B]`, number of real tokens in each row of `encoder_tokens`.
    """

    tokens: Any
    lengths: Any
    answers: Any
    encoder_tokens: Any = None
    encoder_lengths: Any = None


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of ids of different lengths in two flat arrays, which take a tenth of the memory of lists.

    Attributes:
        values: int32 `[N]`, the rows one after the other.
        offsets: int64 `[rows + 1]`, where each row begins; the last is `N`.
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Returns the rows as two flat arrays."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        values = np.fromiter((token for row in rows for token in row), np.int32, int(offsets[-1]))
        return cls(values, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: Any) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """The number of ids in each row, int64 `[rows]`."""
        return np.diff(self.offsets)

    def sums(self, numbers: np.ndarray) -> np.ndarray:
        """Returns, for each row, the sum of `numbers` at the row's values; every row holds at least one."""
        return np.add.reduceat(numbers[self.values], self.offsets[:-1])


class Examples(Protocol):
    """Encoded examples of a corpus, of which a row of a batch joins one or more."""

    @property
    def encoder_decoder(self) -> bool:
        """Whether prompts are an encoder's input."""

    def lengths(self, groups: Ragged) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of tokens of each group's prompt and of its answer, ends included."""

    def row(self, members: np.ndarray, key: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Returns a group's prompt and answer, ends included; `key` is the seed of its random choices, if any."""


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """A global batch, known by its members and its shape; nothing of it is built until a host asks for its rows.

    Attributes:
        examples: the encoded examples; members: for each row the examples that it joins, none for a row that only
            fills up.
        widths: number of slots of a prompt and of an answer; for a decoder-only model, the first holds both.
        key: seed and epoch, which random choices of examples depend on.
    """

    examples: Examples
    members: tuple[np.ndarray, ...]
    widths: tuple[int, int]
    key: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The number of rows of the global batch."""
        return len(self.members)

    def build(self, rows: slice = slice(None)) -> Batch:
        """Returns some rows of the batch; the tokens of other rows are not touched."""
        pairs = [self._row(members) for members in self.members[rows]]
        prompts, answers = ([pair[side] for pair in pairs] for side in (0, 1))
        if self.examples.encoder_decoder:
            # The encoder of a row that only fills up reads one token: attention to nothing would not be finite.
            sources = [prompt or [0] for prompt in prompts]
            source, target = right_pad(sources, self.widths[0]), right_pad(answers, self.widths[1])
            return Batch(target, _sizes(answers), np.zeros(len(pairs), np.int32), source, _sizes(sources))
        joined = [prompt + answer for prompt, answer in pairs]
        return Batch(right_pad(joined, self.widths[0]), _sizes(joined), _sizes(prompts))

    def _row(self, members: np.ndarray) -> tuple[list[int], list[int]]:
        if not len(members):
            return [], []
        return self.examples.row(members, (*self.key, int(members[0])))


def _sizes(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.array([len(row) for row in rows], np.int32)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Shapes of the batches of a corpus.

    Attributes:
        widths: increasing widths in tokens, ends included; an example goes to the first width that holds its longer
            side (for a decoder-only model: prompt and answer together).
        target_widths: increasing widths; the targets of a batch are padded to the first one that holds the longest of
            them. If empty, or if none is wide enough, targets get the width of the sources.
        rows: number of rows of each batch; 0: as many as `tokens_per_batch` allows.
        tokens_per_batch: rows times width of a batch, if `rows` is 0.
        short_first: number of first epochs that go from narrow to wide batches, because word alignment is easier to
            learn from short examples.
    """

    widths: tuple[int, ...] = ()
    target_widths: tuple[int, ...] = ()
    rows: int = 0
    tokens_per_batch: int = 2560
    short_first: int = 0

    def __post_init__(self) -> None:
        for name in ("widths", "target_widths"):
            value = tuple(getattr(self, name))
            object.__setattr__(self, name, value)
            if list(value) != sorted(set(value)):
                raise ValueError(f"{name} must increase, got {value}")
        for name, least in (("rows", 0), ("short_first", 0), ("tokens_per_batch", 1)):
            whole(name, getattr(self, name), least)

    def rows_at(self, width: int) -> int:
        """Returns the number of rows of the batches of a width.

        Raises:
            ValueError: `tokens_per_batch` does not hold one row.
        """
        if rows := self.rows or self.tokens_per_batch // width:
            return rows
        raise ValueError(f"tokens_per_batch={self.tokens_per_batch} is too small for a row of width {width}")

    def plan(self, examples: Examples, groups: Ragged, seed: int, number: int) -> list[PlannedBatch]:
        """Returns the batches of epoch `number`; each group, in random order already, is one row of one batch.

        Raises:
            ValueError: a group is longer than the last width.
        """
        prompts, answers = examples.lengths(groups)
        needed = np.maximum(prompts, answers) if examples.encoder_decoder else prompts + answers
        if needed.max() > self.widths[-1]:
            raise ValueError(f"an example needs {needed.max()} slots, but the widest bucket has {self.widths[-1]}")
        bucket = np.searchsorted(self.widths, needed)
        batches = []
        for index, width in enumerate(self.widths):
            inside = np.flatnonzero(bucket == index)
            for chosen in np.split(inside, range(self.rows_at(width), len(inside), self.rows_at(width))):
                if len(chosen):
                    members = [groups[row] for row in chosen]
                    fill = [np.empty(0, np.int32)] * (self.rows_at(width) - len(chosen))
                    shape = width, self._target_width(int(answers[chosen].max()), width)
                    batches.append(PlannedBatch(examples, (*members, *fill), shape, (seed, number)))
        order = np.random.default_rng((seed, number, 1)).permutation(len(batches))
        shuffled = [batches[place] for place in order]
        return sorted(shuffled, key=lambda batch: batch.widths[0]) if number < self.short_first else shuffled

    def _target_width(self, longest: int, width: int) -> int:
        return next((target for target in self.target_widths if target >= longest), width)


def default_widths(longest: int) -> tuple[int, ...]:
    """Returns `SHORTEST_WIDTH` and its doubles below `longest`, then `longest`."""
    widths, width = [], SHORTEST_WIDTH
    while width < longest:
        widths.append(width)
        width *= 2
    return (*widths, longest)


def check_rows(rows: int, accumulate: int, parts: int) -> None:
    """Checks that each device gets equally many rows of every part of an accumulated batch.

    Args:
        rows: number of rows of a global batch.
        accumulate: number of parts whose gradients are added up.
        parts: number of devices along the mesh's `data` axis.

    Raises:
        ValueError: `accumulate · parts` does not divide the rows.
    """
    if rows % (accumulate * parts):
        raise ValueError(
            f"a batch of {rows} rows is not divisible by accumulate={accumulate} times the {parts} parts that the mesh "
            f"spreads rows over: give a multiple of {accumulate * parts} as rows"
        )
