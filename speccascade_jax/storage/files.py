"""Files that are written completely or not at all, and hashes of the settings that determine a record."""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from speccascade_jax.core.names import shown
from speccascade_jax.storage.readers import json_object

_SCHEME = re.compile(r"(\w[\w+.-]+:)/")  # at least two letters, because C:/ is a drive; Path makes one slash of two
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def expanded(path: str | os.PathLike[str]) -> Path:
    """Expands `~` and `~name` in a path to home folders.

    Raises:
        ValueError: the value is no path, a URL (it would become a folder named `gs:`), or names no home folder.
    """
    try:
        if scheme := _SCHEME.match(os.fspath(path)):
            url = f"{path}: {scheme[1]} is not read or written"
            raise ValueError(f"{url}; copy or mount it here, and give a local path")
        return Path(path).expanduser()
    except TypeError as error:
        raise ValueError(f"{shown(path)} is not a path: give a text or a Path") from error
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}; write the full path") from error


def claim(path: Path, settings: dict[str, Any], remedy: str, checked: Collection[str] = ()) -> None:
    """Writes to `path` (JSON) the settings that its folder is made with; refuses a folder made with other settings.

    Args:
        path: the JSON file that holds the settings.
        settings: values that survive JSON: lists, no tuples.
        remedy: the end of the error's sentence.
        checked: names of files that the caller itself refuses if they are not its own.

    Raises:
        ValueError: names the settings that differ, or files in a folder without settings, which it did not make.
    """
    if path.exists():
        begun = json_object(path, f"the settings of {path.parent} are unknown; {remedy}")
        names = dict.fromkeys([*settings, *begun])
        if changed := [name for name in names if begun.get(name) != settings.get(name)]:
            raise ValueError(f"{path.parent} was started with other values of {', '.join(changed)}: {remedy}")
        return
    kinds = (".json", ".jsonl", ".msgpack", ".npz")
    present = path.parent.iterdir() if path.parent.is_dir() else ()
    if files := sorted({file.name for file in present if file.suffix in kinds} - set(checked)):
        others = f"{files[0]}{' and others' * (len(files) > 1)}"
        raise ValueError(f"{path.parent} holds files that this command did not make ({others}): {remedy}")
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

    A temporary file that a killed writer of the same path left is removed first.

    Args:
        path: the file to write; missing parents are created.
        content: parts of the content, in order.

    Raises:
        OSError: the file cannot be written; names it, and the remedy for a full disk.
    """
    path = expanded(path)
    with naming(path):
        make_folder(path.parent)
        _remove_leftovers(path)
        handle, temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=_TEMPORARY, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                _lock(file.fileno())  # until the file is renamed: it tells a live writer from a killed one
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


_TEMPORARY = ".tmp"


def _remove_leftovers(path: Path) -> None:
    """Removes the temporary files of this path whose writers were killed: their locks are free."""
    name = re.compile(re.escape(path.name) + r"\.[a-z0-9_]{8}" + re.escape(_TEMPORARY))
    for leftover in [entry for entry in path.parent.iterdir() if name.fullmatch(entry.name)]:
        with contextlib.suppress(OSError):  # another writer finished or removed it meanwhile, or the lock is held
            handle = os.open(leftover, os.O_RDWR | os.O_NOFOLLOW)
            try:
                # `mkstemp` makes files for their owner alone, unlike most files of a user; an empty file may belong to
                # a writer that has not locked it yet
                entry = os.fstat(handle)
                if entry.st_mode & 0o777 == 0o600 and entry.st_size and _lock(handle):
                    leftover.unlink()
            finally:
                os.close(handle)


def _lock(handle: int) -> bool:
    """Locks an open file if its file system has locks; returns whether this process holds the lock now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def make_folder(folder: Path) -> None:
    """Makes a folder and the folders above it.

    Raises:
        NotADirectoryError: a file has the name of one of them; names the file and the remedy.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(place for place in (folder, *folder.parents) if place.exists())
        reason = f"{file} is a file, so nothing can be written below it: name another output, or move it away"
        raise NotADirectoryError(errno.ENOTDIR, reason, str(folder)) from error


def check_replaceable(path: str | Path, *marks: str, start: str = "") -> None:
    """Refuses to overwrite a file that this command did not make; commands call it before they measure anything.

    Args:
        path: the path of the report.
        marks: texts that every file of the command contains.
        start: a regular expression that the beginning of every such file matches.

    Raises:
        ValueError: names the file and the remedy.
    """
    path = expanded(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file, so nothing can be written to it: name another output")
    content = path.read_bytes() if path.exists() else b""
    ours = all(mark.encode() in content for mark in marks) and re.match(start.encode(), content, re.DOTALL)
    if content.strip() and (content.startswith(STORE) or not ours):
        raise ValueError(f"{path} was not made by this command, so it is not replaced: name another output, or move it")


STORE = b'{"key":"'
"""Beginning of every line of a store of results, which no other output replaces."""


def rewrite(path: str | Path, content: str | bytes, *marks: str, start: str = "") -> None:
    """Writes an output of a command atomically; it replaces only an older output of the same command.

    Raises:
        ValueError, OSError: as `check_replaceable` (with the same arguments) and `write_atomically`.
    """
    check_replaceable(path, *marks, start=start)
    write_atomically(path, content)


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
