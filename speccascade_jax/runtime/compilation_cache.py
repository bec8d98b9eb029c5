"""The persistent compilation cache, on by default: what XLA has compiled once, later processes read from disk.

A decoding program takes seconds to compile and a tenth of one to read. JAX keeps compiled programs in a folder when
told to; `switch_on` tells it, unless the user has. Programs are found by what they compute, JAX's version, XLA's flags
and the device: a stale one can't be used by mistake, a damaged one is a warning and a compilation. Nothing is ever
removed: the folder may be deleted at any time.
"""

import os
import warnings
from pathlib import Path

import jax

VARIABLE = "SPECCASCADE_COMPILATION_CACHE"
_JAX_KEEPS_FROM = 1.0  # seconds of compilation, JAX's default


def switch_on() -> None:
    """Keep compiled programs on disk from now on; called by `assemble`, so by whatever decodes.

    In this order: a folder that JAX was given (`JAX_COMPILATION_CACHE_DIR`, `jax.config`) stays, with JAX's other
    settings for it; what the environment variable `SPECCASCADE_COMPILATION_CACHE` names; `speccascade_jax/xla` in the
    user's cache folder (`XDG_CACHE_HOME`, or `~/.cache`). If the variable is empty or `off`, nothing is kept.

    A folder that can't be written is a warning, and nothing is kept.
    """
    set_so_far = jax.config.values
    if set_so_far["jax_compilation_cache_dir"] is not None or not set_so_far["jax_enable_compilation_cache"]:
        return
    try:
        path = _path()
        if path is None:
            return
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # private: whoever writes here decides what we execute
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"{path} is not writable")
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"compiled programs are not kept ({error}): every start compiles anew. Name a folder in the environment "
            f"variable {VARIABLE}, or 'off'",
            stacklevel=3,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    if set_so_far["jax_persistent_cache_min_compile_time_secs"] == _JAX_KEEPS_FROM:
        # many small programs cost more together than one that takes a second
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _path() -> Path | None:
    """The folder meant, `None` for none; RuntimeError where the user has no home."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return None if named.strip().lower() in ("", "off") else Path(named).expanduser().absolute()
    user = os.environ.get("XDG_CACHE_HOME", "")
    # relative names are not valid there (XDG Base Directory Specification)
    base = Path(user) if os.path.isabs(user) else Path.home() / ".cache"
    return base / "speccascade_jax" / "xla"
