"""Calls of the target model, and the processing of its output before tokens are committed.

The functions have three topics.

Inputs of the drafter: the target's summary of the prompt and its hidden states.

Trees: one call scores all nodes. After verification the kept path is treated as a plain block.

Widths: methods with stop policies often draft short blocks, although the longest block `G` is long. The target then
scores only as many positions as the batch's longest draft needs, instead of `G + 1`. The compiled program contains one
loop per width, and the device chooses which of them runs.
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
"""The numbers of positions for which target calls are compiled, in addition to the `G + 1` of a full block."""


def check_layers(target: LanguageModel, layers: tuple[int, ...]) -> None:
    """Raises a ValueError if the drafter reads `layers` of a target model that cannot return their hidden states."""
    if layers and not isinstance(target, LayeredModel):
        kind = type(target).__name__
        raise ValueError(
            f"the drafter reads layers {layers} of the target, but {kind} has no extend_layers: "
            "choose another drafter, or implement core.protocols.LayeredModel"
        )


def prefilled(
    target: LanguageModel, params: Params, prompt: Prompt, slots: int, max_rollback: int | None, layers: tuple[int, ...]
) -> tuple[Cache, Array | None]:
    """Prefills the target; returns its cache and, if there are `layers` to read, their states `[B, P, L, D]`."""
    if not layers:  # the plain method suffices, so models whose layers are never read need no `prefill_layers`
        return target.prefill(params, prompt, slots, max_rollback), None
    assert isinstance(target, LayeredModel)
    return target.prefill_layers(params, prompt, slots, layers, max_rollback)


def prompt_features(target: LanguageModel, cache: Cache) -> Array:
    """Returns the target's summary of each prompt, float `[B, D]`, which its prefill computed.

    Raises:
        ValueError: the model has no `prompt_features`.
    """
    if not isinstance(target, PromptSummary):
        raise ValueError(
            f"the drafter reads the target's features, but {type(target).__name__} has no prompt_features: choose "
            "another drafter, or implement core.protocols.PromptSummary"
        )
    return target.prompt_features(cache)


# --- trees


class Scored(NamedTuple):
    """The results of a target call on the first `W` positions of a block.

    Attributes:
        pair: the distributions `[B, W, V]`.
        draft: the drafted block.
        bad: bool `[B, W]`, whether the logits are not finite.
        features: the target's final hidden states `[B, W, D]`; `None` unless the drafter reads them.
        hidden: the target's states `[B, W, L, D]` after the layers that the drafter reads; `None` if it reads none.
        cache: the target's cache.
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
        start: int32 `[B]`, the cache slot of the pending token, which is entry 0 of the tree.
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
        # the path is moved to consecutive slots before any rollback, because a rollback only drops the last slots
        cache=target.keep(scored.cache, start, path[:, : tree.depth + 1]),
    )
    return straight, verdict._replace(law=along(verdict.law, path))


