"""Readers of untrusted files: errors name file, line and remedy, and implausible sizes are refused."""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PLAUSIBLE = 1 << 28
"""Number of bytes that any compressed file may unpack to, whatever its own size."""
RATIO = 100
"""Largest ratio of unpacked to packed size of a larger file: texts and tokens reach 30, zip bombs a thousand."""


def json_object(path: Path, remedy: str, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """Reads the JSON object in a file.

    Args:
        path: the file.
        remedy: the end of the error's sentence.
        error: the error's class.

    Raises:
        OSError: the file cannot be read; ValueError (or `error`): it does not hold a JSON object. Both name the file.
    """
    return parsed(path.read_bytes(), str(path), remedy, error)


def parsed(
    content: bytes | str, location: str, remedy: str, error: type[ValueError] = ValueError, *, unique: bool = False
) -> dict[str, Any]:
    """Parses the JSON object in a text.

    Args:
        content: the text.
        location: the beginning of the error's sentence: file, or file and line.
        remedy: the end of the error's sentence.
        error: the error's class.
        unique: whether an object with two entries of one name is refused; otherwise the last one counts.
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
    """Refuses names of columns or fields that occur twice (`ValueError`); columns without a name are never read."""
    if twice := [name for name in dict.fromkeys(names) if name and names.count(name) > 1]:
        raise ValueError(f"{twice[0]!r} is the name of {names.count(twice[0])} columns")


def check_unpacked(size: int, packed: int) -> None:
    """Refuses content of `size` bytes in a file of `packed` bytes if no texts or tokens can be packed so tightly.

    Raises:
        ValueError: the content is too large.
    """
    if size > max(PLAUSIBLE, RATIO * packed):
        raise ValueError(f"{packed:,} bytes unpack to more than {max(PLAUSIBLE, RATIO * packed):,}")


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields number (from 1) and text of every line of a UTF-8 file, which is gzipped if its name ends in `.gz`.

    The byte order mark that spreadsheets write is no part of the text.

    Raises:
        ValueError: the file is not UTF-8, is no complete gzip file, or unpacks to implausibly many bytes; names file
            and line.
    """
    unpacked, number = 0, 0
    packed = path.stat().st_size
    longest = max(PLAUSIBLE, RATIO * packed) + 1
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
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
