"""The persistent compilation cache, on by default: what XLA has compiled once, later processes read from disk.

A decoding program takes seconds to compile and a tenth of one to read. JAX keeps compiled programs in a folder when
told to; `switch_on` tells it, unless the user has. Programs are found by what they compute, JAX's version, XLA's flags
and the device: a stale one can't be used by mistake. Every file begins with a digest of the rest: a damaged one is
removed before XLA reads it, and made anew. Nothing else is ever removed: the folder may be deleted at any time.

What is read here is executed. So the folder is the user's alone, and one that others can write is not used.
"""

import contextlib
import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax

# JAX has no public way to check what it reads; one that keeps this elsewhere reads without a check
jaxs_own: Any = getattr(getattr(jax, "_src", None), "compilation_cache", None)

VARIABLE = "SPECCASCADE_COMPILATION_CACHE"
_JAX_KEEPS_FROM = 1.0  # seconds of compilation, JAX's default
_DIGEST_SIZE = 32


def switch_on() -> None:
    """Keep compiled programs on disk from now on; called by `methods.build.build`, so by whatever decodes.

    In this order: a folder that JAX was given (`JAX_COMPILATION_CACHE_DIR`, `jax.config`) stays, with JAX's other
    settings for it; what the environment variable `SPECCASCADE_COMPILATION_CACHE` names; `speccascade_jax/xla` in the
    user's cache folder (`XDG_CACHE_HOME`, or `~/.cache`). If the variable is empty or `off`, nothing is kept.

    A folder that can't be written, or that another user owns or can write, is a warning, and nothing is kept.
    """
    set_so_far = jax.config.values
    if set_so_far["jax_compilation_cache_dir"] is not None or not set_so_far["jax_enable_compilation_cache"]:
        return
    try:
        path = folder()
        if path is None:
            return
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # private: whoever writes here decides what we execute
        _refuse_unsafe(path)
    except (OSError, RuntimeError) as error:
        remedy = f"Name a folder in the environment variable {VARIABLE}, or 'off'"
        said = f"compiled programs are not kept ({error}): every start compiles anew. {remedy}"
        warnings.warn(said, stacklevel=3)
        return
    _check_what_is_read(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    if set_so_far["jax_persistent_cache_min_compile_time_secs"] == _JAX_KEEPS_FROM:
        # many small programs cost more together than one that takes a second
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _refuse_unsafe(path: Path) -> None:
    """Refuse a folder that cannot be written, or that others can.

    Raises:
        PermissionError: names the folder and the remedy.
    """
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} is not writable")
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user, who could have any program run in your name")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write {path} and have any program run in your name: chmod go-w {path}")


class _Checked:
    """A cache of files with a digest before each, as `jax._src.compilation_cache_interface.CacheInterface` has it."""

    def __init__(self, path: Path):
        self._path = path

    def get(self, key: str) -> bytes | None:
        """An entry as it was put; `None` where there is none, or a damaged one, which is removed."""
        file = self._file(key)
        with contextlib.suppress(FileNotFoundError):
            content = file.read_bytes()
            if content[:_DIGEST_SIZE] == _digest(content[_DIGEST_SIZE:]):
                return content[_DIGEST_SIZE:]
            file.unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        """Write an entry whole or not at all."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=key[:32], suffix=".tmp", dir=self._path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(value) + value)
            os.replace(temporary, self._file(key))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _file(self, key: str) -> Path:
        return self._path / f"{key}-checked"  # JAX's own files end in -cache and have no digest


def _digest(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=_DIGEST_SIZE).digest()


_given_by_jax: Any = getattr(jaxs_own, "get_file_cache", None)


def _check_what_is_read(path: Path) -> None:
    """Have JAX use `path` by way of `_Checked`; other folders, and one of limited size, as it always does."""
    if _given_by_jax is None:
        return

    def get_file_cache(asked: str) -> Any:
        if asked == str(path) and jax.config.values["jax_compilation_cache_max_size"] == -1:
            return _Checked(path), asked
        return _given_by_jax(asked)

    jaxs_own.get_file_cache = get_file_cache


def folder() -> Path | None:
    """The folder meant, `None` for none; RuntimeError where the user has no home."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return None if named.strip().lower() in ("", "off") else Path(named).expanduser().absolute()
    user = os.environ.get("XDG_CACHE_HOME", "")
    # relative names are not valid there (XDG Base Directory Specification)
    base = Path(user) if os.path.isabs(user) else Path.home() / ".cache"
    return base / "speccascade_jax" / "xla"
