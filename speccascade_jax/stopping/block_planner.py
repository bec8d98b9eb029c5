"""A planner that chooses the block length of the next rounds so that the expected time per token is least.

It chooses before tokens are drafted, so the output's distribution does not change. A round with `γ` drafted tokens
takes `t(γ)` seconds. It commits `E(γ, a)` tokens on average if each draft token is kept with probability `a`. The
planner minimises `t / E`; `t` is measured, and `a` is estimated from earlier rounds.
"""

from dataclasses import dataclass

import flax.struct
import jax.numpy as jnp

from speccascade_jax.core.protocols import Counted
from speccascade_jax.core.types import Array

LENGTHS = (0, 1, 2, 3, 5, 8)
"""The block lengths to choose from.

The program contains a separate round for each length, which costs compilation time, and every cache must have room for
the longest one. Other lengths gain little, except for drafts that are almost never rejected.
"""

PRIOR_TOKENS = 12.0
"""The weight of the prior acceptance probability, as a number of examined draft tokens.

With this weight, the prior's standard error equals the standard deviation of the acceptance rate between outputs of one
task (about 0.12).
"""

REMEMBERED = 0.95
"""The factor by which a count shrinks per round, so that about twenty rounds are remembered.

As the counts shrink, the estimate returns to the prior. So if rows stop drafting, they draft again later if the prior
says that drafting is faster.
"""


DRAFTING, RESTING = 16, 32
"""The numbers of rounds until the next choice, if the block length is positive and if it is 0.

A choice takes a few operations on short arrays. While nothing is drafted, a round is a single call of the target. If
the target is very small, the time of a choice is noticeable beside such a round, so choices are rarer then.
"""


@flax.struct.dataclass
class Costs:
    """The measured times and probabilities that the planner reads; they are traced, so a change never recompiles.

    Attributes:
        rounds: float32 `[N]`, the seconds that a round takes with each of the planner's block lengths.
        prefill: float32 scalar, the seconds in which the draft model reads the prompts, once, before its first block.
        acceptance: float32 scalar, the prior probability that a draft token is kept, measured beforehand.
        length: float32 scalar, the number of tokens of a typical output.
    """

    rounds: Array
    prefill: Array
    acceptance: Array
    length: Array


@flax.struct.dataclass
class Evidence:
    """Counts of draft tokens in earlier rounds, discounted by age.

    Attributes:
        kept: float32 `[B]`, accepted draft tokens.
        tried: float32 `[B]`, draft tokens up to and including the first rejected one of each round.
    """

    kept: Array
    tried: Array


@dataclass(frozen=True)
class Cheapest:
    """A planner that chooses the block length with the least time per token.

    All rows of a batch get the same length, because they wait for each other in every round.

    Attributes:
        lengths: the lengths to choose from, in ascending order.
        bonus: the source of the token after a fully kept block, as in `Engine`.
        drafting, resting: the number of rounds until the next choice, if tokens are drafted and if none are.
    """

    lengths: tuple[int, ...] = LENGTHS
    bonus: str = "rule"
    drafting: int = DRAFTING
    resting: int = RESTING

    def init(self, batch_size: int) -> Evidence:
        """Returns evidence in which all counts are 0."""
        none = jnp.zeros((batch_size,), jnp.float32)
        return Evidence(none, none)

    def drafts(self, costs: Costs, room: int | Array) -> Array:
        """Returns whether drafting saves time at all for outputs of at most `room` tokens, bool scalar.

        If drafting seems slower before the first round, nothing is ever drafted, because the planner learns only from
        drafts. The draft model's time for the prompts is spread over the tokens of a typical output.
        """
        row = jnp.ones((1,), bool)
        seconds = self._seconds(costs, self.init(1), row, room * row.astype(jnp.int32))
        reading = jnp.where(jnp.asarray(self.lengths) > 0, costs.prefill / jnp.minimum(costs.length, room), 0.0)
        return jnp.asarray(self.lengths)[jnp.argmin(seconds + reading)] > 0

    def choose(self, costs: Costs, evidence: Evidence, active: Array, room: Array) -> tuple[Array, Array]:
        """Returns the index in `lengths` for the next rounds, and the number of these rounds, as int32 scalars.

        Args:
            costs: the measured costs.
            evidence: counts of finished rounds only.
            active: bool `[B]`, rows that still generate.
            room: int32 `[B]`, how many tokens still fit under the length limit.
        """
        place = jnp.argmin(self._seconds(costs, evidence, active, room)).astype(jnp.int32)
        return place, jnp.where(jnp.asarray(self.lengths)[place] > 0, self.drafting, self.resting).astype(jnp.int32)

    def _seconds(self, costs: Costs, evidence: Evidence, active: Array, room: Array) -> Array:
        """Returns the estimated seconds per token with each block length, float32 `[N]`."""
        acceptance = (PRIOR_TOKENS * costs.acceptance + evidence.kept) / (PRIOR_TOKENS + evidence.tried)
        tokens = jnp.stack([self.tokens(length, acceptance, room) for length in self.lengths])
        return costs.rounds * jnp.maximum(active.sum(), 1) / jnp.where(active, tokens, 0.0).sum(-1)

    def tokens(self, length: int, acceptance: Array, room: Array) -> Array:
        """Returns the expected number of tokens that a round commits, `Σ_{j ≤ γ} a^j` limited by the room, `[B]`."""
        fits = jnp.minimum(length, room - 1)
        powers = jnp.stack([jnp.where(j <= fits, acceptance**j, 0.0) for j in range(1, length + 1)] or [room * 0.0])
        last = acceptance**length if self.bonus == "none" and length else 0.0
        return jnp.maximum(1.0 + powers.sum(0) - last, 1e-3)

    def update(self, evidence: Evidence, counted: Counted) -> Evidence:
        """Returns the evidence with the counts of new rounds added and older counts discounted."""
        remembered = REMEMBERED**counted.rounds
        return Evidence(remembered * evidence.kept + counted.kept, remembered * evidence.tried + counted.tried)
