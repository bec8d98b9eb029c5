"""Damaged copies of files: with one wrong bit, or JSON with changed entries."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np


def flip(path: Path, byte: int) -> None:
    """Flips the lowest bit of one byte."""
    changed = bytearray(path.read_bytes())
    changed[byte] ^= 1
    path.write_bytes(changed)


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Replaces a JSON file's object by the result of `change`, which may change it in place."""
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def flips(path: Path, count: int | None = None, end: int | None = None) -> Iterator[int]:
    """Flips `count` different bits of the file, or all of them, one at a time, and restores it; yields the wrong bit.

    Args:
        end: bytes after this one are left unchanged.
    """
    whole = path.read_bytes()
    bits = 8 * (len(whole) if end is None else end)
    try:
        for bit in np.random.default_rng(0).choice(bits, count or bits, replace=False).tolist():
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            yield bit
    finally:
        path.write_bytes(whole)
