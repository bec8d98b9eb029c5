"""A tree of drafts: scored in one call, and after its verdict the path that was kept, as a block of its tokens."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from speccascade_jax.core.trees import Tree, along
from speccascade_jax.core.types import Array, Cache, Draft, LawPair, LMOutput, Params
from speccascade_jax.rules.verification import Verdict


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
    branch = None if tree is None else tree.branch(0, tree.size + 1)
    out: tuple[LMOutput, Cache]
    if layers:
        out = target.extend_layers(params, cache, tokens, layers, branch)
    elif branch is None:
        out = target.extend(params, cache, tokens)
    else:
        out = target.extend_branch(params, cache, tokens, branch)
    return out


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
        cache=target.keep(scored.cache, start, path[:, : tree.depth + 1]),
    )
    return straight, verdict._replace(law=along(verdict.law, path))


def straight_draft(draft: Draft, verdict: Verdict, tree: Tree) -> Draft:
    """The path's tokens, and behind them the first of the siblings that were all rejected; `length` counts both."""
    assert verdict.path is not None
    kept, path = verdict.num_kept, verdict.path
    last = jnp.take_along_axis(path, kept[:, None], axis=1)[:, 0]
    tried = jnp.asarray(tree.children)[last, 0]
    slots = jnp.arange(draft.tokens.shape[1])[None]
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
