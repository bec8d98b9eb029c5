"""Random bits: every draw has its own (METHODS section 2, *Randomness*).

A key is folded by row id, level, the row's own round counter, slot in the block and purpose. Folding by
position instead is wrong: a position that is drafted again would reuse bits that an adaptive component has
already seen.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from speccascade_jax.core.types import Array

DRAFT, ACCEPT, REPLACE, BONUS, CHOOSE = range(5)
PURPOSES = 8
"""There is room for so many. The first four share a counter with round and slot, so that a further one alters
none of their bits, and with them no published record: see `RoundKeys.uniform`."""

STAGES = 8
"""Levels below this number are the stages of one generation: 0, and those of sequence cascades."""


def root(seed: Array | int) -> Array:
    """The key that all keys of a generation are folded from; `seed` is below 2³²."""
    return jax.random.key(np.uint32(seed) if isinstance(seed, int) else seed, impl="threefry2x32")


def below(level: int, arm: int = 0) -> int:
    """The level of the `arm`-th drafter (of at most 8) that drafts for an engine of `level`.

    Levels are the nodes of a tree, numbered row by row from its stages on, so that no two engines of one generation
    share bits, however deep hierarchies stand inside sequence cascades or beside each other as arms.

    Raises:
        ValueError: an arm that there is no number for.
    """
    if not 0 <= arm < STAGES:
        raise ValueError(f"arm={arm}: drafters beside each other are numbered from 0 to {STAGES - 1}")
    return STAGES * (level + 1) + arm


def row_keys(key: Array, example_ids: Array, level: int) -> Array:
    """One key per row, uint32 `[B, 2]`: what a row draws depends on its id, never on its neighbours."""
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i), level))(example_ids)
    return jax.random.key_data(keys)


@flax.struct.dataclass
class RoundKeys:
    """The bits of one round: `row` keys uint32 `[B, 2]`, the row's `round` counter and `length`, int32 `[B]`.

    Attributes:
        behind: slots that another one draws for: those asked for stand behind them.
    """

    row: Array
    round: Array
    length: Array
    behind: int = flax.struct.field(pytree_node=False, default=0)

    def uniform(self, slots: Array, purpose: int | Array) -> Array:
        """float32 in [0, 1) of the shape of `slots`: int32 `[B]` or `[B, T]`, slots in the block; one purpose or `[B]`.

        Round, slot and purpose are one block of Threefry's counter: one call of the cipher per draw, where
        folding them in one after the other takes three. Its first word holds the round, and in its highest bit whether
        the purpose is one of the last four; its second word slot and purpose.
        """
        purpose = jnp.reshape(jnp.asarray(purpose, jnp.uint32), (-1, 1))
        flat = (slots.reshape(slots.shape[0], -1) + self.behind).astype(jnp.uint32) * 4 + purpose % 4
        rounds = jnp.broadcast_to(self.round[:, None].astype(jnp.uint32) + (purpose // 4 << 31), flat.shape)
        counters = jnp.stack([rounds, flat], axis=-1)
        bits = jax.vmap(jax.vmap(threefry_2x32, (None, 0)))(self.row, counters)[..., 0]
        # 23 bits become the mantissa of a float in [1, 2)
        ones = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
        return (ones - 1.0).reshape(slots.shape)
