"""Results to the host in one transfer, however many arrays they are."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.types import Array, PyTree

Tree = TypeVar("Tree")
_JOINED = ("int32", "uint32", "float32")


def join(tree: PyTree) -> Array:
    """int32: the bits of all arrays of `tree`, which hold numbers of 32 bits, one after the other."""
    leaves = jax.tree.leaves(tree)
    return jnp.concatenate([jax.lax.bitcast_convert_type(leaf, jnp.int32).ravel() for leaf in leaves])


class Layout(NamedTuple):
    """Where the arrays of a tree lie in what `join` makes of it: shape, dtype, first byte; and how long that is."""

    structure: jax.tree_util.PyTreeDef
    places: tuple[tuple[tuple[int, ...], np.dtype, int], ...]
    size: int

    @classmethod
    def of(cls, tree: PyTree) -> Layout:
        """Returns the layout of arrays, or of their shapes."""
        leaves, structure = jax.tree.flatten(tree)
        ends = list(itertools.accumulate((math.prod(leaf.shape) for leaf in leaves), initial=0))
        places = tuple((leaf.shape, leaf.dtype, 4 * begin) for leaf, begin in zip(leaves, ends, strict=False))
        return cls(structure, places, ends[-1])

    def fetch(self, joined: Array) -> PyTree:
        """The tree on the host, read-only: its arrays are made while the device works, and filled when it is done."""
        memory = np.empty(self.size, np.int32)
        readable = memory.view()
        readable.flags.writeable = False
        arrays = [np.ndarray(shape, dtype, readable, begin) for shape, dtype, begin in self.places]
        tree = jax.tree.unflatten(self.structure, arrays)
        memory[:] = np.asarray(joined)
        return tree


def fetch(tree: Tree) -> Tree:
    """The arrays of `tree` on the host, as `jax.device_get` gives them.

    Waiting for an array and handing it over takes about as long for a single number as for a thousand: the device joins
    them into one first. What is no array of 32-bit numbers, or on the host already, goes the usual way.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves or not all(isinstance(leaf, jax.Array) and leaf.dtype.name in _JOINED for leaf in leaves):
        return cast(Tree, jax.device_get(tree))
    joined = _join(tree)
    return cast(Tree, Layout.of(tree).fetch(joined))


_join = jax.jit(join)
