"""Limit on the memory maps of compiled programs: all programs are dropped before the kernel refuses more maps."""

import gc
from pathlib import Path

import jax

_MAPS, _LIMIT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_COMPILED = "/jax/core/compile/backend_compile_duration"
SHARE = 0.4
"""Share of a process's permitted memory maps that may be in use before programs are dropped."""


class _Seen:
    """Counts of programs and memory maps.

    Attributes:
        programs: number of compilations so far.
        counted: `programs` when maps were last counted.
        maps: number of maps at that time.
        limit: number of maps allowed at that time.
    """

    programs = counted = maps = 0
    limit = 1


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    _Seen.programs += event == _COMPILED


jax.monitoring.register_event_duration_secs_listener(_on_event)


def release_when_crowded(share: float | None = None) -> bool:
    """Drops all compiled programs if this process uses more than `share` (`SHARE`) of its permitted memory maps.

    Called whenever programs are made: by `methods.build.build`, so by every `decode` and `stream`, and by every group
    of a sweep. XLA on a CPU maps some 550 areas per program of the engine (jax 0.10.2). Linux allows 65,530 by default,
    and a program that exceeds them dies of a segmentation fault in the compiler. Programs that are needed again are
    compiled again, or read from the persistent cache. The engines that JAX's tables kept alive are dropped with the
    programs. Maps are counted, which takes milliseconds, only if something was compiled since the last count. Does
    nothing on systems without `/proc`.

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
