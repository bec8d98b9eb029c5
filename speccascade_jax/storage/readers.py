"""Reading what others wrote: errors name file, line and remedy, and no file is believed to be larger than it can be."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLAUSIBLE = 1 << 28
"""Bytes that a compressed file may hold whatever its own size is."""
RATIO = 100
"""How many times its own size a larger one may hold: texts and tokens reach 30, bombs a thousand."""


def json_object(path: Path, remedy: str, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        remedy: the end of the error's sentence; error: its class.

    Raises:
        OSError: it can't be read; ValueError (or `error`): it holds something else. Both name the file.
    """
    return parsed(path.read_bytes(), str(path), remedy, error)


def parsed(content: bytes | str, where: str, remedy: str, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """The JSON object in a text; `where` (file, or file and line) begins the error's sentence."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as reason:
        raise error(f"{where} is damaged (no JSON: {reason}): {remedy}") from reason
    if not isinstance(found, dict):
        raise error(f"{where} is damaged (no JSON object, but {found!r:.40}): {remedy}")
    return found


def check_unpacked(size: int, packed: int) -> None:
    """Refuse content of `size` bytes in a file of `packed`, where no text and no tokens are packed so tightly.

    Raises:
        ValueError: as above.
    """
    if size > max(PLAUSIBLE, RATIO * packed):
        raise ValueError(f"{packed:,} bytes unpack to more than {max(PLAUSIBLE, RATIO * packed):,}")


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of every line of a UTF-8 file, gzipped if its name ends in `.gz`.

    Raises:
        ValueError: not UTF-8, no whole gzip file, or one that unpacks to far more than texts do; names file and line.
    """
    unpacked, number = 0, 0
    packed = path.stat().st_size
    longest = max(PLAUSIBLE, RATIO * packed) + 1
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while line := file.readline(longest):
                unpacked, number = unpacked + len(line), number + 1
                check_unpacked(unpacked, packed)
                yield number, line.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}:{number} is not UTF-8 ({error.reason}): convert the file, or copy it again"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        raise ValueError(f"{path} is damaged behind line {number} ({error}): copy it again") from error
