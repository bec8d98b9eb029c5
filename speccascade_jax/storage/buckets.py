"""Objects in Google Cloud Storage, as paths that begin with `gs://`.

A bucket has no folders, no append, no rename and no locks. An object is written as a whole, so readers see its old or
its new content. With every write, the server gives the object a new number, its generation. `create` writes an object
only if it is absent, and `swap` only if its generation is still the expected one. Several writers of one object
coordinate by these two operations alone.

Failed requests are repeated for about a minute; then an error names the object. The credentials are those of
`gcloud auth application-default login`, of a service account's key, or of a machine in Google's cloud.
"""

from __future__ import annotations

import collections
import fnmatch
import functools
import io
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PosixPath, PurePosixPath
from typing import IO, Any, NamedTuple, cast

SCHEME = "gs://"
RETRIES: dict[str, Any] = {"max_retries": 6, "initial_delay": "1s", "max_delay": "16s"}
"""Waiting times of tensorstore before it repeats a failed request: 1, 2, 4, 8, 16 and 16 s, varied at random."""
_PART, _PARTS = 1 << 24, 8
"""Size of a part of an object in bytes, and number of parts that a file object (`_Ranges`) reads at the same time."""
_REQUESTS, _PIECE = 64, 1 << 21
"""Number of byte ranges that `read_into` reads at the same time, and size in bytes of the pieces into which it cuts
longer ranges: at most 128 MB are in flight."""
_LARGEST, _PROBES = 44, 32
"""An object has less than `2**_LARGEST` bytes (Google's limit is 5 TiB). To find its size, `_PROBES` offsets are read
at the same time."""
_LONGEST_NAME = 1024
"""Largest length of an object's name in bytes."""
ABSENT = b"\x02"
"""The generation that tensorstore gives to an absent object."""
_REMEDIES = (
    ("UNAUTHENTICATED|401", "run gcloud auth application-default login, or renew the key of the service account"),
    ("PERMISSION_DENIED|403", "give this account the role Storage Object User for the bucket"),
    ("NOT_FOUND|404", "create the bucket, or name another one"),
    ("Invalid GCS object name", "give a name of at most 1,024 bytes"),
    ("UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED", "the server failed several times; run the same command again"),
)  # fmt: skip
"""Pairs of a regular expression, which matches messages of tensorstore, and the remedy for these errors."""


class Stat(NamedTuple):
    """Size of an object in bytes."""

    st_size: int


