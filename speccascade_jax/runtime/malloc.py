"""Settings of the C library's allocator for XLA on Linux: freed blocks are kept instead of returned."""

import os
import sys

# glibc reads these when a process starts, so a running process can't set them for itself: a single heap (blocks freed
# by one thread serve the others), no separate mapping for a block below 1 GiB, nothing below 2 GiB returned to the
# kernel, and more memory fetched 128 MiB at a time.
SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(2**27),
}


def keep_freed_memory() -> None:
    """Restarts this program with the same arguments, with glibc set to keep freed memory for the next step.

    XLA allocates temporaries in each step, and by default glibc fetches large blocks from the kernel and returns them
    every time: on a CPU up to a third of a training step is page faults. Returns at once if any of the variables is set
    (so also after the restart) and on other platforms.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in SETTINGS):
        return
    os.environ.update(SETTINGS)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
