"""A tree of parameters that is taken apart once, and not anew by every call of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax.core import freeze


@jax.tree_util.register_pytree_with_keys_class
class Flat(Mapping[str, Any]):
    """A nested dictionary of arrays that knows its leaves; it reads as the dictionary does, inside `jit` too.

    JAX takes the arguments of a compiled program apart in every call, and sorts the names in every dictionary: of the
    shipped pair's hundred arrays in sixty dictionaries that is a quarter of a millisecond. Of this it asks the leaves.

    Read-only to the last dictionary: what was taken apart would not see a change. `{**params, "drafter": …}` makes
    another.
    """

    def __init__(self, tree: Mapping[str, Any]):
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
        """Returns what JAX asks for in every call."""
        return self._leaves, (self._structure, self._paths)

    def tree_flatten_with_keys(self) -> tuple[Sequence[tuple[Any, Any]], Any]:
        """Returns the same with the place of each leaf, as profiles and error messages show it."""
        leaves, described = self.tree_flatten()
        return list(zip(self._paths, leaves, strict=True)), described

    @classmethod
    def tree_unflatten(cls, described: Any, leaves: Sequence[Any]) -> Flat:
        """Returns the same tree with other leaves."""
        flat = cls.__new__(cls)
        flat._structure, flat._paths = described
        flat._leaves = tuple(leaves)
        flat._tree = jax.tree.unflatten(flat._structure, flat._leaves)
        return flat
