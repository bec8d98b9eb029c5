"""Batches, and the plan of an epoch, which is made from the lengths of the examples alone.

The plan of an epoch shuffles the examples, sorts them into buckets of fixed shapes, cuts the buckets into batches, and
shuffles the batches. It depends only on the seed and the number of the epoch. So the position of a run is two numbers,
the epoch and the index of its next batch, and a resumed run plans its epoch again. The global batches do not depend on
the number of hosts: every host has the whole plan, and builds only its own rows of each batch. So a run may be resumed
with another number of hosts at any batch.

Grain, the reader of T5X's successors, is not used. Its release 0.2.18 was compared:

- It cannot group examples of similar length (buckets). Its batches hold a fixed number of consecutive examples, which
  are padded to one length or packed. For sentence pairs with 28 tokens per side on average, padding to T5's 80 tokens
  makes 65% of a batch padding, and five buckets 37%. Packing needs attention masks of segments, which the models of
  this package do not have.
- Its experimental `ElasticIterator` can resume with another number of hosts, but it drops the last examples of an epoch
  that do not fill a batch, and does not accept an iterator with batches of several lengths.
- Its strength, reading and processing records in many processes, is not needed: texts are encoded once, at 27,000
  sentence pairs a second on one core, and then a batch of 128 rows is built in a millisecond.

seqio's reader is one of the sources of tasks (`data.tasks.seqio_task`). Its own batches go through tf.data, whose
shuffling cannot be resumed without its checkpoints, and these belong to one number of hosts.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from speccascade_jax.core.arrays import right_pad
from speccascade_jax.core.checks import whole
from speccascade_jax.data.vocabularies.vocabulary import TextVocabulary

ROWS = 128
"""The rows of a batch if a corpus sets neither `rows` nor `tokens_per_batch`: the batch of T5's fine-tuning."""


class Batch(NamedTuple):
    """Training batch: NumPy arrays on the host, JAX arrays in a step.

    Padding is recognised by lengths, never by a token's value. Rows with length 0 hold no example and only fill the
    batch up; their encoder input is one end-of-sequence token (EOS), so that no softmax is over an empty set.

    Attributes:
        tokens: int32 `[B, T]`: the target of an encoder-decoder, which ends with EOS; prompt and answer of a
            decoder-only model.
        lengths: int32 `[B]`: number of real tokens of each row.
        answers: int32 `[B]`: index in `tokens` of the first token that counts in the loss; 0 for an encoder-decoder.
        encoder_tokens: int32 `[B, S]` that ends with EOS; `None` for a decoder-only model.
        encoder_lengths: int32 `[B]`; `None` for a decoder-only model.
    """

    tokens: Any
    lengths: Any
    answers: Any
    encoder_tokens: Any = None
    encoder_lengths: Any = None


class PlannedBatch(Protocol):
    """Batch of an epoch's plan, whose rows are built only when they are needed."""

    @property
    def rows(self) -> int:
        """The global number of rows."""

    def build(self, rows: slice) -> Batch:
        """Returns the rows `rows` of the batch; other rows are not built."""


class Data(Protocol):
    """Encoded examples of a corpus."""

    def epoch(self, seed: int, number: int) -> Sequence[PlannedBatch]:
        """Returns the batches of one epoch, which depend on the seed and the number of the epoch only."""


@runtime_checkable
class Corpus(Protocol):
    """Settings of a corpus, which gin binds."""

    def tokens(self, vocabulary: TextVocabulary, encoder_decoder: bool) -> "PlannedData":
        """Reads and encodes the corpus.

        Raises:
            ValueError: there is no training split, or no example fits.
            FileNotFoundError: the data are not on this machine.
        """


class Row(NamedTuple):
    """One example: `tokens`, `answer` and `encoder` as a row of `Batch`, without padding."""

    tokens: np.ndarray
    answer: int = 0
    encoder: np.ndarray | None = None


class Examples(Protocol):
    """The examples of one pass over a corpus."""

    @property
    def lengths(self) -> np.ndarray:
        """Int `[N, 2]`: numbers of encoder tokens (0 for a decoder-only model) and of tokens of each example."""

    def row(self, index: int) -> Row:
        """Returns one example."""


