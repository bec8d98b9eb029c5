"""How an engine calls its target, and what it makes of an answer before it commits.

Reading: what a drafter reads of the target, its summary of the prompt and its hidden states.

Trees: all drafts are scored in one call; after the verdict the path that was kept stands as a block of its tokens.

Widths: the positions that the target is called on follow the batch's longest draft. Adaptive methods draft short blocks
under a large capacity `G`. A program per width, chosen on the device, spares them the capacity's `G + 1` positions in
the target's call and in everything over the vocabulary behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from speccascade_jax.core.protocols import LanguageModel, LayeredModel, PromptSummary
from speccascade_jax.core.trees import Tree, along
from speccascade_jax.core.types import Array, Cache, Draft, LawPair, LMOutput, Params, Prompt, PyTree, Round
from speccascade_jax.rules.verification import Verdict

T = TypeVar("T")

WIDTHS = (3, 5, 9, 13)
"""Positions worth a program of their own; the full block's `G + 1` is the last."""


def check_layers(target: LanguageModel, layers: tuple[int, ...]) -> None:
    """Refuses a drafter that reads layers of a target that cannot give them, with a ValueError."""
    if layers and not isinstance(target, LayeredModel):
        kind = type(target).__name__
        raise ValueError(f"the drafter reads layers {layers} of the target, but {kind} has no extend_layers")


def prefilled(
    target: LanguageModel, params: Params, prompt: Prompt, slots: int, max_rollback: int | None, layers: tuple[int, ...]
) -> tuple[Cache, Array | None]:
    """Returns the target's cache, and its states `[B, P, L, D]` along the prompt if there are `layers` to read."""
    if not layers:  # the plain method: models that drafters never read need not have the other
        return target.prefill(params, prompt, slots, max_rollback), None
    assert isinstance(target, LayeredModel)
    return target.prefill_layers(params, prompt, slots, layers, max_rollback)


def prompt_features(target: LanguageModel, cache: Cache) -> Array:
    """Returns float `[B, D]`, what the target's prefill made of the prompt.

    Raises:
        ValueError: a model that says nothing of it.
    """
    if not isinstance(target, PromptSummary):
        raise ValueError(f"the drafter reads the target's features, but {type(target).__name__} has no prompt_features")
    return target.prompt_features(cache)


# --- trees


class Scored(NamedTuple):
    """The first `W` positions of a block after the target's call.

    Attributes:
        pair: the distributions `[B, W, V]`; draft: the block; bad: bool `[B, W]`, where the logits are not finite.
        features: `[B, W, D]` and hidden: `[B, W, L, D]`, the target's states, each `None` unless the drafter reads it.
        cache: the target's.
    """

    pair: LawPair
    draft: Draft
    bad: Array
    features: Array | None
    hidden: Array | None
    cache: Cache


def extended(
    target: Any, tree: Tree | None, params: Params, cache: Cache, tokens: Array, layers: tuple[int, ...] = ()
) -> tuple[LMOutput, Cache]:
    """Calls the target on a block, or on all of a tree's entries; reads its states after `layers`."""
    branch = None if tree is None else tree.branch(0, tree.size + 1)  # entry 0 is the pending token, the root
    scored: tuple[LMOutput, Cache]
    if layers:
        scored = target.extend_layers(params, cache, tokens, layers, branch)
    elif branch is None:
        scored = target.extend(params, cache, tokens)
    else:
        scored = target.extend_branch(params, cache, tokens, branch)
    return scored


def straightened(target: Any, tree: Tree, start: Array, scored: Scored, verdict: Verdict) -> tuple[Scored, Verdict]:
    """What was scored of a tree and the verdict, along the path that was kept; the cache with that path alone.

    Args:
        target: a `BranchingModel`; start: int32 `[B]`, where the pending token lies in its cache.
    """
    assert verdict.path is not None
    path = verdict.path
    straight = Scored(
        pair=jax.tree.map(lambda each: along(each, path), scored.pair),
        draft=straight_draft(scored.draft, verdict, tree),
        bad=jnp.take_along_axis(scored.bad, path, axis=1),
        features=None if scored.features is None else along(scored.features, path),
        hidden=None if scored.hidden is None else along(scored.hidden, path),
        # before any rollback: a length alone cannot drop entries that lie between those of the path
        cache=target.keep(scored.cache, start, path[:, : tree.depth + 1]),
    )
    return straight, verdict._replace(law=along(verdict.law, path))


def straight_draft(draft: Draft, verdict: Verdict, tree: Tree) -> Draft:
    """The path's tokens, and behind them the first of the siblings that were all rejected; `length` counts both."""
    assert verdict.path is not None
    kept, path = verdict.num_kept, verdict.path
    # the deepest kept entry: its children are what was tried next, and its first one stands for all of them
    last = jnp.take_along_axis(path, kept[:, None], axis=1)[:, 0]
    tried = jnp.asarray(tree.children)[last, 0]
    slots = jnp.arange(draft.tokens.shape[1])[None]
    # entry 0 is no draft, so token `j` of the block is entry `path[j + 1]`, which is node `path[j + 1] - 1`
    entries = jnp.where(slots == kept[:, None], tried[:, None], path[:, 1:])
    return replace(
        draft,
        tokens=jnp.take_along_axis(draft.tokens, jnp.maximum(entries - 1, 0), axis=1),
        length=kept + verdict.rejected,
        q=along(draft.q, path),
        q_tilde=along(draft.q_tilde, path),
        logs=jax.tree.map(lambda each: along(each, path), draft.logs),
        bad=jnp.take_along_axis(draft.bad, path, axis=1),
    )


# --- widths


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
    full = choices[-1]  # every width gives arrays of this one, or a loop could not carry them
    if len(choices) == 1 and needed is None:
        return judge(full, cache)
    shapes = jax.eval_shape(lambda cache: judge(full, cache), cache)
    # no zeros for the cache: it goes in as it is
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes._replace(target_cache=()))
    chosen = (jnp.asarray(choices) < longest + 1).sum(dtype=jnp.int32)
    # -1 is the place of no width: then no loop has a turn
    chosen = chosen if needed is None else jnp.where(needed, chosen, -1)
    judged: Judged = blank._replace(target_cache=cache)
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
    # laws have a place more than tokens: the bonus's
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
        # nobody asked the target: such a token obeys the law that it was drawn from
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
