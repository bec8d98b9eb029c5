"""How long the block of a round is, settled before anything of it is drafted: the law holds by construction.

A round that aims at `γ` drafts takes `t(γ)` seconds and commits `E(γ, a)` tokens where each draft is kept with chance
`a`; what is least is the time per token. `t` is measured, `a` is estimated from the rounds before this one.
"""

from dataclasses import dataclass
from typing import Any

import flax.struct
import jax.numpy as jnp

from speccascade_jax.core.protocols import Decision, DraftStep, Outcome
from speccascade_jax.core.types import Array, Controls
from speccascade_jax.stopping.policies import Capped

LENGTHS = (0, 1, 2, 4, 7, 10)
"""γ's worth choosing from. Each is a program of the target's own width, which costs compilation: between them hardly
anything is lost, and beyond them hardly anything is gained but for drafts that are nearly always right."""

PRIOR_TOKENS = 12.0
"""How many examined drafts the acceptance measured beforehand counts for: as many as make its standard error that of
acceptance between outputs of one task (a standard deviation of about 0.12)."""

REMEMBERED = 0.95
"""What a count weighs one round later: twenty rounds are remembered. What is forgotten goes back to the prior, so that
a row in which nothing is drafted any more is tried again where the prior says that drafting pays."""


@flax.struct.dataclass
class Costs:
    """What the choice rests on; traced, so that other costs never recompile.

    Attributes:
        rounds: float32 `[N]`, seconds of a round that aims at each of the policy's lengths.
        prefill: float32 scalar, seconds in which the draft reads the prompts, once, before its first block.
        acceptance: float32 scalar, the chance that a draft is kept, as measured beforehand.
    """

    rounds: Array
    prefill: Array
    acceptance: Array


@flax.struct.dataclass
class Evidence:
    """Drafts of the rounds so far, older ones weighing less: float32 `[B]`, kept and examined."""

    kept: Array
    examined: Array


@dataclass(frozen=True)
class Cheapest:
    """The length of the least time per token, the same for all rows of a batch, for they wait for each other.

    Attributes:
        lengths: rising, what it chooses from; bonus: what follows a fully kept block, as of `Engine`.
    """

    lengths: tuple[int, ...] = LENGTHS
    bonus: str = "rule"

    def init(self, batch_size: int) -> Evidence:
        """Nothing seen yet."""
        none = jnp.zeros((batch_size,), jnp.float32)
        return Evidence(none, none)

    def choose(self, costs: Costs, evidence: Evidence, active: Array, room: Array, ready: Array) -> Array:
        """The place in `lengths` of this round's, int32 scalar.

        Args:
            evidence: of earlier rounds alone; active: bool `[B]`; room: int32 `[B]`, tokens that still fit.
            ready: bool scalar, whether the draft has read the prompts. Where it has not, that time is laid on half of
                the tokens that still fit: where between now and the limit an output ends is not known.
        """
        acceptance = (PRIOR_TOKENS * costs.acceptance + evidence.kept) / (PRIOR_TOKENS + evidence.examined)
        tokens = jnp.stack([self.tokens(length, acceptance, room) for length in self.lengths])
        rows = jnp.maximum(active.sum(), 1)
        per_row = jnp.where(active, tokens, 0.0).sum(-1) / rows
        left = jnp.maximum(jnp.where(active, room, 0).sum() / rows, 1.0)
        drafts = jnp.asarray(self.lengths) > 0
        first = jnp.where(drafts & ~ready, 2.0 * costs.prefill / left, 0.0)
        return jnp.argmin(costs.rounds / per_row + first).astype(jnp.int32)

    def tokens(self, length: int, acceptance: Array, room: Array) -> Array:
        """What a round commits on average, float32 `[B]`: `Σ_{j ≤ γ} a^j`, no more than fits."""
        fits = jnp.minimum(length, room - 1)
        powers = jnp.stack([jnp.where(j <= fits, acceptance**j, 0.0) for j in range(1, length + 1)] or [room * 0.0])
        last = acceptance**length if self.bonus == "none" and length else 0.0
        return jnp.maximum(1.0 + powers.sum(0) - last, 1e-3)

    def update(self, evidence: Evidence, outcome: Outcome) -> Evidence:
        """With what became of a round's block."""
        seen = outcome.active & (outcome.draft.length > 0)
        kept = jnp.where(seen, outcome.num_kept, 0)
        return Evidence(
            REMEMBERED * evidence.kept + kept,
            REMEMBERED * evidence.examined + kept + (seen & outcome.rejected),
        )


@dataclass(frozen=True)
class UpTo(Capped):
    """Drafts as many tokens as its state says, int32 `[B]`, at most `block`."""

    def init(self, batch_size: int) -> Array:
        return jnp.full((batch_size,), self.block, jnp.int32)

    def __call__(self, params: Any, state: Array, step: DraftStep, controls: Controls) -> tuple[Decision, Array]:
        return Decision(draw=step.slot < state, proceed=step.slot + 1 < state), state