class Source(Protocol):
    """Encoded texts from which the examples of every pass (epoch) over a corpus are made."""

    @property
    def size(self) -> int:
        """The number of stored examples."""

    @property
    def limits(self) -> tuple[int, int]:
        """The largest numbers of encoder tokens and of tokens that the settings allow an example."""

    @property
    def longest(self) -> tuple[int, int]:
        """The largest numbers of encoder tokens and of tokens of an example in any pass."""

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of examples, and of those that were cut or left out, for reports."""

    def examples(self, seed: int, number: int) -> Examples:
        """Returns the examples of pass `number`, in an order that need not be random."""


class Shape(NamedTuple):
    """Shape of the batches of a bucket: rows, width of the encoder's input (0: none), and width of the tokens."""

    rows: int
    encoder: int
    width: int


@dataclasses.dataclass(frozen=True, eq=False)
class Planned:
    """A `PlannedBatch`: a shape, and the indices of the batch's examples, which may be fewer than the shape's rows."""

    shape: Shape
    examples: Examples
    indices: np.ndarray
    eos_id: int

    @property
    def rows(self) -> int:
        """The global number of rows."""
        return self.shape.rows

    def build(self, rows: slice = slice(None)) -> Batch:
        """Returns some rows of the batch."""
        chosen = [self._row(number) for number in range(self.rows)[rows]]
        tokens, lengths = _padded([row.tokens for row in chosen], self.shape.width)
        answers: Any = np.array([row.answer for row in chosen], np.int32)
        if not self.shape.encoder:
            return Batch(tokens, lengths, answers, None, None)
        encoder, encoder_lengths = _padded([row.encoder for row in chosen], self.shape.encoder)
        return Batch(tokens, lengths, answers, encoder, encoder_lengths)

    def _row(self, number: int) -> Row:
        """Returns row `number`; rows beyond the examples are empty."""
        if number < len(self.indices):
            return self.examples.row(int(self.indices[number]))
        return Row(np.zeros(0, np.int32), 0, np.array([self.eos_id], np.int32))


def _padded(rows: Sequence[Any], width: int) -> tuple[Any, Any]:
    """Returns rows as int32 `[B, width]`, padded with 0, and their lengths, int32 `[B]`."""
    return right_pad(rows, width), np.array([len(row) for row in rows], np.int32)


def plan(examples: Examples, shapes: Sequence[Shape], rng: np.random.Generator, eos_id: int) -> list[Planned]:
    """Returns the shuffled batches of one epoch, in which every example occurs once.

    An example goes into the first shape that holds it. Examples that are left over because they do not fill a batch of
    their shape go into batches of the next wider shape. So at most one batch, of the widest shape in use, has rows
    without an example.

    Args:
        examples: the examples.
        shapes: shapes that grow in both widths.
        rng: source of the epoch's random bits.
        eos_id: id of the end-of-sequence token, for rows without an example.
    """
    order = rng.permutation(len(examples.lengths))
    buckets = first_shapes(examples.lengths, shapes)[order]
    batches, waiting = list[Planned](), np.zeros(0, order.dtype)
    widest = buckets.max(initial=-1)
    for number, shape in enumerate(shapes[: widest + 1]):
        members = np.concatenate([waiting, order[buckets == number]])
        full = len(members) // shape.rows * shape.rows
        end = len(members) if number == widest else full
        starts = range(0, end, shape.rows)
        batches += [Planned(shape, examples, members[start : start + shape.rows], eos_id) for start in starts]
        waiting = members[end:]
    return [batches[index] for index in rng.permutation(len(batches))]


