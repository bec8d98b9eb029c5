"""Tests of random bits: they differ by purpose, slot, round and level; the four oldest purposes keep recorded bits."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core import rngs

KNOWN = (0.5914783477783203, 0.9366904497146606, 0.6492871046066284, 0.49217891693115234)


def bits(purpose, round=0, level=0, seed=7):
    rows = rngs.row_keys(rngs.root(seed), jnp.arange(3), level)
    keys = rngs.RoundKeys(rows, jnp.full((3,), round, jnp.int32), jnp.ones((3,), jnp.int32))
    return np.asarray(keys.uniform(jnp.tile(jnp.arange(5), (3, 1)), purpose))


def test_the_four_old_purposes_keep_their_recorded_bits():
    """Compares seed 7, row 2, round 3, slot 4 with numbers that were recorded before there were more purposes."""
    uniforms = [float(bits(purpose, round=3)[2, 4]) for purpose in range(4)]
    assert uniforms == pytest.approx(KNOWN, abs=0)


def test_no_two_draws_share_bits():
    draws = [bits(p, r, level) for p, r, level in itertools.product(range(rngs.PURPOSES), (0, 1, 5), (0, 1, 8))]
    values = np.concatenate([draw.ravel() for draw in draws])
    # 1,080 of 2²³ values: chance gives 0.07 pairs
    assert len(np.unique(values)) >= len(values) - 2


def test_a_purpose_per_row_gives_each_row_its_own_bits():
    rows = rngs.row_keys(rngs.root(7), jnp.arange(3), 0)
    keys = rngs.RoundKeys(rows, jnp.zeros((3,), jnp.int32), jnp.ones((3,), jnp.int32))
    mixed = keys.uniform(jnp.tile(jnp.arange(5), (3, 1)), jnp.array([1, 6, 3]))
    for row, purpose in enumerate((1, 6, 3)):
        np.testing.assert_array_equal(mixed[row], bits(purpose)[row])


def test_no_two_engines_of_a_hierarchy_share_a_level():
    """Counts the levels of eight stages, each with eight arms, three levels deep."""
    nodes = generation = list(range(rngs.STAGES))
    for _ in range(3):
        generation = [rngs.below(level, arm) for level in generation for arm in range(8)]
        nodes = nodes + generation
    assert len(set(nodes)) == len(nodes) == 8 + 64 + 512 + 4096
    with pytest.raises(ValueError, match="arm=8 is out of range: .* numbered from 0 to 7"):
        rngs.below(0, 8)
