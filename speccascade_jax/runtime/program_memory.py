"""Compiled programs cost address space: giving them back before the kernel refuses more."""

import gc
from pathlib import Path

import jax

_MAPS, _LIMIT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def release_when_crowded(share: float = 0.4) -> bool:
    """Drop all compiled programs if this process uses more than `share` of the memory maps it may have.

    XLA on a CPU maps some 550 areas per program of the engine (jax 0.10.2); Linux allows 65,530 by default, and the
    program that exceeds them dies of a segmentation fault in the compiler. What is needed again is compiled again, or
    read from the persistent cache. Does nothing on systems without `/proc`.

    Returns:
        Whether programs were dropped.
    """
    if not (_MAPS.exists() and _LIMIT.exists()):
        return False
    with _MAPS.open("rb") as maps:
        used = sum(1 for _ in maps)
    if used <= share * int(_LIMIT.read_text()):
        return False
    jax.clear_caches()
    gc.collect()
    return True
