"""Settings of glibc's memory allocator for XLA on Linux, which make it keep freed memory instead of returning it."""

import os
import sys

# glibc reads these variables only when a process starts, so a running process cannot set them for itself. In order,
# they mean: use a single heap, so that one thread can reuse blocks that another thread freed; create no separate
# mapping for a block below 1 GiB; return nothing below 2 GiB to the kernel; and fetch 128 MiB more memory than
# necessary each time.
SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(2**27),
}


def keep_freed_memory() -> None:
    """Restarts this program with the same arguments, and with variables that make glibc keep freed memory.

    XLA allocates temporaries in each step. By default, glibc fetches large blocks from the kernel and returns them
    every time, so that up to a third of a training step on a CPU is spent on page faults. The function returns at once
    on other platforms, and if any of the variables is set, which is also the case after the restart.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in SETTINGS):
        return
    os.environ.update(SETTINGS)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
