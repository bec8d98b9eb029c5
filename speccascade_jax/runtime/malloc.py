"""How the C library hands memory to XLA on Linux: freed blocks are kept instead of returned."""

import os
import sys

# Read by glibc when a process starts, which is why one that runs already can't set them for itself: a single heap
# (blocks freed by one thread serve the others), no block below 1 GiB mapped alone, nothing below 2 GiB given back,
# and more fetched 128 MiB at a time.
SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(2**27),
}


def keep_freed_memory() -> None:
    """Start this program anew, same arguments, with glibc told to keep what was freed for the next step.

    XLA allocates a step's temporaries in each step, and by default glibc fetches large blocks from the kernel and
    gives them back every time: on a CPU up to a third of a training step is page faults. Returns at once where
    any of the variables is set (so the second time too) and on other platforms.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in SETTINGS):
        return
    os.environ.update(SETTINGS)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
