"""Matrices laid out in panels, in 32, 16 or 8 bits: what a CPU's products of a few rows read at full bandwidth."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np


@flax.struct.dataclass
class Packed:
    """A matrix `[K, N]` in panels of `P` columns: a leaf of the parameters, in a kernel's place.

    Attributes:
        panels: `[ceil(N / P), K, P]`, column `c` of the matrix in panel `c // P`, zeros beyond the last; float32,
            float16, bfloat16 or int8.
        scales: float32 `[ceil(N / P) * P]`, what each column of int8 is multiplied by; `None` of the others.
        columns: `N` (static).
        turned: whether the parameter is the matrix's transpose: an embedding that makes the logits (static).
    """

    panels: jax.Array
    scales: jax.Array | None
    columns: int = flax.struct.field(pytree_node=False)
    turned: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def shape(self) -> tuple[int, int]:
        """The parameter's: `(K, N)`, or `(N, K)` where it is turned."""
        shape = (self.panels.shape[1], self.columns)
        return shape[::-1] if self.turned else shape

    @property
    def size(self) -> int:
        """How many numbers the matrix has."""
        return self.shape[0] * self.shape[1]

    @property
    def dtype(self) -> Any:
        """What the numbers are held in."""
        return self.panels.dtype

    def rows(self, taken: jax.Array) -> jax.Array:
        """Columns `taken` (int32, any shape) of the matrix, `[*taken.shape, K]`, float32: rows of its transpose."""
        width = self.panels.shape[2]
        found = self.panels[taken // width, :, taken % width].astype(jnp.float32)
        return found if self.scales is None else found * self.scales[taken][..., None]

    def dense(self) -> np.ndarray:
        """The parameter on the host, as it is held: scales are left out."""
        panels = np.asarray(self.panels)
        matrix = panels.transpose(1, 0, 2).reshape(panels.shape[1], -1)[:, : self.columns]
        return matrix.T if self.turned else matrix

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """`dense` with its scales: the parameter that products are made with."""
        dense = self.dense()
        if self.scales is not None:
            scales = np.asarray(self.scales)[: self.columns]
            dense = dense.astype(np.float32) * (scales[:, None] if self.turned else scales)
        return dense if dtype is None else dense.astype(dtype)


def is_packed(leaf: Any) -> bool:
    """For `jax.tree` functions that take a packed matrix as one leaf."""
    return isinstance(leaf, Packed)
