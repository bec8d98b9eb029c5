"""What a checkpoint that can't be loaded says: the path, the arrays, the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

COPY_AGAIN = "copy the checkpoint again or choose another one"


class CheckpointError(ValueError):
    """A checkpoint is there but can't be used; the message names the path, the arrays and the remedy."""


def listing(names: Iterable[str], limit: int = 5) -> str:
    """The first `limit` names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def incomplete(path: Path, missing: Iterable[str], total: int) -> CheckpointError:
    """Arrays that the checkpoint should hold are not there."""
    missing = list(missing)
    return CheckpointError(
        f"{path} is incomplete: {len(missing)} of {total} arrays are missing ({listing(missing)}); {COPY_AGAIN}"
    )


def damaged(path: Path, reasons: Mapping[str, str]) -> CheckpointError:
    """Arrays are there but can't be read; `reasons` by array name."""
    lines = "".join(f"\n  {name}: {reasons[name]}" for name in sorted(reasons)[:3])
    return CheckpointError(
        f"{path} is damaged: {len(reasons)} arrays can't be read ({listing(reasons)}); {COPY_AGAIN}{lines}"
    )
