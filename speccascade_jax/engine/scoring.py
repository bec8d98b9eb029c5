"""Calls of the target, and the processing of its answer before it is committed.

Reading: the drafter's inputs from the target, its summary of the prompt and its hidden states.

Trees: one call scores all drafts; after the verdict the kept path is a block of its tokens.

Widths: the number of positions of the target's call follows the batch's longest draft. Adaptive methods draft short
blocks under a large capacity `G`. One program per width, chosen on the device, saves them the capacity's `G + 1`
positions in the target's call and in everything over the vocabulary after it.
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
"""Numbers of positions that have a compiled program of their own, in addition to a full block's `G + 1`."""


def check_layers(target: LanguageModel, layers: tuple[int, ...]) -> None:
    """Raises a ValueError if the drafter reads `layers` of a target model that cannot return their hidden states."""
    if layers and not isinstance(target, LayeredModel):
        kind = type(target).__name__
        raise ValueError(f"the drafter reads layers {layers} of the target, but {kind} has no extend_layers")


def prefilled(
    target: LanguageModel, params: Params, prompt: Prompt, slots: int, max_rollback: int | None, layers: tuple[int, ...]
) -> tuple[Cache, Array | None]:
    """Prefills the target; returns its cache and, if there are `layers` to read, their states `[B, P, L, D]`."""
    if not layers:  # the plain method, so that models whose layers are never read need not implement the other
        return target.prefill(params, prompt, slots, max_rollback), None
    assert isinstance(target, LayeredModel)
    return target.prefill_layers(params, prompt, slots, layers, max_rollback)


def prompt_features(target: LanguageModel, cache: Cache) -> Array:
    """Returns float `[B, D]`, the target's summary of the prompt after its prefill.

    Raises:
        ValueError: the model has no `prompt_features`.
    """
    if not isinstance(target, PromptSummary):
        raise ValueError(f"the drafter reads the target's features, but {type(target).__name__} has no prompt_features")
    return target.prompt_features(cache)


# --- trees


class Scored(NamedTuple):
    """The first `W` positions of a block after the target's call.

    Attributes:
        pair: the distributions `[B, W, V]`.
        draft: the block.
        bad: bool `[B, W]`, whether the logits are not finite.
        features: the target's states `[B, W, D]`, or `None` unless the drafter reads them.
        hidden: the target's states `[B, W, L, D]` after the layers that the drafter reads, or `None`.
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
    """Calls the target on a block, or on all entries of a tree; also returns its hidden states after `layers`."""
    branch = None if tree is None else tree.branch(0, tree.size + 1)  # entry 0, the root, is the last committed token
    scored: tuple[LMOutput, Cache]
    if layers:
        scored = target.extend_layers(params, cache, tokens, layers, branch)
    elif branch is None:
        scored = target.extend(params, cache, tokens)
    else:
        scored = target.extend_branch(params, cache, tokens, branch)
    return scored


def straightened(target: Any, tree: Tree, start: Array, scored: Scored, verdict: Verdict) -> tuple[Scored, Verdict]:
    """Reduces the scores and the verdict of a tree to the kept path, and the target's cache to that path's entries.

    Args:
        target: a `BranchingModel`.
        tree: the tree that was scored.
        start: int32 `[B]`, position of the pending token in the target's cache.
        scored: the scores of all entries.
        verdict: the verdict, with its path.
    """
    assert verdict.path is not None
    path = verdict.path
    straight = Scored(
        pair=jax.tree.map(lambda values: along(values, path), scored.pair),
        draft=straight_draft(scored.draft, verdict, tree),
        bad=jnp.take_along_axis(scored.bad, path, axis=1),
        features=None if scored.features is None else along(scored.features, path),
        hidden=None if scored.hidden is None else along(scored.hidden, path),
        # the path is moved before any rollback, because setting a length cannot drop entries in between
        cache=target.keep(scored.cache, start, path[:, : tree.depth + 1]),
    )
    return straight, verdict._replace(law=along(verdict.law, path))


def straight_draft(draft: Draft, verdict: Verdict, tree: Tree) -> Draft:
    """Turns the draft of a tree into a block: the kept path's tokens, then a rejected one if there is any.

    That one is the first of the siblings that were all rejected; `length` counts it.
    """
    assert verdict.path is not None
    kept, path = verdict.num_kept, verdict.path
    # the deepest kept entry: its children were tried next, and the first of them stands for all
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
        logs=jax.tree.map(lambda values: along(values, path), draft.logs),
        bad=jnp.take_along_axis(draft.bad, path, axis=1),
    )


# --- widths


class Judged(NamedTuple):
    """A block after the target's call and the verdict.

    `pair` over `[B, G + 1, V]`, `bad` bool `[B, G + 1]`, `eta` float32 `[B, G + 1]` and `deferred` `[B, G]` as
    `Verifier.deferred` returns them; `features` `[B, G + 1, D]` and `hidden` `[B, G + 1, L, D]` if the drafter reads
    them. Positions beyond the scored width are zero.
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
    """Returns the widths, ascending, at which blocks of at most `block` tokens are scored; the last is `block + 1`."""
    return (*(width for width in WIDTHS if width <= block), block + 1)


