"""Scoring no wider than the batch's longest draft: which width, and that nothing but time depends on it."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import Prompt
from speccascade_jax.engine.generate import generate
from speccascade_jax.engine.width_buckets import widths
from speccascade_jax.methods.build import assemble
from speccascade_jax.stopping.policies import Confidence
from tests.support import conformance


@given(st.integers(0, 60))
def test_widths_rise_to_the_whole_block(block):
    found = widths(block)
    assert found[-1] == block + 1
    assert list(found) == sorted(set(found))


@dataclass(frozen=True)
class ScoredWhole(Confidence):
    """Its blocks are scored as wide as they might be."""

    adaptive: ClassVar[bool] = False


def trace(turn):
    """Everything that a round decided, `[B, …]`."""
    return turn.num_new, turn.num_kept, turn.tokens, turn.eta


@pytest.mark.parametrize("bonus", ["rule", pytest.param("target", marks=pytest.mark.laws)])
def test_what_is_generated_does_not_depend_on_the_widths(bonus):
    """A rule that reads `q`, blocks of zero to nine tokens, rows that stop early: the same rounds as at full width."""
    q_table, p_table = conformance.tables(6, seed=41)
    pair = conformance.tabular_pair(q_table, p_table)
    engine, params = assemble(pair, rule="token_v3", bonus=bonus, stop=lambda _: Confidence(9), stop_ids=[5])
    whole, _ = assemble(pair, rule="token_v3", bonus=bonus, stop=lambda _: ScoredWhole(9), stop_ids=[5])
    assert engine.drafter.adaptive and not whole.drafter.adaptive
    prompt = Prompt(jnp.zeros((8, 1), jnp.int32), jnp.ones((8,), jnp.int32))
    controls = make_controls(8, alpha=0.4, temperature=1.0, stop_threshold=np.linspace(0.3, 1.0, 8))
    runs = [
        generate(one, params, prompt, 3, controls=controls, max_new_tokens=24, record=trace) for one in (engine, whole)
    ]
    drafted, narrow, wide = np.asarray(runs[0].stats.drafted), *runs
    assert drafted.min() < drafted.max()
    assert (np.asarray(narrow.tokens) == np.asarray(wide.tokens)).all()
    rounds = int(narrow.num_rounds)
    for got, expected in zip(narrow.record[:3], wide.record[:3], strict=True):
        assert (np.asarray(got)[:rounds] == np.asarray(expected)[:rounds]).all()
    for name in ("target_calls", "discarded", "deferred", "decided", "kept_at", "deferred_at"):
        np.testing.assert_allclose(getattr(narrow.stats, name), getattr(wide.stats, name), rtol=1e-6)
