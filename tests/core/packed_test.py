"""Packed matrices: whatever the layout, the same matrix."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccascade_jax.core.types import count
from speccascade_jax.models.products import panels


@settings(deadline=None, max_examples=40)
@given(
    inputs=st.integers(1, 9),
    columns=st.integers(1, 40),
    width=st.sampled_from([None, 1, 16, 64]),
    turned=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_matrix_comes_back(inputs, columns, width, turned, seed):
    matrix = np.random.default_rng(seed).normal(size=(inputs, columns)).astype(np.float32)
    leaf = matrix.T if turned else matrix
    packed = panels(leaf, "float32", width, turned)
    np.testing.assert_array_equal(packed.dense(), leaf)
    np.testing.assert_array_equal(np.asarray(packed), leaf)
    assert packed.shape == leaf.shape and packed.size == leaf.size == count({"a": packed})
    taken = np.random.default_rng(seed).integers(0, columns, (2, 3))
    np.testing.assert_array_equal(packed.rows(taken), matrix.T[taken])


@pytest.mark.parametrize("turned", [False, True])
def test_eight_bits_come_back_with_their_scales(turned):
    matrix = np.random.default_rng(0).normal(size=(30, 20)).astype(np.float32) * np.arange(20)
    packed = panels(matrix.T if turned else matrix, "int8", 16, turned)
    step = np.abs(matrix).max(0) / 127
    given = np.asarray(packed).T if turned else np.asarray(packed)
    assert np.all(np.abs(given - matrix) <= step / 2 * 1.0001)
    assert np.abs(given - matrix).max() > 0 and packed.dtype == np.int8
    np.testing.assert_allclose(packed.rows(np.arange(20)), given.T, rtol=1e-6)


def test_it_travels_as_arrays():
    packed = panels(np.eye(3, 5, dtype=np.float32), "int8", 16)
    assert len(jax.tree.leaves(packed)) == 2
    assert jax.tree.map(lambda leaf: leaf, packed).columns == 5
