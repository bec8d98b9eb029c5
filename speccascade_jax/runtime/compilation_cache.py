"""JAX's persistent compilation cache, on by default, from which later processes read compiled programs.

A decoding program takes seconds to compile and a tenth of a second to read. JAX stores compiled programs in a folder if
it is configured to do so; `switch_on` configures JAX unless the user already has. A program is identified by its
computation, JAX's version, XLA's flags and the device, so an outdated program cannot be used by mistake. Every file
begins with a digest of its remaining content: a damaged file is deleted before XLA reads it, and written again later.
No other file is ever deleted. Users may delete the folder at any time.

Programs that are read from the folder are executed. For this reason the folder must belong to the user alone; a folder
that others can write to is not used. The folder may be in a bucket (`gs://…`), which outlives the machine; there, the
bucket's own permissions decide who can write.
"""

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from speccascade_jax.runtime import progress
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.files import expanded

# JAX has no public way to verify the files that it reads, so a private module is patched. If a version of JAX has no
# module of this name, its files are read unverified.
jaxs_own: Any = getattr(getattr(jax, "_src", None), "compilation_cache", None)

VARIABLE = "SPECCASCADE_COMPILATION_CACHE"
_JAX_KEEPS_FROM = 1.0  # seconds: by default, JAX stores only programs that took at least this long to compile
_DIGEST_SIZE = 32


def switch_on() -> None:
    """Makes JAX store compiled programs on disk; everything that decodes calls it, for example `methods.build.build`.

    The folder is the first of these that is set:

    * the folder that the user has given to JAX (`JAX_COMPILATION_CACHE_DIR`, `jax.config`); JAX's settings do not
      change;
    * the folder, or the place in a bucket, in the environment variable `SPECCASCADE_COMPILATION_CACHE`; with an empty
      value or `off`, programs are not stored;
    * `speccascade_jax/xla` in the user's cache folder (`XDG_CACHE_HOME`, or `~/.cache`).

    If the folder cannot be written, or another user owns it or can write to it, programs are not stored, and a warning
    says so.
    """
    _tell_compiling()
    set_so_far = jax.config.values
    if set_so_far["jax_compilation_cache_dir"] is not None or not set_so_far["jax_enable_compilation_cache"]:
        return
    try:
        path = folder()
        if path is None:
            return
        # private, because whoever can write to this folder determines the code that we execute
        if not isinstance(path, BucketPath):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_unsafe(path)
    except (OSError, RuntimeError, ValueError) as error:
        remedy = f"Set the environment variable {VARIABLE} to a folder, or to 'off'"
        said = f"compiled programs are not cached ({error}), so every start compiles them again. {remedy}"
        warnings.warn(said, stacklevel=3)
        return
    if isinstance(path, BucketPath):  # XLA would look for its own caches, such as autotuning results, below this path
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    _check_what_is_read(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    if set_so_far["jax_persistent_cache_min_compile_time_secs"] == _JAX_KEEPS_FROM:
        # many small programs together take longer to compile than one large program
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@functools.cache
def _tell_compiling() -> None:
    """Makes lines of progress (`progress`) say when JAX compiles, and leaves that time out of their estimates."""

    def begins(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/compile_requests_use_cache":  # the first event of a compilation
            progress.compiling(True)

    def ends(event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):  # of tracing, lowering and compiling
            progress.prepared(duration_secs, time.monotonic())
        if event == "/jax/core/compile/backend_compile_duration":
            progress.compiling(False)

    jax.monitoring.register_event_listener(begins)
    jax.monitoring.register_event_duration_secs_listener(ends)


def _refuse_unsafe(path: Path) -> None:
    """Raises PermissionError for a folder that this process cannot write to, or that other users can write to.

    Raises:
        PermissionError: the message names the folder and the remedy.
    """
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} is not writable")
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user, who could run any program as you")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users can write to {path} and so run any program as you: chmod go-w {path}")


class _Checked:
    """A cache of compiled programs whose files begin with a digest; implements JAX's `CacheInterface`.

    After one failed request to a bucket the cache stays unused, because every further request would be retried for a
    minute.
    """

    def __init__(self, path: Path):
        self._path = path
        self._failed = False

    def get(self, key: str) -> bytes | None:
        """Returns an entry, or `None` if the file is missing or damaged; a damaged file is deleted."""
        if self._failed:
            return None
        file = self._file(key)
        with self._until_it_fails(), contextlib.suppress(FileNotFoundError):
            content = file.read_bytes()
            if content[:_DIGEST_SIZE] == _digest(content[_DIGEST_SIZE:]):
                return content[_DIGEST_SIZE:]
            file.unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        """Writes an entry after its digest to a file, atomically."""
        if isinstance(self._path, BucketPath):
            with self._until_it_fails():
                if not self._failed:
                    self._file(key).write_bytes(_digest(value) + value)
            return
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=key[:32], suffix=".tmp", dir=self._path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(value) + value)
            os.replace(temporary, self._file(key))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _until_it_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not isinstance(self._path, BucketPath) or isinstance(error, FileNotFoundError):
                raise
            self._failed = True
            warnings.warn(f"compiled programs are not cached from here on ({error})", stacklevel=4)

    def _file(self, key: str) -> Path:
        return self._path / f"{key}-checked"  # JAX's own files end in -cache and contain no digest


def _digest(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=_DIGEST_SIZE).digest()


_given_by_jax: Any = getattr(jaxs_own, "get_file_cache", None)


def _check_what_is_read(path: Path) -> None:
    """Makes JAX read and write the folder `path` through `_Checked`, unless the cache has a maximum size.

    JAX handles other folders as before.
    """
    if _given_by_jax is None:
        return

    def get_file_cache(asked: str) -> Any:
        if asked == str(path) and jax.config.values["jax_compilation_cache_max_size"] == -1:
            return _Checked(path), asked
        return _given_by_jax(asked)

    jaxs_own.get_file_cache = get_file_cache


def folder() -> Path | None:
    """Returns the folder for compiled programs, or `None` if the environment variable switches the cache off.

    Raises:
        RuntimeError: the user has no home folder.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return None if named.strip().lower() in ("", "off") else expanded(named).absolute()
    user = os.environ.get("XDG_CACHE_HOME", "")
    # XDG_CACHE_HOME must be an absolute path (XDG Base Directory Specification)
    base = Path(user) if os.path.isabs(user) else Path.home() / ".cache"
    return base / "speccascade_jax" / "xla"
