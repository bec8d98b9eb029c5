"""Files that are written completely or not at all, and hashes of the settings that determine a record."""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speccascade_jax.storage.readers import json_object

_SCHEME = re.compile(r"(\w[\w+.-]+:)/")  # at least two letters, because C:/ is a drive; Path makes one slash of two
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def expanded(path: str | os.PathLike[str]) -> Path:
    """Expands `~` and `~name` in a path to home folders.

    Raises:
        ValueError: there is no such home folder, or the path is a URL, which would become a folder named `gs:`.
    """
    if scheme := _SCHEME.match(os.fspath(path)):
        raise ValueError(f"{path}: {scheme[1]} is not read or written; copy or mount it here, and give a local path")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}; write the full path") from error


def claim(path: Path, settings: dict[str, Any], remedy: str) -> None:
    """Writes to `path` (JSON) the settings that its folder is made with; refuses a folder made with other settings.

    Args:
        path: the JSON file that holds the settings.
        settings: values that survive JSON: lists, no tuples.
        remedy: the end of the error's sentence.

    Raises:
        ValueError: names the settings that differ.
    """
    if path.exists():
        begun = json_object(path, f"the settings of {path.parent} are unknown; {remedy}")
        names = dict.fromkeys([*settings, *begun])
        if changed := [name for name in names if begun.get(name) != settings.get(name)]:
            raise ValueError(f"{path.parent} was started with other values of {', '.join(changed)}: {remedy}")
    else:
        write_atomically(path, json.dumps(settings, indent=1).encode())


def point_key(**parts: Any) -> str:
    """Hashes everything that determines a record (32 hex digits); equal parts give equal keys in every process."""
    text = json.dumps(plain(parts), sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def plain(value: Any) -> Any:
    """Converts `value` for JSON: NumPy scalars and arrays become numbers and lists, NaN and infinity `None`."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_atomically(path: str | Path, *content: str | bytes) -> None:
    """Writes a file so that it holds the old or the new content, never a part, at any moment and after a kill.

    Args:
        path: the file to write; missing parents are created.
        content: parts of the content, in order.

    Raises:
        OSError: the file cannot be written; names it, and the remedy for a full disk.
    """
    path = expanded(path)
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                for part in content:
                    file.write(part.encode() if isinstance(part, str) else part)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def check_replaceable(path: str | Path, *marks: str) -> None:
    """Checks, before anything is measured, that a report would not overwrite a file of another kind.

    Args:
        path: the report's path.
        marks: texts that every such report contains.

    Raises:
        ValueError: names the file and the remedy.
    """
    path = expanded(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file, so no report can be written to it: name another output")
    content = path.read_bytes() if path.exists() else b""
    if content.strip() and not all(mark.encode() in content for mark in marks):
        raise ValueError(
            f"{path} is not a report of an earlier run, so it is not replaced: name another output, or move it"
        )


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Adds `path`, and the remedy for a full disk, to system errors raised inside the block."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        full = "; the previous content is unchanged: free some space, or write elsewhere"
        raise OSError(error.errno, f"{error.strerror}{full * (error.errno in _FULL)}", str(path)) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
