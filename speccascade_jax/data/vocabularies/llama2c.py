"""Tokeniser files of llama2.c, encoded and decoded as in its `run.c` (https://github.com/karpathy/llama2.c, MIT).

File format: an int32 with the length of the longest piece; then for each piece a float32 score, an int32 length, and
the bytes. Numbers are little endian, and spaces are stored as spaces.
"""

import re
import struct
from pathlib import Path
from typing import NamedTuple

from speccascade_jax.data.vocabularies.vocabulary import FileVocabulary

_FIRST_BYTE = 3  # ids 0, 1 and 2 are UNK, BOS and EOS; ids 3 to 258 are the 256 bytes
_BYTE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
_NO_MERGE = -1e10  # as in run.c: pieces with lower scores are never merged
_LONGEST = 1 << 16


class _Piece(NamedTuple):
    score: float
    text: bytes


class Llama2cVocabulary(FileVocabulary):
    """A vocabulary of llama2.c: the id of BOS is 1, of EOS 2, and of byte `b` `b + 3`.

    BOS and EOS both end an output. Models of TinyStories are trained with BOS between stories, and llama2.c's own loop
    stops there.

    Attributes: as in `TextVocabulary`; `fingerprint` is the SHA-256 of the file's bytes.
    """

    bos_id = 1
    eos_id = 2
    stop_ids = (1, 2)
    specials = controls = frozenset((1, 2))

    def _read(self, content: bytes) -> bytes:
        table = read_pieces(self.path)
        if table is None:
            raise ValueError(
                f"vocabulary {self.path} is not a tokenizer of llama2.c (int32, then float32, int32 and bytes per "
                f"piece; piece {_FIRST_BYTE} is <0x00>): give the file that the model was trained with, such as "
                "tokenizer.bin"
            )
        self.vocab_size = len(table)
        self._table = table
        self._ids: dict[bytes, int] = {}
        for token, piece in enumerate(table):
            self._ids.setdefault(piece.text, token)
        return b""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without BOS and EOS.

        A space is put before a text that is not empty. The text is split into characters, and a character without a
        piece into bytes. Then neighbours that together form a piece are merged, until no pair does. The pair whose
        piece has the highest score is merged first; if scores are equal, the leftmost pair.
        """
        ids = [token for character in " " * bool(text) + text for token in self._spelt(character)]
        merged = [self._merge(*pair) for pair in zip(ids, ids[1:], strict=False)]
        while merged and (best := max(merged, key=lambda scored: scored[0]))[0] > _NO_MERGE:
            position = merged.index(best)
            ids[position : position + 2] = [best[1]]
            del merged[position]
            for pair in (position - 1, position):
                if 0 <= pair < len(merged):
                    merged[pair] = self._merge(ids[pair], ids[pair + 1])
        return ids

    def _spelt(self, character: str) -> list[int]:
        text = character.encode()
        token = self._ids.get(text)
        return [byte + _FIRST_BYTE for byte in text] if token is None else [token]

    def _merge(self, first: int, second: int) -> tuple[float, int]:
        """Returns the score and the id of two pieces joined; the lowest score if they do not form a piece."""
        token = self._ids.get(self._table[first].text + self._table[second].text)
        return (_NO_MERGE, -1) if token is None else (self._table[token].score, token)

    def _text(self, ids: list[int], goes_on: bool) -> str:
        text = b"".join(map(self._bytes, ids))
        begins_with_space = bool(ids) and self._table[ids[0]].text.startswith(b" ")
        return text[begins_with_space and not goes_on :].decode("utf-8", "replace")

    def _bytes(self, token: int) -> bytes:
        text = self._table[token].text
        spelt = _BYTE.fullmatch(text)
        return bytes([int(spelt[1], 16)]) if spelt else text

    def piece(self, token: int) -> str:
        """Returns the piece of `token` in the notation of sentencepiece, from which llama2.c's files are converted."""
        if token in (self.bos_id, self.eos_id):
            return "<s>" if token == self.bos_id else "</s>"
        return self._table[token].text.decode("utf-8", "replace").replace(" ", "▁")


def read_pieces(path: Path) -> list[_Piece] | None:
    """Returns the pieces of a llama2.c tokenizer, or `None` if the file is not one.

    The first bytes of most other files are enough to tell that they are not one.
    """
    with path.open("rb") as file:
        header = file.read(4)
        longest = struct.unpack("<i", header)[0] if len(header) == 4 else 0
        if not 0 < longest < _LONGEST:
            return None
        pieces: list[_Piece] = []
        while head := file.read(8):
            score, length = struct.unpack("<fi", head) if len(head) == 8 else (0.0, -1)
            text = file.read(length) if 0 <= length <= longest else b""
            byte = len(pieces) - _FIRST_BYTE
            if len(text) != length or (0 <= byte < 256 and text != b"<0x%02X>" % byte):
                return None  # returns at once, so that a large file of another kind is not read to its end
            pieces.append(_Piece(score, text))
    return pieces if len(pieces) >= _FIRST_BYTE + 256 else None
