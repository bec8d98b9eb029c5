"""Random bits: every draw has its own (METHODS section 2, *Randomness*).

A key is folded by row id, level, the row's own round counter, slot in the block and purpose. Folding by
position instead is wrong: a position that is drafted again would reuse bits that an adaptive component has
already seen.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

from speccascade_jax.core.types import Array

DRAFT, ACCEPT, REPLACE, BONUS = range(4)
_PURPOSES = 4


def row_keys(key: Array, example_ids: Array, level: int) -> Array:
    """One key per row, uint32 `[B, 2]`: what a row draws depends on its id, never on its neighbours."""
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i), level))(example_ids)
    return jax.random.key_data(keys)


@flax.struct.dataclass
class RoundKeys:
    """The bits of one round: `row` keys uint32 `[B, 2]`, the row's `round` counter and `length`, int32 `[B]`."""

    row: Array
    round: Array
    length: Array

    def uniform(self, slots: Array, purpose: int | Array) -> Array:
        """float32 in [0, 1) of the shape of `slots`: int32 `[B]` or `[B, T]`, slots in the block; one purpose or `[B]`.

        Round, slot and purpose are one block of Threefry's counter: one call of the cipher per draw, where
        folding them in one after the other takes three.
        """
        flat = slots.reshape(slots.shape[0], -1) * _PURPOSES + jnp.reshape(purpose, (-1, 1))
        rounds = jnp.broadcast_to(self.round[:, None], flat.shape)
        counters = jnp.stack([rounds, flat], axis=-1).astype(jnp.uint32)
        bits = jax.vmap(jax.vmap(threefry_2x32, (None, 0)))(self.row, counters)[..., 0]
        # 23 bits become the mantissa of a float in [1, 2)
        ones = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
        return (ones - 1.0).reshape(slots.shape)
