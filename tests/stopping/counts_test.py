"""What a generation costs, token by token: `N_draft + N_target = N + N_discarded` (METHODS section 6, *Figures*)."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import Prompt
from speccascade_jax.engine.generate import generate
from speccascade_jax.methods.build import assemble
from speccascade_jax.stopping.policies import AcceptanceHead, Confidence, Fixed
from tests.support import conformance
from tests.support.acceptance_heads import head_for

pytestmark = pytest.mark.laws

ROWS, LIMIT, STOP = 24, 9, 3


def sampled(turn):
    """Per row and round: drafts, drafts committed, own tokens committed, whether the row took part."""
    committed = jnp.arange(turn.tokens.shape[1])[None] < turn.num_new[:, None]
    drafts = (committed & (turn.source == 0)).sum(-1)
    return turn.draft.length, drafts, (committed & (turn.source != 0)).sum(-1), turn.active


@functools.cache
def _engine(policy):
    pair = conformance.tabular_pair(*conformance.tables(5, seed=61))
    head = head_for(pair, depth=1, law=True) if isinstance(policy, AcceptanceHead) else None
    return assemble(pair, stop=lambda _: policy, head=head, stop_ids=[STOP])


@pytest.mark.parametrize("policy", [Fixed(3), Confidence(5), AcceptanceHead(5)])
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-0.2, 1.2), st.sampled_from([0.0, 0.7, 1.5]))
def test_every_sampled_token_is_committed_or_discarded(policy, seed, threshold, temperature):
    engine, params = _engine(policy)
    prompt = Prompt(jnp.arange(ROWS, dtype=jnp.int32)[:, None] % 5, jnp.ones((ROWS,), jnp.int32))
    controls = make_controls(ROWS, temperature=temperature, stop_threshold=threshold)
    out = generate(engine, params, prompt, seed, controls=controls, max_new_tokens=LIMIT, record=sampled)
    drafted, kept, own, active = (np.asarray(x)[: int(out.num_rounds)] for x in out.record)
    stats, lengths = out.stats, np.asarray(out.lengths)

    assert (np.asarray(stats.drafted) == np.where(active, drafted, 0).sum(0)).all()
    assert (np.asarray(stats.target_calls) == active.sum(0)).all()
    # a call of the target gives one token of its own, which a stop id or the limit may leave no room for
    discarded = np.where(active, drafted - kept + 1 - own, 0).sum(0)
    assert (np.asarray(stats.discarded) == discarded).all()
    assert (np.asarray(stats.drafted) + np.asarray(stats.target_calls) == lengths + discarded).all()
    ended = np.asarray(out.tokens)[np.arange(ROWS), lengths - 1] == STOP
    assert ((lengths == LIMIT) | ended).all()


def test_rows_end_at_stop_ids_and_at_the_limit_in_these_trials():
    engine, params = _engine(Fixed(3))
    prompt = Prompt(jnp.arange(ROWS, dtype=jnp.int32)[:, None] % 5, jnp.ones((ROWS,), jnp.int32))
    controls = make_controls(ROWS, temperature=0.7)
    out = generate(engine, params, prompt, 1, controls=controls, max_new_tokens=LIMIT, record=sampled)
    lengths = np.asarray(out.lengths)
    assert 0 < (lengths == LIMIT).sum() < ROWS
