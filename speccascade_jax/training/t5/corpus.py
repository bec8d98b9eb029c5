"""Conversion of sentence pairs to training batches: pairs are joined and sorted into length buckets of fixed shapes.

An *epoch* depends only on the seed and the number of the epoch. Pairs are shuffled, joined in groups of 1 to
`max_joined`, sorted into buckets by length, and cut into batches with about the same number of tokens. Then the batches
are shuffled. A resumed run builds its epoch again and skips the batches that it has used.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from speccascade_jax.core.arrays import right_pad
from speccascade_jax.data.sentence_pairs import Columns, TokenPair, group, join_tokens, read_tokens
from speccascade_jax.data.vocabularies.load import Vocabulary


class Batch(NamedTuple):
    """Batch of `source` int32 `[B, S]` and `target` int32 `[B, T]`: token ids that end with EOS, then padding with 0.

    Rows that only fill a batch up have EOS alone as source and an empty target, so they do not contribute to the loss.
    """

    source: np.ndarray
    target: np.ndarray


def bucketed(
    examples: Sequence[TokenPair], widths: Sequence[int], tokens_per_batch: int, target_widths: Sequence[int] = ()
) -> list[Batch]:
    """Returns batches of `tokens_per_batch // width` rows; every example occurs once.

    Within the bucket of a width, examples keep their order.

    Args:
        examples: pairs of token ids.
        widths: increasing widths; an example goes to the first width that holds its longer side and EOS.
        tokens_per_batch: number of source tokens in a batch, padding included.
        target_widths: increasing widths; the targets of a batch are padded to the first width that holds the longest
            target. If empty, or if none is wide enough, targets get the width of the sources.

    Raises:
        ValueError: an example is longer than the last width, or a batch cannot hold one row of a width.
    """
    members: dict[int, list[TokenPair]] = {width: [] for width in widths}
    for example in examples:
        needed = max(len(example.source), len(example.target)) + 1
        if needed > widths[-1]:
            raise ValueError(f"an example needs {needed} slots, but the widest bucket has {widths[-1]}")
        members[next(width for width in widths if width >= needed)].append(example)
    batches = []
    for width, inside in members.items():
        rows = tokens_per_batch // width
        if rows == 0:
            raise ValueError(f"tokens_per_batch={tokens_per_batch} is too small for a row of width {width}")
        starts = range(0, len(inside), rows)
        batches += [_pack(inside[start : start + rows], rows, width, target_widths) for start in starts]
    return batches


def _pack(examples: Sequence[TokenPair], rows: int, width: int, target_widths: Sequence[int]) -> Batch:
    fill, eos = rows - len(examples), [Vocabulary.eos_id]
    longest = max(len(example.target) for example in examples) + 1
    source = [example.source + eos for example in examples] + [eos] * fill
    target = [example.target + eos for example in examples] + [[]] * fill
    return Batch(right_pad(source, width), right_pad(target, next((w for w in target_widths if w >= longest), width)))


class _Epochs:
    """Mixin that makes the epochs of a corpus.

    The corpus provides `examples` and the settings of the batches.
    """

    def epoch(self: Any, pairs: Any, seed: int, epoch: int) -> list[Batch]:
        """Returns the shuffled batches of one epoch over `pairs`, the result of `tokens`.

        In the first `short_first` epochs, batches are sorted from narrow to wide.
        """
        rng = np.random.default_rng((seed, epoch))
        examples = self.examples(pairs, rng)
        batches = bucketed(examples, self.widths, self.tokens_per_batch, self.target_widths)
        shuffled = [batches[i] for i in rng.permutation(len(batches))]
        if epoch < self.short_first:
            shuffled.sort(key=lambda batch: batch.source.shape[1])
        return shuffled


@dataclasses.dataclass(frozen=True)
class JoinedCorpus(_Epochs):
    """Training corpus: a file of pairs and the settings of its batches.

    Attributes:
        path: path of a file that `read_pairs` can read, with text, or with token pieces if its name says so
            (`holds_pieces`).
        columns: the columns of source and target (`read_pairs`).
        max_joined: largest number of pairs that are joined into one example.
        widths: widths of the buckets in tokens, EOS included; pairs that do not fit the last width are left out.
        tokens_per_batch: rows times width of a batch.
        limit: number of pairs to use, from the first on; 0 uses all. every: use only one pair in `every`, because files
            are often sorted.
        cut: number of tokens that sources are truncated to, as a task does; 0 truncates nothing, so too long pairs are
            left out.
        short_first: number of first epochs that go from narrow to wide batches, because word alignment is easier to
            learn from short examples.
        target_widths: padding widths of targets, which may be much shorter than sources.
    """

    path: str
    columns: Columns = (0, 1)
    max_joined: int = 4
    widths: tuple[int, ...] = (16, 24, 32, 48, 64)
    tokens_per_batch: int = 2560
    limit: int = 0
    short_first: int = 0
    target_widths: tuple[int, ...] = ()
    every: int = 1
    cut: int = 0

    def __post_init__(self) -> None:
        for name in ("widths", "columns", "target_widths"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.widths or list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths must increase, got {self.widths}")
        if self.max_joined < 1:
            raise ValueError(f"max_joined must be at least 1, got {self.max_joined}")
        if self.every < 1 or self.cut < 0:
            raise ValueError(f"every={self.every} must be at least 1, and cut={self.cut} at least 0")

    def tokens(self, vocabulary: Vocabulary) -> list[TokenPair]:
        """Returns the encoded pairs that fit the widest bucket."""
        encoded = read_tokens(self.path, vocabulary, self.limit or None, self.columns)[:: self.every]
        if self.cut:
            encoded = [TokenPair(pair.source[: self.cut], pair.target) for pair in encoded]
        fitting = [pair for pair in encoded if max(map(len, pair)) < self.widths[-1]]
        if not fitting:
            raise ValueError(
                f"no pair of {self.path} fits into {self.widths[-1]} tokens: check the file, or raise widths"
            )
        return fitting

    def examples(self, pairs: Sequence[TokenPair], rng: np.random.Generator) -> list[TokenPair]:
        """Returns the joined examples of one pass over `pairs`, the result of `tokens`, in random order."""
        return [join_tokens(pairs, members) for members in group(pairs, self.max_joined, rng, self.widths[-1] - 1)]


@dataclasses.dataclass(frozen=True)
class MixedCorpus(_Epochs):
    """Corpus of several parts: an epoch holds one epoch of each part, shuffled together.

    No example joins pairs of two parts.

    Attributes:
        parts: the corpora; every part has its own limit, joining and columns.
        widths, tokens_per_batch, short_first, target_widths: as in `JoinedCorpus`. A part's own values are ignored,
            except its widest width, which decides which of its pairs fit.
    """

    parts: tuple[JoinedCorpus, ...]
    widths: tuple[int, ...] = (16, 24, 32, 48, 64)
    tokens_per_batch: int = 2560
    short_first: int = 0
    target_widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("parts", "widths", "target_widths"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.parts:
            raise ValueError("a MixedCorpus needs parts: give at least one JoinedCorpus")
        if max(part.widths[-1] for part in self.parts) > self.widths[-1]:
            raise ValueError(f"a part has a wider bucket than widths={self.widths}: raise the last width")

    def tokens(self, vocabulary: Vocabulary) -> list[list[TokenPair]]:
        """Returns the encoded pairs of every part."""
        return [part.tokens(vocabulary) for part in self.parts]

    def examples(self, pairs: Sequence[Sequence[TokenPair]], rng: np.random.Generator) -> list[TokenPair]:
        """Returns the joined examples of one pass over all parts' pairs, the result of `tokens`, in random order."""
        parts = zip(self.parts, pairs, strict=True)
        examples = [example for part, inside in parts for example in part.examples(inside, rng)]
        return [examples[i] for i in rng.permutation(len(examples))]


Corpus = JoinedCorpus | MixedCorpus
