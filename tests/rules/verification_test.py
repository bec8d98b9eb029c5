"""What a verdict says of a block's positions: the law that each committed token obeys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core import rngs
from speccascade_jax.core.types import Draft
from speccascade_jax.rules.acceptance import Deferral, Speculative
from speccascade_jax.rules.block_wise import BlockWise
from speccascade_jax.rules.deferral import RULES
from tests.support import conformance

ROWS, BLOCK, VOCAB, ALPHA = 40, 3, 11, 0.4


def verdict(verifier, bonus, lawful=None):
    """Of blocks of 0 to 3 tokens over random laws; also the laws."""
    q, p = (np.stack([x] * (BLOCK + 1), axis=1) for x in conformance.logit_pairs(7, ROWS, VOCAB))
    q = np.roll(q, 3, axis=0)
    pair = conformance.law_pair(q, p, 1.0)
    draft = Draft(
        tokens=jnp.argmax(pair.q_tilde[:, :BLOCK], -1).astype(jnp.int32),
        length=jnp.arange(ROWS) % (BLOCK + 1),
        q=pair.q,
        q_tilde=pair.q_tilde,
        greedy=jnp.zeros((ROWS,), bool),
        steps=jnp.zeros((ROWS,), jnp.int32),
        bad=jnp.zeros((ROWS, BLOCK + 1), bool),
        lawful=lawful,
    )
    zero = jnp.zeros((ROWS,), jnp.int32)
    keys = rngs.RoundKeys(rngs.row_keys(rngs.root(0), jnp.arange(ROWS), 0), zero, zero)
    verify = jax.jit(verifier.verify, static_argnames="bonus")
    return pair, draft, verify(pair, draft, keys, jnp.full((ROWS,), ALPHA), bonus=bonus)


@pytest.mark.parametrize("bonus", ["rule", "target", "none"])
@pytest.mark.parametrize("accept", [Speculative, Deferral, BlockWise])
def test_the_law_behind_a_whole_block_is_that_of_who_writes_there(accept, bonus):
    """`π` at every position of the block; behind it `p̃` where the bonus is the target's, as records are told."""
    pair, draft, found = verdict(accept(RULES["token_v3"]), bonus)
    law = np.asarray(RULES["token_v3"].target_law(pair, jnp.full((ROWS, BLOCK + 1, 1), ALPHA)))
    behind = np.arange(BLOCK + 1)[None] == np.asarray(draft.length)[:, None]
    theirs = np.asarray(pair.p_tilde)
    assert np.abs(law - theirs)[behind].max() > 0.1
    expected = np.where(behind[..., None] & (bonus == "target"), theirs, law)
    np.testing.assert_array_equal(found.law, expected)


def test_a_row_without_a_law_behind_its_block_has_the_targets():
    lawful = np.arange(ROWS) % 2 == 0
    pair, draft, found = verdict(Speculative(RULES["token_v3"]), "rule", jnp.asarray(lawful))
    law = np.asarray(RULES["token_v3"].target_law(pair, jnp.full((ROWS, BLOCK + 1, 1), ALPHA)))
    behind = (np.arange(BLOCK + 1)[None] == np.asarray(draft.length)[:, None]) & ~lawful[:, None]
    np.testing.assert_allclose(found.law, np.where(behind[..., None], pair.p_tilde, law), rtol=1e-6)
