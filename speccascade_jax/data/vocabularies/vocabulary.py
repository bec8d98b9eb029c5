"""The vocabulary protocol, and the code that all kinds of vocabularies share."""

import copy
import hashlib
import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from speccascade_jax.storage import checksums
from speccascade_jax.storage.files import expanded

Ids = Sequence[int] | np.ndarray
# pieces of T5 that stand for a gap in a prompt and begin its filling in an output
SENTINEL = re.compile(r"<extra_id_\d+>")


class TextVocabulary(Protocol):
    """A mapping from text to token ids and back.

    Attributes:
        vocab_size: the number of pieces; ids are `0 … vocab_size − 1`.
        bos_id: the beginning of a text; `None` if texts begin with nothing.
        eos_id: the end of a text.
        stop_ids: ids that end an output; the end of sequence is among them.
        fingerprint: hexadecimal digest of everything that encoding and decoding depend on.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int
    stop_ids: tuple[int, ...]
    fingerprint: str

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without a beginning or an end of sequence."""

    def decode(self, ids: Iterable[int], after: Ids = ()) -> str:
        """Returns the text of `ids` up to the first stop id, without padding, beginnings and ids beyond the vocabulary.

        Args:
            ids: the ids to decode.
            after: ids before them, such as a prompt's. Many vocabularies put a space before a text's first word and
                drop it again when decoding. After an id with text the space belongs to the text and is kept, so that
                prompt and output join correctly.
        """

    @abstractmethod
    def piece(self, token: int) -> str:
        """Returns the piece of `token` in the vocabulary's notation (`▁` for a space in sentencepiece's)."""

    def piece_table(self) -> list[str]:
        """Returns the result of `piece` for every id; "" for an unused id."""


def settled(text: str, last: bool) -> str:
    """Returns the part of a decoded text that further tokens can't change.

    A piece's text depends on its neighbours (spaces at the beginning, characters spelt in bytes), so the whole output
    is decoded again. Only the end can change, if a character still lacks bytes.
    """
    return text if last else text.rstrip("\N{REPLACEMENT CHARACTER}")


def added_texts(vocabulary: TextVocabulary, ids: Sequence[int], after: Ids = ()) -> list[str]:
    """Returns the text that each id adds; joined, the texts equal the result of `decode`.

    A stop id adds nothing, and bytes of a character add nothing until its last byte.
    """
    texts = _added(vocabulary, ids, after, _WINDOW)
    if "".join(texts) == vocabulary.decode(ids, after=after):
        return texts
    return _added(vocabulary, ids, after, None)  # some pieces depend on text far before them


_WINDOW = 8


def _added(vocabulary: TextVocabulary, ids: Sequence[int], after: Ids, window: int | None) -> list[str]:
    """Returns the text that each id adds; decodes every prefix in full, or with `window` only its unsettled part.

    Args:
        vocabulary: decodes the ids.
        ids: the ids whose texts are returned.
        after: ids before them, as in `TextVocabulary.decode`.
        window: number of ids before the unsettled part that are decoded with it; `None` decodes every beginning in
            full.
    """
    texts, begin, shown = list[str](), 0, ""
    context = [*after, *ids]
    for number in range(1, len(ids) + 1):
        end = len(after) + begin
        before = context[:end] if window is None else context[max(0, end - window) : end]
        text = vocabulary.decode(ids[begin:number], after=before)
        whole = settled(text, number == len(ids))
        texts.append(whole[len(shown) :])
        shown = whole
        if window is not None and whole == text:
            begin, shown = number, ""
    return texts


class FileVocabulary(TextVocabulary):
    """A `TextVocabulary` read from a file. Two are equal, and hash alike, if their fingerprints are equal.

    Attributes:
        path: the file.
        specials: ids that have no text.
        controls: ids that no text without names of pieces has: control pieces, added pieces, unused ids.
    """

    path: Path
    specials: frozenset[int]
    controls: frozenset[int]

    def __init__(self, path: str | Path):
        """Reads `path`, and checks it against the digests next to it (`checksums.read`).

        Raises:
            FileNotFoundError: no such file.
            ImportError: a library that the kind needs is not installed.
            ValueError: the file is not of this kind, or damaged.
        """
        self.path = expanded(path)
        content = checksums.read(self.path)
        self.fingerprint = hashlib.sha256(content + self._read(content)).hexdigest()

    @abstractmethod
    def _read(self, content: bytes) -> bytes:
        """Sets pieces and special ids from the content; returns other bytes that the fingerprint depends on."""

    def ending_with(self, stop_ids: Iterable[int]) -> Self:
        """Returns the vocabulary with further ids that end an output: those of a model that uses it.

        The fingerprint stays: it is that of the files. A record's key holds the stop ids besides.
        """
        if not (more := [token for token in dict.fromkeys(stop_ids) if token not in self.stop_ids]):
            return self
        other = copy.copy(self)
        other.stop_ids, other.specials = (*self.stop_ids, *more), self.specials.union(more)
        return other

    @abstractmethod
    def _text(self, ids: list[int], goes_on: bool) -> str:
        """Decodes ids that all have text; `goes_on` says whether the result continues another text."""

    def decode(self, ids: Iterable[int], after: Ids = ()) -> str:
        """Returns the text of `ids`; it continues the text of `after` if the last id of `after` has text."""
        goes_on = len(after) > 0 and self._has_text(int(after[-1]))
        return self._text(self._kept(ids), goes_on)

    def _has_text(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and token not in self.specials

    def _kept(self, ids: Iterable[int]) -> list[int]:
        kept: list[int] = []
        for place, token in enumerate(map(int, ids)):
            # a BOS in the first position begins the text, even if it is a stop id too
            if token in self.stop_ids and (place or token != self.bos_id):
                break
            if self._has_text(token):
                kept.append(token)
        return kept

    def piece_table(self) -> list[str]:
        """Returns the result of `piece` for every id, with one call per id."""
        return [self.piece(token) for token in range(self.vocab_size)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileVocabulary) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {self.vocab_size} pieces, {self.fingerprint[:12]})"
