"""Several short sentence pairs as one longer example."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TextPair = tuple[str, str]


def join_pairs(pairs: Sequence[TextPair], rng: np.random.Generator, low: int = 1, high: int = 4) -> list[TextPair]:
    """One pass over `pairs` in random order, each used exactly once, joined by spaces.

    Every example takes a number of pairs drawn uniformly from `low` to `high`, both included; the last one takes
    what is left, which may be fewer than `low`. Both sides keep the same order.

    Raises:
        ValueError: not `1 <= low <= high`.
    """
    if not 1 <= low <= high:
        raise ValueError(f"low={low} and high={high}: 1 <= low <= high is needed")
    order = rng.permutation(len(pairs)).tolist()
    joined, start = [], 0
    while start < len(order):
        end = start + int(rng.integers(low, high + 1))
        chosen = [pairs[index] for index in order[start:end]]
        joined.append((" ".join(source for source, _ in chosen), " ".join(target for _, target in chosen)))
        start = end
    return joined
