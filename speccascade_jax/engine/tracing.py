"""Functions that reduce each round to a few numbers per position, for the argument `record` of `generate`.

No array of the vocabulary's size is kept, and the generated tokens do not change. On the host, `results.store.trace`
converts the numbers into a trace, which shows the drafted and the committed tokens with their probabilities.
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
        num_new: int32 `[B]`, how many tokens were committed.
        source: int32 `[B, G + 1]`, each token's index into `core.names.SOURCES`.
    """

    num_new: Array
    source: Array


@flax.struct.dataclass
class Chances:
    """The probabilities of one token per position under five distributions, `[B, G + 1]` each, and its ranks.

    `q`, `p`: under the raw distributions (temperature 1, nothing truncated); `q_tilde`, `p_tilde`: under the scaled
    ones, from which tokens are drawn; `pi`: under the rule's `π`. `rank_q`, `rank_p`: the token's rank under `q` and
    `p`, where 1 is the most likely token. Numbers at positions where nothing was drafted (for `q`) or scored are
    meaningless.
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
    """The numbers that a trace shows of one round, per row and position of the block.

    Attributes:
        origins: the sources of the tokens.
        tokens: int32 `[B, G + 1]`, the first `num_new` are committed.
        proposed: int32 `[B, G + 1]`, the drafted tokens (0 at the bonus position).
        drafted: int32 `[B]`, the length of the drafted block.
        spent: int32 `[B]`, how many tokens were drafted, including a tree's tokens off the kept path.
        num_kept, rejected, examined, unverified: as in `Round`, `[B]`.
        of_proposed, of_committed: the probabilities of the proposed and of the committed token.
        entropy_q, entropy_p: the entropies of `q` and `p` in nats.
        max_q: the largest probability of `q`.
        divergence: the total variation distance of `q` and `p`.
        deferral: the rule's `r` of the proposed token; 0 if the rule has no deferral.
        stop: the number that the stop policy compared with its threshold, NaN if it was not called.

    The last six are float32 `[B, G + 1]`.
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
    """Reduces a round to the numbers that a trace shows, in `O(V)` time per position."""
    # The draft tokens are padded to `G + 1` entries like the other arrays, although the bonus position has no draft.
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
    # a rank is computed as the number of more likely tokens, because a sort would need a further array of size V
    ranks = {f"rank_{name}": (laws[name] > probabilities[name]).sum(-1, dtype=jnp.int32) + 1 for name in ("q", "p")}
    return Chances(**jax.tree.map(lambda x: jnp.broadcast_to(x[..., 0], tokens.shape), probabilities), **ranks)
