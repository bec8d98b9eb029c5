"""What the package asks of a vocabulary, and what the kinds of it share."""

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from speccascade_jax.storage import checksums
from speccascade_jax.storage.files import expanded

Ids = Sequence[int] | np.ndarray


class TextVocabulary(Protocol):
    """Text to token ids and back.

    Attributes:
        vocab_size: how many pieces there are; ids are `0 … vocab_size − 1`.
        bos_id: what a text begins with; `None` where texts begin with nothing.
        eos_id: what ends a text.
        stop_ids: ids that end an output; the end of sequence is the first of them or among them.
        fingerprint: hexadecimal digest of everything that encoding and decoding depend on.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int
    stop_ids: tuple[int, ...]
    fingerprint: str

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without a beginning or an end of sequence."""

    def decode(self, ids: Iterable[int], after: Ids = ()) -> str:
        """The text of `ids` up to the first stop id, without padding, beginnings and ids beyond the vocabulary.

        Args:
            after: ids before them, such as a prompt's. Many vocabularies put a space before a text's first word and
                drop it again when decoding; behind a text's id the space is the text's own and is kept, so that
                prompt and output read right together.
        """

    @abstractmethod
    def piece(self, token: int) -> str:
        """What `token` stands for, in the vocabulary's own notation (`▁` for a space in sentencepiece's)."""

    def piece_table(self) -> list[str]:
        """`piece` of every id; "" for an id that is none."""


def settled(text: str, last: bool) -> str:
    """The part of a decoded text that further tokens can't change.

    A piece's text depends on its neighbours (spaces at the beginning, characters spelt in bytes), so the whole output
    is decoded anew; all that can change is the end, where bytes of a character still lack others.
    """
    return text if last else text.rstrip("\N{REPLACEMENT CHARACTER}")


def added_texts(vocabulary: TextVocabulary, ids: Sequence[int], after: Ids = ()) -> list[str]:
    """Returns what each id adds to the text of all: joined they are what `decode` gives.

    Empty for a stop id, and for bytes of a character until the one that completes it.
    """
    texts = _added(vocabulary, ids, after, _WINDOW)
    if "".join(texts) == vocabulary.decode(ids, after=after):
        return texts
    return _added(vocabulary, ids, after, None)  # pieces depend on what stands far before


_WINDOW = 8


def _added(vocabulary: TextVocabulary, ids: Sequence[int], after: Ids, window: int | None) -> list[str]:
    """Decodes every beginning anew, or with a `window` only what is not settled yet and so many ids before it."""
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
    """A `TextVocabulary` read from a file. Two are equal, and hash alike, when their fingerprints are.

    Attributes:
        path: where the file lies.
        specials: ids that have no text.
    """

    path: Path
    specials: frozenset[int]

    def __init__(self, path: str | Path):
        """Reads `path`, compared with the digests beside it (`checksums.read`).

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
        """Sets pieces and special ids from the file's content; returns what else the fingerprint depends on."""

    @abstractmethod
    def _text(self, ids: list[int], goes_on: bool) -> str:
        """The text of ids that have one; `goes_on`: it continues another text."""

    def decode(self, ids: Iterable[int], after: Ids = ()) -> str:
        goes_on = len(after) > 0 and self._has_text(int(after[-1]))
        return self._text(self._kept(ids), goes_on)

    def _has_text(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and token not in self.specials

    def _kept(self, ids: Iterable[int]) -> list[int]:
        kept: list[int] = []
        for place, token in enumerate(map(int, ids)):
            if token in self.stop_ids and (place or token != self.bos_id):  # a first BOS begins, wherever it also ends
                break
            if self._has_text(token):
                kept.append(token)
        return kept

    def piece_table(self) -> list[str]:
        return [self.piece(token) for token in range(self.vocab_size)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileVocabulary) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {self.vocab_size} pieces, {self.fingerprint[:12]})"
