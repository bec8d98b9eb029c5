"""Errors for checkpoints that cannot be loaded, and for outputs that another process writes; messages have a remedy."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

COPY_AGAIN = "copy the checkpoint again or choose another one"
POINTER = b"version https://git-lfs"
"""First bytes of the small text file (a pointer) that Git LFS puts in place of a large file."""
PULL = "is a pointer of Git LFS, not the file itself: run git lfs pull in its repository, or download it"


class CheckpointError(ValueError):
    """Error for a checkpoint that exists but cannot be used; the message names the path, the arrays and the remedy."""


class LockedError(RuntimeError):
    """Error that is raised if another process is writing the same output."""


class UnreadableError(Exception):
    """Error for one array that cannot be read.

    A reader collects these errors, so that a single `CheckpointError` can name all lost arrays.

    Attributes:
        missing: whether the array is missing rather than damaged.
    """

    def __init__(self, reason: str, *, missing: bool = False):
        super().__init__(reason)
        self.missing = missing


def listing(names: Iterable[str], limit: int = 5) -> str:
    """Returns the first `limit` names in sorted order as a text, followed by the number of omitted names."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def counted(names: Collection[str]) -> str:
    """Returns the number of arrays with its noun, such as "3 arrays", for a message."""
    return f"{len(names)} array{'s' * (len(names) != 1)}"


def incomplete(path: Path, missing: Collection[str], total: int) -> CheckpointError:
    """Returns the error for a checkpoint from which arrays are missing."""
    return CheckpointError(
        f"{path} is incomplete: {len(missing)} of {total} arrays are missing ({listing(missing)}); {COPY_AGAIN}"
    )


def damaged(path: Path, reasons: Mapping[str, str]) -> CheckpointError:
    """Returns the error for a checkpoint whose arrays cannot be read; `reasons` maps an array's name to the reason."""
    lines = "".join(f"\n  {name}: {reasons[name]}" for name in sorted(reasons)[:3])
    return CheckpointError(
        f"{path} is damaged: {counted(reasons)} can't be read ({listing(reasons)}); {COPY_AGAIN}{lines}"
    )


def not_finite(path: Path, reasons: Mapping[str, str]) -> CheckpointError:
    """Returns the error for arrays with NaN or infinite values; `reasons` maps an array's name to the reason."""
    text = "; ".join(f"{name}: {reasons[name]}" for name in sorted(reasons)[:3])
    return CheckpointError(
        f"{path}: values of {counted(reasons)} are not finite ({text}): the file is damaged or training diverged; "
        "choose an earlier checkpoint"
    )


def unreadable(path: Path, failures: Mapping[str, UnreadableError], total: int) -> CheckpointError:
    """Returns the error for arrays that could not be read; if any are missing, it names only the missing arrays."""
    if missing := [name for name, failure in failures.items() if failure.missing]:
        return incomplete(path, missing, total)
    return damaged(path, {name: str(failure) for name, failure in failures.items()})
