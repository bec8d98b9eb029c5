"""Trees of drafted tokens that follow the last committed token; their shape is static (docs/methods.md, section 10).

Entry 0 of a tree is the last committed token. It is *pending*: no model has been fed with it, so no cache contains it.
The other entries are the tree's nodes, level by level: node `n` is entry `n + 1`. A cache stores the entries in this
order, in the slots after the committed tokens, although nodes of one level have the same position in the sequence.
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
    """A run of `T` tree entries that a model is fed in one call, from entry `num_cached` on; all fields are static.

    Attributes:
        num_cached: how many entries the cache already contains.
        depths: the depths of all entries from entry 0 to the last one that is fed; entry 0 has depth 0.
        sees: bool `[T, num_cached + T]`, the entries that each entry attends to: its ancestors and itself.
    """

    num_cached: int
    depths: tuple[int, ...]
    sees: tuple[tuple[bool, ...], ...]

    @property
    def own(self) -> tuple[int, ...]:
        """The depths of the `T` entries that are fed."""
        return self.depths[self.num_cached :]

    @property
    def parents(self) -> tuple[int, ...]:
        """The parent entry of each of the `T` entries; none of them may be entry 0."""
        # Entries are listed level by level, so the parent is the last of the ancestors.
        rows = enumerate(self.sees, start=self.num_cached)
        return tuple(max(other for other in range(entry) if seen[other]) for entry, seen in rows)


@dataclass(frozen=True)
class Tree:
    """A tree of `N` drafted tokens.

    Attributes:
        parents: each node's parent node, or −1 for the pending token. Nodes are listed level by level: a node comes
            after its parent, and depths never decrease along the list. A node's children are drawn one after the other
            without replacement.

    Raises:
        ValueError: there are no nodes, or they are not listed level by level.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents:
            raise ValueError("a tree without nodes drafts nothing: give its parents, (-1,) for a single token")
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} of the tree follows {parent}: its parent must be −1 or an earlier node")
        # A level must be contiguous: the model is fed one level at a time, as a slice of entries.
        for node in range(1, self.size):
            if self.depths[node + 1] < self.depths[node]:
                raise ValueError(f"node {node} of the tree is shallower than the one before it: list nodes by level")

    @classmethod
    def of_branching(cls, children: tuple[int, ...]) -> "Tree":
        """Returns the tree whose entries of depth `d` have `children[d]` children; `(3, 2)` gives six 2-token paths."""
        level, parents = [-1], list[int]()
        for count in children:
            above, first = level, len(parents)
            # All children of a level come before any grandchild, which is the order that `parents` must have.
            parents += [parent for parent in above for _ in range(count)]
            level = list(range(first, len(parents)))
        return cls(tuple(parents))

    @property
    def size(self) -> int:
        """`N`, the number of nodes."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of every entry; 0 for the pending token."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The number of tokens on the longest path."""
        return self.depths[-1]

    @cached_property
    def children(self) -> np.ndarray:
        """int32 `[N + 1, K]`: the entry numbers of every entry's children, in order, padded with 0."""
        followers = [list[int]() for _ in range(self.size + 1)]
        for entry, parent in enumerate(self.parents, start=1):
            followers[parent + 1].append(entry)
        return right_pad(followers, max(map(len, followers)))

    def level(self, depth: int) -> tuple[int, int]:
        """Returns the range of entries at a depth: the first entry, and the entry after the last one."""
        return self.depths.index(depth), len(self.depths) - self.depths[::-1].index(depth)

    def branch(self, first: int, end: int) -> Branch:
        """Returns the `Branch` of entries `first` to `end − 1`; the cache must contain all entries before them."""
        # Parents come before children, so a parent's row is complete when its child copies it.
        seen = np.eye(self.size + 1, dtype=bool)
        for entry, parent in enumerate(self.parents, start=1):
            seen[entry] |= seen[parent + 1]
        return Branch(first, self.depths[:end], tuple(map(tuple, seen[first:end, :end].tolist())))


def without(q_tilde: Array, q: Array, taken: Array) -> Array:
    """Returns the distribution from which a node's next child is drawn: `q̃` without the earlier siblings' tokens.

    The `q̃` of a greedy draft is a one-hot, so nothing of it remains after the first child. The result is then the
    one-hot of the most likely token under `q` that is not taken, or of token 0 if all tokens are taken.

    Args:
        q_tilde: float32 `[..., V]`, the distribution of the first child.
        q: float32 `[..., V]`, the draft's raw distribution.
        taken: bool `[..., V]`, the tokens of the earlier siblings.

    Returns:
        float32 `[..., V]`.
    """
    remaining = jnp.where(taken, 0.0, q_tilde)
    total = remaining.sum(-1, keepdims=True)
    # −1 is below every probability, so a taken token is not chosen even where `q` is 0 for all other tokens.
    best = one_hot(argmax(jnp.where(taken, -1.0, q)), q.shape[-1])
    return jnp.where(total > 0, remaining / jnp.where(total > 0, total, 1.0), best)


def along(values: Array, entries: Array) -> Array:
    """Gathers `values` `[B, N + 1, …]` at the given tree entries of each row, `entries` int32 `[B, W]`."""
    return jnp.take_along_axis(values, entries.reshape(*entries.shape, *[1] * (values.ndim - 2)), axis=1)
