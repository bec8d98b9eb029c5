"""Scoring a block no wider than it is: the positions that the target is called on follow the batch's longest draft.

Adaptive methods draft short blocks under a large capacity `G`. A program per width, chosen on the device, spares
them the capacity's `G + 1` positions in the target's call and in everything over the vocabulary behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from speccascade_jax.core.types import Array, Cache, Draft, LawPair, PyTree, Round
from speccascade_jax.rules.verification import Verdict

T = TypeVar("T")

WIDTHS = (3, 5, 9, 13)
"""Positions worth a program of their own; the full block's `G + 1` is the last."""


class Judged(NamedTuple):
    """A block that the target has seen and the acceptance has decided on.

    `pair` over `[B, G + 1, V]`, `bad` bool `[B, G + 1]`, `eta` float32 `[B, G + 1]` and `deferred` `[B, G]` as
    `Verifier.deferred` gives them; `features` `[B, G + 1, D]` and `hidden` `[B, G + 1, L, D]` where the drafter reads
    them. Positions beyond the width that was scored are zero.
    """

    target_cache: Cache
    pair: LawPair
    verdict: Verdict
    bad: Array
    eta: Array
    deferred: Array
    features: Array | None
    hidden: Array | None = None


def widths(block: int) -> tuple[int, ...]:
    """Numbers of positions, rising, of blocks of at most `block` tokens; the last is `block + 1`."""
    return (*(width for width in WIDTHS if width <= block), block + 1)


def by_width(
    choices: Sequence[int],
    longest: Array,
    judge: Callable[[int, Cache], Judged],
    cache: Cache,
    needed: Array | None = None,
) -> Judged:
    """`judge` at the narrowest of the rising `choices` that holds `longest` drafts (int32 scalar) and the bonus.

    Where it is not `needed` (bool scalar) nothing is called and everything but the cache is zero. Each width is a loop
    of at most one turn: XLA passes a cache through a loop in place, but into and out of a conditional by copies.
    """
    full = choices[-1]
    if len(choices) == 1 and needed is None:
        return judge(full, cache)
    shapes = jax.eval_shape(lambda cache: judge(full, cache), cache)
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes._replace(target_cache=()))
    chosen = (jnp.asarray(choices) < longest + 1).sum(dtype=jnp.int32)
    chosen = chosen if needed is None else jnp.where(needed, chosen, -1)
    judged = blank._replace(target_cache=cache)
    for place, width in enumerate(choices):
        judged = at_most_once(chosen == place, partial(_judge_padded, judge, width, full), judged)
    return judged


def at_most_once(wanted: Array, turn: Callable[[T], T], held: T) -> T:
    """`turn(held)` where it is wanted (bool scalar), else `held`, by a loop of one turn or none.

    XLA moves what does not hang on `held` out of the loop, and then computes it wanted or not: tie it to `held`.
    """

    def body(carry: tuple[Array, T]) -> tuple[Array, T]:
        return jnp.zeros((), bool), turn(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], body, (wanted, held))[1]


def _judge_padded(judge: Callable[[int, Cache], Judged], width: int, full: int, held: Judged) -> Judged:
    found = judge(width, held.target_cache)
    verdict = found.verdict._replace(law=_pad(found.verdict.law, full))
    over_block = {name: jax.tree.map(partial(_pad, width=full), getattr(found, name)) for name in _OVER_BLOCK}
    return found._replace(verdict=verdict, deferred=_pad(found.deferred, full - 1), **over_block)


_OVER_BLOCK = ("pair", "bad", "eta", "features", "hidden")


def cut(draft: Draft, width: int) -> Draft:
    """A draft's first `width` positions; its tokens are at most `width − 1` then."""
    names = ("q", "q_tilde", "bad", "logs", "stop")
    positions: dict[str, Any] = {name: jax.tree.map(lambda x: x[:, :width], getattr(draft, name)) for name in names}
    return replace(draft, tokens=draft.tokens[:, : width - 1], **positions)


def _pad(values: PyTree, width: int) -> PyTree:
    missing = width - values.shape[1]
    return jnp.pad(values, [(0, 0), (0, missing)] + [(0, 0)] * (values.ndim - 2)) if missing else values


def kept_whole(verdict: Verdict, draft: Draft, as_it_is: Array) -> Verdict:
    """The verdict with the blocks of rows `as_it_is` kept whole: their tokens' law is what they were drawn from."""
    return verdict._replace(
        num_kept=jnp.where(as_it_is, draft.length, verdict.num_kept),
        rejected=verdict.rejected & ~as_it_is,
        law=jnp.where(as_it_is[:, None, None], draft.q_tilde, verdict.law),
    )


def without_failed(turn: Round, failed: Array) -> Round:
    """The round without the rows whose logits failed: they commit nothing and are not counted."""
    return replace(
        turn,
        active=turn.active & ~failed,
        num_kept=jnp.where(failed, 0, turn.num_kept),
        rejected=turn.rejected & ~failed,
        examined=jnp.where(failed, 0, turn.examined),
        num_new=jnp.where(failed, 0, turn.num_new),
    )
