"""Fast transfers to and from compiled programs: a pytree is flattened only once, and results arrive in one copy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import freeze

from speccascade_jax.core.types import Array, PyTree

Tree = TypeVar("Tree")
_JOINED = ("int32", "uint32", "float32")


def join(tree: PyTree) -> Array:
    """Concatenates the bits of all arrays of `tree` into one int32 array; the arrays must hold 32-bit numbers."""
    leaves = jax.tree.leaves(tree)
    # A bitcast keeps every bit, including those of NaN, whereas a conversion would round.
    return jnp.concatenate([jax.lax.bitcast_convert_type(leaf, jnp.int32).ravel() for leaf in leaves])


class Layout(NamedTuple):
    """The position of each array of a tree in the output of `join`.

    Attributes:
        structure: the tree's structure.
        places: shape, dtype and first byte of each array.
        size: the length of the joined array.
    """

    structure: jax.tree_util.PyTreeDef
    places: tuple[tuple[tuple[int, ...], np.dtype, int], ...]
    size: int

    @classmethod
    def of(cls, tree: PyTree) -> Layout:
        """Returns the layout of a tree of arrays or of `jax.ShapeDtypeStruct`s."""
        leaves, structure = jax.tree.flatten(tree)
        ends = list(itertools.accumulate((math.prod(leaf.shape) for leaf in leaves), initial=0))
        places = tuple((leaf.shape, leaf.dtype, 4 * begin) for leaf, begin in zip(leaves, ends, strict=False))
        return cls(structure, places, ends[-1])

    def fetch(self, joined: Array) -> PyTree:
        """Copies a joined array to the host and returns the tree of read-only arrays that it contains."""
        # The views are made before `np.asarray` waits for the device, so making them costs no extra time.
        memory = np.empty(self.size, np.int32)
        readable = memory.view()
        # The views are read-only, but `memory` itself stays writable, because it is filled below.
        readable.flags.writeable = False
        arrays = [np.ndarray(shape, dtype, readable, begin) for shape, dtype, begin in self.places]
        tree = jax.tree.unflatten(self.structure, arrays)
        memory[:] = np.asarray(joined)
        return tree


def fetch(tree: Tree) -> Tree:
    """Copies the arrays of `tree` to the host, as `jax.device_get` does, but in a single transfer.

    Waiting for an array and copying it takes about as long for a single number as for a thousand, so the device first
    joins all arrays into one. If an array is not of 32 bits or already on the host, `device_get` is called instead.
    """
    # 64-bit and 16-bit arrays do not fit into an int32 buffer, and host arrays need no transfer.
    leaves = jax.tree.leaves(tree)
    if not leaves or not all(isinstance(leaf, jax.Array) and leaf.dtype.name in _JOINED for leaf in leaves):
        return cast(Tree, jax.device_get(tree))
    joined = _join(tree)
    return cast(Tree, Layout.of(tree).fetch(joined))


_join = jax.jit(join)


@jax.tree_util.register_pytree_with_keys_class
class Flat(Mapping[str, Any]):
    """A read-only nested dictionary of arrays that stores its leaves, so that JAX need not flatten it at every call.

    JAX flattens the arguments of a compiled program in every call, and sorts the names in every dictionary. For the
    models that the package ships (a hundred arrays in sixty dictionaries) this takes a quarter of a millisecond. A
    `Flat` returns its stored leaves at once.

    All nested dictionaries are read-only too, because the stored leaves would not follow a change. To change an entry,
    make a new dictionary: `{**params, "drafter": …}`.
    """

    def __init__(self, tree: Mapping[str, Any]):
        # The tree is frozen, because a later change would make it disagree with the leaves that are stored here.
        tree = freeze(dict(tree))
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._leaves: Sequence[Any] = [leaf for _, leaf in leaves]
        self._paths, self._tree = tuple(jax.tree_util.keystr(path) for path, _ in leaves), tree

    def __getitem__(self, name: str) -> Any:
        return self._tree[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    def __repr__(self) -> str:
        return f"Flat({self._tree!r})"

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        """Returns the stored leaves and their structure; JAX calls this at every call of a compiled program."""
        return self._leaves, (self._structure, self._paths)

    def tree_flatten_with_keys(self) -> tuple[Sequence[tuple[Any, Any]], Any]:
        """Returns each leaf with its path, as profiles and error messages show it, and the structure."""
        leaves, described = self.tree_flatten()
        return list(zip(self._paths, leaves, strict=True)), described

    @classmethod
    def tree_unflatten(cls, described: Any, leaves: Sequence[Any]) -> Flat:
        """Returns a `Flat` that has the structure `described` and the given leaves."""
        # `__init__` would flatten the tree again, which this class is meant to avoid.
        flat = cls.__new__(cls)
        flat._structure, flat._paths = described
        flat._leaves = tuple(leaves)
        flat._tree = jax.tree.unflatten(flat._structure, flat._leaves)
        return flat
