"""A model that drafts as many tokens as pay: none where drafting costs more than it saves (`block_size="auto"`)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core.checks import MOST
from speccascade_jax.core.protocols import Counted, Drafter, LanguageModel, Start
from speccascade_jax.core.types import Array, Cache, Params, PyTree
from speccascade_jax.drafters.model import ModelDrafter, ModelDrafterState
from speccascade_jax.drafters.none import NoDrafter
from speccascade_jax.models.teacher_forcing import catch_up
from speccascade_jax.stopping.block_planner import Cheapest, Evidence
from speccascade_jax.stopping.policies import Fixed


@flax.struct.dataclass
class PlannedState:
    """The drafting model's cache, and what its lengths are chosen by.

    Attributes:
        cache: `()` where nothing is ever drafted.
        place, turns: int32 scalars, the phase's length and how many of its rounds are left.
        evidence: of earlier phases; counted: of this one's rounds so far.
        chosen: int32 `[B, N]`, rounds of each row by length.
    """

    cache: Cache
    place: Array
    turns: Array
    evidence: Evidence
    counted: Counted
    chosen: Array


@dataclass(frozen=True)
class PlannedDrafter:
    """Drafts with `model` blocks of the length that `plan` chooses before each phase: a `Planner`.

    Parameters are `{"model": …, "costs": Costs}`. The plan reads finished rounds alone, never what is about to be
    drafted, so that any of its choices leaves the law as it is. A round of length 0 makes no call of the model.

    Without the model's parameters nothing is ever drafted, and the program is the target's alone, with nothing of a
    draft in it: `methods.block_costs.ready` leaves them out where no draft pays.
    """

    model: LanguageModel
    plan: Cheapest
    adaptive: ClassVar[bool] = False
    reads_features: ClassVar[bool] = False

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.plan.lengths

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        return tuple(ModelDrafter(self.model, Fixed(length)) if length else NoDrafter() for length in self.lengths)

    @property
    def block(self) -> int:
        return self.lengths[-1]

    def init(self, params: Params, start: Start) -> PlannedState:
        """The prompt is read, if there is a model to read it.

        Raises:
            ValueError: parameters without costs.
        """
        if "costs" not in params:
            raise ValueError(
                "costs are not known: add them to the parameters with methods.block_costs.ready, or by hand"
            )
        rows, cache = start.prompt.tokens.shape[0], ()
        if "model" in params:
            cache = self.model.prefill(params["model"], start.prompt, start.slots, start.max_rollback)
        none, zero = jnp.zeros((rows,), jnp.int32), jnp.zeros((), jnp.int32)
        return PlannedState(
            cache=cache,
            place=zero,
            turns=zero,
            evidence=self.plan.init(rows),
            counted=Counted(none, none, none),
            chosen=jnp.zeros((rows, len(self.lengths)), jnp.int32),
        )

    def places(self, params: Params) -> tuple[int, ...]:
        """All lengths, or none but 0."""
        return tuple(range(len(self.lengths))) if "model" in params else (self.lengths.index(0),)

    def settle(
        self, params: Params, state: PlannedState, tokens: Array, length: Array, room: Array, active: Array
    ) -> tuple[PlannedState, Array]:
        """Choose, and bring the cache up to date if there are to be drafts."""
        if "model" not in params:
            return replace(state, turns=jnp.full_like(state.turns, MOST)), jnp.zeros_like(length)
        evidence = self.plan.update(state.evidence, state.counted)
        place, turns = self.plan.choose(params["costs"], evidence, active, room)
        drafts = active & (jnp.asarray(self.lengths, jnp.int32)[place] > 0)
        with jax.named_scope("catch_up"):
            behind = length - 1 - self.model.consumed(state.cache)
            late = drafts & (behind > 1)  # rounds without drafts lie between
            cache = catch_up(self.model, params["model"], state.cache, tokens, length, late, block=self.block)
        settled = replace(
            state,
            cache=cache,
            place=place,
            turns=turns,
            evidence=evidence,
            counted=jax.tree.map(jnp.zeros_like, state.counted),
        )
        return settled, jnp.where(late, -(-behind // self.block), 0)

    def entered(self, state: PlannedState, place: int) -> PyTree:
        return ModelDrafterState(state.cache, ()) if self.lengths[place] else ()

    def left(self, state: PlannedState, place: int, own: PyTree, counted: Counted) -> PlannedState:
        """With what the rounds showed, which counts when the next phase is settled."""
        return replace(
            state,
            cache=own.cache if self.lengths[place] else state.cache,
            turns=state.turns - counted.rounds.max(),
            counted=jax.tree.map(jnp.add, state.counted, counted),
            chosen=state.chosen.at[:, place].add(counted.rounds),
        )

    def stats(self, state: PlannedState) -> Any:
        """`chosen`: rounds of each row by length."""
        return {"chosen": state.chosen}
