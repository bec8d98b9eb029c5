"""What a checkpoint that can't be loaded says: the path, the arrays, the remedy."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

COPY_AGAIN = "copy the checkpoint again or choose another one"


class CheckpointError(ValueError):
    """A checkpoint is there but can't be used; the message names the path, the arrays and the remedy."""


class UnreadableError(Exception):
    """One array can't be read; its reader gathers these, so that one error names all that are lost.

    Attributes:
        missing: the array is not there, rather than damaged.
    """

    def __init__(self, reason: str, *, missing: bool = False):
        super().__init__(reason)
        self.missing = missing


def listing(names: Iterable[str], limit: int = 5) -> str:
    """The first `limit` names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def counted(names: Collection[str]) -> str:
    """How many arrays, as a message says it."""
    return f"{len(names)} array{'s' * (len(names) != 1)}"


def incomplete(path: Path, missing: Collection[str], total: int) -> CheckpointError:
    """Arrays that the checkpoint should hold are not there."""
    return CheckpointError(
        f"{path} is incomplete: {len(missing)} of {total} arrays are missing ({listing(missing)}); {COPY_AGAIN}"
    )


def damaged(path: Path, reasons: Mapping[str, str]) -> CheckpointError:
    """Arrays are there but can't be read; `reasons` by array name."""
    lines = "".join(f"\n  {name}: {reasons[name]}" for name in sorted(reasons)[:3])
    return CheckpointError(
        f"{path} is damaged: {counted(reasons)} can't be read ({listing(reasons)}); {COPY_AGAIN}{lines}"
    )


def not_finite(path: Path, reasons: Mapping[str, str]) -> CheckpointError:
    """Arrays hold NaN or infinity; `reasons` by array name."""
    text = "; ".join(f"{name}: {reasons[name]}" for name in sorted(reasons)[:3])
    return CheckpointError(
        f"{path}: values of {counted(reasons)} are not finite ({text}): the file is damaged or training diverged; "
        "choose an earlier checkpoint"
    )


def unreadable(path: Path, failures: Mapping[str, UnreadableError], total: int) -> CheckpointError:
    """The error for arrays that couldn't be read; where some are missing, those are named."""
    if missing := [name for name, failure in failures.items() if failure.missing]:
        return incomplete(path, missing, total)
    return damaged(path, {name: str(failure) for name, failure in failures.items()})