def straight_draft(draft: Draft, verdict: Verdict, tree: Tree) -> Draft:
    """Turns the draft of a tree into a block: the kept path's tokens, then one rejected token if there is any.

    The rejected token is the first child of the last kept entry, whose children were all rejected. `length` counts it.
    """
    assert verdict.path is not None
    kept, path = verdict.num_kept, verdict.path
    # `last` is the deepest kept entry; if its children were rejected, the block ends with the first of them
    last = jnp.take_along_axis(path, kept[:, None], axis=1)[:, 0]
    tried = jnp.asarray(tree.children)[last, 0]
    slots = jnp.arange(draft.tokens.shape[1])[None]
    # entry 0 is not a draft token, so token `j` of the block is entry `path[j + 1]`, which is node `path[j + 1] - 1`
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
    """The results of scoring and verifying a block.

    `pair` has arrays `[B, G + 1, V]`, and `bad` is bool `[B, G + 1]`. `eta`, float32 `[B, G + 1]`, and `deferred`,
    `[B, G]`, come from `Verifier.deferred`. `features` `[B, G + 1, D]` and `hidden` `[B, G + 1, L, D]` are `None`
    unless the drafter reads them. All arrays are zero at positions that were not scored.
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
    """Returns the possible numbers of scored positions, ascending, for blocks of at most `block` tokens."""
    return (*(width for width in WIDTHS if width <= block), block + 1)


def by_width(
    choices: Sequence[int],
    longest: Array,
    judge: Callable[[int, Cache], Judged],
    cache: Cache,
    needed: Array | None = None,
) -> Judged:
    """Calls `judge` with the smallest width of `choices` (ascending) that has room for `longest` drafts and the bonus.

    `longest` is an int32 scalar. If `needed` (bool scalar) is False, `judge` is not called, and the result is zero
    except for the cache. Each width has a loop of at most one iteration and not a conditional, because XLA updates a
    cache in place in a loop, but copies it into and out of a conditional.
    """
    full = choices[-1]  # the results of every width are padded to the full width, because a loop's carry has one shape
    if len(choices) == 1 and needed is None:
        return judge(full, cache)
    shapes = jax.eval_shape(lambda cache: judge(full, cache), cache)
    # the blank result is made without a cache, because it gets the argument `cache` below
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes._replace(target_cache=()))
    chosen = (jnp.asarray(choices) < longest + 1).sum(dtype=jnp.int32)
    # no width has index -1, so no loop runs if no call is needed
    chosen = chosen if needed is None else jnp.where(needed, chosen, -1)
    judged: Judged = blank._replace(target_cache=cache)
    for place, width in enumerate(choices):
        with jax.named_scope(f"width_{width}"):
            judged = at_most_once(chosen == place, partial(_judge_padded, judge, width, full), judged)
    return judged


def at_most_once(wanted: Array, turn: Callable[[T], T], state: T) -> T:
    """Returns `turn(state)` if `wanted` (bool scalar), else `state`, by a loop of at most one iteration.

    XLA moves computations of `turn` that do not depend on `state` out of the loop, so they run even if `wanted` is
    False. To keep them inside the loop, make them depend on `state` with `jax.lax.optimization_barrier`.
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
    """Cuts a draft to its first `width` positions: `width − 1` tokens, and the position after the last of them."""
    names = ("q", "q_tilde", "bad", "logs", "stop", "logits")
    # these arrays have one entry more than there are tokens, for the bonus position
    positions: dict[str, Any] = {name: jax.tree.map(lambda x: x[:, :width], getattr(draft, name)) for name in names}
    return replace(draft, tokens=draft.tokens[:, : width - 1], **positions)


def _pad(values: PyTree, width: int) -> PyTree:
    missing = width - values.shape[1]
    return jnp.pad(values, [(0, 0), (0, missing)] + [(0, 0)] * (values.ndim - 2)) if missing else values


def kept_whole(verdict: Verdict, draft: Draft, as_it_is: Array) -> Verdict:
    """Returns the verdict, changed so that rows marked in `as_it_is` (bool `[B]`) keep their whole block."""
    return verdict._replace(
        num_kept=jnp.where(as_it_is, draft.length, verdict.num_kept),
        rejected=verdict.rejected & ~as_it_is,
        # the target did not score a block that is kept whole: the distribution of its tokens is `q̃`, from which the
        # drafter drew them
        law=jnp.where(as_it_is[:, None, None], draft.q_tilde, verdict.law),
    )


def without_failed(turn: Round, failed: Array) -> Round:
    """Returns the round without the rows that had non-finite logits (`failed`): they commit and count nothing."""
    return replace(
        turn,
        active=turn.active & ~failed,
        num_kept=jnp.where(failed, 0, turn.num_kept),
        rejected=turn.rejected & ~failed,
        examined=jnp.where(failed, 0, turn.examined),
        num_new=jnp.where(failed, 0, turn.num_new),
    )
