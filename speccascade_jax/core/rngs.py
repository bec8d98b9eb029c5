"""Random bits of a generation; no two draws share any (METHODS section 2, *Randomness*).

A key is folded by row id, level, the row's round counter, slot in the block and purpose. Folding by position instead is
wrong: a position that is drafted again would reuse bits that an adaptive component has already seen.

Examples:
    >>> import numpy as np
    >>> from speccascade_jax.extend import rngs
    >>> def draw(ids):  # a number per row, for the second slot of its third round
    ...     keys = rngs.row_keys(rngs.root(0), np.array(ids), level=0)
    ...     rounds = np.full(len(ids), 2)
    ...     return np.asarray(rngs.RoundKeys(keys, rounds, rounds).uniform(np.ones(len(ids), int), rngs.DRAFT))
    >>> bool(draw([4, 7])[1] == draw([7, 5])[0])  # a row's bits depend on its id, never on its neighbours
    True
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from speccascade_jax.core.types import Array

DRAFT, ACCEPT, REPLACE, BONUS, CHOOSE = range(5)
PURPOSES = 8
"""The number of purposes that a key has room for.

The first four share a counter with round and slot, so that a further purpose changes none of their bits, and no
published record: see `RoundKeys.uniform`.
"""

STAGES = 8
"""The number of stages of one generation. Levels below it are stages: 0, and those of sequence cascades."""


def root(seed: Array | int) -> Array:
    """Returns the key that all keys of a generation are folded from; `seed` is below 2³²."""
    return jax.random.key(np.uint32(seed) if isinstance(seed, int) else seed, impl="threefry2x32")


def below(level: int, arm: int = 0) -> int:
    """Returns the level that keys the random bits of the `arm`-th drafter (of at most 8) of an engine at `level`.

    Levels number the nodes of the tree of engines, row by row, beginning with its stages. So no two engines of one
    generation share bits, however deep hierarchies are nested inside sequence cascades or stand next to each other as
    arms.

    Raises:
        ValueError: the arm has no number, or the level is too deep for one.
    """
    if not 0 <= arm < STAGES:
        raise ValueError(f"arm={arm} is out of range: the drafters of one engine are numbered from 0 to {STAGES - 1}")
    if (number := STAGES * (level + 1) + arm) >= 2**32:  # keys are folded with 32 bits
        raise ValueError("drafters are nested too deeply to have random bits of their own: nest at most 10 levels")
    return number


def row_keys(key: Array, example_ids: Array, level: int) -> Array:
    """Returns one key per row, uint32 `[B, 2]`; a row's bits depend on its id, never on its neighbours."""
    # The id is folded in before the level. Published records depend on this order, so it cannot change.
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i), level))(example_ids)
    return jax.random.key_data(keys)


@flax.struct.dataclass
class RoundKeys:
    """The random bits of one round.

    Attributes:
        row: keys, uint32 `[B, 2]`.
        round: the row's round counter, int32 `[B]`.
        length: the row's length, int32 `[B]`.
        behind: the number of leading slots that another drafter draws for; requested slots are counted after them.
    """

    row: Array
    round: Array
    length: Array
    behind: int = flax.struct.field(pytree_node=False, default=0)

    def uniform(self, slots: Array, purpose: int | Array) -> Array:
        """Returns float32 in [0, 1), one number per slot.

        Round, slot and purpose form one block of Threefry's counter, so a draw costs one call of the cipher; folding
        them in one after the other takes three. The first word holds the round, and in its highest bit whether the
        purpose is one of the last four. The second word holds slot and purpose.

        Args:
            slots: int32 `[B]` or `[B, T]`, slots in the block.
            purpose: one purpose, or `[B]`.
        """
        # `[1, 1]` or `[B, 1]`, so that it broadcasts over the slots of a row.
        purpose = jnp.reshape(jnp.asarray(purpose, jnp.uint32), (-1, 1))
        flat = (slots.reshape(slots.shape[0], -1) + self.behind).astype(jnp.uint32) * 4 + purpose % 4
        # Round counters stay below 2³¹, so that the highest bit is free for the purpose.
        rounds = jnp.broadcast_to(self.round[:, None].astype(jnp.uint32) + (purpose // 4 << 31), flat.shape)
        counters = jnp.stack([rounds, flat], axis=-1)
        bits = jax.vmap(jax.vmap(threefry_2x32, (None, 0)))(self.row, counters)[..., 0]
        # 23 bits become the mantissa of a float in [1, 2)
        ones = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
        return (ones - 1.0).reshape(slots.shape)
