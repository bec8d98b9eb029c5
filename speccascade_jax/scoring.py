"""Scoring a block no wider than it is: the positions that the target is called on follow the batch's longest draft.

Adaptive methods draft short blocks under a large capacity `G`. One program per width, chosen on the device, spares
them the capacity's `G + 1` positions in the target's call and in everything over the vocabulary behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from speccascade_jax.accept import Verdict
from speccascade_jax.models.base import Cache
from speccascade_jax.types import Array, Draft, LawPair, PyTree

WIDTHS = (3, 5, 9)
"""Positions worth a program of their own; the full block's `G + 1` is the last."""


class Judged(NamedTuple):
    """A block that the target has seen and the acceptance has decided on.

    `pair` over `[B, G + 1, V]`, `bad` bool `[B, G + 1]`, `eta` float32 `[B, G + 1]` and `deferred` `[B, G]` as
    `counters.deferrals` gives them; positions beyond the width that was scored are zero.
    """

    target_cache: Cache
    pair: LawPair
    verdict: Verdict
    bad: Array
    eta: Array
    deferred: Array


def widths(block: int) -> tuple[int, ...]:
    """Numbers of positions, rising, of blocks of at most `block` tokens; the last is `block + 1`."""
    return (*(width for width in WIDTHS if width <= block), block + 1)


def by_width(choices: Sequence[int], longest: Array, judge: Callable[[int], Judged]) -> Judged:
    """`judge` at the narrowest of the rising `choices` that holds `longest` drafts (int32 scalar) and the bonus."""
    full = choices[-1]
    if len(choices) == 1:
        return judge(full)

    def padded(width: int) -> Judged:
        found = judge(width)
        verdict = found.verdict._replace(law=_pad(found.verdict.law, full))
        over_block = {name: jax.tree.map(partial(_pad, width=full), getattr(found, name)) for name in _OVER_BLOCK}
        return found._replace(verdict=verdict, deferred=_pad(found.deferred, full - 1), **over_block)

    index = (jnp.asarray(choices) < longest + 1).sum()
    return jax.lax.switch(index, [lambda width=width: padded(width) for width in choices])


_OVER_BLOCK = ("pair", "bad", "eta")


def cut(draft: Draft, width: int) -> Draft:
    """A draft's first `width` positions; its tokens are at most `width − 1` then."""
    positions: dict[str, Any] = {name: getattr(draft, name)[:, :width] for name in ("q", "q_tilde", "bad")}
    return replace(draft, tokens=draft.tokens[:, : width - 1], **positions)


def _pad(values: PyTree, width: int) -> PyTree:
    missing = width - values.shape[1]
    return jnp.pad(values, [(0, 0), (0, missing)] + [(0, 0)] * (values.ndim - 2)) if missing else values
