"""Files with one wrong bit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np


def flips(path: Path, count: int) -> Iterator[int]:
    """Flip `count` different bits of the file, one a step, and restore it; yields which bit is wrong."""
    whole = path.read_bytes()
    try:
        for bit in np.random.default_rng(0).choice(8 * len(whole), count, replace=False).tolist():
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            yield bit
    finally:
        path.write_bytes(whole)
