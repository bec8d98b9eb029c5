"""Hugging Face's `tokenizer.json` (byte-level BPE as in Llama 3 and Qwen, or sentencepiece-like as in Gemma)."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speccascade_jax.data.vocabularies.vocabulary import FileVocabulary
from speccascade_jax.storage import checksums
from speccascade_jax.storage.readers import parsed

TOKENIZER = "tokenizer.json"
# files that name the special pieces, and files that number them; the first with an entry counts
NAMING = ("tokenizer_config.json", "special_tokens_map.json")
NUMBERING = ("generation_config.json", "config.json")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class HuggingFaceVocabulary(FileVocabulary):
    """A `tokenizer.json`, with the special ids from files in the same folder.

    Texts are encoded without the additions of its post-processor. Names of special pieces inside a text are read as
    these pieces, as the library does.

    Attributes: as in `TextVocabulary`; `fingerprint` is the SHA-256 of the file's bytes and of the special ids.
    """

    def _read(self, content: bytes) -> bytes:
        self._tokenizer = _parse(self.path, content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self._names = {token: name for name, token in ids.items()}
        self.vocab_size = max(self._names, default=-1) + 1
        if self.vocab_size > len(content):
            sizes = f"{len(content):,} bytes, too few for {self.vocab_size:,} pieces"
            raise ValueError(f"{self.path} has {sizes}: copy it again")
        self.bos_id, self.stop_ids = _special_ids(self.path, ids)
        self.eos_id = self.stop_ids[0]
        added = self._tokenizer.get_added_tokens_decoder()
        without_text = [token for token, piece in added.items() if piece.special]
        self.specials = frozenset([*without_text, *self.stop_ids, *([] if self.bos_id is None else [self.bos_id])])
        self._bytes = {token: int(match[1], 16) for name, token in ids.items() if (match := _BYTE.fullmatch(name))}
        self._anchor = self.encode("a")
        return repr((self.bos_id, self.eos_id, self.stop_ids)).encode()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without the additions of the file's post-processor."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _text(self, ids: list[int], goes_on: bool) -> str:
        """Decodes ids; runs of byte pieces without the library, which drops a whole run if one character is broken."""
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
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

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
    except BaseException as error:  # the library raises bare Exceptions, and its panics are not even Exceptions
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(
            f'{path} is not a tokenizer.json (JSON with a "model" that tokenizers can read): {error}'
        ) from error


def _special_ids(path: Path, ids: Mapping[str, int]) -> tuple[int | None, tuple[int, ...]]:
    """Returns `bos_id` and `stop_ids` from files in the folder of a `tokenizer.json`.

    The files name the ids (`NAMING`) or number them (`NUMBERING`). If `bos_token` is null, or `add_bos_token` is false,
    texts begin with nothing (Qwen 2.5), even if `config.json` has a number for it. An output ends with the `eos_token`
    and with every number in `eos_token_id`.

    Args:
        path: the `tokenizer.json`.
        ids: maps a piece to its id.

    Raises:
        ValueError: no end of sequence, one that is no piece, or a file that is no JSON object or has odd entries.
    """
    files = [path.parent / name for name in (*NAMING, *NUMBERING)]
    tables = {file.name: parsed(checksums.read(file), str(file), "copy it again") for file in files if file.is_file()}
    naming, numbering = ([tables.get(name, {}) for name in names] for names in (NAMING, NUMBERING))
    try:
        bos = None
        if naming[0].get("add_bos_token") is not False:
            is_named = any("bos_token" in table for table in naming)
            bos = _named("bos_token", path, naming, ids) if is_named else _numbered("bos_token_id", numbering)
        numbers = _numbered("eos_token_id", numbering)
        ends = [_named("eos_token", path, naming, ids), *(numbers if isinstance(numbers, list) else [numbers])]
        stops = tuple(dict.fromkeys(token for token in ends if token is not None))
        if not stops:
            entries = f"eos_token in {NAMING[0]}, or eos_token_id in {NUMBERING[1]}"
            raise ValueError(f"no file in the folder of {path} defines the end of sequence: add {entries}")
        known = {None, *ids.values()}
        for name, token in [("bos_token_id", bos), *(("eos_token_id", stop) for stop in stops)]:
            if token not in known:
                raise ValueError(
                    f"{name} {token} in the folder of {path} is not one of its pieces: "
                    "the files belong to different models"
                )
    except (TypeError, KeyError, AttributeError) as error:
        file_names = ", ".join(tables)
        raise ValueError(
            f"a file in the folder of {path} ({file_names}) has an invalid entry ({error!r}): copy it again"
        ) from error
    return bos, stops


def _numbered(entry: str, tables: list[dict]) -> Any:
    """Returns the first number, or list of numbers, in the tables; `None` if there is none."""
    return next((table[entry] for table in tables if table.get(entry) is not None), None)


def _named(entry: str, path: Path, tables: list[dict], ids: Mapping[str, int]) -> int | None:
    """Returns the id of the piece that the first table with an entry names; `None` if it names none."""
    value = next((table[entry] for table in tables if entry in table), None)
    name = value["content"] if isinstance(value, dict) else value
    if name is not None and name not in ids:
        raise ValueError(
            f"{entry} {name!r} in the folder of {path} is not one of its pieces: the files belong to different models"
        )
    return None if name is None else ids[name]
