"""Sentencepiece files: any with an end of sequence (T5, Llama 2, Gemma), and those with T5's ids that we train."""

import io
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from speccascade_jax.data.vocabularies.vocabulary import FileVocabulary
from speccascade_jax.storage.files import expanded


class SentencePieceVocabulary(FileVocabulary):
    """A sentencepiece vocabulary with its file's special ids.

    T5's 100 sentinels are no pieces of its file: models may have more entries than `vocab_size`.

    Names of control pieces in a text ("</s>", "<bos>") are read as these pieces, as with a `tokenizer.json`; the
    library itself does not do so. The text between two of them is encoded separately, with the space that many files
    put before a text's first word: chat models such as Llama 2's and Vicuna were trained on turns encoded so, and
    `decode` drops the space after such a piece. Without a BOS, as in T5, the names are ordinary text.

    Attributes:
        unk_id: the id of characters without a piece.
        Otherwise as in `TextVocabulary`; `fingerprint` is the SHA-256 of the file's bytes.
    """

    unk_id: int

    def __init__(self, path: str | Path):
        """Reads `path`; raises the errors of `FileVocabulary`."""
        if not expanded(path).is_file():
            raise FileNotFoundError(f"vocabulary {path} does not exist; experiments/train_vocab.py trains one")
        super().__init__(path)

    def _read(self, content: bytes) -> bytes:
        self._pieces = _parse(self.path, content)
        self.vocab_size = int(self._pieces.get_piece_size())
        self._take_special_ids()
        self.stop_ids = (self.eos_id,)
        controls = np.flatnonzero(self._pieces.is_control(list(range(self.vocab_size))))
        self.specials = frozenset(controls.tolist())
        self._controls = {self.piece(token): token for token in self.specials if self.bos_id is not None}
        self._anchor = list(self._pieces.encode("a"))
        return b""

    def _take_special_ids(self) -> None:
        bos, self.eos_id, self.unk_id = self._pieces.bos_id(), self._pieces.eos_id(), self._pieces.unk_id()
        self.bos_id = bos if bos >= 0 else None
        if self.eos_id < 0:
            remedy = "use one with an eos_id, like those of T5, Llama and Gemma"
            raise ValueError(f"vocabulary {self.path} has no end of sequence, so outputs would never end: {remedy}")

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`; BOS and EOS only if the text names them."""
        if not self._controls:
            return list(self._pieces.encode(text))
        names = "|".join(map(re.escape, sorted(self._controls, key=len, reverse=True)))
        parts = re.split(f"({names})", text)  # text and names in turns
        ids = [[self._controls[p]] if n % 2 else self._pieces.encode(p) for n, p in enumerate(parts)]
        return list(itertools.chain.from_iterable(ids))

    def _text(self, ids: list[int], goes_on: bool) -> str:
        if not goes_on:
            return str(self._pieces.decode(ids))
        return str(self._pieces.decode(self._anchor + ids))[len(self._pieces.decode(self._anchor)) :]

    def piece(self, token: int) -> str:
        """Returns the piece of `token` as the file stores it, with `▁` for a space."""
        return str(self._pieces.id_to_piece(int(token)))

    def piece_table(self) -> list[str]:
        """Returns all pieces with a single call of the library."""
        return list(self._pieces.id_to_piece(list(range(self.vocab_size))))

    def pieces(self, ids: Iterable[int]) -> str:
        """Returns the pieces of `ids`, separated by spaces; `ids_of_pieces` turns them into the same ids again.

        Text does not: `encode(decode(ids))` may split a word differently from `ids`.
        """
        return " ".join(self._pieces.id_to_piece([int(token) for token in ids]))

    def ids_of_pieces(self, pieces: str) -> list[int]:
        """Returns the ids of a text that the method `pieces` wrote.

        Raises:
            ValueError: a name that is no piece of this vocabulary.
        """
        names = pieces.split(" ") if pieces else []
        ids = list(self._pieces.piece_to_id(names))
        for name, token in zip(names, ids, strict=True):
            if token == self.unk_id and name != self._pieces.id_to_piece(self.unk_id):
                raise ValueError(
                    f"{name!r} is not a piece of vocabulary {self.path}; use the vocabulary that wrote the pieces"
                )
        return ids


class Vocabulary(SentencePieceVocabulary):
    """A sentencepiece vocabulary with T5's special ids, as training needs and writes it.

    Attributes:
        pad_id, eos_id, unk_id: 0, 1, 2.
    """

    pad_id = 0
    eos_id = 1
    unk_id = 2

    def _take_special_ids(self) -> None:
        ids = (self._pieces.pad_id(), self._pieces.eos_id(), self._pieces.unk_id())
        wanted = (self.pad_id, self.eos_id, self.unk_id)
        if ids != wanted:
            remedy = "train it with experiments/train_vocab.py or with --pad_id=0 --eos_id=1 --unk_id=2"
            raise ValueError(
                f"vocabulary {self.path} has (pad, eos, unk) ids {ids}, but training needs {wanted}: {remedy}"
            )
        super()._take_special_ids()


def is_sentencepiece(content: bytes) -> bool:
    """Returns whether a file's content is a sentencepiece model."""
    try:
        _parse(Path(), content)
    except ValueError:
        return False
    return True


def _parse(path: Path, content: bytes) -> sentencepiece.SentencePieceProcessor:
    try:
        if not content:
            raise RuntimeError("it is empty")
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise ValueError(f"vocabulary {path} is not a sentencepiece model: {error}") from error


def train(sentences: Iterable[str], vocab_size: int) -> bytes:
    """Trains a unigram vocabulary of `vocab_size` pieces on `sentences` and returns the file's bytes.

    One thread and no sampling: the same sentences give the same bytes. Every character seen is a piece (coverage 1.0)
    and all others are spelt in bytes, so `Vocabulary.encode` never returns `unk_id`.

    Raises:
        RuntimeError: from sentencepiece, for instance if `vocab_size` exceeds what the sentences support.
    """
    model = io.BytesIO()
    special_ids = {"pad_id": Vocabulary.pad_id, "eos_id": Vocabulary.eos_id, "unk_id": Vocabulary.unk_id, "bos_id": -1}
    pieces = {"model_type": "unigram", "vocab_size": vocab_size, "character_coverage": 1.0, "byte_fallback": True}
    running = {"num_threads": 1, "shuffle_input_sentence": False, "minloglevel": 2}
    options: dict[str, Any] = special_ids | pieces | running
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=model, **options)
    return model.getvalue()
