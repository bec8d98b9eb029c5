"""Tests of parameter trees that are flattened once, and of results that are fetched together."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core.transfers import Flat, fetch

# --- a flat tree of parameters is the tree it was made of, wherever one is expected


TREE = {"target": {"b": np.float32(2), "a": {"w": np.arange(3.0)}}, "drafter": {}}


def test_flat_reads_like_a_dictionary():
    flat = Flat(TREE)
    assert dict(flat) == TREE and len(flat) == 2 and {**flat, "drafter": 1} == {**TREE, "drafter": 1}
    with pytest.raises(KeyError):
        flat["draft"]


def test_flat_has_the_leaves_and_paths_of_the_dictionary():
    """Profiles identify modules by these paths."""
    leaves = [[(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
             for tree in (Flat(TREE), TREE)]  # fmt: skip
    assert [path for path, _ in leaves[0]] == ["['target']['a']['w']", "['target']['b']"]
    assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(*leaves, strict=True))


def test_programs_take_and_return_flat():
    @jax.jit
    def double(params):
        assert params["drafter"] == {}
        return jax.tree.map(lambda x: 2 * x, params)

    twice = double(double(Flat(TREE)))
    assert isinstance(twice, Flat) and float(twice["target"]["b"]) == 8
    np.testing.assert_array_equal(twice["target"]["a"]["w"], [0, 4, 8])
    assert double._cache_size() <= 2  # at most one program for host arrays and one for device arrays
    different = Flat({"target": {"b": np.float32(2), "c": {"w": np.arange(3.0)}}, "drafter": {}})
    assert jax.tree.structure(Flat(TREE)) == jax.tree.structure(twice) != jax.tree.structure(different)


def test_flat_is_flattened_once():
    """A `Flat` flattens its dictionaries when it is made, and no call does so again."""
    tree = {"target": {"a": np.zeros(1)}, "drafter": {}}
    flat = Flat(tree)
    tree["target"]["b"] = np.ones(1)
    assert len(jax.tree.leaves(flat)) == 1


def test_flat_is_immutable():
    flat = Flat({"target": np.ones(2), "drafter": {"model": np.ones(3)}})
    with pytest.raises(ValueError, match="FrozenDict is immutable"):
        flat["drafter"]["stop"] = np.ones(1)
    more = Flat({**flat, "drafter": {**flat["drafter"], "stop": np.ones(1)}})
    assert len(jax.tree.leaves(more)) == 3 and len(jax.tree.leaves(flat)) == 2


# --- results come to the host as they are


@flax.struct.dataclass
class Both:
    whole: jax.Array
    real: jax.Array


def base(array):
    """Returns the array that owns the memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


REAL = np.array([[-0.0, np.inf, 1e-45], [np.nan, 3.5, -7]], np.float32)


def test_fetched_numbers_equal_the_devices_bit_for_bit():
    tree = {
        "both": Both(jnp.arange(6, dtype=jnp.int32).reshape(2, 3) - 3, jnp.asarray(REAL)),
        "none": None, "one": jnp.uint32(2**32 - 1), "empty": jnp.zeros((2, 0), jnp.float32),
    }  # fmt: skip
    fetched, expected = fetch(tree), jax.device_get(tree)
    assert jax.tree.structure(fetched) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(fetched), jax.tree.leaves(expected), strict=True):
        assert isinstance(ours, np.ndarray) and ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes() and not ours.flags.writeable


def test_fetch_transfers_one_array():
    leaves = jax.tree.leaves(fetch({"a": jnp.arange(4), "b": (jnp.ones(3), jnp.int32(5))}))
    assert len({id(base(leaf)) for leaf in leaves}) == 1 and sum(leaf.size for leaf in leaves) == base(leaves[0]).size


@pytest.mark.parametrize("other", [np.arange(3), jnp.array([True, False]), jnp.ones(2, jnp.bfloat16), None])
def test_arrays_that_cannot_be_joined_are_fetched_separately(other):
    fetched = fetch((other, jnp.arange(2)))
    assert jax.tree.structure(fetched) == jax.tree.structure((other, 0))
    for ours, theirs in zip(jax.tree.leaves(fetched), jax.tree.leaves((other, np.arange(2))), strict=True):
        assert ours.dtype == np.asarray(theirs).dtype or ours.dtype == np.int32
        np.testing.assert_array_equal(ours, theirs)
