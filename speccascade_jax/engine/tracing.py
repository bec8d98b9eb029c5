"""What a trace is made of: `generate(record=…)` with functions that reduce each round to a few numbers per position.

Nothing of the size of the vocabulary is kept, and the generation is the ordinary one: the same rounds of the same loop.
`results.store.trace` makes tokens of it on the host.
"""

import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core.types import Array, Round
from speccascade_jax.rules.laws import at_tokens
from speccascade_jax.rules.measures import entropy, total_variation


@flax.struct.dataclass
class Origins:
    """Of one round: `num_new` int32 `[B]`; source int32 `[B, G + 1]`, each token's place in `core.names.SOURCES`."""

    num_new: Array
    source: Array


@flax.struct.dataclass
class Chances:
    """What the laws at a position say of one token, float32 `[B, G + 1]`; ranks int32, 1 for the most likely.

    `q`, `p`: raw (temperature 1, nothing truncated); `q_tilde`, `p_tilde`: as tokens are drawn; `pi`: the rule's law.
    What stands at positions where nothing was drafted (of `q`), or that were not scored, means nothing.
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
    """Of one round, per row and position of the block.

    Attributes:
        origins: as `Origins`; tokens: int32 `[B, G + 1]`, the first `num_new` committed.
        proposed: int32 `[B, G + 1]`, what was drafted (0 at the bonus position); drafted: int32 `[B]`, how many; spent:
            int32 `[B]`, with those of a tree beside the path.
        num_kept, rejected, examined, unverified: as in `Round`, `[B]`.
        of_proposed, of_committed: what the laws say of the two.
        entropy_q, entropy_p: in nats; max_q; divergence: total variation of `q` and `p`; deferral: the rule's `r` of
            the proposed token, 0 without a deferral; stop: what the stop policy compared with its threshold, NaN where
            it was not asked. All float32 `[B, G + 1]`.
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
    """Where the tokens of a round came from."""
    return Origins(turn.num_new, turn.source)


def facts(turn: Round) -> RoundFacts:
    """All that a trace tells of a round; `O(V)` work per position, in reductions."""
    # `G + 1` places like everything else, though the bonus position has no draft
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
        # where nothing drafts `q` is a stub `[B, 1, 1]`
        divergence=total_variation(jnp.broadcast_to(q, p.shape), p)[..., 0],
        deferral=jnp.pad(turn.deferred, [(0, 0), (0, 1)]),
        stop=jnp.full(turn.tokens.shape, jnp.nan) if turn.draft.stop is None else turn.draft.stop,
    )


def _chances(turn: Round, tokens: Array) -> Chances:
    pair = turn.pair
    laws = {"q": pair.q, "p": pair.p, "q_tilde": pair.q_tilde, "p_tilde": pair.p_tilde, "pi": turn.law}
    at = at_tokens(laws, tokens)
    # reductions over V: sorting would keep an array of the vocabulary's size per position
    ranks = {f"rank_{name}": (laws[name] > at[name]).sum(-1, dtype=jnp.int32) + 1 for name in ("q", "p")}
    return Chances(**jax.tree.map(lambda x: jnp.broadcast_to(x[..., 0], tokens.shape), at), **ranks)
