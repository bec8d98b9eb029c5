"""Files that are written completely or not at all, and hashes of the settings that determine a stored result."""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from speccascade_jax.core.names import shown
from speccascade_jax.storage import buckets
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.readers import json_object

# Two letters at least, because C:/ is a drive and no URL. One slash is enough, because `Path` merges the two slashes.
_SCHEME = re.compile(r"(\w[\w+.-]+:)/")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def expanded(path: str | os.PathLike[str]) -> Path:
    """Returns a path with `~` or `~name` replaced by the user's home folder, or a `BucketPath` for a `gs://` address.

    Raises:
        ValueError: the value is not a path; it is a URL of another kind, which would become a folder such as `s3:`; or
            there is no such home folder.
    """
    try:
        if buckets.is_bucket(path):
            return buckets.checked(path)
        _check_address(os.fspath(path))
        if scheme := _SCHEME.match(os.fspath(path)):
            url = f"{path}: addresses of {scheme[1]} can't be read or written"
            raise ValueError(f"{url}; copy or mount it here, and give a local path or one in gs://")
        return Path(path).expanduser()
    except TypeError as error:
        raise ValueError(f"{shown(path)} is not a path: give a text or a Path") from error
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}; write the full path") from error


def _check_address(text: str) -> None:
    """Raises ValueError for an address with spaces around it, or without slashes, which would become a local path."""
    if text != text.strip() and _SCHEME.match(text.strip()):
        raise ValueError(f"{text!r} has spaces around it: leave them out")
    if text.startswith(buckets.SCHEME[:3]):
        raise ValueError(f"{text!r} is no address of a bucket: give gs://BUCKET/NAME")


def claim(path: Path, settings: dict[str, Any], remedy: str, checked: Collection[str] = ()) -> None:
    """Writes an output folder's settings to the JSON file `path`, or compares them with the file if it exists.

    Commands call this function before they write into the folder, so that results of different settings never mix.

    Args:
        path: the JSON file in the output folder.
        settings: the command's settings, with values that JSON does not change: lists instead of tuples.
        remedy: the end of the error's sentence.
        checked: names of files that the folder may hold without settings, because the caller checks them itself.

    Raises:
        ValueError: the settings differ from the stored ones (names them), or the folder has no settings but holds other
            data files (names one).
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
    """Returns a hash (32 hex digits) of `parts`, which determine a stored result; it is the same in every process."""
    text = json.dumps(plain(parts), sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def plain(value: Any) -> Any:
    """Returns `value` in a form for JSON: NumPy scalars and arrays as numbers and lists, NaN and infinity as `None`."""
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
    """Writes a file so that it holds the old or the new content at any moment, even if the process is killed.

    On a disk, temporary files that killed writers of the same path left behind are removed first. In a bucket, the
    server writes every object as a whole.

    Args:
        path: the file to write; missing parents are created.
        content: parts of the content, in order.

    Raises:
        OSError: the file cannot be written; names the file, and the remedy for a full disk.
    """
    path = expanded(path)
    if isinstance(path, BucketPath):
        return path.write(b"".join(part.encode() if isinstance(part, str) else part for part in content))
    with naming(path):
        make_folder(path.parent)
        _remove_leftovers(path)
        handle, temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=_TEMPORARY, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                _lock(file.fileno())  # Shows other processes that the writer is alive (`_remove_leftovers`).
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
    """Removes temporary files that killed writers of `path` left behind.

    A live writer holds a lock on its temporary file, so a file that can be locked has no live writer.
    """
    name = re.compile(re.escape(path.name) + r"\.[a-z0-9_]{8}" + re.escape(_TEMPORARY))
    for leftover in [entry for entry in path.parent.iterdir() if name.fullmatch(entry.name)]:
        with contextlib.suppress(OSError):  # Another process may have renamed or removed the file meanwhile.
            handle = os.open(leftover, os.O_RDWR | os.O_NOFOLLOW)
            try:
                # Files of `mkstemp` can be read by their owner only, unlike most other files with such a name. An empty
                # file is kept, because it may belong to a live writer that has not locked it yet.
                entry = os.fstat(handle)
                if entry.st_mode & 0o777 == 0o600 and entry.st_size and _lock(handle):
                    leftover.unlink()
            finally:
                os.close(handle)


def _lock(handle: int) -> bool:
    """Tries to lock an open file without waiting; returns whether this process now holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def make_folder(folder: Path) -> None:
    """Creates a folder and the folders above it, if they do not exist.

    Raises:
        NotADirectoryError: one of these paths is a file; names the file and the remedy.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(place for place in (folder, *folder.parents) if place.exists())
        reason = f"{file} is a file, so nothing can be written below it: name another output, or move it away"
        raise NotADirectoryError(errno.ENOTDIR, reason, str(folder)) from error


def remove_folder(folder: Path) -> None:
    """Deletes a folder and all that it holds, or all objects below a place in a bucket."""
    if isinstance(folder, BucketPath):
        folder.remove_below()
    else:
        shutil.rmtree(folder)


def check_replaceable(path: str | Path, *marks: str, start: str = "") -> None:
    """Checks that a command may write its output to `path`: the file is absent, empty or written by the same command.

    Commands call this function before they measure anything, so that a refusal costs no time.

    Args:
        path: the path of the output.
        marks: texts that every output of the command contains.
        start: regular expression that matches the beginning of every output of the command.

    Raises:
        ValueError: the file is not an output of the command; names the file and the remedy.
    """
    path = expanded(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file, so nothing can be written to it: name another output")
    content = path.read_bytes() if path.exists() else b""
    ours = all(mark.encode() in content for mark in marks) and re.match(start.encode(), content, re.DOTALL)
    if content.strip() and (content.startswith(STORE) or not ours):
        raise ValueError(f"{path} was not made by this command, so it is not replaced: name another output, or move it")


STORE = b'{"key":"'
"""First bytes of every line of a results file, which no other output may replace."""


def rewrite(path: str | Path, content: str | bytes, *marks: str, start: str = "") -> None:
    """Writes a command's output atomically, after checking that it replaces only an older output of the same command.

    Args:
        path: the path of the output.
        content: the output.
        marks: as in `check_replaceable`.
        start: as in `check_replaceable`.

    Raises:
        ValueError: the file is not an output of the command.
        OSError: the file cannot be written.
    """
    check_replaceable(path, *marks, start=start)
    write_atomically(path, content)


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Adds `path`, and the remedy for a full disk, to system errors that are raised inside the `with` block."""
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
