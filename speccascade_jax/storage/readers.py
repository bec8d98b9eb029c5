"""Readers of untrusted files: their errors name file, line and remedy, and they refuse implausibly large content."""

import codecs
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PLAUSIBLE = 1 << 28
"""Number of bytes that every compressed file may unpack to, however small the file is."""
RATIO = 100
"""Largest allowed ratio of unpacked to packed size for files that unpack to more than `PLAUSIBLE` bytes: texts and
tokens reach 30, zip bombs 1,000."""


def json_object(path: Path, remedy: str, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """Returns the JSON object that a file holds.

    Args:
        path: the file.
        remedy: the end of the error's sentence.
        error: class of the error for a file without a JSON object.

    Raises:
        OSError: the file cannot be read; names the file.
        ValueError (or `error`): the file does not hold a JSON object; names the file.
    """
    return parsed(path.read_bytes(), str(path), remedy, error)


def parsed(
    content: bytes | str, location: str, remedy: str, error: type[ValueError] = ValueError, *, unique: bool = False
) -> dict[str, Any]:
    """Returns the JSON object that a text holds.

    Args:
        content: the text.
        location: the file, or the file and the line, with which the error's sentence begins.
        remedy: the end of the error's sentence.
        error: class of the error.
        unique: whether two entries of the same name are an error; otherwise the last one is used.

    Raises:
        ValueError (or `error`): the text does not hold a JSON object.
    """
    try:
        value = json.loads(content, object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as reason:
        raise error(f"{location} is damaged (not JSON: {reason}): {remedy}") from reason
    if not isinstance(value, dict):
        raise error(f"{location} is damaged (not a JSON object, but {value!r:.40}): {remedy}")
    return value


def _unique(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in entries]
    check_unique(names)
    return dict(entries)


def check_unique(names: Sequence[str]) -> None:
    """Raises `ValueError` if a column's or field's name occurs twice; empty names may repeat, as they are not read."""
    if twice := [name for name in dict.fromkeys(names) if name and names.count(name) > 1]:
        raise ValueError(f"{twice[0]!r} is the name of {names.count(twice[0])} columns")


def check_unpacked(size: int, packed: int) -> None:
    """Checks that a compressed file of `packed` bytes may hold `size` bytes of texts or tokens.

    Raises:
        ValueError: texts and tokens cannot be compressed so much; the file may be a zip bomb.
    """
    if size > max(PLAUSIBLE, RATIO * packed):
        raise ValueError(f"{packed:,} bytes unpack to more than {max(PLAUSIBLE, RATIO * packed):,} bytes")


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the number (from 1) and the text of every line of a UTF-8 file; unpacks it if its name ends in `.gz`.

    A byte order mark at the beginning of the file, as spreadsheets write, is removed.

    Raises:
        ValueError: the file is not UTF-8, is not a complete gzip file, or unpacks to implausibly many bytes; names the
            file and the line.
    """
    unpacked, number = 0, 0
    try:
        with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            packed = raw.seek(0, os.SEEK_END)
            raw.seek(0)
            longest = max(PLAUSIBLE, RATIO * packed) + 1
            while line := file.readline(longest):
                unpacked, number = unpacked + len(line), number + 1
                check_unpacked(unpacked, packed)
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                yield number, line.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        utf16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and number == 1
        kind = "UTF-16" if utf16 else f"not UTF-8 ({error.reason})"
        raise ValueError(f"{path}:{number} is {kind}: convert the file to UTF-8, or copy it again") from error
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        raise ValueError(f"{path} is damaged after line {number} ({error}): copy it again") from error