def first_shapes(lengths: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    """Returns the index of the first shape that holds each example, int64 `[N]`.

    Raises:
        ValueError: an example is longer than the last shape.
    """
    by_side = [
        np.searchsorted([getattr(shape, side) for shape in shapes], lengths[:, column])
        for column, side in enumerate(("encoder", "width"))
    ]
    index = np.maximum(*by_side)
    if len(index) and index.max() == len(shapes):
        encoder, width = lengths[index.argmax()]
        text = f"{encoder} encoder tokens and {width} tokens" if encoder else f"{width} tokens"
        room = f"{shapes[-1].encoder} and {shapes[-1].width}" if encoder else f"{shapes[-1].width}"
        raise ValueError(f"an example has {text}, but the widest bucket {room}: raise widths, or shorten the example")
    return index


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedData:
    """The `Data` of a corpus: a source of examples, and the shapes of its batches.

    Attributes:
        source: the encoded texts.
        shapes: shapes that grow in both widths.
        eos_id: id of the end of a sequence.
        short_first: number of first epochs whose batches are sorted from narrow to wide.
    """

    source: Source
    shapes: tuple[Shape, ...]
    eos_id: int
    short_first: int = 0

    def epoch(self, seed: int, number: int) -> list[Planned]:
        """Returns the batches of epoch `number`."""
        examples = self.source.examples(seed, number)
        batches = plan(examples, self.shapes, np.random.default_rng((seed, number)), self.eos_id)
        if number < self.short_first:
            batches.sort(key=lambda batch: batch.shape[1:])
        return batches

    def from_position(self, seed: int, number: int, index: int) -> Iterator[tuple[int, int, Planned]]:
        """Yields `(epoch, index, batch)` for batch `index` of epoch `number` and all batches after it, without end."""
        while True:
            for place, batch in enumerate(self.epoch(seed, number)[index:], index):
                yield number, place, batch
            number, index = number + 1, 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batching:
    """Settings of batches, which every corpus has.

    Attributes:
        widths: increasing widths of the encoder's input in the buckets, in tokens, EOS included. If empty, fractions of
            the largest possible length (`default_widths`).
        target_widths: width of the targets in each bucket; if there are fewer than buckets, the last one is repeated.
            If empty, `widths`, up to the longest possible target.
            A decoder-only model has prompt and answer in one row. A bucket's width is then the sum of both widths, so
            that the same settings serve both families; without `target_widths`, it is `widths` alone.
        rows: number of rows of every batch; 0: determined by `tokens_per_batch`, or 128 (`ROWS`) if that is 0, too.
        tokens_per_batch: rows times width of a batch, so narrow batches have more rows; 0: determined by `rows`.
        multiple: with `tokens_per_batch`, the number of rows is rounded down to a multiple of this number, so that a
            mesh or several hosts can share them equally.
        short_first: number of epochs at the beginning whose batches are sorted from narrow to wide, because word
            alignment is easier to learn from short examples.

    Raises:
        ValueError: a value is invalid, or both `rows` and `tokens_per_batch` are set.
    """

    widths: tuple[int, ...] = ()
    target_widths: tuple[int, ...] = ()
    rows: int = 0
    tokens_per_batch: int = 0
    multiple: int = 1
    short_first: int = 0

    def __post_init__(self) -> None:
        for name in ("widths", "target_widths"):
            object.__setattr__(self, name, values := tuple(getattr(self, name)))
            growing = list(values) == sorted(set(values) if name == "widths" else values)
            if not growing or not all(isinstance(width, int) and width > 0 for width in values):
                raise ValueError(f"{name}={values} must be positive numbers that increase")
        if len(self.target_widths) > max(1, len(self.widths)):
            raise ValueError(
                f"target_widths={self.target_widths} has more entries than widths={self.widths}: give at most one per "
                "width"
            )
        for name, low in (("rows", 0), ("tokens_per_batch", 0), ("multiple", 1), ("short_first", 0)):
            whole(name, getattr(self, name), low)
        if self.rows and self.tokens_per_batch:
            raise ValueError(f"rows={self.rows} and tokens_per_batch={self.tokens_per_batch}: set one of them to 0")

    def shapes(self, limits: tuple[int, int]) -> tuple[Shape, ...]:
        """Returns the shapes of the buckets.

        Args:
            limits: the largest numbers of encoder tokens (0: there is no encoder) and of tokens.

        Raises:
            ValueError: `tokens_per_batch` is too small for a row.
        """
        encoder, longest = limits
        widths = self.widths or default_widths(encoder or longest)
        targets = self._targets(widths, longest)
        pairs: Iterable[tuple[int, int]] = zip(widths, targets, strict=True)
        if not encoder:
            answers = targets if self.widths and self.target_widths else [0] * len(widths)
            pairs = ((0, width + answer) for width, answer in zip(widths, answers, strict=True))
        return tuple(dict.fromkeys(Shape(self._rows(first or width), first, width) for first, width in pairs))

    def _targets(self, widths: tuple[int, ...], longest: int) -> tuple[int, ...]:
        """Returns the width of the targets in each bucket, where `longest` tokens is the longest possible target."""
        if self.target_widths:
            return (*self.target_widths, *self.target_widths[-1:] * len(widths))[: len(widths)]
        if self.widths:
            return (*(min(width, longest) for width in widths[:-1]), longest)
        return default_widths(longest)

    def _rows(self, width: int) -> int:
        if not self.tokens_per_batch:
            return self.rows or ROWS
        rows = self.tokens_per_batch // width // self.multiple * self.multiple
        if not rows:
            few = f"for {self.multiple} rows" if self.multiple > 1 else "for a row"
            raise ValueError(f"tokens_per_batch={self.tokens_per_batch} is too small {few} of width {width}: raise it")
        return rows

    def planned(self, source: Source, eos_id: int) -> PlannedData:
        """Returns the data of a source.

        Raises:
            ValueError: the source has a longer example than the widest bucket.
        """
        shapes = self.shapes(source.limits)
        first_shapes(np.array([source.longest]), shapes)
        return PlannedData(source, shapes, eos_id, self.short_first)


def default_widths(longest: int) -> tuple[int, ...]:
    """Returns five widths: an eighth, a quarter, a half, three quarters and the whole of `longest`.

    All but the last are rounded up to a multiple of 8, so small widths may be equal. They do not depend on the data, so
    `experiments.preflight` can compile the programs without reading the data.
    """
    return (*(min(longest, -(-longest * eighths // 64) * 8) for eighths in (1, 2, 4, 6)), longest)


def check_rows(rows: int, parts: int) -> int:
    """Returns the number of rows per part.

    Args:
        rows: rows of a global batch.
        parts: number of parts that share them: hosts, devices along the mesh's data axis, or steps of accumulation.

    Raises:
        ValueError: the rows do not divide.
    """
    if rows % parts:
        near = f"rows={rows // parts * parts} or {(rows // parts + 1) * parts}" if rows > parts else f"rows={parts}"
        raise ValueError(
            f"a batch of {rows} rows does not divide into {parts} equal parts (hosts, the mesh's data axis, "
            f"accumulation): set the corpus's {near}, or multiple={parts} beside tokens_per_batch"
        )
    return rows // parts


def check_data(data: PlannedData, parts: int, max_length: int | None) -> None:
    """Checks that batches divide into `parts` and that a model has enough positions, before anything is compiled.

    Args:
        data: the data of a corpus.
        parts: as in `check_rows`.
        max_length: the largest number of positions of the model; `None`: no limit (T5).

    Raises:
        ValueError: a batch does not divide, or a sequence is longer than the model.
    """
    for shape in data.shapes:
        check_rows(shape.rows, parts)
    longest = max(shape.width for shape in data.shapes)
    if max_length is not None and longest > max_length:
        raise ValueError(
            f"sequences have up to {longest} tokens, but the model has {max_length} positions: lower the corpus's "
            f"widths, and the task's max_input_length or max_output_length"
        )


def concatenated(parts: Sequence[tuple[Examples, np.ndarray]]) -> "Selected":
    """Concatenates selections of several parts, each a pair of the part's examples and the chosen indices."""
    lengths = [part.lengths[indices] for part, indices in parts]
    ends = np.cumsum([0, *map(len, lengths)])
    return Selected([part for part, _ in parts], [indices for _, indices in parts], np.concatenate(lengths), ends)


@dataclasses.dataclass(frozen=True, eq=False)
class Selected:
    """The `Examples` of a mixture.

    Attributes:
        parts: the examples of each part; indices: int `[n]` per part, its chosen examples.
        lengths: int `[N, 2]`, of all chosen examples; ends: int `[parts + 1]`, where each part begins and ends.
    """

    parts: Sequence[Examples]
    indices: Sequence[np.ndarray]
    lengths: np.ndarray
    ends: Any

    def row(self, index: int) -> Row:
        """Returns one example."""
        part = int(np.searchsorted(self.ends, index, side="right")) - 1
        return self.parts[part].row(int(self.indices[part][index - self.ends[part]]))
