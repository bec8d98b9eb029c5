"""The protocol of a vocabulary, and the code that all kinds of vocabularies share."""

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
# The sentinels of T5: such a piece marks a gap in a prompt, and comes before the text for this gap in an output.
SENTINEL = re.compile(r"<extra_id_\d+>")


class TextVocabulary(Protocol):
    """A mapping from text to token ids and back.

    Attributes:
        vocab_size: the number of pieces; ids are `0 … vocab_size − 1`.
        bos_id: the id with which a text begins; `None` if a text begins with no special id.
        eos_id: the id of the end of a text.
        stop_ids: the ids that end an output; `eos_id` is one of them.
        fingerprint: hexadecimal digest of everything on which encoding and decoding depend.
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
        """Returns the text of `ids` up to the first stop id.

        Padding, beginnings of sequence and ids outside the vocabulary have no text.

        Args:
            ids: the ids to decode.
            after: ids that come before `ids`, such as those of a prompt. Many vocabularies put a space before the first
                word of a text and drop it again when decoding. After an id with text, the space belongs to the text and
                is kept, so that prompt and output join correctly.
        """

    @abstractmethod
    def piece(self, token: int) -> str:
        """Returns the piece of `token` in the notation of the vocabulary (sentencepiece writes `▁` for a space)."""

    def piece_table(self) -> list[str]:
        """Returns the result of `piece` for every id; "" for an unused id."""


def settled(text: str, last: bool) -> str:
    """Returns the part of a decoded text that further tokens cannot change; all of it if `last`.

    The text of a piece depends on its neighbours (spaces at the beginning, characters encoded as several bytes), so an
    output is decoded again after every token. Only the end of the text can change, if bytes of a character are missing.
    """
    return text if last else text.rstrip("\N{REPLACEMENT CHARACTER}")


def added_texts(vocabulary: TextVocabulary, ids: Sequence[int], after: Ids = ()) -> list[str]:
    """Returns the text that each id adds; joined, these texts equal the result of `decode`.

    A stop id adds no text. If several ids encode the bytes of one character, only the last of them adds text.
    """
    texts = _added(vocabulary, ids, after, _WINDOW)
    if "".join(texts) == vocabulary.decode(ids, after=after):
        return texts
    return _added(vocabulary, ids, after, None)  # slower, for vocabularies whose pieces depend on text far before them


_WINDOW = 8


def _added(vocabulary: TextVocabulary, ids: Sequence[int], after: Ids, window: int | None) -> list[str]:
    """Returns the text that each id adds, which is the difference between the decoded texts of two prefixes.

    Args:
        vocabulary: decodes the ids.
        ids: the ids whose texts are returned.
        after: ids before them, as in `TextVocabulary.decode`.
        window: if set, only the ids whose text may still change are decoded, and this many ids before them. `None`:
            every prefix is decoded in full.
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
    """A `TextVocabulary` that is read from a file; two such vocabularies are equal if their fingerprints are equal.

    Attributes:
        path: the file.
        template_paths: paths in or beside which a chat template may be, in order: the file, then the target.
        specials: ids that have no text.
        controls: ids of control pieces, added pieces and unused ids; a text has them only if it contains names of
            pieces.
        ends_inputs: whether `eos_id` ends the input of an encoder (T5); otherwise `bos_id` begins it (T5Gemma).
    """

    path: Path
    template_paths: tuple[Path, ...]
    specials: frozenset[int]
    controls: frozenset[int]
    ends_inputs: bool = True

    def __init__(self, path: str | Path):
        """Reads `path`, and checks it against the digests next to it (`checksums.read`).

        Raises:
            FileNotFoundError: there is no such file.
            ImportError: a library that this kind of vocabulary needs is not installed.
            ValueError: the file is of another kind, or damaged.
        """
        self.path = expanded(path)
        self.template_paths = (self.path,)
        content = checksums.read(self.path)
        self.fingerprint = hashlib.sha256(content + self._read(content)).hexdigest()

    @abstractmethod
    def _read(self, content: bytes) -> bytes:
        """Sets the pieces and special ids from a file's content; returns further bytes for the fingerprint."""

    def ending_with(self, stop_ids: Iterable[int]) -> Self:
        """Returns the vocabulary with further stop ids, which come from the model that uses the vocabulary.

        The fingerprint does not change, because it is that of the files. The key of a record holds the stop ids
        separately.
        """
        if not (more := [token for token in dict.fromkeys(stop_ids) if token not in self.stop_ids]):
            return self
        other = copy.copy(self)
        other.stop_ids, other.specials = (*self.stop_ids, *more), self.specials.union(more)
        return other

    def of_target(self, target: Path) -> Self:
        """Returns the vocabulary with the target's checkpoint, beside which a chat template may be too."""
        other = copy.copy(self)
        other.template_paths = (self.path, target)
        return other

    def for_gemma(self) -> Self:
        """Returns the vocabulary of a T5Gemma, whose encoder's input begins with `bos_id` (`ends_inputs`)."""
        other = copy.copy(self)
        other.ends_inputs = False
        return other

    @abstractmethod
    def _text(self, ids: list[int], goes_on: bool) -> str:
        """Decodes ids, all of which have text; `goes_on` says whether the result continues another text."""

    def decode(self, ids: Iterable[int], after: Ids = ()) -> str:
        """Returns the text of `ids`; it continues another text if the last id of `after` has text."""
        goes_on = len(after) > 0 and self._has_text(int(after[-1]))
        return self._text(self._kept(ids), goes_on)

    def _has_text(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and token not in self.specials

    def _kept(self, ids: Iterable[int]) -> list[int]:
        kept: list[int] = []
        for place, token in enumerate(map(int, ids)):
            # A BOS in the first position begins the text and does not end it, even if it is a stop id too.
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
