"""Mixture of several corpora."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from speccascade_jax.data.vocabularies.vocabulary import TextVocabulary
from speccascade_jax.training.finetune.batches import Batching, PlannedData, Selected, Source, concatenated


@runtime_checkable
class Part(Protocol):
    """Interface of a corpus that can be a part of a mixture; all corpora of the package have it."""

    def source(self, vocabulary: TextVocabulary, encoder_decoder: bool) -> Source:
        """Reads and encodes the texts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedCorpus(Batching):
    """Corpus of several parts, whose examples are shuffled together; no example joins texts of two parts.

    Without rates, an epoch holds one epoch of each part. With rates, an epoch has as many examples as all parts
    together, and part `i` provides the share `rates[i] / sum(rates)` of them. Every example of a part is used once
    before any of them is used again, also across epochs. A `JoinedCorpus` counts with its number of pairs before
    joining.

    Attributes:
        parts: the corpora, each with its own settings for reading its data.
        rates: one positive number per part, or empty; like the rates of a seqio mixture.
        Other attributes are those of `Batching`. The batch settings of the parts are ignored, except the widest width
        of a `JoinedCorpus`, which decides which of its pairs fit.
    """

    parts: tuple[Part, ...]
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("parts", "rates"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.parts:
            raise ValueError("a MixedCorpus needs parts: give at least one corpus")
        if self.rates and len(self.rates) != len(self.parts):
            raise ValueError(f"rates={self.rates} for {len(self.parts)} parts: give one rate per part")
        if not all(rate > 0 and math.isfinite(rate) for rate in self.rates):
            raise ValueError(f"rates={self.rates} must be positive numbers: remove parts that are not wanted")

    def source(self, vocabulary: TextVocabulary, encoder_decoder: bool) -> "MixedSource":
        """Reads and encodes all parts; raises their errors."""
        return MixedSource([part.source(vocabulary, encoder_decoder) for part in self.parts], self.rates)

    def tokens(self, vocabulary: TextVocabulary, encoder_decoder: bool) -> PlannedData:
        """Reads and encodes the corpus.

        Raises:
            ValueError: a part has no example, or an example of a part is longer than the widest bucket.
            FileNotFoundError: data are not on this machine.
        """
        return self.planned(self.source(vocabulary, encoder_decoder), vocabulary.eos_id)


@dataclasses.dataclass(frozen=True, eq=False)
class MixedSource:
    """The sources of all parts of a mixture, and their rates."""

    parts: Sequence[Source]
    rates: tuple[float, ...]

    @property
    def size(self) -> int:
        """The number of examples of all parts."""
        return sum(part.size for part in self.parts)

    @property
    def limits(self) -> tuple[int, int]:
        """The largest lengths that the settings of any part allow."""
        return _largest([part.limits for part in self.parts])

    @property
    def longest(self) -> tuple[int, int]:
        """The largest lengths that examples of any part have."""
        return _largest([part.longest for part in self.parts])

    @property
    def counts(self) -> dict[str, int]:
        """The counts of all parts together."""
        names = dict.fromkeys(name for part in self.parts for name in part.counts)
        return {name: sum(part.counts.get(name, 0) for part in self.parts) for name in names}

    def passes(self) -> list[float]:
        """Returns how many times an epoch goes through each part."""
        if not self.rates:
            return [1.0] * len(self.parts)
        shares = [rate / sum(self.rates) for rate in self.rates]
        return [share * self.size / part.size for share, part in zip(shares, self.parts, strict=True)]

    def examples(self, seed: int, number: int) -> Selected:
        """Returns the examples of epoch `number`.

        Each part is read as an endless sequence of passes, each in a new random order. An epoch takes the next stretch
        of this sequence, `passes()` passes long.
        """
        chosen = []
        for place, (part, passes) in enumerate(zip(self.parts, self.passes(), strict=True)):
            begin, end = number * passes, (number + 1) * passes
            for turn in range(int(begin), math.ceil(end)):
                examples = part.examples(_seed(seed, place), turn)
                count = len(examples.lengths)
                # The same rounding ends a stretch and begins the next, so that no example is lost between epochs.
                first, last = (round(min(1.0, max(0.0, edge - turn)) * count) for edge in (begin, end))
                order = np.random.default_rng((seed, turn, place, 2)).permutation(count)
                chosen.append((examples, order[first:last]))
        return concatenated(chosen)


def _largest(lengths: Sequence[tuple[int, int]]) -> tuple[int, int]:
    encoder, width = zip(*lengths, strict=True)
    return max(encoder), max(width)


def _seed(seed: int, place: int) -> int:
    """Returns a seed for part `place`, so that two parts with the same file do not join the same pairs."""
    return int(np.random.SeedSequence((seed, place)).generate_state(1)[0])
