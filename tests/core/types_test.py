"""Tests of packed matrices, which are the same matrix in every layout, of prompt widths, and of annotated shapes."""

import typing
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped

import speccascade_jax as sc
from speccascade_jax.core import types
from speccascade_jax.core.arrays import bucket
from speccascade_jax.core.types import Round, count
from speccascade_jax.engine.generate import generate
from speccascade_jax.methods.build import build
from speccascade_jax.methods.settings import Level, Settings
from speccascade_jax.models.products import panels
from tests.support import engines


@settings(deadline=None, max_examples=40)
@given(
    inputs=st.integers(1, 9),
    columns=st.integers(1, 40),
    width=st.sampled_from([None, 1, 16, 64]),
    turned=st.booleans(),
    seed=st.integers(0, 99),
)
def test_packing_a_matrix_is_reversible(inputs, columns, width, turned, seed):
    matrix = np.random.default_rng(seed).normal(size=(inputs, columns)).astype(np.float32)
    leaf = matrix.T if turned else matrix
    packed = panels(leaf, "float32", width, turned)
    np.testing.assert_array_equal(packed.dense(), leaf)
    np.testing.assert_array_equal(np.asarray(packed), leaf)
    assert packed.shape == leaf.shape and packed.size == leaf.size == count({"a": packed})
    taken = np.random.default_rng(seed).integers(0, columns, (2, 3))
    np.testing.assert_array_equal(packed.rows(taken), matrix.T[taken])


@pytest.mark.parametrize("turned", [False, True])
def test_packing_8_bits_keeps_the_scales(turned):
    matrix = np.random.default_rng(0).normal(size=(30, 20)).astype(np.float32) * np.arange(20)
    packed = panels(matrix.T if turned else matrix, "int8", 16, turned)
    step = np.abs(matrix).max(0) / 127
    unpacked = np.asarray(packed).T if turned else np.asarray(packed)
    assert np.all(np.abs(unpacked - matrix) <= step / 2 * 1.0001)
    assert np.abs(unpacked - matrix).max() > 0 and packed.dtype == np.int8
    np.testing.assert_allclose(packed.rows(np.arange(20)), unpacked.T, rtol=1e-6)


def test_packed_matrices_travel_as_arrays():
    packed = panels(np.eye(3, 5, dtype=np.float32), "int8", 16)
    assert len(jax.tree.leaves(packed)) == 2
    assert jax.tree.map(lambda leaf: leaf, packed).columns == 5


def test_buckets_are_few_and_waste_less_than_half_of_the_prompt():
    widths = [bucket(length) for length in range(1, 1025)]
    assert widths == sorted(widths) and sorted(set(widths))[:6] == [8, 12, 16, 24, 32, 48]
    assert len(set(widths)) == 15
    for length, width in enumerate(widths, start=1):
        assert bucket(width) == width >= length
        assert width == 8 or width - length < length / 2


def shaped_fields(value):
    """Yields `(name, annotated shape, array)` of a value's fields, and of the values inside it."""
    for name, hint in typing.get_type_hints(type(value)).items():
        field = getattr(value, name)
        shape = next((kind for kind in (hint, *typing.get_args(hint)) if hasattr(kind, "dim_str")), None)
        if shape is not None and field is not None:
            yield f"{type(value).__name__}.{name}", shape, field
        elif type(field).__module__ == types.__name__:
            yield from shaped_fields(field)


def check_shapes(value):
    with jaxtyped("context"):  # within this context, a letter stands for one size
        for name, shape, array in shaped_fields(value):
            assert isinstance(array, shape), f"{name} is {array.dtype}{array.shape}, annotated as {shape}"


CHECKED = []


def look_at(turn: Round):
    """Checks a round while it is traced."""
    check_shapes(turn)
    CHECKED.append(turn.draft.tokens.shape)
    return turn.num_new


@pytest.mark.parametrize(
    ("settings", "drafted"),
    [
        ({"block_size": 3}, 3),
        ({"block_size": 3, "verify": "block", "rule": "token_v3", "alpha": 0.3}, 3),
        ({"tree": (2, 1)}, 2),
        ({"drafters": (Level(model="middle", budget=3, block_size=2),)}, 3),
        ({"method": "autoregressive"}, 0),
    ],
)
def test_rounds_have_the_annotated_shapes(settings, drafted):
    CHECKED.clear()
    pair = sc.Pair(sc.FakeLM(12), sc.FakeLM(12, noise=0.3), others={"middle": sc.FakeLM(12, noise=0.1)})
    decoder = build(pair, Settings(temperature=1.0, **settings))
    more = {"controls": decoder.controls(3), "max_new_tokens": 8, "record": look_at}
    jax.eval_shape(partial(generate, decoder.engine, **more), decoder.params, engines.THREE, 0)
    assert CHECKED and CHECKED[0][0] == 3 and CHECKED[0][1] >= drafted, CHECKED
