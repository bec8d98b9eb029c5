"""What a verdict says of a block's positions: the law that each committed token obeys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.rules.acceptance import Deferral, Speculative
from speccascade_jax.rules.block_wise import BlockWise
from speccascade_jax.rules.deferral import RULES
from tests.support import blocks

ROWS, BLOCK, ALPHA = 40, 3, 0.4
BONUSES = ("rule", "target", "none")
LAWLESS = np.arange(ROWS) % 2 == 1


@pytest.mark.parametrize(
    ("accept", "bonus", "targets"),
    [(accept, bonus, bonus == "target") for accept in (Speculative, Deferral, BlockWise) for bonus in BONUSES]
    + [(Speculative, "rule", LAWLESS)],
)
def test_the_law_behind_a_whole_block_is_that_of_who_writes_there(accept, bonus, targets):
    """`π` at every position of blocks of 0 to 3 tokens; behind them `p̃` where the bonus is the target's.

    So it is where the draft has no law behind the block, too.
    """
    rule, pair = RULES["token_v3"], blocks.positions(ROWS, BLOCK, 11)
    tokens, length = np.argmax(pair.q_tilde[:, :BLOCK], -1), np.arange(ROWS) % (BLOCK + 1)
    draft = blocks.draft_of(pair, tokens, length, jnp.asarray(~LAWLESS) if targets is LAWLESS else None)
    verify = jax.jit(accept(rule).verify, static_argnames="bonus")
    verdict = verify(pair, draft, blocks.round_keys(ROWS), jnp.full((ROWS,), ALPHA), bonus=bonus)
    law = np.asarray(rule.target_law(pair, jnp.full((ROWS, BLOCK + 1, 1), ALPHA)))
    behind = np.arange(BLOCK + 1)[None] == length[:, None]
    assert np.abs(law - pair.p_tilde)[behind].max() > 0.1
    expected = np.where((behind & np.reshape(targets, (-1, 1)))[..., None], pair.p_tilde, law)
    np.testing.assert_allclose(verdict.law, expected, rtol=1e-6)
