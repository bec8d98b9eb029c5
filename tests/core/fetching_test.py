"""Results come to the host as they are, and together."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core.fetching import fetch


@flax.struct.dataclass
class Both:
    whole: jax.Array
    real: jax.Array


def base(array):
    """The array that owns the memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


REAL = np.array([[-0.0, np.inf, 1e-45], [np.nan, 3.5, -7]], np.float32)


def test_numbers_are_the_devices_bit_for_bit():
    tree = {
        "both": Both(jnp.arange(6, dtype=jnp.int32).reshape(2, 3) - 3, jnp.asarray(REAL)),
        "none": None, "one": jnp.uint32(2**32 - 1), "empty": jnp.zeros((2, 0), jnp.float32),
    }  # fmt: skip
    found, expected = fetch(tree), jax.device_get(tree)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(ours, np.ndarray) and ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes() and not ours.flags.writeable


def test_there_is_one_array_to_wait_for():
    found = jax.tree.leaves(fetch({"a": jnp.arange(4), "b": (jnp.ones(3), jnp.int32(5))}))
    assert len({id(base(leaf)) for leaf in found}) == 1 and sum(leaf.size for leaf in found) == base(found[0]).size


@pytest.mark.parametrize("other", [np.arange(3), jnp.array([True, False]), jnp.ones(2, jnp.bfloat16), None])
def test_what_cannot_be_joined_comes_as_it_is(other):
    found = fetch((other, jnp.arange(2)))
    assert jax.tree.structure(found) == jax.tree.structure((other, 0))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves((other, np.arange(2))), strict=True):
        assert ours.dtype == np.asarray(theirs).dtype or ours.dtype == np.int32
        np.testing.assert_array_equal(ours, theirs)
