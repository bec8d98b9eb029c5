"""Random bits: every draw has its own (METHODS section 2, *Randomness*).

A key is folded by row id, level, the row's own round counter, slot in the block and purpose. Folding by
position instead is wrong: a position that is drafted again would reuse bits that an adaptive component has
already seen.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.types import Array

DRAFT, ACCEPT, REPLACE, BONUS = range(4)
_PURPOSES = 4


def row_keys(key: Array, example_ids: Array, level: int) -> Array:
    """One key per row `[B]`: what a row draws depends on its id, never on its neighbours."""
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i), level))(example_ids)


@flax.struct.dataclass
class RoundKeys:
    """The bits of one round: `row` keys `[B]`, the row's `round` counter and its `length`, int32 `[B]`."""

    row: Array
    round: Array
    length: Array

    def uniform(self, slots: Array, purpose: int) -> Array:
        """float32 in [0, 1) of the shape of `slots`: int32 `[B]` or `[B, T]`, slots in the block."""
        keys = jax.vmap(jax.random.fold_in)(self.row, self.round)
        flat = slots.reshape(slots.shape[0], -1) * _PURPOSES + purpose
        draw = jax.vmap(jax.vmap(lambda k, n: jax.random.uniform(jax.random.fold_in(k, n)), (None, 0)))
        return draw(keys, flat).reshape(slots.shape).astype(jnp.float32)
