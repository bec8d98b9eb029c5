"""What a call allocates."""

import tracemalloc
from collections.abc import Callable


def peak(call: Callable[[], object], turns: int = 3) -> int:
    """Bytes that Python's allocator held for `call` at once: the least of some turns.

    Other threads' allocations count too, and what is imported late is so once: neither happens every time.
    """
    return min(_peak(call) for _ in range(turns))


def _peak(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
