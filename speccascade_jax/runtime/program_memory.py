"""Release of all compiled JAX programs before this process exceeds the kernel's limit on memory maps."""

import gc
from pathlib import Path

import jax

_MAPS, _LIMIT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_COMPILED = "/jax/core/compile/backend_compile_duration"
SHARE = 0.4
"""Fraction of the kernel's limit on memory maps above which all compiled programs are dropped."""


class _Seen:
    """Numbers of compilations and of memory maps that this process has counted.

    Attributes:
        programs: number of compilations so far.
        counted: value of `programs` at the last count of memory maps; -1 forces a new count.
        maps: number of memory maps at the last count.
        limit: the kernel's limit on memory maps at the last count.
    """

    programs = counted = maps = 0
    limit = 1


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    _Seen.programs += event == _COMPILED


jax.monitoring.register_event_duration_secs_listener(_on_event)


def release_when_crowded(share: float | None = None) -> bool:
    """Drops all compiled programs if this process uses more than `share` (`SHARE`) of its permitted memory maps.

    `methods.build.build` calls this function, so every `decode`, every `stream` and every group of a sweep does. XLA on
    a CPU maps about 550 memory areas per program of the engine (jax 0.10.2). Linux allows 65,530 areas by default; a
    process that exceeds this limit dies of a segmentation fault in the compiler. Dropped programs that are needed again
    are compiled again, or read from the persistent cache. JAX's caches also keep engines alive, which are freed with
    the programs. Counting the maps takes milliseconds, so they are counted only if something was compiled since the
    last count. On systems without `/proc` the function does nothing.

    Returns:
        Whether programs were dropped.
    """
    share = SHARE if share is None else share
    if _Seen.counted == _Seen.programs and _Seen.maps <= share * _Seen.limit:
        return False
    if not (_MAPS.exists() and _LIMIT.exists()):
        return False
    if _Seen.counted != _Seen.programs:
        with _MAPS.open("rb") as maps:
            _Seen.maps = sum(1 for _ in maps)
        _Seen.counted, _Seen.limit = _Seen.programs, int(_LIMIT.read_text())
    if _Seen.maps <= share * _Seen.limit:
        return False
    jax.clear_caches()
    gc.collect()
    _Seen.counted = -1
    return True
