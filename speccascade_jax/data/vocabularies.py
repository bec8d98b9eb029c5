"""Text to token ids and back: sentencepiece files with T5's ids (pad 0, EOS 1, unknown 2)."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path

import sentencepiece


class Vocabulary:
    """A sentencepiece vocabulary read from one file.

    Two vocabularies are equal, and hash alike, when their files' contents are.

    Attributes:
        path: where the file lies.
        fingerprint: SHA-256 of the file's bytes, hexadecimal.
        pad_id, eos_id, unk_id: 0, 1, 2.
    """

    pad_id = 0
    eos_id = 1
    unk_id = 2

    def __init__(self, path: str | Path):
        """Read `path`.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a sentencepiece model, or one whose special ids are not T5's.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"vocabulary {self.path} does not exist; experiments/train_vocab.py trains one")
        content = self.path.read_bytes()
        self.fingerprint = hashlib.sha256(content).hexdigest()
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise ValueError(f"vocabulary {self.path} is not a sentencepiece model: {error}") from error
        self._check_special_ids()

    def _check_special_ids(self) -> None:
        found = (self._pieces.pad_id(), self._pieces.eos_id(), self._pieces.unk_id())
        wanted = (self.pad_id, self.eos_id, self.unk_id)
        if found != wanted:
            raise ValueError(
                f"vocabulary {self.path} has (pad, eos, unk) ids {found}; {wanted} are needed: train it with "
                "experiments/train_vocab.py or with --pad_id=0 --eos_id=1 --unk_id=2"
            )

    @property
    def vocab_size(self) -> int:
        """How many pieces there are."""
        return int(self._pieces.get_piece_size())

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without EOS."""
        return list(self._pieces.encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` up to the first EOS; padding and ids beyond the vocabulary are left out."""
        kept: list[int] = []
        for token in ids:
            if int(token) == self.eos_id:
                break
            if int(token) != self.pad_id and 0 <= int(token) < self.vocab_size:
                kept.append(int(token))
        return str(self._pieces.decode(kept))

    def pieces(self, ids: Iterable[int]) -> str:
        """The pieces of `ids`, separated by spaces: what `ids_of_pieces` turns into the same ids again.

        Text does not: `encode(decode(ids))` may cut a word in another way than `ids` did.
        """
        return " ".join(self._pieces.id_to_piece([int(token) for token in ids]))

    def ids_of_pieces(self, pieces: str) -> list[int]:
        """The ids of `pieces` as `pieces` writes them.

        Raises:
            ValueError: one is not a piece of this vocabulary.
        """
        names = pieces.split(" ") if pieces else []
        ids = list(self._pieces.piece_to_id(names))
        for name, found in zip(names, ids, strict=True):
            if found == self.unk_id and name != self._pieces.id_to_piece(self.unk_id):
                raise ValueError(f"{name!r} is no piece of vocabulary {self.path}; name the one it was written with")
        return ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Vocabulary({str(self.path)!r}, {self.vocab_size} pieces, {self.fingerprint[:12]})"


def train(sentences: Iterable[str], vocab_size: int) -> bytes:
    """The bytes of a unigram vocabulary of `vocab_size` pieces trained on `sentences`.

    One thread and no sampling: the same sentences give the same bytes. Every character seen is a piece
    (coverage 1.0) and all others are spelt in bytes, so `unk_id` never comes out of `Vocabulary.encode`.

    Raises:
        RuntimeError: sentencepiece's own, e.g. when `vocab_size` exceeds what the sentences support.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="unigram",
        vocab_size=vocab_size,
        character_coverage=1.0,
        byte_fallback=True,
        pad_id=Vocabulary.pad_id,
        eos_id=Vocabulary.eos_id,
        unk_id=Vocabulary.unk_id,
        bos_id=-1,
        num_threads=1,
        shuffle_input_sentence=False,
        minloglevel=2,
    )
    return model.getvalue()