class BucketPath(PosixPath):
    """Path of an object, or of the objects below it, in a bucket.

    It is a `Path`, so that code which only reads and writes whole files works on disks and in buckets. An object has no
    file descriptor: code that asks the operating system for the file gets an error that says so.

    Attributes:
        generation: the generation that the object must still have when a part of it is read (set by `pinned`); `None`:
            any.

    Example:
        >>> from speccascade_jax.storage.buckets import BucketPath
        >>> BucketPath("gs://bucket/runs/a.jsonl").with_suffix(".png")
        BucketPath('gs://bucket/runs/a.png')
    """

    generation: bytes | None = None

    def __str__(self) -> str:
        return SCHEME + "/".join(self.parts[1:])

    def __fspath__(self) -> str:
        raise ValueError(f"{self}: this step works on local files only; copy it here, and give a local path")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @property
    def bucket(self) -> str:
        """Name of the bucket."""
        return self.parts[1]

    @property
    def key(self) -> str:
        """Name of the object in its bucket, without a slash at its ends."""
        return "/".join(self.parts[2:])

    def read(self) -> tuple[bytes | None, bytes]:
        """Returns the object's content (`None` if it is absent) and its generation."""
        result = self._ask(_opened(self.bucket).read(self.key))
        return (None, ABSENT) if result.state == "missing" else (result.value, result.stamp.generation)

    def write(self, content: bytes) -> None:
        """Writes the object, whether it exists or not."""
        self._ask(_opened(self.bucket).write(self.key, content))

    def create(self, content: bytes) -> bool:
        """Writes the object if it is absent; returns whether it now has this content."""
        return self.swap(content, ABSENT)

    def swap(self, content: bytes | None, generation: bytes) -> bool:
        """Writes the object, or deletes it if `content` is `None`, but only if its generation is still `generation`.

        Returns:
            Whether the object has this content now. If the server's answer is lost, the request is repeated, and the
            server refuses the repetition because the first request has changed the generation. So after a refusal this
            method compares the object's content with `content`.
        """
        return self.exchange(content, generation) is not None

    def exchange(
        self, content: bytes | None, generation: bytes, is_ours: Callable[[], bool] = lambda: True
    ) -> bytes | None:
        """Does what `swap` does; returns the object's new generation, or `None` if the write was refused.

        Args:
            content: the new content; `None`: the object is deleted.
            generation: the generation that the object must have.
            is_ours: returns whether this process has written the object's present content; called after a refusal if
                that content equals `content`.
        """
        stamp = self._ask(_opened(self.bucket).write(self.key, content, if_equal=generation))
        if stamp.generation:
            return bytes(stamp.generation)
        current, latest = self.read()
        return latest if current == content and is_ours() else None

    def pinned(self) -> BucketPath:
        """Returns a copy of this path; reads of parts through the copy fail once the object is replaced.

        Raises:
            FileNotFoundError: the object is absent.
        """
        pinned = type(self)(self)
        pinned.generation = self._stat().stamp.generation
        return pinned

    def _stat(self) -> Any:
        """Returns the server's answer to a read of zero bytes, which holds the object's state and generation."""
        answer = self._ask(_opened(self.bucket).read(self.key, byte_range=slice(0, 0)))
        return self._same(answer)

    def _same(self, result: Any) -> Any:
        """Returns an answer of the server after checking that the object exists and has the pinned generation.

        Raises:
            FileNotFoundError: the object is absent.
            OSError: the object was replaced.
        """
        if self.generation is not None and result.stamp.generation != self.generation:
            raise OSError(f"{self}: the object was deleted or replaced while it was read; read it again")
        if result.state == "missing":
            raise FileNotFoundError(2, "there is no such object", str(self))
        return result

    def read_range(self, start: int, stop: int) -> bytes:
        """Returns the object's bytes from offset `start` to `stop`, exclusive."""
        return bytes(self._same(self._ask(_opened(self.bucket).read(self.key, byte_range=slice(start, stop)))).value)

    def read_into(self, starts: Sequence[int], buffers: Sequence[memoryview]) -> int:
        """Fills each buffer with the object's bytes from the offset in `starts`; reads several at the same time.

        Returns:
            The number of bytes of all buffers that lie beyond the object's end, and so were not filled.
        """
        parts = [
            (start + begin, buffer[begin : begin + _PIECE])
            for start, buffer in zip(starts, buffers, strict=True)
            for begin in range(0, len(buffer), _PIECE)
        ]
        missing, store = 0, _opened(self.bucket)
        for begin in range(0, len(parts), _REQUESTS):
            group = parts[begin : begin + _REQUESTS]
            spans = [slice(start, start + len(buffer)) for start, buffer in group]
            answers = collections.deque(store.read(self.key, byte_range=span) for span in spans)
            # `popleft` drops each answer once it is copied, so that memory does not hold the whole group twice.
            missing += sum(self._fill(answers.popleft(), buffer) for _, buffer in group)
        return missing

    def _fill(self, answer: Any, buffer: memoryview) -> int:
        """Copies an answer into its buffer; returns the number of bytes that are missing."""
        result = self._same(self._ask(answer))
        buffer[: len(result.value)] = result.value
        return len(buffer) - len(result.value)

    def below(self) -> list[str]:
        """Returns the names of all objects below this path, relative to it, sorted.

        The list omits the empty objects that Google's console creates as folders; their names end in a slash.
        """
        prefix = f"{self.key}/" if self.key else ""
        last = prefix[:-1] + chr(ord("/") + 1) if prefix else ""
        store = _opened(self.bucket)
        names = self._ask(store.list(store.KeyRange(prefix, last)))
        self.is_file()  # raises an error if access is denied; tensorstore would then list no names instead of failing
        return sorted(name.decode()[len(prefix) :] for name in names if not name.endswith(b"/"))

    def read_below(self, names: list[str]) -> list[bytes | None]:
        """Returns the contents of several objects below this path, read at the same time."""
        store = _opened(self.bucket)
        results = [store.read((self / name).key) for name in names]
        values = [(self / name)._ask(result) for name, result in zip(names, results, strict=True)]
        return [None if value.state == "missing" else value.value for value in values]

    def remove_below(self, names: Sequence[str] | None = None) -> None:
        """Deletes the objects below this path with these relative names; with `None`, all objects below it."""
        store = _opened(self.bucket)
        for answer in [store.write((self / name).key, None) for name in (self.below() if names is None else names)]:
            self._ask(answer)

    def _ask(self, answer: Any) -> Any:
        try:
            return answer.result()
        except ValueError as error:
            raise self.failed(error) from error

    def failed(self, error: ValueError) -> OSError:
        """Converts an error of tensorstore to an `OSError` with a message of one line that names object and remedy."""
        return OSError(f"{self}: {_reason(str(error))}")

    def read_bytes(self) -> bytes:
        """Returns the object's content; raises FileNotFoundError if it is absent."""
        content, _ = self.read()
        if content is None:
            raise FileNotFoundError(2, "there is no such object", str(self))
        return content

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        """Returns the object's content as text, in UTF-8 unless another encoding is given."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def open(self, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:  # type: ignore[override]
        """Opens the object for reading.

        Reads the whole object into memory, except with mode "rb" and `buffering` 0, which readers of weights use.
        """
        if mode not in ("r", "rt", "rb"):
            raise ValueError(f"{self}: an object can't be opened with mode {mode!r}; write a local file, and copy it")
        if buffering == 0 and mode == "rb":
            return cast(IO[bytes], _Ranges(self))
        content = io.BytesIO(self.read_bytes())
        return content if mode == "rb" else io.TextIOWrapper(content, kwargs.get("encoding") or "utf-8")

    def write_bytes(self, data: Any) -> int:
        """Writes the object; returns its size."""
        self.write(bytes(data))
        return len(data)

    def write_text(self, data: str, *args: Any, **kwargs: Any) -> int:
        """Writes the object in UTF-8; returns its number of characters."""
        self.write(data.encode())
        return len(data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes the object."""
        if not missing_ok and not self.is_file():
            raise FileNotFoundError(2, "there is no such object", str(self))
        self._ask(_opened(self.bucket).write(self.key, None))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing, because a bucket has no folders."""

    def is_file(self, **kwargs: Any) -> bool:
        """Returns whether there is an object of this name."""
        answer = self._ask(_opened(self.bucket).read(self.key or "-", byte_range=slice(0, 0)))
        return bool(self.key) and answer.state == "value"

    def is_dir(self, **kwargs: Any) -> bool:
        """Returns whether there are objects below this path."""
        return bool(self.below())

    def exists(self, **kwargs: Any) -> bool:
        """Returns whether there is an object of this name, or one below it."""
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        """Returns False, because a bucket has no links."""
        return False

    def stat(self, **kwargs: Any) -> Any:
        """Returns the object's size as `st_size`, without reading it."""
        return Stat(self._size())

    def _size(self) -> int:
        """Returns the object's size in bytes, which tensorstore does not report.

        Reads single bytes at several offsets at once: first at powers of two, then between the last offset that exists
        and the first that does not.
        """
        if not self.is_file():
            raise FileNotFoundError(2, "there is no such object", str(self))
        store, low, high = _opened(self.bucket), 0, 1 << _LARGEST
        places = [1 << power for power in range(_LARGEST)]
        while places:
            answers = [store.read(self.key, byte_range=slice(place - 1, place)) for place in places]
            inside = [self._is_inside(answer) for answer in answers]
            low = max([low, *itertools.compress(places, inside)])
            high = min([high, *itertools.compress(places, (not is_inside for is_inside in inside))])
            step = max(1, (high - low) // _PROBES)
            places = list(range(low + step, high, step))
        return low

    def _is_inside(self, answer: Any) -> bool:
        try:
            return bool(self._ask(answer).value)
        except OSError as error:
            if "OUT_OF_RANGE" in str(error) or "InvalidRange" in str(error):
                return False
            raise

    def iterdir(self) -> Iterator[BucketPath]:  # type: ignore[override]
        """Yields the paths directly below this one, in sorted order."""
        for name in dict.fromkeys(name.split("/")[0] for name in self.below()):
            yield self / name

    def glob(self, pattern: str, **kwargs: Any) -> Iterator[BucketPath]:  # type: ignore[override]
        """Yields the objects below this path whose relative names match a pattern without `**`."""
        parts = pattern.split("/")
        for name in dict.fromkeys("/".join(name.split("/")[: len(parts)]) for name in self.below()):
            if len(names := name.split("/")) == len(parts) and all(map(fnmatch.fnmatchcase, names, parts)):
                yield self / name

    def relative_to(self, other: Any, *more: Any, **kwargs: Any) -> PurePosixPath:  # type: ignore[override]
        """Returns the part of this path below `other`, as an ordinary relative path without a bucket."""
        above = BucketPath(other, *more).parts
        if self.parts[: len(above)] != above:
            raise ValueError(f"{self} is not below {BucketPath(other, *more)}")
        return PurePosixPath(*self.parts[len(above) :])

    def expanduser(self) -> BucketPath:
        """Returns the path itself; `~` has no meaning in a bucket."""
        return self

    def resolve(self, strict: bool = False) -> BucketPath:
        """Returns the path itself, because a bucket has no links."""
        return self

    absolute = resolve


class _Ranges(io.RawIOBase):
    """File object that reads parts of an object at the same time; memory never holds the whole object twice."""

    def __init__(self, path: BucketPath):
        self._path, self._place = path if path.generation else path.pinned(), 0
        self._size = path.stat().st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        stop = min(self._place + len(buffer), self._size, self._place + _PARTS * _PART)
        store, begin = _opened(self._path.bucket), self._place
        parts = [slice(start, min(start + _PART, stop)) for start in range(begin, stop, _PART)]
        answers = [store.read(self._path.key, byte_range=part) for part in parts]
        for part, answer in zip(parts, answers, strict=True):
            buffer[part.start - begin : part.stop - begin] = self._path._same(self._path._ask(answer)).value
        self._place = max(begin, stop)
        return self._place - begin


def kvstore(folder: Path) -> dict[str, Any]:
    """Returns tensorstore's key-value store specification of the files below a folder, on a disk or in a bucket."""
    if isinstance(folder, BucketPath):
        context = {"gcs_request_retries": RETRIES}
        return {"driver": "gcs", "bucket": folder.bucket, "path": f"{folder.key}/", "context": context}
    return {"driver": "file", "path": f"{folder.absolute()}/"}


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path leads into a bucket.

    `gs:/` with one slash counts too, because `Path` merges the two slashes of an address.
    """
    return isinstance(path, BucketPath) or (isinstance(path, str | Path) and bool(re.match("gs:/", str(path))))


def checked(path: str | os.PathLike[str]) -> BucketPath:
    """Returns an address `gs://BUCKET/NAME` as a path, after checking it.

    Raises:
        ValueError: the address names no bucket, leads out of the bucket with `..`, or cannot be the name of an object.
    """
    if (text := str(path)) != text.strip():
        raise ValueError(f"{text!r} has spaces around it: leave them out")
    place = BucketPath(text)
    if len(place.parts) < 2 or not re.fullmatch(r"[a-z0-9][\w.-]{1,220}", place.parts[1]):
        raise ValueError(f"{path} names no bucket: give gs://BUCKET/NAME")
    if {".", ".."} & set(place.parts):
        raise ValueError(f"{path}: . and .. have no meaning in a bucket; write the whole name without them")
    if not place.key.isprintable() or len(place.key.encode(errors="replace")) > _LONGEST_NAME:
        raise ValueError(f"{str(path)!r:.120} can't name an object: give at most {_LONGEST_NAME:,} printable bytes")
    return place


@functools.cache
def _opened(bucket: str) -> Any:
    import tensorstore as ts  # imported here, because it takes 0.1 s, which only programs that use buckets should pay

    context = {"gcs_request_retries": RETRIES}
    return ts.KvStore.open({"driver": "gcs", "bucket": bucket, "context": context}).result()


def _reason(message: str) -> str:
    """Returns the first line of tensorstore's message without the details in brackets, and the remedy if known."""
    plain = message.split(" [")[0].splitlines()[0]
    remedy = next((text for pattern, text in _REMEDIES if re.search(pattern, message)), "")
    return f"{plain}; {remedy}" if remedy else plain