def by_width(
    choices: Sequence[int],
    longest: Array,
    judge: Callable[[int, Cache], Judged],
    cache: Cache,
    needed: Array | None = None,
) -> Judged:
    """Calls `judge` at the smallest of the ascending widths `choices` that fits `longest` drafts and the bonus.

    `longest` is an int32 scalar. If no call is `needed` (bool scalar), nothing is called and everything but the cache
    is zero. Each width is a loop of at most one iteration: XLA passes a cache through a loop in place, but copies it
    into and out of a conditional.
    """
    full = choices[-1]  # every width gives arrays of the full width, because a loop's carry has one shape
    if len(choices) == 1 and needed is None:
        return judge(full, cache)
    shapes = jax.eval_shape(lambda cache: judge(full, cache), cache)
    # the cache needs no zeros: it is passed unchanged
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes._replace(target_cache=()))
    chosen = (jnp.asarray(choices) < longest + 1).sum(dtype=jnp.int32)
    # -1 is the index of no width, so that no loop runs
    chosen = chosen if needed is None else jnp.where(needed, chosen, -1)
    judged: Judged = blank._replace(target_cache=cache)
    for place, width in enumerate(choices):
        with jax.named_scope(f"width_{width}"):
            judged = at_most_once(chosen == place, partial(_judge_padded, judge, width, full), judged)
    return judged


def at_most_once(wanted: Array, turn: Callable[[T], T], state: T) -> T:
    """Returns `turn(state)` if `wanted` (bool scalar), else `state`; it is a loop of at most one iteration.

    XLA moves computations that do not depend on `state` out of the loop and runs them in any case: tie them to `state`.
    """

    def body(carry: tuple[Array, T]) -> tuple[Array, T]:
        return jnp.zeros((), bool), turn(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], body, (wanted, state))[1]


def _judge_padded(judge: Callable[[int, Cache], Judged], width: int, full: int, previous: Judged) -> Judged:
    judged = judge(width, previous.target_cache)
    verdict = judged.verdict._replace(law=_pad(judged.verdict.law, full))
    over_block = {name: jax.tree.map(partial(_pad, width=full), getattr(judged, name)) for name in _OVER_BLOCK}
    return judged._replace(verdict=verdict, deferred=_pad(judged.deferred, full - 1), **over_block)


_OVER_BLOCK = ("pair", "bad", "eta", "features", "hidden")


def cut(draft: Draft, width: int) -> Draft:
    """Returns a draft's first `width` positions; it then has at most `width − 1` tokens."""
    names = ("q", "q_tilde", "bad", "logs", "stop")
    # distributions have one entry more than tokens: the bonus's
    positions: dict[str, Any] = {name: jax.tree.map(lambda x: x[:, :width], getattr(draft, name)) for name in names}
    return replace(draft, tokens=draft.tokens[:, : width - 1], **positions)


def _pad(values: PyTree, width: int) -> PyTree:
    missing = width - values.shape[1]
    return jnp.pad(values, [(0, 0), (0, missing)] + [(0, 0)] * (values.ndim - 2)) if missing else values


def kept_whole(verdict: Verdict, draft: Draft, as_it_is: Array) -> Verdict:
    """Returns the verdict with whole blocks kept in rows `as_it_is` (bool `[B]`), under the draft's distributions."""
    return verdict._replace(
        num_kept=jnp.where(as_it_is, draft.length, verdict.num_kept),
        rejected=verdict.rejected & ~as_it_is,
        # the target did not score such a block: its tokens follow the distribution that they were drawn from
        law=jnp.where(as_it_is[:, None, None], draft.q_tilde, verdict.law),
    )


def without_failed(turn: Round, failed: Array) -> Round:
    """Returns the round without the rows whose logits failed: they commit nothing and are not counted."""
    return replace(
        turn,
        active=turn.active & ~failed,
        num_kept=jnp.where(failed, 0, turn.num_kept),
        rejected=turn.rejected & ~failed,
        examined=jnp.where(failed, 0, turn.examined),
        num_new=jnp.where(failed, 0, turn.num_new),
    )
