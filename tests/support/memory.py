"""Memory that a call allocates."""

import tracemalloc
from collections.abc import Callable


def peak(call: Callable[[], object], turns: int = 3) -> int:
    """Returns the largest number of bytes that Python's allocator held for `call`: the least of some repetitions.

    Allocations of other threads and of late imports count too, but do not happen in every repetition.
    """
    return min(_peak(call) for _ in range(turns))


def _peak(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
