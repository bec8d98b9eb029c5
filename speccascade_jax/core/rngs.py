"""Random bits of a generation; no two draws use the same bits (docs/methods.md, section 2, *Randomness*).

The bits of a draw depend on the seed, the row's id, the level (the number of the engine that draws), the row's round
counter, the slot in the block and the purpose of the draw (such as drafting a token, or deciding its acceptance). They
do not depend on the position in the output: a position that is drafted a second time would then reuse bits that an
adaptive component has already seen.

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
"""The largest number of purposes that `RoundKeys.uniform` can tell apart.

Purposes 0 to 3 and purposes 4 to 7 are encoded separately. A purpose that is added later therefore changes no random
bits of purposes 0 to 3, and stored results stay valid.
"""

STAGES = 8
"""The number of levels that are reserved for outermost engines, which draft for no other engine.

Usually there is one of them, at level 0. A sequence cascade runs several, one after the other.
"""


def root(seed: Array | int) -> Array:
    """Returns the key from which all keys of a generation are derived; `seed` must be below 2³²."""
    return jax.random.key(np.uint32(seed) if isinstance(seed, int) else seed, impl="threefry2x32")


def below(level: int, arm: int = 0) -> int:
    """Returns the level of an inner engine, which is drafter number `arm` (0 to 7) of the engine at `level`.

    Random bits depend on the level. Engines whose drafters contain engines form a tree. Levels number the nodes of that
    tree breadth first, so no two engines of one generation share random bits, however deep drafters are nested and
    however many are side by side.

    Raises:
        ValueError: `arm` is not from 0 to 7, or drafters are nested so deeply that the number exceeds 32 bits.
    """
    if not 0 <= arm < STAGES:
        raise ValueError(f"arm={arm} is out of range: the drafters of one engine are numbered from 0 to {STAGES - 1}")
    if (number := STAGES * (level + 1) + arm) >= 2**32:  # `jax.random.fold_in` takes a number of 32 bits
        raise ValueError("drafters are nested too deeply to have random bits of their own; use at most 10 levels")
    return number


def row_keys(key: Array, example_ids: Array, level: int) -> Array:
    """Returns one key per row, uint32 `[B, 2]`; a row's key depends on its id, never on other rows of the batch."""
    # The id is folded in before the level. Published records depend on this order, so it cannot change.
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i), level))(example_ids)
    return jax.random.key_data(keys)


@flax.struct.dataclass
class RoundKeys:
    """The random bits of one round.

    Attributes:
        row: one key per row, uint32 `[B, 2]`.
        round: each row's round counter, int32 `[B]`.
        length: each row's number of tokens, int32 `[B]`.
        behind: how many slots at the start of the block another drafter fills; this drafter's slot 0 follows them.
    """

    row: Array
    round: Array
    length: Array
    behind: int = flax.struct.field(pytree_node=False, default=0)

    def uniform(self, slots: Array, purpose: int | Array) -> Array:
        """Returns random numbers in [0, 1), float32, one per slot.

        Round, slot and purpose form one counter of the Threefry cipher, so a draw costs one call of the cipher. Folding
        them into the key one after the other would take three calls. The first word of the counter holds the round; its
        highest bit tells whether the purpose is 4 or more. The second word holds the slot and the purpose modulo 4.

        Args:
            slots: int32 `[B]` or `[B, T]`, slots in the block.
            purpose: one purpose for all rows, or one per row, `[B]`.
        """
        # The shape becomes `[1, 1]` or `[B, 1]`, so that the purpose broadcasts over the slots of a row.
        purpose = jnp.reshape(jnp.asarray(purpose, jnp.uint32), (-1, 1))
        flat = (slots.reshape(slots.shape[0], -1) + self.behind).astype(jnp.uint32) * 4 + purpose % 4
        # Round counters stay below 2³¹, so the highest bit is free for the purpose.
        rounds = jnp.broadcast_to(self.round[:, None].astype(jnp.uint32) + (purpose // 4 << 31), flat.shape)
        counters = jnp.stack([rounds, flat], axis=-1)
        bits = jax.vmap(jax.vmap(threefry_2x32, (None, 0)))(self.row, counters)[..., 0]
        # 23 bits become the mantissa of a float in [1, 2)
        ones = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
        return (ones - 1.0).reshape(slots.shape)
