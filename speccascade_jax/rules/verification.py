"""Verifying a block: the longest accepted prefix, and one token after it (METHODS section 2)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from speccascade_jax.core import rngs
from speccascade_jax.core.sampling import sample
from speccascade_jax.core.types import Array, Draft, LawPair
from speccascade_jax.rules import laws
from speccascade_jax.rules.acceptance import AcceptFn


class Verdict(NamedTuple):
    """The outcome of verifying a block.

    `num_kept` int32 `[B]`; `rejected` bool `[B]`; `final` int32 `[B]`: the replacement, or the bonus;
    `law` float32 `[B, G + 1, V]`: the law of the token at each position, if it is committed.
    """

    num_kept: Array
    rejected: Array
    final: Array
    law: Array


def verify(accept: AcceptFn, pair: LawPair, alpha: Array, draft: Draft, keys: rngs.RoundKeys, bonus: str) -> Verdict:
    """Keep the longest accepted prefix of each row's block and draw one token after it (METHODS section 2).

    Args:
        accept: the acceptance.
        pair: laws over `[B, G + 1, V]`.
        alpha: `[B]`.
        draft: the block; `draft.q_tilde` is what its tokens were drawn from.
        keys: this round's bits.
        bonus: "rule": after a fully kept block draw from `π`; "target": from `p̃`; "none" is "rule" here,
            the engine drops the token.

    Returns:
        A `Verdict`. The replacement is drawn at one position only, not at all of them.
    """
    num_kept = _count_kept(accept, pair, alpha, draft, keys)
    rejected = num_kept < draft.length
    last = jax.tree.map(lambda x: jnp.take_along_axis(x, num_kept[:, None, None], axis=1)[:, 0], pair)
    with jax.named_scope("rule"):
        after = accept(last, alpha[:, None])
        bonus_law = last.p_tilde if bonus == "target" else accept.law(last, alpha[:, None])
    final_law = jnp.where(rejected[:, None], after.replacement, bonus_law)
    uniform = keys.uniform(num_kept, jnp.where(rejected, rngs.REPLACE, rngs.BONUS))
    with jax.named_scope("rule"):
        law = accept.law(pair, alpha[:, None, None])
    if bonus == "target":
        at_bonus = jnp.arange(law.shape[1])[None] == draft.length[:, None]
        law = jnp.where(at_bonus[..., None], pair.p_tilde, law)
    with jax.named_scope("sampling"):
        final = sample(final_law, uniform)
    return Verdict(num_kept, rejected, final, law)


def _count_kept(accept: AcceptFn, pair: LawPair, alpha: Array, draft: Draft, keys: rngs.RoundKeys) -> Array:
    """int32 `[B]`: kept are the `x_j` with `u · q̃_j(x_j) < kept_j(x_j)`, up to the first that is not."""
    batch, block = draft.tokens.shape
    if block == 0:
        return jnp.zeros((batch,), jnp.int32)
    tokens = jnp.pad(draft.tokens, [(0, 0), (0, 1)])  # cheaper than cutting the bonus position off every law
    with jax.named_scope("rule"):
        kept_at = accept.kept_at(pair, alpha[:, None, None], tokens)[:, :block]
    drawn_at = laws.at_tokens(pair.q_tilde, tokens)[:, :block, 0]
    slots = jnp.broadcast_to(jnp.arange(block, dtype=jnp.int32), (batch, block))
    keep = (keys.uniform(slots, rngs.ACCEPT) * drawn_at < kept_at) & (slots < draft.length[:, None])
    return jnp.cumprod(keep, -1).sum(-1).astype(jnp.int32)
