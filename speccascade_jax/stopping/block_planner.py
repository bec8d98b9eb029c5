"""A planner that chooses the block length for some rounds before anything is drafted, so the distribution is unchanged.

A round that aims at `γ` drafts takes `t(γ)` seconds and commits `E(γ, a)` tokens if each draft is kept with probability
`a`; the planner minimises the time per token. `t` is measured, and `a` is estimated from earlier rounds.
"""

from dataclasses import dataclass

import flax.struct
import jax.numpy as jnp

from speccascade_jax.core.protocols import Counted
from speccascade_jax.core.types import Array

LENGTHS = (0, 1, 2, 3, 5, 8)
"""The block lengths to choose from.

Each is a separate round in the program, which costs compilation, and every cache must have room for the longest. Other
lengths gain little, except for drafts that are almost never wrong.
"""

PRIOR_TOKENS = 12.0
"""The weight of the prior acceptance, in examined drafts.

It gives the prior a standard error equal to the standard deviation of acceptance between outputs of one task (about
0.12).
"""

REMEMBERED = 0.95
"""The factor by which a count shrinks per round, so that about twenty rounds are remembered.

The rest returns to the prior: a row in which nothing is drafted any more is tried again if the prior says that drafting
pays.
"""


DRAFTING, RESTING = 16, 32
"""Rounds of a phase that drafts, and of one that does not.

A choice takes as long as a few operations on short arrays, which is noticeable next to a round of a very small model
alone.
"""


@flax.struct.dataclass
class Costs:
    """The numbers that a choice depends on; traced, so that other costs never recompile.

    Attributes:
        rounds: float32 `[N]`, seconds of a round that aims at each of the policy's lengths.
        prefill: float32 scalar, seconds in which the draft reads the prompts, once, before its first block.
        acceptance: float32 scalar, the prior probability that a draft is kept, measured beforehand.
        length: float32 scalar, tokens of a usual output.
    """

    rounds: Array
    prefill: Array
    acceptance: Array
    length: Array


@flax.struct.dataclass
class Evidence:
    """Counts of drafts in earlier phases, discounted by age.

    Attributes:
        kept: float32 `[B]`, accepted drafts.
        tried: float32 `[B]`, drafts up to the first rejection.
    """

    kept: Array
    tried: Array


@dataclass(frozen=True)
class Cheapest:
    """A planner that picks the block length with the least time per token, one for all rows: they wait for each other.

    Attributes:
        lengths: the lengths to choose from, rising.
        bonus: what follows a fully kept block, as in `Engine`.
        drafting, resting: rounds of a phase that drafts, and of one that does not.
    """

    lengths: tuple[int, ...] = LENGTHS
    bonus: str = "rule"
    drafting: int = DRAFTING
    resting: int = RESTING

    def init(self, batch_size: int) -> Evidence:
        """Returns empty evidence."""
        none = jnp.zeros((batch_size,), jnp.float32)
        return Evidence(none, none)

    def drafts(self, costs: Costs, room: int | Array) -> Array:
        """Returns whether outputs of at most `room` tokens are worth drafting at all, bool scalar.

        If no length pays before the first round none ever will, because nothing is learnt without drafts. The time in
        which the draft reads the prompts is spread over the tokens of a usual output.
        """
        row = jnp.ones((1,), bool)
        seconds = self._seconds(costs, self.init(1), row, room * row.astype(jnp.int32))
        reading = jnp.where(jnp.asarray(self.lengths) > 0, costs.prefill / jnp.minimum(costs.length, room), 0.0)
        return jnp.asarray(self.lengths)[jnp.argmin(seconds + reading)] > 0

    def choose(self, costs: Costs, evidence: Evidence, active: Array, room: Array) -> tuple[Array, Array]:
        """Returns the index in `lengths` for the next rounds, and the number of these rounds: int32 scalars.

        Args:
            costs: the measured costs.
            evidence: counts of earlier phases alone.
            active: bool `[B]`, rows that still generate.
            room: int32 `[B]`, tokens that still fit.
        """
        place = jnp.argmin(self._seconds(costs, evidence, active, room)).astype(jnp.int32)
        return place, jnp.where(jnp.asarray(self.lengths)[place] > 0, self.drafting, self.resting).astype(jnp.int32)

    def _seconds(self, costs: Costs, evidence: Evidence, active: Array, room: Array) -> Array:
        """Returns the seconds per token of each length, float32 `[N]`."""
        acceptance = (PRIOR_TOKENS * costs.acceptance + evidence.kept) / (PRIOR_TOKENS + evidence.tried)
        tokens = jnp.stack([self.tokens(length, acceptance, room) for length in self.lengths])
        return costs.rounds * jnp.maximum(active.sum(), 1) / jnp.where(active, tokens, 0.0).sum(-1)

    def tokens(self, length: int, acceptance: Array, room: Array) -> Array:
        """Returns the expected tokens that a round commits, float32 `[B]`: `Σ_{j ≤ γ} a^j`, limited by the room."""
        fits = jnp.minimum(length, room - 1)
        powers = jnp.stack([jnp.where(j <= fits, acceptance**j, 0.0) for j in range(1, length + 1)] or [room * 0.0])
        last = acceptance**length if self.bonus == "none" and length else 0.0
        return jnp.maximum(1.0 + powers.sum(0) - last, 1e-3)

    def update(self, evidence: Evidence, counted: Counted) -> Evidence:
        """Returns the evidence with a phase's counts added."""
        remembered = REMEMBERED**counted.rounds
        return Evidence(remembered * evidence.kept + counted.kept, remembered * evidence.tried + counted.tried)
