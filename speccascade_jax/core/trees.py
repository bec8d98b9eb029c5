"""Drafts that branch: a static tree of tokens behind the pending one (METHODS section 10).

Its *entries* are the pending token, entry 0, and the tree's nodes behind it, level by level: node `n` is entry `n + 1`.
A cache holds them in slots of that order behind what is committed, whatever their positions are.
"""

from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.arrays import right_pad
from speccascade_jax.core.sampling import argmax, one_hot
from speccascade_jax.core.types import Array


@dataclass(frozen=True)
class Branch:
    """Entries `held … held + T` of a tree, as a model is fed them (static).

    Attributes:
        held: how many entries the cache has already; depths: of all entries up to the last of these, from 0.
        sees: bool `[T, held + T]`, which entries each sees: those before it on its path, and itself.
    """

    held: int
    depths: tuple[int, ...]
    sees: tuple[tuple[bool, ...], ...]

    @property
    def own(self) -> tuple[int, ...]:
        """Depths of the entries that are fed."""
        return self.depths[self.held :]


@dataclass(frozen=True)
class Tree:
    """A tree of `N` drafted tokens.

    Attributes:
        parents: of each node, the node that it follows, or −1 for the pending token; level by level, so that a node
            stands behind its parent and is no shallower than the one before it. A node's children are drawn one after
            the other, without those before them.

    Raises:
        ValueError: parents in another order.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents:
            raise ValueError("a tree without nodes drafts nothing: give parents, (-1,) for a single token")
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} of the tree follows {parent}: it must follow −1 or a node before it")
        for node in range(1, self.size):
            if self.depths[node + 1] < self.depths[node]:
                raise ValueError(f"node {node} of the tree is shallower than the one before it: list level by level")

    @classmethod
    def of_branching(cls, children: tuple[int, ...]) -> "Tree":
        """Every node of depth `d` has `children[d]` children: `(3, 2, 1)` is three paths, then six, of three tokens."""
        level, parents = [-1], list[int]()
        for count in children:
            above, first = level, len(parents)
            parents += [parent for parent in above for _ in range(count)]
            level = list(range(first, len(parents)))
        return cls(tuple(parents))

    @property
    def size(self) -> int:
        """`N`."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of every entry: 0 of the pending token."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The longest path's tokens."""
        return self.depths[-1]

    @cached_property
    def children(self) -> np.ndarray:
        """int32 `[N + 1, K]`: every entry's children as entries, in their order; 0 where there are no more."""
        followers = [list[int]() for _ in range(self.size + 1)]
        for entry, parent in enumerate(self.parents, start=1):
            followers[parent + 1].append(entry)
        return right_pad(followers, max(map(len, followers)))

    def level(self, depth: int) -> tuple[int, int]:
        """The first entry of a depth, and the one behind its last."""
        return self.depths.index(depth), len(self.depths) - self.depths[::-1].index(depth)

    def branch(self, first: int, end: int) -> Branch:
        """Entries `first` to below `end`, fed to a cache that holds those before."""
        seen = np.eye(self.size + 1, dtype=bool)
        for entry, parent in enumerate(self.parents, start=1):
            seen[entry] |= seen[parent + 1]
        return Branch(first, self.depths[:end], tuple(map(tuple, seen[first:end, :end].tolist())))


def without(q_tilde: Array, q: Array, taken: Array) -> Array:
    """What a node's next child is drawn from, float32 `[..., V]`: `q̃` without the tokens `taken` bool `[..., V]`.

    Where nothing is left of `q̃` (a greedy draft's is one-hot), the most likely token by `q` that is not taken, alone
    (token 0 where all are).
    """
    left = jnp.where(taken, 0.0, q_tilde)
    total = left.sum(-1, keepdims=True)
    best = one_hot(argmax(jnp.where(taken, -1.0, q)), q.shape[-1])
    return jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), best)


def along(values: Array, entries: Array) -> Array:
    """`values` `[B, N + 1, …]` at `entries` int32 `[B, W]` of each row."""
    return jnp.take_along_axis(values, entries.reshape(*entries.shape, *[1] * (values.ndim - 2)), axis=1)
