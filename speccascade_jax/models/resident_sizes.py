"""Sizes of the kernel that drafts blocks (`resident_draft`), and which caches it keeps in VMEM.

Weights always stay in VMEM for the whole block, and so do the caches that fit beside them. The caches of
self-attention, which the block also writes, come first, then those of cross-attention for as many layers as possible.
The kernel reads all other caches from HBM again for each token.

Shape letters: those of `resident_draft`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from speccascade_jax.core.types import Array
from speccascade_jax.models.decode_attention import LANES

SUBLANES = 16
"""Number of rows of a bfloat16 register, a multiple of the 8 rows of a float32 register."""
_COMPILER = 2**20
"""Bytes of VMEM that are left to the compiler for intermediate values."""


@dataclass(frozen=True)
class Sizes:
    """The kernel's sizes. A *turn* is a step of its grid: turn 0 feeds missed tokens, each later turn drafts a token.

    Attributes:
        rows, turns: `B`, and the number of tokens that are fed after the missed one.
        layers, heads, size: the number of layers, `H` and `K`.
        width, hidden: `E` and `F`.
        entries, vocab: `M`, and the number of these rows that are tokens; the others are padding.
        slots, fixed: `S` and `N`.
        dtype: dtype of weights and caches.
        epsilon: number added to the mean square in the norms.
        gate: activation of the first half of the gated units.
        vmem: bytes of VMEM that the kernel may use.
        group: number of rows whose attention is computed at the same time, a divisor of `rows`.
    """

    rows: int
    turns: int
    layers: int
    heads: int
    size: int
    width: int
    hidden: int
    entries: int
    vocab: int
    slots: int
    fixed: int
    dtype: str
    epsilon: float
    gate: Callable[[Array], Array]
    vmem: int
    group: int = 1

    @property
    def inner(self) -> int:
        """Number of columns of the queries, `H K`."""
        return self.heads * self.size

    @property
    def padded(self) -> int:
        """Number of rows rounded up to whole registers of 8 rows: the rows of the hidden state, `R`."""
        return -(-self.rows // 8) * 8

    @property
    def groups(self) -> int:
        """Number of groups of rows."""
        return self.rows // self.group

    @property
    def padded_heads(self) -> int:
        """Number of heads, rounded up to whole registers."""
        # Rows beyond the heads have queries of zeros. Their results are finite, and no column keeps them.
        return -(-self.heads // 8) * 8

    @property
    def tiles(self) -> int:
        """Largest number of tiles of slots into which a block of `turns + 1` tokens is written."""
        return min(self.slots // LANES, (self.turns + LANES - 1) // LANES + 1)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Shapes of a layer's matrices."""
        e, a, f = self.width, self.inner, self.hidden
        return (e, 3 * a), (a, e), (e, a), (a, e), (e, 2 * f), (f, e)

    @property
    def fits(self) -> bool:
        """Returns whether all sizes are whole tiles, and the weights and buffers fit into VMEM."""
        columns = [size for shape in self.shapes for size in shape]
        whole = all(size % LANES == 0 for size in (*columns, self.entries, self.slots))
        # The kernel reads single rows of an array with `inner` columns. Mosaic cannot do so if these are a single tile.
        whole = whole and self.size % SUBLANES == 0 and self.entries % SUBLANES == 0 and self.inner > LANES
        return whole and self.needed_bytes(0, 0) <= self.vmem

    def kept(self, crossed: bool) -> int:
        """Returns the number of layers, counted from the first, whose caches stay in VMEM.

        Args:
            crossed: whether the caches are those of cross-attention; otherwise those of self-attention.
        """
        # The caches of self-attention stay for all layers or for none. If only one layer's were read again in every
        # turn, the copy for the next turn could begin before the current turn has written its token.
        slots = self.layers if self.needed_bytes(self.layers, 0) <= self.vmem else 0
        if not crossed:
            return slots
        return max(
            (count for count in range(self.layers + 1) if self.needed_bytes(slots, count) <= self.vmem), default=0
        )

    def buffers(self, crossed: bool) -> int:
        """Returns the number of rows in the two buffers for caches that every turn reads; 0 if all caches stay."""
        return 2 * self.group if self.kept(crossed) < self.layers else 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that stay in VMEM."""
        matrices = self.layers * sum(rows * columns for rows, columns in self.shapes)
        return self._number * (matrices + self.width * self.entries)

    def cache_bytes(self, slots: int) -> int:
        """Returns the bytes of one row's keys and values in one layer with this number of slots."""
        return self._number * 2 * self.inner * slots

    @property
    def moved_bytes(self) -> int:
        """Bytes that one call moves between HBM and VMEM if no token was missed."""
        slots, fixed = self.kept(crossed=False), self.kept(crossed=True)
        once = slots * self.cache_bytes(self.slots + self.tiles * LANES) + fixed * self.cache_bytes(self.fixed)
        slots_again, fixed_again = self.layers - slots, self.layers - fixed
        # For each token, one tile of self-attention's cache is written.
        again = slots_again * self.cache_bytes(self.slots + LANES) + fixed_again * self.cache_bytes(self.fixed)
        moved = once + self.turns * again
        return self.weight_bytes + self.rows * moved + 4 * self.turns * self.rows * self.entries

    def needed_bytes(self, slots: int, fixed: int) -> int:
        """Returns the bytes of VMEM that the kernel needs if it keeps these caches there.

        Args:
            slots: number of layers whose self-attention caches stay.
            fixed: number of layers whose cross-attention caches stay.
        """
        # Slots fill whole tiles. If a layer's caches do not stay, buffers hold those of two groups of rows.
        lanes = -(-self.fixed // LANES) * LANES
        counts = [count * self.rows + 2 * self.group * (count < self.layers) for count in (slots, fixed)]
        caches = counts[0] * self.cache_bytes(self.slots) + counts[1] * self.cache_bytes(lanes)
        bias = 4 * self.rows * (self.turns + 2) * self.padded_heads * self.slots
        # Float32 logits exist four times: in the output's two buffers, as the weights of a draw, and as a value.
        logits = 4 * 4 * self.padded * self.entries
        # These are the tiles of embeddings, the projections, the state twice, and each row's scalars in whole tiles.
        state = self.padded * (self._number * SUBLANES * self.width + 4 * (4 * self.inner + 2 * self.width) + 2**13)
        # Products in full precision divide float32 matrices into parts, block by block.
        parts = 2 * max(rows * columns for rows, columns in self.shapes) if self._number == 4 else 0
        return self.weight_bytes + caches + bias + logits + state + parts + _COMPILER

    @property
    def _number(self) -> int:
        """Bytes per number in weights and caches."""
        return jnp.dtype(self.dtype).itemsize
