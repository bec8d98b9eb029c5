"""Vocabularies from Hugging Face's `tokenizer.json`.

The file holds byte-level BPE, as in Llama 3 and Qwen, or a tokeniser like sentencepiece, as in Gemma.
"""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speccascade_jax.data.vocabularies.tokenizer_files import Added, TokenizerFiles
from speccascade_jax.data.vocabularies.vocabulary import SENTINEL, FileVocabulary

TOKENIZER = "tokenizer.json"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class HuggingFaceVocabulary(FileVocabulary):
    """The vocabulary of a `tokenizer.json`, with the special ids from files in the same folder.

    Texts are encoded without the pieces that the file's post-processor adds at the beginning or the end; `bos_id` is
    the piece at the beginning. If a text contains the name of a special piece, such as "</s>", the name is encoded as
    this piece, as in the library `tokenizers`. Pieces that only the other files of the folder define are added.

    Attributes: as in `TextVocabulary`; `fingerprint` is the SHA-256 of the file's bytes and of the special ids.
    """

    def _read(self, content: bytes) -> bytes:
        self._tokenizer = _parse(self.path, content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        files = TokenizerFiles(self.path)
        more = files.added(self._tokenizer.get_vocab(with_added_tokens=True))
        self._add(more)
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self._names = {token: name for name, token in ids.items()}
        self.vocab_size = max(self._names, default=-1) + 1
        if self.vocab_size > len(content) + len(more):
            sizes = f"{len(content):,} bytes, too few for {self.vocab_size:,} pieces"
            raise ValueError(f"{self.path} has {sizes}: copy it again")
        self.bos_id, self.stop_ids = files.bos_id(ids, self._front()), files.stop_ids(ids)
        self.eos_id = self.stop_ids[0]
        added = self._tokenizer.get_added_tokens_decoder()
        hidden = [token for token, piece in added.items() if piece.special and not SENTINEL.fullmatch(piece.content)]
        self.specials = frozenset([*hidden, *self.stop_ids, *([] if self.bos_id is None else [self.bos_id])])
        self.controls = frozenset([*added, *set(range(self.vocab_size)).difference(self._names)])
        self._bytes = {token: int(match[1], 16) for name, token in ids.items() if (match := _BYTE.fullmatch(name))}
        self._anchor = self.encode("a")
        special_ids = (self.bos_id, self.eos_id, self.stop_ids)
        return repr((*special_ids, more) if more else special_ids).encode()

    def _add(self, more: Mapping[int, Added]) -> None:
        """Adds pieces that `tokenizer.json` lacks, and to which the other files of the folder give ids."""
        from tokenizers import AddedToken

        for token, piece in more.items():
            options = {"lstrip": piece.lstrip, "rstrip": piece.rstrip, "special": piece.special, "normalized": False}
            self._tokenizer.add_tokens([AddedToken(piece.name, **options)])
            if (number := self._tokenizer.token_to_id(piece.name)) != token:
                ids = f"gives {piece.name!r} the id {token}, but {self.path.name} {number}"
                raise ValueError(f"a file in the folder of {self.path} {ids}: the files belong to different models")

    def _front(self) -> int | None:
        """Returns the id that the tokenizer's own post-processor puts before a text, or `None` if it puts none."""
        plain, whole = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
        front = next(n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)
        if front > 1:
            raise ValueError(
                f"{self.path} puts {front} pieces before a text: only one is supported, so remove the others from its "
                "post_processor"
            )
        return whole[0] if front else None

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without the pieces that the file's post-processor adds."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _text(self, ids: list[int], goes_on: bool) -> str:
        """Decodes ids; runs of byte pieces are decoded without the library.

        The library would drop a whole run of bytes if one character in it is broken.
        """
        parts: list[str] = []
        for spelt, run in itertools.groupby(ids, key=self._bytes.__contains__):
            if spelt:
                parts.append(bytes(self._bytes[token] for token in run).decode("utf-8", "replace"))
            elif goes_on or parts:
                parts.append(self._raw(self._anchor + list(run))[len(self._raw(self._anchor)) :])
            else:
                parts.append(self._raw(list(run)))
        return "".join(parts)

    def _raw(self, ids: list[int]) -> str:
        # Pieces without a text have been removed before. With skip_special_tokens=True the library would also remove
        # T5's sentinels, which have a text.
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def piece(self, token: int) -> str:
        """Returns the piece of `token` in the file's notation; "" for an unused id."""
        return self._names.get(token, "")


def _parse(path: Path, content: bytes) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        install = "pip install 'speccascade_jax[huggingface]'"
        raise ImportError(f"{path} is read through the library tokenizers: {install}") from error
    try:
        return Tokenizer.from_buffer(content)
    except BaseException as error:  # the library raises plain Exceptions, and panics that are only BaseExceptions
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(
            f'{path} is not a tokenizer.json (JSON with a "model" that tokenizers can read): {error}'
        ) from error
