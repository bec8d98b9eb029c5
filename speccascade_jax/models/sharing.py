"""Several models' parameters with each array once, however many of them hold it: early exits hold their target's."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from speccascade_jax.core.types import Array, Params

Places = tuple[tuple[jax.tree_util.PyTreeDef, tuple[int, ...]], ...]
"""For each model the shape of its tree, and where among the arrays its leaves are. Hashable: static under jit."""


def distinct(params: Sequence[Params]) -> tuple[list[Array], Places]:
    """The arrays of all trees, one that is held twice once, and what `restored` needs to give the trees back.

    A compiler merges what is computed twice from one array, and cannot from two arguments, be they one in the caller's
    hands.
    """
    arrays: list[Array] = []
    known: dict[int, int] = {}
    places = []
    for tree in params:
        leaves, shape = jax.tree.flatten(tree)
        for leaf in leaves:
            if id(leaf) not in known:
                known[id(leaf)] = len(arrays)
                arrays.append(leaf)
        places.append((shape, tuple(known[id(leaf)] for leaf in leaves)))
    return arrays, tuple(places)


def restored(arrays: Sequence[Array], places: Places) -> list[Params]:
    """The trees that `distinct` took apart."""
    return [jax.tree.unflatten(shape, [arrays[n] for n in own]) for shape, own in places]
