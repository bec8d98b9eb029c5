"""Traces: `record` functions for `generate` that reduce each round to a few numbers per position.

Nothing of the size of the vocabulary is kept, and the generation is the ordinary one: the same rounds of the same loop.
`results.store.trace` turns them into tokens on the host.
"""

import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core.types import Array, Round
from speccascade_jax.rules.laws import at_tokens
from speccascade_jax.rules.measures import entropy, total_variation


@flax.struct.dataclass
class Origins:
    """The sources of one round's tokens.

    Attributes:
        num_new: int32 `[B]`.
        source: int32 `[B, G + 1]`, each token's index into `core.names.SOURCES`.
    """

    num_new: Array
    source: Array


@flax.struct.dataclass
class Chances:
    """One token's probability per position under each distribution, float32 `[B, G + 1]`, and its ranks (1: likeliest).

    `q`, `p`: raw (temperature 1, nothing truncated); `q_tilde`, `p_tilde`: as tokens are drawn; `pi`: the rule's.
    Values at positions where nothing was drafted (for `q`) or scored are meaningless.
    """

    q: Array
    p: Array
    q_tilde: Array
    p_tilde: Array
    pi: Array
    rank_q: Array
    rank_p: Array


@flax.struct.dataclass
class RoundFacts:
    """The facts about one round, per row and position of the block.

    Attributes:
        origins: as `Origins`.
        tokens: int32 `[B, G + 1]`, the first `num_new` are committed.
        proposed: int32 `[B, G + 1]`, the drafted tokens (0 at the bonus position).
        drafted: int32 `[B]`, how many were drafted.
        spent: int32 `[B]`, `drafted` with a tree's tokens off the path.
        num_kept, rejected, examined, unverified: as in `Round`, `[B]`.
        of_proposed, of_committed: the probabilities of the two tokens.
        entropy_q, entropy_p: in nats.
        max_q: the largest probability of `q`.
        divergence: total variation of `q` and `p`.
        deferral: the rule's `r` of the proposed token, 0 without a deferral.
        stop: the value that the stop policy compared with its threshold, NaN if it was not called. The last six are
            float32 `[B, G + 1]`.
    """

    origins: Origins
    tokens: Array
    proposed: Array
    drafted: Array
    spent: Array
    num_kept: Array
    rejected: Array
    examined: Array
    unverified: Array
    of_proposed: Chances
    of_committed: Chances
    entropy_q: Array
    entropy_p: Array
    max_q: Array
    divergence: Array
    deferral: Array
    stop: Array


def origins(turn: Round) -> Origins:
    """Returns the sources of a round's tokens."""
    return Origins(turn.num_new, turn.source)


def facts(turn: Round) -> RoundFacts:
    """Reduces a round to everything that a trace shows; `O(V)` work per position."""
    # `G + 1` entries like everything else, although the bonus position has no draft
    proposed = jnp.pad(turn.draft.tokens, [(0, 0), (0, 1)])
    q, p = turn.pair.q, turn.pair.p
    return RoundFacts(
        origins=origins(turn),
        tokens=turn.tokens,
        proposed=proposed,
        drafted=turn.draft.length,
        spent=turn.draft.length if turn.draft.spent is None else turn.draft.spent,
        num_kept=turn.num_kept,
        rejected=turn.rejected.astype(jnp.int32),
        examined=turn.examined,
        unverified=turn.unverified.astype(jnp.int32),
        of_proposed=_chances(turn, proposed),
        of_committed=_chances(turn, turn.tokens),
        entropy_q=entropy(q)[..., 0],
        entropy_p=entropy(p)[..., 0],
        max_q=q.max(-1),
        # without a drafter `q` is a stub `[B, 1, 1]`
        divergence=total_variation(jnp.broadcast_to(q, p.shape), p)[..., 0],
        deferral=jnp.pad(turn.deferred, [(0, 0), (0, 1)]),
        stop=jnp.full(turn.tokens.shape, jnp.nan) if turn.draft.stop is None else turn.draft.stop,
    )


def _chances(turn: Round, tokens: Array) -> Chances:
    pair = turn.pair
    laws = {"q": pair.q, "p": pair.p, "q_tilde": pair.q_tilde, "p_tilde": pair.p_tilde, "pi": turn.law}
    probabilities = at_tokens(laws, tokens)
    # reductions over V: sorting would keep an array of the vocabulary's size per position
    ranks = {f"rank_{name}": (laws[name] > probabilities[name]).sum(-1, dtype=jnp.int32) + 1 for name in ("q", "p")}
    return Chances(**jax.tree.map(lambda x: jnp.broadcast_to(x[..., 0], tokens.shape), probabilities), **ranks)
