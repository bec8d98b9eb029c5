"""Vocabularies from sentencepiece files with an end of sequence (T5, Llama 2, Gemma), and training of such files."""

import copy
import io
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import sentencepiece

from speccascade_jax.data.vocabularies.tokenizer_files import Added, TokenizerFiles
from speccascade_jax.data.vocabularies.vocabulary import SENTINEL, FileVocabulary
from speccascade_jax.storage.files import expanded

HUGGING_FACE = ("tokenizer.model", "spiece.model")
"""Names of sentencepiece files in a folder with the layout of Hugging Face, whose other files are read too."""

# Appended to a model, these bytes set `normalizer_spec.add_dummy_prefix` (field 3 of field 3) to false: parts of the
# same protobuf message are merged, and the last value of a field is used.
_WITHOUT_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceVocabulary(FileVocabulary):
    """A sentencepiece vocabulary, with the special ids and added pieces of its own file and of its `TokenizerFiles`.

    The 100 sentinels of T5 are not pieces of its file; `with_sentinels` adds them for a model that has rows for them.

    If a text contains the name of a control piece ("</s>", "<bos>"), the name is encoded as this piece, as with a
    `tokenizer.json`; the library sentencepiece itself does not do so. The text between two such names is encoded
    separately, with the space that many files put before the first word of a text. Chat models such as Llama 2's and
    Vicuna were trained on turns that were encoded in this way, and `decode` drops the space after such a piece. If
    `tokenizer_config.json` says `"legacy": false`, only the beginning of the whole text gets this space, as in
    transformers. In a vocabulary without BOS, such as T5's, the names of control pieces are ordinary text, and `legacy`
    has no effect. The name of an added piece is always encoded as this piece.

    Attributes:
        unk_id: the id of characters without a piece.
        Otherwise as in `TextVocabulary`; `fingerprint` is the SHA-256 of the file's bytes.
    """

    unk_id: int

    def __init__(self, path: str | Path):
        """Reads `path`; raises the same errors as `FileVocabulary`."""
        if not expanded(path).is_file():
            raise FileNotFoundError(f"vocabulary {path} does not exist; experiments/train_vocab.py trains one")
        super().__init__(path)

    def _read(self, content: bytes) -> bytes:
        self._pieces = _parse(self.path, content)
        self.unk_id = self._pieces.unk_id()
        self._anchor = list(self._pieces.encode("a"))
        bos, eos = (token if token >= 0 else None for token in (self._pieces.bos_id(), self._pieces.eos_id()))
        # Next to a file with another name, the files of the folder may belong to another model, so they are not read.
        files = TokenizerFiles(self.path, read=self.path.name in HUGGING_FACE)
        ids = {name: token for token, name in enumerate(self._own_pieces())}
        added = files.added(ids)
        ids |= {piece.name: token for token, piece in added.items()}
        self.bos_id, self.stop_ids = files.bos_id(ids, bos), files.stop_ids(ids, eos)
        self.eos_id = self.stop_ids[0]
        self._take(added)
        self._later_pieces = self._pieces
        if bos is not None and files.prefixes_only_the_beginning():
            self._later_pieces = _parse(self.path, content + _WITHOUT_PREFIX)
        once = list(self._later_pieces.encode("a")) != self._anchor
        # If other files change nothing, the fingerprint is the digest of the file alone, as in older versions.
        special_ids = (self.bos_id, self.stop_ids, added)
        if once:
            return repr((*special_ids, "only the beginning has a prefix")).encode()
        return b"" if special_ids == (bos, (eos,), {}) else repr(special_ids).encode()

    def _take(self, added: Mapping[int, Added]) -> None:
        """Sets all attributes that depend on the added pieces."""
        pieces = range(self._pieces.get_piece_size())
        self._added, self.vocab_size = added, max(len(pieces), max(added, default=-1) + 1)
        controls = np.flatnonzero(self._pieces.is_control(list(pieces))).tolist()
        unused = set(range(self.vocab_size)).difference(pieces, added)
        hidden = [token for token, piece in added.items() if piece.special and not SENTINEL.fullmatch(piece.name)]
        self.specials = frozenset([*controls, *hidden, *unused, *self.stop_ids])
        self.controls = frozenset([*controls, *added, *unused, self.unk_id])
        named = {} if self._pieces.bos_id() < 0 else {self.piece(token): Added("", True) for token in controls}
        self._named = named | {piece.name: piece for piece in added.values()}
        self._ids = {self.piece(token): token for token in self.controls}
        longest_first = sorted(self._named.items(), key=lambda item: -len(item[0]))
        strips = ((re.escape(name), r"\s*" * p.lstrip, r"\s*" * p.rstrip) for name, p in longest_first)
        self._pattern = re.compile("|".join(f"{before}({name}){after}" for name, before, after in strips))

    def _own_pieces(self) -> list[str]:
        return list(self._pieces.id_to_piece(list(range(self._pieces.get_piece_size()))))

    def with_sentinels(self, entries: int) -> Self:
        """Returns the vocabulary with T5's 100 sentinels appended, if it is T5's and the model has rows for them.

        The id of sentinel `n`, "<extra_id_n>", is `pieces + 99 - n`, as in transformers and in seqio. `entries` is the
        number of rows of the model's embedding.
        """
        first = self._pieces.get_piece_size()
        known = any(map(SENTINEL.search, self.piece_table())) or not self._added.keys().isdisjoint(
            range(first, first + 100)
        )
        if known or self._pieces.bos_id() >= 0 or entries < first + 100:
            return self
        other = copy.copy(self)
        other._take({first + 99 - n: Added(f"<extra_id_{n}>", True) for n in range(100)} | dict(self._added))
        return other

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`; BOS and EOS are included only if the text contains their names."""
        ids, begin, pieces = list[int](), 0, self._pieces
        for match in self._pattern.finditer(text) if self._named else ():
            ids += [*pieces.encode(text[begin : match.start()]), self._ids[match[match.lastindex or 0]]]
            begin, pieces = match.end(), self._later_pieces
        return [*ids, *pieces.encode(text[begin:])]

    def _text(self, ids: list[int], goes_on: bool) -> str:
        parts = list[str]()
        for added, tokens in itertools.groupby(ids, key=self._added.__contains__):
            run = list(tokens)
            parts.append("".join(self._added[token].name for token in run) if added else self._plain(run, goes_on))
            goes_on = True
        return "".join(parts)

    def _plain(self, ids: list[int], goes_on: bool) -> str:
        if not goes_on:
            return str(self._pieces.decode(ids))
        return str(self._pieces.decode(self._anchor + ids))[len(self._pieces.decode(self._anchor)) :]

    def piece(self, token: int) -> str:
        """Returns the piece of `token` as the file stores it, with `▁` for a space; "" for an unused id."""
        if token in self._added:
            return self._added[token].name
        return str(self._pieces.id_to_piece(int(token))) if token < self._pieces.get_piece_size() else ""

    def piece_table(self) -> list[str]:
        """Returns all pieces with a single call of the library."""
        table = [*self._own_pieces(), *[""] * self.vocab_size][: self.vocab_size]
        for token, piece in self._added.items():
            table[token] = piece.name
        return table

    def pieces(self, ids: Iterable[int]) -> str:
        """Returns the pieces of `ids`, separated by spaces; `ids_of_pieces` converts them back to the same ids.

        A decoded text cannot be used for this purpose, because `encode(decode(ids))` may split a word differently.
        """
        return " ".join(self._pieces.id_to_piece([int(token) for token in ids]))

    def ids_of_pieces(self, pieces: str) -> list[int]:
        """Returns the ids of a text that the method `pieces` wrote.

        Raises:
            ValueError: a name is not a piece of this vocabulary.
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
    """A sentencepiece vocabulary with the special ids of T5, as training needs and writes it.

    Attributes:
        pad_id, eos_id, unk_id: 0, 1, 2.
    """

    pad_id = 0
    eos_id = 1
    unk_id = 2

    def _read(self, content: bytes) -> bytes:
        more = super()._read(content)
        ids = (self._pieces.pad_id(), self._pieces.eos_id(), self._pieces.unk_id())
        wanted = (Vocabulary.pad_id, Vocabulary.eos_id, Vocabulary.unk_id)
        if ids != wanted:
            remedy = "train it with experiments/train_vocab.py or with --pad_id=0 --eos_id=1 --unk_id=2"
            raise ValueError(
                f"vocabulary {self.path} has (pad, eos, unk) ids {ids}, but training needs {wanted}: {remedy}"
            )
        return more


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
    """Trains a unigram vocabulary of `vocab_size` pieces on `sentences` and returns the bytes of its file.

    Training uses one thread and no sampling, so the same sentences give the same bytes. Every character of the
    sentences is a piece (coverage 1.0), and all other characters are encoded as bytes, so `Vocabulary.encode` never
    returns `unk_id`.

    Raises:
        RuntimeError: raised by sentencepiece, for example if `vocab_size` is too large for the sentences.
    """
    model = io.BytesIO()
    special_ids = {"pad_id": Vocabulary.pad_id, "eos_id": Vocabulary.eos_id, "unk_id": Vocabulary.unk_id, "bos_id": -1}
    pieces = {"model_type": "unigram", "vocab_size": vocab_size, "character_coverage": 1.0, "byte_fallback": True}
    running = {"num_threads": 1, "shuffle_input_sentence": False, "minloglevel": 2}
    options: dict[str, Any] = special_ids | pieces | running
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=model, **options)
    return model.getvalue()
