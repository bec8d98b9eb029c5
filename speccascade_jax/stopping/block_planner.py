"""How long the blocks of some rounds are, settled before anything of them is drafted: the law holds by construction.

A round that aims at `γ` drafts takes `t(γ)` seconds and commits `E(γ, a)` tokens where each draft is kept with chance
`a`; what is least is the time per token. `t` is measured, `a` is estimated from the rounds before this one.
"""

from dataclasses import dataclass

import flax.struct
import jax.numpy as jnp

from speccascade_jax.core.protocols import Counted
from speccascade_jax.core.types import Array

LENGTHS = (0, 1, 2, 3, 5, 8)
"""γ's worth choosing from. Each is a round of its own in the program, which costs compilation, and the longest is room
that every cache must have. Between and beyond them little is gained but for drafts that are hardly ever wrong."""

PRIOR_TOKENS = 12.0
"""How many examined drafts the acceptance measured beforehand counts for: as many as make its standard error that of
acceptance between outputs of one task (a standard deviation of about 0.12)."""

REMEMBERED = 0.95
"""What a count weighs one round later: twenty rounds are remembered. What is forgotten goes back to the prior, so that
a row in which nothing is drafted any more is tried again where the prior says that drafting pays."""


DRAFTING, RESTING = 16, 32
"""Rounds of a phase that drafts, and of one that does not: choosing takes as long as a few operations on short arrays,
which beside a round of a very small model alone would show."""


@flax.struct.dataclass
class Costs:
    """What the choice rests on; traced, so that other costs never recompile.

    Attributes:
        rounds: float32 `[N]`, seconds of a round that aims at each of the policy's lengths.
        prefill: float32 scalar, seconds in which the draft reads the prompts, once, before its first block.
        acceptance: float32 scalar, the chance that a draft is kept, as measured beforehand.
        length: float32 scalar, tokens of a usual output.
    """

    rounds: Array
    prefill: Array
    acceptance: Array
    length: Array


@flax.struct.dataclass
class Evidence:
    """Drafts of earlier phases, older ones weighing less: float32 `[B]`, kept, and up to the first that was not."""

    kept: Array
    tried: Array


@dataclass(frozen=True)
class Cheapest:
    """The length of the least time per token, the same for all rows of a batch, for they wait for each other.

    Attributes:
        lengths: rising, what it chooses from; bonus: what follows a fully kept block, as of `Engine`.
        drafting, resting: rounds of a phase that drafts, and of one that does not.
    """

    lengths: tuple[int, ...] = LENGTHS
    bonus: str = "rule"
    drafting: int = DRAFTING
    resting: int = RESTING

    def init(self, batch_size: int) -> Evidence:
        """Nothing seen yet."""
        none = jnp.zeros((batch_size,), jnp.float32)
        return Evidence(none, none)

    def drafts(self, costs: Costs, room: int | Array) -> Array:
        """Whether there is to be any draft of outputs of at most `room` tokens, bool scalar.

        Where none pays before the first round none ever will, for without drafts nothing is learnt. The time in which
        the draft reads the prompts is laid on the tokens of a usual output.
        """
        one = jnp.ones((1,), bool)
        seconds = self._seconds(costs, self.init(1), one, room * one.astype(jnp.int32))
        reading = jnp.where(jnp.asarray(self.lengths) > 0, costs.prefill / jnp.minimum(costs.length, room), 0.0)
        return jnp.asarray(self.lengths)[jnp.argmin(seconds + reading)] > 0

    def choose(self, costs: Costs, evidence: Evidence, active: Array, room: Array) -> tuple[Array, Array]:
        """The place in `lengths` of the next rounds', and for how many rounds: int32 scalars.

        Args:
            evidence: of earlier phases alone; active: bool `[B]`; room: int32 `[B]`, tokens that still fit.
        """
        place = jnp.argmin(self._seconds(costs, evidence, active, room)).astype(jnp.int32)
        return place, jnp.where(jnp.asarray(self.lengths)[place] > 0, self.drafting, self.resting).astype(jnp.int32)

    def _seconds(self, costs: Costs, evidence: Evidence, active: Array, room: Array) -> Array:
        """Of a token, by length, float32 `[N]`."""
        acceptance = (PRIOR_TOKENS * costs.acceptance + evidence.kept) / (PRIOR_TOKENS + evidence.tried)
        tokens = jnp.stack([self.tokens(length, acceptance, room) for length in self.lengths])
        return costs.rounds * jnp.maximum(active.sum(), 1) / jnp.where(active, tokens, 0.0).sum(-1)

    def tokens(self, length: int, acceptance: Array, room: Array) -> Array:
        """What a round commits on average, float32 `[B]`: `Σ_{j ≤ γ} a^j`, no more than fits."""
        fits = jnp.minimum(length, room - 1)
        powers = jnp.stack([jnp.where(j <= fits, acceptance**j, 0.0) for j in range(1, length + 1)] or [room * 0.0])
        last = acceptance**length if self.bonus == "none" and length else 0.0
        return jnp.maximum(1.0 + powers.sum(0) - last, 1e-3)

    def update(self, evidence: Evidence, counted: Counted) -> Evidence:
        """With what became of a phase's blocks."""
        remembered = REMEMBERED**counted.rounds
        return Evidence(remembered * evidence.kept + counted.kept, remembered * evidence.tried + counted.tried)
