"""Hugging Face's `tokenizer.json` (byte-level BPE as Llama 3's and Qwen's, or sentencepiece-like as Gemma's)."""

import hashlib
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speccascade_jax.data.vocabularies.vocabulary import FileVocabulary
from speccascade_jax.storage import checksums
from speccascade_jax.storage.files import expanded
from speccascade_jax.storage.readers import parsed

TOKENIZER = "tokenizer.json"
# what names the special pieces, and what numbers them; the first that speaks is believed
NAMING = ("tokenizer_config.json", "special_tokens_map.json")
NUMBERING = ("generation_config.json", "config.json")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class HuggingFaceVocabulary(FileVocabulary):
    """A `tokenizer.json`, with the special ids of the files beside it.

    Texts are encoded without what its post-processor would add; names of special pieces inside a text are read as
    these pieces, as the library does it.

    Attributes: as in `TextVocabulary`; `fingerprint` is the SHA-256 of the file's bytes and of the special ids.
    """

    def __init__(self, path: str | Path):
        """Read `path`.

        Raises:
            FileNotFoundError: no such file.
            ImportError: the library `tokenizers` is not installed.
            ValueError: not a `tokenizer.json`, no end of sequence named beside it, or one that is no piece of it.
        """
        self.path = expanded(path)
        content = checksums.read(self.path)
        self._tokenizer = _parse(self.path, content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self._names = {token: name for name, token in ids.items()}
        self.vocab_size = max(self._names, default=-1) + 1
        if self.vocab_size > len(content):
            raise ValueError(
                f"{self.path} has {len(content):,} bytes and can't number {self.vocab_size:,} pieces: copy it again"
            )
        special = _special_ids(self.path, ids)
        self.bos_id, self.eos_id, self.stop_ids = special
        self.fingerprint = hashlib.sha256(content + repr(special).encode()).hexdigest()
        added = self._tokenizer.get_added_tokens_decoder()
        without_text = [token for token, piece in added.items() if piece.special]
        self.specials = frozenset([*without_text, *self.stop_ids, *([] if self.bos_id is None else [self.bos_id])])
        self._bytes = {token: int(found[1], 16) for name, token in ids.items() if (found := _BYTE.fullmatch(name))}
        self._anchor = self.encode("a")

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _text(self, ids: list[int], goes_on: bool) -> str:
        """Runs of byte pieces are decoded here: the library gives a run up as a whole when one character is broken."""
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
        """The piece of `token` in the file's notation; "" for a hole in the numbering."""
        return self._names.get(token, "")


def _parse(path: Path, content: bytes) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(
            f"{path} is read through the library tokenizers: pip install 'speccascade_jax[huggingface]'"
        ) from error
    try:
        return Tokenizer.from_buffer(content)
    except BaseException as error:  # the library raises bare Exceptions, and its panics are none
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(f'{path} is no tokenizer.json (JSON with a "model" that tokenizers reads): {error}') from error


def _special_ids(path: Path, ids: Mapping[str, int]) -> tuple[int | None, int, tuple[int, ...]]:
    """`read_special_ids`, where entries of a wrong type end in a ValueError too."""
    try:
        return read_special_ids(path, ids)
    except (TypeError, KeyError, AttributeError) as error:
        beside = ", ".join(name for name in (*NAMING, *NUMBERING) if (path.parent / name).is_file())
        raise ValueError(f"a file beside {path} ({beside}) has an odd entry ({error!r}): copy it again") from error


def read_special_ids(path: Path, ids: Mapping[str, int]) -> tuple[int | None, int, tuple[int, ...]]:
    """`bos_id`, `eos_id`, `stop_ids`, as files beside a `tokenizer.json` name (`NAMING`) or number (`NUMBERING`) them.

    A `bos_token` that is null, or `add_bos_token` false, means that texts begin with nothing (Qwen 2.5), whatever
    number `config.json` has for it. An output ends with the `eos_token` and with every number in `eos_token_id`.

    Args:
        path: of the `tokenizer.json`; ids: piece -> id.

    Raises:
        ValueError: no end of sequence, one that is no piece, or a file that is no JSON object.
    """
    naming = [_read(path.parent / name) for name in NAMING]
    numbering = [_read(path.parent / name) for name in NUMBERING]
    numbers: int | list[int] = next(
        (table["eos_token_id"] for table in numbering if table.get("eos_token_id") is not None), []
    )
    ends = numbers if isinstance(numbers, list) else [numbers]
    eos = _named("eos_token", path, naming, ids)
    stops = tuple(dict.fromkeys([*([] if eos is None else [eos]), *ends]))
    if not stops:
        raise ValueError(
            f"no end of sequence beside {path}: give eos_token in {NAMING[0]}, or eos_token_id in {NUMBERING[1]}"
        )
    bos = _bos(path, naming, numbering, ids)
    known = set(ids.values())
    for name, token in [("bos_token_id", bos), *(("eos_token_id", stop) for stop in stops)]:
        if token is not None and token not in known:
            raise ValueError(f"{name} {token} beside {path} is no piece of it: the files are of different models")
    return bos, stops[0], stops


def _bos(path: Path, naming: list[dict], numbering: list[dict], ids: Mapping[str, int]) -> int | None:
    if naming[0].get("add_bos_token") is False:
        return None
    if any("bos_token" in table for table in naming):
        return _named("bos_token", path, naming, ids)
    return next((table["bos_token_id"] for table in numbering if table.get("bos_token_id") is not None), None)


def _named(what: str, path: Path, tables: list[dict], ids: Mapping[str, int]) -> int | None:
    """The id of the piece that the first table with an entry names; `None` where it names none."""
    given = next((table[what] for table in tables if what in table), None)
    name = given["content"] if isinstance(given, dict) else given
    if name is not None and name not in ids:
        raise ValueError(f"{what} {name!r} beside {path} is no piece of it: the files are of different models")
    return None if name is None else ids[name]


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file."""
    if not path.is_file():
        return {}
    return parsed(checksums.read(path), str(path), "copy it again")
