"""Memory that a call allocates, and the memory and the reads of this process as Linux counts them."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path


def peak(call: Callable[[], object], turns: int = 3) -> int:
    """Returns the peak number of bytes that Python's allocator held for `call`, the smallest peak of `turns` calls.

    The smallest one is taken, because allocations of other threads and of late imports disturb only some calls.
    """
    return min(_peak(call) for _ in range(turns))


def _peak(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def bytes_read() -> int:
    """Returns the number of bytes that this process has read from files."""
    return _entry("io", "rchar")


def resident(kind: str = "VmRSS") -> int:
    """Returns an entry of /proc/self/status in bytes: VmRSS is memory now, VmHWM its peak, RssAnon without files."""
    return 1024 * _entry("status", kind)


def _entry(file: str, name: str) -> int:
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
