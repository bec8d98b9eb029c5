"""Results to the host in one transfer, however many arrays they are."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.types import Array, PyTree

_JOINED = ("int32", "uint32", "float32")


def join(tree: PyTree) -> Array:
    """int32: the bits of all arrays of `tree`, which hold numbers of 32 bits, one after the other."""
    leaves = jax.tree.leaves(tree)
    return jnp.concatenate([jax.lax.bitcast_convert_type(leaf, jnp.int32).ravel() for leaf in leaves])


class Layout(NamedTuple):
    """Where the arrays of a tree lie in what `join` makes of it."""

    structure: Any
    places: tuple[tuple[slice, Any, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tree: PyTree) -> Layout:
        """Of arrays, or of their shapes."""
        leaves, structure = jax.tree.flatten(tree)
        places, end = [], 0
        for leaf in leaves:
            begin, end = end, end + math.prod(leaf.shape)
            places.append((slice(begin, end), leaf.dtype, leaf.shape))
        return cls(structure, tuple(places))

    def split(self, joined: np.ndarray) -> PyTree:
        """The tree, of views of `joined`."""
        return jax.tree.unflatten(self.structure, [joined[at].view(of).reshape(shape) for at, of, shape in self.places])


def fetch(tree: PyTree) -> PyTree:
    """The arrays of `tree` on the host, as `jax.device_get` gives them.

    Waiting for an array and handing it over takes about as long for a single number as for a thousand: the device joins
    them into one first. What is no array of 32-bit numbers, or on the host already, goes the usual way.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves or not all(isinstance(leaf, jax.Array) and leaf.dtype.name in _JOINED for leaf in leaves):
        return jax.device_get(tree)
    joined = _join(tree)
    return Layout.of(tree).split(np.asarray(joined))


_join = jax.jit(join)
