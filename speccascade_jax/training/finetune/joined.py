"""Corpus of sentence pairs that are joined at random, so that a small model sees texts of all lengths."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from speccascade_jax.core.checks import whole
from speccascade_jax.data.sentence_pairs import Columns, group, read_tokens
from speccascade_jax.data.vocabularies.vocabulary import TextVocabulary
from speccascade_jax.training.finetune.batches import Batching, PlannedData, Row
from speccascade_jax.training.finetune.ragged import Ragged


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinedCorpus(Batching):
    """Training corpus of a file of sentence pairs, which are joined into longer examples, differently in every epoch.

    The prompt of a decoder-only model is the source, and its answer is the target.

    Attributes:
        path: path of a file that `read_pairs` can read. It holds text, or token pieces if its name ends in `.pieces` or
            `.pieces.gz` (`holds_pieces`).
        columns: the columns of source and target (`read_pairs`).
        max_joined: largest number of pairs that are joined into one example.
        widths: as in `Batching`; pairs that do not fit the last width are left out.
        tokens_per_batch: as in `Batching`; 2560 if `rows` is 0 too.
        limit: number of pairs to use, from the first on; 0 uses all. every: use only every `every`-th pair, because
            files are often sorted.
        cut: number of tokens to which sources are truncated, as tasks truncate prompts; 0: sources are not truncated,
            and pairs that are too long are left out.
        Other attributes are those of `Batching`.
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
        if not self.rows and not self.tokens_per_batch:
            object.__setattr__(self, "tokens_per_batch", 2560)
        if not self.widths:
            raise ValueError("widths=() is empty: give the widths of a JoinedCorpus, which say what pairs fit")
        for name, low in (("max_joined", 1), ("limit", 0), ("every", 1), ("cut", 0)):
            whole(name, getattr(self, name), low)

    def source(self, vocabulary: TextVocabulary, encoder_decoder: bool) -> "JoinedSource":
        """Reads and encodes the pairs that fit the widest bucket.

        Raises:
            ValueError: no pair fits.
            FileNotFoundError: there is no such file.
        """
        pairs = read_tokens(self.path, vocabulary, self.limit or None, self.columns)[:: self.every]
        if self.cut:
            pairs = [pair._replace(source=pair.source[: self.cut]) for pair in pairs]
        if encoder_decoder and not getattr(vocabulary, "ends_inputs", True):
            raise ValueError("pairs can't be joined for a T5Gemma, whose inputs lack an EOS token: give a TaskCorpus")
        begin = [] if encoder_decoder or vocabulary.bos_id is None else [vocabulary.bos_id]
        room = self.widths[-1] - 1 - len(begin)
        measure = max if encoder_decoder else sum
        fitting = [pair for pair in pairs if measure(map(len, pair)) <= room]
        if not fitting:
            raise ValueError(
                f"no pair of {self.path} fits into {self.widths[-1]} tokens: check the file, or raise widths"
            )
        counts = {"examples": len(fitting), "pairs_left_out": len(pairs) - len(fitting)}
        sources, targets = Ragged.columns(2, fitting)
        return JoinedSource(self, sources, targets, encoder_decoder, begin, vocabulary.eos_id, counts)

    def tokens(self, vocabulary: TextVocabulary, encoder_decoder: bool) -> PlannedData:
        """Reads and encodes the corpus; raises the errors of `source`."""
        return self.planned(self.source(vocabulary, encoder_decoder), vocabulary.eos_id)


@dataclasses.dataclass(frozen=True, eq=False)
class JoinedSource:
    """Encoded sentence pairs without special ids, which are joined in new random groups in every pass."""

    corpus: JoinedCorpus
    sources: Ragged
    targets: Ragged
    encoder_decoder: bool
    begin: list[int]
    eos_id: int
    counts: dict[str, int]

    @property
    def size(self) -> int:
        """The number of pairs."""
        return len(self.sources)

    @property
    def limits(self) -> tuple[int, int]:
        """The width of the widest bucket, which no group exceeds."""
        longest = self.corpus.widths[-1]
        return (longest, longest) if self.encoder_decoder else (0, longest)

    @property
    def longest(self) -> tuple[int, int]:
        """The width of the widest bucket, because a group may fill it in some pass."""
        return self.limits

    def examples(self, seed: int, number: int) -> "JoinedExamples":
        """Returns the joined examples of pass `number`."""
        lengths = list(self._lengths())
        room = self.corpus.widths[-1] - 1 - len(self.begin)
        groups = group(lengths, self.corpus.max_joined, np.random.default_rng((seed, number, 1)), room)
        return JoinedExamples(self, Ragged.of(groups))

    def _lengths(self) -> Iterator[tuple[range, range]]:
        """Yields for each pair two ranges with the lengths of source and target, because `group` calls `len` on both.

        For a decoder-only model, source and target share one sequence, so the first range has the sum of both lengths,
        and the second is empty.
        """
        for source, target in zip(self.sources.lengths.tolist(), self.targets.lengths.tolist(), strict=True):
            yield (range(source), range(target)) if self.encoder_decoder else (range(source + target), range(0))


@dataclasses.dataclass(frozen=True, eq=False)
class JoinedExamples:
    """The joined examples of one pass.

    Attributes:
        source: the pairs.
        groups: the indices of the pairs that each example joins.
    """

    source: JoinedSource
    groups: Ragged

    @property
    def lengths(self) -> np.ndarray:
        """The lengths of all examples, as in `Examples`."""
        pairs = (self.source.sources, self.source.targets)
        sources, targets = (_sums(side.lengths[self.groups.flat], self.groups.offsets) for side in pairs)
        if self.source.encoder_decoder:
            return np.stack([sources + 1, targets + 1], axis=1)
        whole_lengths = sources + targets + 1 + len(self.source.begin)
        return np.stack([np.zeros_like(whole_lengths), whole_lengths], axis=1)

    def row(self, index: int) -> Row:
        """Returns one example."""
        members: Sequence[int] = self.groups[index].tolist()
        source, target = self.source.sources.joined(members), self.source.targets.joined(members)
        eos = np.array([self.source.eos_id], np.int32)
        if self.source.encoder_decoder:
            return Row(np.concatenate([target, eos]), 0, np.concatenate([source, eos]))
        begin = np.array(self.source.begin, np.int32)
        return Row(np.concatenate([begin, source, target, eos]), len(begin) + len(source))


def _sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Returns the sums of the segments `values[offsets[i] : offsets[i + 1]]`."""
    totals = np.concatenate([[0], np.cumsum(values)])
    return totals[offsets[1:]] - totals[offsets[:-1]]
