"""A model that drafts as many tokens as pay: none where drafting costs more than it saves (`block_size="auto"`)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core.protocols import LanguageModel, Outcome, Request, Start
from speccascade_jax.core.types import Array, Cache, Draft, Params, Prompt
from speccascade_jax.drafters.model import ModelDrafter, ModelDrafterState
from speccascade_jax.engine.widths import once
from speccascade_jax.models.along import catch_up
from speccascade_jax.stopping.lengths import Cheapest, Evidence, UpTo


@flax.struct.dataclass
class PlannedState:
    """The drafting model's state, and what its lengths are chosen by.

    Attributes:
        inner: its cache is empty until `ready`: a model that never drafts does not read the prompt either.
        evidence: of the rounds so far; chosen: int32 `[B, N]`, rounds of each row by the length aimed at.
        prompt, slots, max_rollback: as of `Start`.
    """

    inner: ModelDrafterState
    ready: Array
    evidence: Evidence
    chosen: Array
    prompt: Prompt
    slots: int = flax.struct.field(pytree_node=False)
    max_rollback: int = flax.struct.field(pytree_node=False)


@dataclass(frozen=True)
class PlannedDrafter:
    """Drafts with `model` blocks of the length that `plan` chooses before each round.

    Parameters are `{"model": …, "costs": Costs}`. The plan reads finished rounds alone, never what it is about to
    draft, so that any of its choices leaves the law as it is. A round of length 0 makes no call of the model.
    """

    model: LanguageModel
    plan: Cheapest
    adaptive: ClassVar[bool] = True
    reads_features: ClassVar[bool] = False

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.plan.lengths

    @property
    def block(self) -> int:
        return self.lengths[-1]

    @property
    def _inner(self) -> ModelDrafter:
        return ModelDrafter(self.model, UpTo(self.block))

    def init(self, params: Params, start: Start) -> PlannedState:
        """Nothing is read of the prompt yet.

        Raises:
            ValueError: parameters without costs.
        """
        if "costs" not in params:
            raise ValueError("costs are not known: add them to the parameters with methods.costs.ready, or by hand")
        rows = start.prompt.tokens.shape[0]
        shapes = jax.eval_shape(
            lambda own: self.model.prefill(own, start.prompt, start.slots, start.max_rollback), params["model"]
        )
        cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return PlannedState(
            inner=ModelDrafterState(cache, self._inner.stop.init(rows)),
            ready=jnp.zeros((), bool),
            evidence=self.plan.init(rows),
            chosen=jnp.zeros((rows, len(self.lengths)), jnp.int32),
            prompt=start.prompt,
            slots=start.slots,
            max_rollback=start.max_rollback,
        )

    def propose(self, params: Params, state: PlannedState, request: Request) -> tuple[Draft, PlannedState, Cache]:
        """Settle the length, bring the cache up to date if there is one, draft."""
        place = self.plan.choose(params["costs"], state.evidence, request.active, request.room, state.ready)
        length = jnp.asarray(self.lengths, jnp.int32)[place]
        drafts = request.active & (length > 0)
        none = self._inner._empty(request, jnp.zeros_like(request.length))

        def write(carry: tuple[Draft, Cache, Array]) -> tuple[Draft, Cache, Array]:
            return self._written(params["model"], state, carry, request, drafts, length)

        # all of it in one loop of a turn or none: every loop that is passed by costs something
        draft, cache, ready = once(jnp.any(drafts), write, (none, state.inner.cache, state.ready))
        aimed = (jnp.arange(len(self.lengths)) == place) & request.active[:, None]
        state = replace(
            state,
            inner=replace(state.inner, cache=cache),
            ready=ready,
            chosen=state.chosen + aimed.astype(jnp.int32),
        )
        return draft, state, request.target.cache

    def _written(
        self,
        params: Params,
        state: PlannedState,
        carry: tuple[Draft, Cache, Array],
        request: Request,
        drafts: Array,
        length: Array,
    ) -> tuple[Draft, Cache, Array]:
        """A block of `length` tokens in the rows that draft, the cache behind it, and that the prompt has been read."""
        none, cache, ready = carry
        # tied to the loop: XLA would move what no turn changes out of it, the whole prefill among it, and always run it
        held = (request.tokens, request.keys.round, state.prompt, self.model.consumed(cache))
        tokens, rounds, prompt, _ = jax.lax.optimization_barrier(held)
        request = replace(
            request, tokens=tokens, keys=replace(request.keys, round=rounds), active=drafts, block=none.laws
        )
        with jax.named_scope("catch_up"):
            cache = once(~ready, lambda _: self.model.prefill(params, prompt, state.slots, state.max_rollback), cache)
            behind = request.length - 1 - self.model.consumed(cache)
            late = drafts & (behind > 1)  # rounds without drafts lie between
            cache = catch_up(self.model, params, cache, tokens, request.length, late, block=self.block)
        inner = ModelDrafterState(cache, jnp.broadcast_to(length, drafts.shape))
        draft, inner, _ = self._inner.propose({"model": params}, inner, request)
        passes = jnp.where(late, -(-behind // self.block), 0)
        return replace(draft, steps=draft.steps + passes), inner.cache, jnp.ones_like(ready)

    def commit(self, params: Params, state: PlannedState, outcome: Outcome) -> PlannedState:
        """Roll back, and learn."""
        return replace(
            state,
            inner=self._inner.commit(params, state.inner, outcome),
            evidence=self.plan.update(state.evidence, outcome),
        )

    def stats(self, state: PlannedState) -> Any:
        """`chosen`: rounds of each row by the length that was aimed at."""
        return {"chosen": state.chosen}
