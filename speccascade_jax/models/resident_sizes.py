"""Sizes of the kernel that drafts blocks (`resident_draft`), and which caches it keeps in VMEM.

Weights always stay in VMEM for the whole block. So do the caches that fit beside them: first those of self-attention,
which a block also writes, then the encoder's keys and values of as many layers as possible. The kernel reads all other
caches anew for each token.

Shape letters: those of `resident_draft`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from speccascade_jax.core.types import Array
from speccascade_jax.models.decode_attention import LANES

SUBLANES = 16
"""Rows of a register of bfloat16, and a multiple of those of float32."""
_COMPILER = 2**20
"""Bytes of VMEM for intermediate values of the compiler."""


@dataclass(frozen=True)
class Sizes:
    """The kernel's sizes. Turn 0 of its grid feeds missed tokens, and each later turn drafts a token.

    Attributes:
        rows, turns: `B`, and the number of tokens that are fed after the missed one.
        layers, heads, size: `L`, `H` and `K`.
        width, hidden: `E` and `F`.
        entries, vocab: `M`, and how many entries of it are tokens.
        slots, fixed: `S` and `N`.
        dtype: dtype of weights and caches.
        epsilon: that of the norms.
        gate: function of the first half of the gated units.
        vmem: bytes of VMEM that the kernel may use.
        group: rows whose attention is computed at the same time, a divisor of `rows`.
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
        """Columns of queries, `H K`."""
        return self.heads * self.size

    @property
    def padded(self) -> int:
        """Rows of the state: `R`."""
        return -(-self.rows // 8) * 8

    @property
    def groups(self) -> int:
        """Number of groups of rows."""
        return self.rows // self.group

    @property
    def padded_heads(self) -> int:
        """Rows of one row's attention logits: the heads in whole registers."""
        # Rows beyond the heads have queries of zeros. Their results are finite, and no column keeps them.
        return -(-self.heads // 8) * 8

    @property
    def tiles(self) -> int:
        """Most tiles of slots that a block of `turns + 1` tokens touches."""
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
        # A row is read from the columns by its number, which Mosaic cannot do if the columns are a single tile.
        whole = whole and self.size % SUBLANES == 0 and self.entries % SUBLANES == 0 and self.inner > LANES
        return whole and self.needed_bytes(0, 0) <= self.vmem

    def kept(self, crossed: bool) -> int:
        """Returns the number of first layers whose caches stay in VMEM.

        Args:
            crossed: whether the caches are the encoder's keys and values.
        """
        # All layers of self-attention, or none: a single layer that is read anew could be read before it is written.
        slots = self.layers if self.needed_bytes(self.layers, 0) <= self.vmem else 0
        if not crossed:
            return slots
        return max(
            (count for count in range(self.layers + 1) if self.needed_bytes(slots, count) <= self.vmem), default=0
        )

    def buffers(self, crossed: bool) -> int:
        """Returns the number of rows of the two buffers of a group's keys and values, if any layer needs them."""
        return 2 * self.group if self.kept(crossed) < self.layers else 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that stay in VMEM."""
        matrices = self.layers * sum(rows * columns for rows, columns in self.shapes)
        return self._number * (matrices + self.width * self.entries)

    def cache_bytes(self, slots: int) -> int:
        """Returns the bytes of one row's keys and values of one layer, for a number of slots."""
        return self._number * 2 * self.inner * slots

    @property
    def moved_bytes(self) -> int:
        """Bytes that a block moves between HBM and VMEM, without those of a missed token."""
        slots, fixed = self.kept(crossed=False), self.kept(crossed=True)
        once = slots * self.cache_bytes(self.slots + self.tiles * LANES) + fixed * self.cache_bytes(self.fixed)
        slots_again, fixed_again = self.layers - slots, self.layers - fixed
        # a tile of self-attention is written for each token
        again = slots_again * self.cache_bytes(self.slots + LANES) + fixed_again * self.cache_bytes(self.fixed)
        moved = once + self.turns * again
        return self.weight_bytes + self.rows * moved + 4 * self.turns * self.rows * self.entries

    def needed_bytes(self, slots: int, fixed: int) -> int:
        """Returns the bytes of VMEM that the kernel needs if caches stay there.

        Args:
            slots: number of layers whose self-attention's caches stay.
            fixed: number of layers whose keys and values of the encoder stay.
        """
        # A row of slots fills whole tiles. Two groups of rows are in VMEM at once if the other layers are read anew.
        lanes = -(-self.fixed // LANES) * LANES
        counts = [count * self.rows + 2 * self.group * (count < self.layers) for count in (slots, fixed)]
        caches = counts[0] * self.cache_bytes(self.slots) + counts[1] * self.cache_bytes(lanes)
        bias = 4 * self.rows * (self.turns + 2) * self.padded_heads * self.slots
        # Float32 logits exist four times: two blocks of the output, as the weights of a draw, and as a value.
        logits = 4 * 4 * self.padded * self.entries
        # embeddings with the tokens around them, projections, the state twice, and a row's small numbers in whole tiles
        state = self.padded * (self._number * SUBLANES * self.width + 4 * (4 * self.inner + 2 * self.width) + 2**13)
        # Products in full precision divide float32 matrices into parts, block by block.
        parts = 2 * max(rows * columns for rows, columns in self.shapes) if self._number == 4 else 0
        return self.weight_bytes + caches + bias + logits + state + parts + _COMPILER

    @property
    def _number(self) -> int:
        """Bytes of a number of the weights and caches."""
        return jnp.dtype(self.dtype).itemsize
