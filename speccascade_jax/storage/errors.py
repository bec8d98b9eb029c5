"""Errors of checkpoints that cannot be loaded; their messages name the path, the arrays and the remedy."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

COPY_AGAIN = "copy the checkpoint again or choose another one"
POINTER = b"version https://git-lfs"
"""The beginning of the small text that Git LFS leaves in place of a large file."""
PULL = "is a pointer of Git LFS, not the file itself: run git lfs pull in its repository, or download it"


class CheckpointError(ValueError):
    """Error of a checkpoint that exists but cannot be used; the message names the path, the arrays and the remedy."""


class UnreadableError(Exception):
    """Error of one array that cannot be read; a reader collects them, so that one error names all lost arrays.

    Attributes:
        missing: whether the array is missing rather than damaged.
    """

    def __init__(self, reason: str, *, missing: bool = False):
        super().__init__(reason)
        self.missing = missing


def listing(names: Iterable[str], limit: int = 5) -> str:
    """Returns the first `limit` names in order, and the number of the rest."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def counted(names: Collection[str]) -> str:
    """Returns the number of arrays with its noun for a message, such as "3 arrays"."""
    return f"{len(names)} array{'s' * (len(names) != 1)}"


def incomplete(path: Path, missing: Collection[str], total: int) -> CheckpointError:
    """Returns the error for arrays that are missing from the checkpoint."""
    return CheckpointError(
        f"{path} is incomplete: {len(missing)} of {total} arrays are missing ({listing(missing)}); {COPY_AGAIN}"
    )


def damaged(path: Path, reasons: Mapping[str, str]) -> CheckpointError:
    """Returns the error for arrays that exist but cannot be read; `reasons` by array name."""
    lines = "".join(f"\n  {name}: {reasons[name]}" for name in sorted(reasons)[:3])
    return CheckpointError(
        f"{path} is damaged: {counted(reasons)} can't be read ({listing(reasons)}); {COPY_AGAIN}{lines}"
    )


def not_finite(path: Path, reasons: Mapping[str, str]) -> CheckpointError:
    """Returns the error for arrays with NaN or infinity; `reasons` by array name."""
    text = "; ".join(f"{name}: {reasons[name]}" for name in sorted(reasons)[:3])
    return CheckpointError(
        f"{path}: values of {counted(reasons)} are not finite ({text}): the file is damaged or training diverged; "
        "choose an earlier checkpoint"
    )


def unreadable(path: Path, failures: Mapping[str, UnreadableError], total: int) -> CheckpointError:
    """Returns the error for arrays that could not be read; if some are missing, it names those."""
    if missing := [name for name, failure in failures.items() if failure.missing]:
        return incomplete(path, missing, total)
    return damaged(path, {name: str(failure) for name, failure in failures.items()})
