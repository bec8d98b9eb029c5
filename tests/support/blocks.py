"""Block verification by enumeration: exact probabilities of all outcomes for every block, without sampling."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core import rngs
from speccascade_jax.core.types import Draft
from speccascade_jax.rules import laws
from speccascade_jax.rules.block_wise import BlockWise
from speccascade_jax.rules.verification import at_position
from tests.support import conformance


def kept_tokens(p, q, block, jointly):
    """Returns the expected number of kept tokens of blocks of independent tokens, as a fraction.

    It implements METHODS section 2 (token-wise) or 10 (`jointly`) a second time.
    """
    expected = Fraction(0)
    for drafted in itertools.product(range(len(p)), repeat=block):
        chance = Fraction(1)
        for token in drafted:
            chance *= q[token]
        if jointly:
            reached = [Fraction(1)]
            for token in drafted:
                reached.append(min(Fraction(1), reached[-1] * p[token] / q[token]))
            stays = [_stays(p, q, reached[i]) for i in range(1, block)] + [reached[block]]
            missed = Fraction(1)
            for i in range(block, 0, -1):
                expected += chance * missed * stays[i - 1] * i
                missed *= 1 - stays[i - 1]
        else:
            kept = Fraction(1)
            for token in drafted:
                kept *= min(Fraction(1), p[token] / q[token])
                expected += chance * kept
    return expected


def _stays(p, q, reached):
    mass = sum(max(Fraction(0), reached * a - b) for a, b in zip(p, q, strict=True))
    return mass / (mass + 1 - reached) if mass + 1 - reached else Fraction(1)


@partial(jax.jit, static_argnames="verifier")
def _parts(verifier, pair, draft, alpha):
    """Returns `P_i` and `h_i` of METHODS section 10, `[N, G + 1]` each, and the distribution of the next token.

    Entry `i` of the distribution `[N, G + 1, V]` holds if `i` tokens of the block are kept.
    """
    block = draft.tokens.shape[1]
    law = verifier.law(pair, alpha[:, None, None])
    reached = verifier._reached(pair, law, draft, alpha, jnp.zeros((len(alpha), block + 1)))
    pairs_at = [(i, at_position(pair, jnp.full(alpha.shape, i))) for i in range(block + 1)]
    laws_at = [verifier._law_at(here, law, jnp.full(alpha.shape, i), alpha) for i, here in pairs_at]
    chances = [verifier._chance(here, laws_at[i], reached[:, i]) for i, here in pairs_at[:-1]] + [reached[:, block]]
    after = [verifier._replacement(here, laws_at[i], alpha[:, None], reached[:, i]) for i, here in pairs_at[:-1]]
    after.append(laws_at[-1])
    return reached, jnp.stack(chances, 1), jnp.stack(after, 1)


def drafted(q_table, p_table, block, temperature, top_p, **more):
    """Enumerates all blocks that a tabular draft can draw after token 0.

    Returns:
        The models' distributions at all positions of each block, `[N, G + 1, V]`; the blocks as a `Draft`; and the
        probability of each block, float64 `[N]`.
    """
    vocab = len(q_table)
    tokens = np.array(list(itertools.product(range(vocab), repeat=block)), np.int32).reshape(-1, block)
    context = np.concatenate([np.zeros((len(tokens), 1), np.int32), tokens], axis=1)
    pair = conformance.law_pair(q_table[context], p_table[context], temperature, top_p, **more)
    drawn, rows = np.asarray(pair.q_tilde, np.float64), np.arange(len(tokens))
    chance = np.prod([drawn[rows, i, tokens[:, i]] for i in range(block)], axis=0)
    return pair, draft_of(pair, tokens, np.full(len(tokens), block)), chance


def draft_of(pair, tokens, length, lawful=None):
    """Returns a `Draft` of tokens `[B, G]` with lengths `[B]`, drawn from the distributions of `pair`."""
    rows, block = tokens.shape
    return Draft(
        tokens=jnp.asarray(tokens, jnp.int32),
        length=jnp.asarray(length, jnp.int32),
        q=pair.q,
        q_tilde=pair.q_tilde,
        greedy=jnp.zeros((rows,), bool),
        steps=jnp.zeros((rows,), jnp.int32),
        bad=jnp.zeros((rows, block + 1), bool),
        lawful=lawful,
    )


def positions(rows, block, vocab_size, seed=7):
    """Returns random and adversarial distributions `[B, G + 1, V]`, which differ at every position."""
    logits = conformance.logit_pairs(seed, rows, vocab_size)
    q, p = (np.stack([np.roll(x, i, axis=0) for i in range(block + 1)], axis=1) for x in logits)
    return conformance.law_pair(q, p, 1.0)


def round_keys(rows):
    """Returns the random bits of a first round."""
    zero = jnp.zeros((rows,), jnp.int32)
    return rngs.RoundKeys(rngs.row_keys(rngs.root(0), jnp.arange(rows), 0), zero, zero)


@dataclass
class Outcomes:
    """The outcomes of every block that can be drafted.

    Attributes:
        tokens: `[N, G]`.
        chance: `[N]`, the probability that the block is drafted.
        ends: `[N, G + 1]`; entry `i` is the probability that exactly `i` of the block's tokens are kept.
        after: `[N, G + 1, V]`; entry `i` is the distribution of the next token in this case.
    """

    tokens: np.ndarray
    chance: np.ndarray
    ends: np.ndarray
    after: np.ndarray

    @property
    def kept(self):
        """The value of `E[kept]`."""
        return float((self.chance[:, None] * self.ends * np.arange(self.ends.shape[1])).sum())

    def law(self, chain):
        """Returns the joint distribution of the next `G + 1` tokens, `[V] * (G + 1)`.

        Tokens after the round's last one are drawn from the Markov chain `chain` `[V, V]`.
        """
        block, vocab = self.tokens.shape[1], len(chain)
        total = np.zeros([vocab] * (block + 1))
        for n in np.flatnonzero(self.chance):
            for i in range(block + 1):
                mass = self.chance[n] * self.ends[n, i] * self.after[n, i]
                for _ in range(block - i):
                    mass = mass[..., None] * chain
                total[tuple(self.tokens[n, :i])] += mass
        return total


def outcomes(verifier, q_table, p_table, block, alpha, temperature=1.0, top_p=1.0, **more):
    """Computes the outcomes of a block verifier on Markov chains, exactly."""
    pair, draft, chance = drafted(q_table, p_table, block, temperature, top_p, **more)
    alphas = jnp.full(chance.shape, alpha, jnp.float32)
    possible = chance > 0
    _, stays, after = (np.asarray(part, np.float64) for part in _parts(verifier, pair, draft, alphas))
    stays[:, 0] = 1.0
    missed = np.cumprod(np.concatenate([np.ones((len(stays), 1)), 1 - stays[:, :0:-1]], axis=1), axis=1)[:, ::-1]
    ends = np.where(possible[:, None], stays * missed, 0.0)
    return Outcomes(np.asarray(draft.tokens), np.where(possible, chance, 0.0), ends, after)


def chain_law(chain, length):
    """Returns the distribution of `length` tokens of a Markov chain after token 0."""
    mass = chain[0]
    for _ in range(length - 1):
        mass = mass[..., None] * chain
    return mass


@dataclass(frozen=True)
class ReplacesTokenWise(BlockWise):
    """A planted bug: after a rejection, the replacement is drawn as in token-wise verification."""

    def _replacement(self, last, law, alpha, reached):
        return self(last, alpha).replacement


@dataclass(frozen=True)
class Unnormalised(BlockWise):
    """A planted bug: `h_i` of METHODS section 10 without the denominator."""

    def _chance(self, after, law, reached):
        return self._mass(after, law, reached).sum(-1)


@dataclass(frozen=True)
class Uncapped(BlockWise):
    """A planted bug: `P_i` of METHODS section 10 may exceed 1."""

    def _reached(self, pair, law, draft, alpha, uniforms):
        tokens = jnp.pad(draft.tokens, [(0, 0), (0, 1)])
        ratio = self.rule.law_at(pair, alpha[:, None, None], tokens) / laws.at_tokens(pair.q_tilde, tokens)[..., 0]
        return jnp.cumprod(jnp.concatenate([jnp.ones_like(ratio[:, :1]), ratio[:, :-1]], axis=1), axis=1)


BUGS = {
    "token-wise residual distribution after a block-wise stop": ReplacesTokenWise,
    "h without the normaliser": Unnormalised,
    "P may exceed 1": Uncapped,
}
