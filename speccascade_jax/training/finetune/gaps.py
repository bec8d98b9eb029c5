"""Span corruption: random spans of a text are replaced by sentinels, and the target holds the spans.

Source: Raffel et al. (2020), section 3.1.4; sizes of pieces and of spans as in T5's published code
(`random_spans_helper`, `random_spans_noise_mask`).
"""

from dataclasses import dataclass

import numpy as np

from speccascade_jax.data.vocabularies.load import FileVocabulary
from speccascade_jax.data.vocabularies.vocabulary import SENTINEL
from speccascade_jax.training.finetune.batches import Ragged


@dataclass(frozen=True, eq=False)
class Gaps:
    """Pieces of text of one length, which get other gaps in every epoch; it implements `batches.Examples`.

    Attributes:
        pieces: int32 `[pieces, size]`, the ids.
        sentinels: the ids that mark the gaps, in order.
        eos_id: the id of the end.
        density, mean_span: as in `corpus.SpanCorruption`.
    """

    pieces: np.ndarray
    sentinels: np.ndarray
    eos_id: int
    density: float
    mean_span: float
    encoder_decoder: bool = True

    def lengths(self, groups: Ragged) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of tokens of each row's input and target, which are the same for all pieces."""
        inputs, targets = sizes(self.pieces.shape[1], self.density, self.mean_span)
        return np.full(len(groups), inputs), np.full(len(groups), targets)

    def row(self, members: np.ndarray, key: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Returns the input and the target of a piece, EOS included; `key` is the seed of its gaps."""
        piece = self.pieces[int(members[0])]
        removed = mask(len(piece), self.density, self.mean_span, np.random.default_rng((*key, 3)))
        return self._marked(piece, removed), self._marked(piece, ~removed)

    def _marked(self, piece: np.ndarray, dropped: np.ndarray) -> list[int]:
        """Returns the piece with a sentinel in place of each dropped span, and EOS."""
        begins = dropped & ~np.concatenate([[False], dropped[:-1]])
        marks = self.sentinels[np.maximum(np.cumsum(begins) - 1, 0)]
        return [*np.where(begins, marks, piece)[~dropped | begins].tolist(), self.eos_id]


def counts(size: int, density: float, mean_span: float) -> tuple[int, int]:
    """Returns the number of removed tokens and the number of spans in a piece of `size` tokens."""
    removed = min(max(round(size * density), 1), size - 1)
    return removed, min(max(round(removed / mean_span), 1), removed, size - removed)


def sizes(size: int, density: float, mean_span: float) -> tuple[int, int]:
    """Returns the number of tokens of input and target, EOS included, of a piece of `size` tokens.

    A piece begins with text and ends with a gap. So the target begins with a sentinel, and has one for each span.
    """
    removed, spans = counts(size, density, mean_span)
    return size - removed + spans + 1, removed + spans + 1


def piece_size(length: int, density: float, mean_span: float) -> int:
    """Returns the largest number of tokens of a piece whose input has at most `length` tokens, EOS included."""
    size = length - 1
    while sizes(size + 1, density, mean_span)[0] <= length:
        size += 1
    return size


def mask(size: int, density: float, mean_span: float, rng: np.random.Generator) -> np.ndarray:
    """Returns which tokens of a piece are removed, bool `[size]`: spans of random lengths between kept spans."""
    removed, spans = counts(size, density, mean_span)
    kept_spans, removed_spans = (_parts(total, spans, rng) for total in (size - removed, removed))
    lengths = np.stack([kept_spans, removed_spans], axis=1).reshape(-1)
    return np.repeat(np.tile([False, True], spans), lengths)


def _parts(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Returns `parts` positive numbers with the sum `total`, uniformly among all such numbers."""
    bounds = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], bounds, [total]]))


def sentinels(vocabulary: FileVocabulary, size: int, density: float, mean_span: float) -> np.ndarray:
    """Returns the ids of a vocabulary's sentinels, `<extra_id_0>` first.

    Raises:
        ValueError: there are fewer sentinels than spans in a piece.
    """
    named = {piece: token for token, piece in enumerate(vocabulary.piece_table()) if SENTINEL.fullmatch(piece)}
    ids = [token for _, token in sorted(named.items(), key=lambda item: int(item[0][len("<extra_id_") : -1]))]
    spans = counts(size, density, mean_span)[1]
    if len(ids) < spans:
        raise ValueError(
            f"{vocabulary.path} has {len(ids)} sentinels (<extra_id_n>), but a piece of {size} tokens has {spans} "
            "gaps: lower length, or use a vocabulary with more"
        )
    return np.array(ids, np.int32)
