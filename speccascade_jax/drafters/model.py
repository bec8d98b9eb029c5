"""A language model that drafts, token by token, until its stop policy or the block's end says stop."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core import rngs
from speccascade_jax.core.arrays import is_stop
from speccascade_jax.core.protocols import Decision, DraftStep, LanguageModel, Outcome, Request, Start, StopPolicy
from speccascade_jax.core.sampling import expand, laws_and_token, log_laws
from speccascade_jax.core.types import Array, Cache, Draft, Laws, Params, PyTree
from speccascade_jax.models.teacher_forcing import catch_up


@flax.struct.dataclass
class ModelDrafterState:
    """The draft model's cache and the stop policy's own state."""

    cache: Cache
    policy: PyTree


class _Drafting(NamedTuple):
    """The loop's state; `going` rows take part in the next forward pass, `drawing` rows may draw from it.

    `drawn` float32 `[B]`: the probability that the current token was drawn with.
    """

    slot: Array
    going: Array
    drawing: Array
    current: Array
    drawn: Array
    state: ModelDrafterState
    draft: Draft


@dataclass(frozen=True)
class ModelDrafter:
    """Drafts with `model` under `stop`; parameters are `{"model": …}` and, where the policy has some, `{"stop": …}`.

    Attributes:
        sits_out: whether there are rounds and rows that others draft for. It then leaves their rows of the laws'
            buffers alone.
        catches_up: how many tokens it is fed at once where it has missed some: more than one pays where others write
            what it misses. At most the engine's longest block, for which caches have room.
    """

    model: LanguageModel
    stop: StopPolicy
    sits_out: bool = False
    catches_up: int = 1
    reads_features: ClassVar[bool] = False

    @property
    def block(self) -> int:
        return self.stop.block

    @property
    def adaptive(self) -> bool:
        return self.stop.adaptive

    def init(self, params: Params, start: Start) -> ModelDrafterState:
        cache = self.model.prefill(params["model"], start.prompt, start.slots, start.max_rollback)
        return ModelDrafterState(cache=cache, policy=self.stop.init(start.prompt.tokens.shape[0]))

    def propose(
        self, params: Params, state: ModelDrafterState, request: Request
    ) -> tuple[Draft, ModelDrafterState, Cache]:
        """Draw up to `block` tokens per row; see `Drafter.propose`.

        With `complete` a row that drew its last token takes one more pass, which gives the law at the bonus
        position and brings the cache up to date; without it the missing token is caught up next round.
        """
        behind = jnp.maximum(request.length - 1 - self.model.consumed(state.cache), 0)
        with jax.named_scope("catch_up"):
            cache = catch_up(
                self.model, params["model"], state.cache, request.tokens, request.length, request.active,
                block=self.catches_up,
            )  # fmt: skip
        pending = jnp.take_along_axis(request.tokens, request.length[:, None] - 1, axis=1)[:, 0]
        start = _Drafting(
            slot=jnp.zeros((), jnp.int32),
            going=request.active & ((request.room > 0) | request.complete),
            drawing=request.active & (request.room > 0),
            current=pending,
            drawn=jnp.ones(pending.shape, jnp.float32),
            state=replace(state, cache=cache),
            draft=self._empty(request, steps=jnp.where(request.active, -(-behind // self.catches_up), 0)),
        )

        # the bits of all slots in one call of the cipher
        slots = jnp.broadcast_to(jnp.arange(self.block, dtype=jnp.int32), (pending.shape[0], self.block))
        uniforms = request.keys.uniform(slots, rngs.DRAFT)

        def body(carry: _Drafting) -> _Drafting:
            return self._step(params, carry, request, uniforms)

        end = jax.lax.while_loop(lambda carry: jnp.any(carry.going), body, start)
        return end.draft, end.state, request.target.cache

    def _empty(self, request: Request, steps: Array) -> Draft:
        rows = request.length.shape[0]
        return Draft(
            tokens=jnp.zeros((rows, self.block), jnp.int32),
            length=jnp.zeros((rows,), jnp.int32),
            q=request.block.q,
            q_tilde=request.block.q_tilde,
            greedy=request.controls.draft.temperature <= 0,
            steps=steps,
            bad=jnp.zeros((rows, self.block + 1), bool),
            logs=request.block.logs,
            stop=jnp.full((rows, self.block + 1), jnp.nan) if self.stop.threshold else None,
        )

    def _forward(self, params: Params, carry: _Drafting) -> tuple[Array, Array | None, Cache]:
        """Logits `[B, V]` after the current token; rows that don't take part keep their cache's length."""
        cache = carry.state.cache
        before = self.model.consumed(cache)
        out, cache = self.model.extend(params["model"], cache, carry.current[:, None])
        cache = self.model.rollback(cache, jnp.where(carry.going, before + 1, before))
        hidden = None if out.hidden is None else out.hidden[:, 0]
        return out.logits[:, 0, : self.model.vocab_size], hidden, cache

    def _step(self, params: Params, carry: _Drafting, request: Request, uniforms: Array) -> _Drafting:
        """One forward pass and, where the policy says so, one drawn token."""
        logits, hidden, cache = self._forward(params, carry)
        with jax.named_scope("sampling"):
            at = jnp.minimum(carry.slot, self.block - 1)
            uniform = jax.lax.dynamic_index_in_dim(uniforms, at, axis=1, keepdims=False)
            (q, q_tilde, max_q), token = laws_and_token(logits, request.controls.draft, uniform)
        seen = DraftStep(q, max_q, hidden, carry.slot, position=request.length + carry.slot, drawn=carry.drawn)
        decision, policy = self.stop(params.get("stop"), carry.state.policy, seen, request.controls)
        policy = jax.tree.map(
            lambda new, old: jnp.where(expand(carry.drawing, new.ndim), new, old), policy, carry.state.policy
        )
        draws = carry.drawing & decision.draw & (carry.slot < self.block)
        ends = is_stop(token, request.stop_ids) | (carry.slot + 1 >= request.room)
        laws = Laws(q, q_tilde)
        if request.block.logs is not None:
            laws = replace(laws, logs=log_laws(logits, q_tilde, request.controls.draft))
        draft = self._record(carry, laws, token, draws, ~jnp.isfinite(logits.max(-1)))
        draft = replace(draft, stop=_compared(carry, decision))
        return _Drafting(
            slot=carry.slot + 1,
            # a stop id or the limit ends the row if it is kept: no bonus, so no law is needed there
            going=draws & ~ends & (decision.proceed | request.complete),
            drawing=draws & ~ends & decision.proceed,
            current=jnp.where(draws, token, carry.current),
            drawn=jnp.take_along_axis(q_tilde, token[:, None], axis=1)[:, 0],
            state=replace(carry.state, cache=cache, policy=policy),
            draft=draft,
        )

    def _record(self, carry: _Drafting, laws: Laws, token: Array, draws: Array, bad: Array) -> Draft:
        old, slot = carry.draft, carry.slot
        write = jax.lax.dynamic_update_slice_in_dim
        at = jnp.minimum(slot, max(self.block - 1, 0))
        kept = jax.lax.dynamic_slice_in_dim(old.tokens, at, 1, axis=1)[:, 0]
        tokens = write(old.tokens, jnp.where(draws, token, kept)[:, None], at, axis=1)
        if self.sits_out:
            laws = jax.tree.map(partial(self._own_rows, carry), old.laws, laws)
        # slots a row does not reach are overwritten with junk that nothing reads: cheaper than a select over V
        written: Laws = jax.tree.map(lambda held, new: write(held, new[:, None], slot, axis=1), old.laws, laws)
        return replace(
            old,
            tokens=tokens,
            length=old.length + draws,
            q=written.q,
            q_tilde=written.q_tilde,
            logs=written.logs,
            steps=old.steps + carry.going,
            bad=write(old.bad, (bad & carry.going)[:, None], slot, axis=1),
        )

    def _own_rows(self, carry: _Drafting, buffer: Array, new: Array) -> Array:
        """`new` `[B, V]` in the rows that take part, what stands in the buffer in the others."""
        held = jax.lax.dynamic_index_in_dim(buffer, carry.slot, axis=1, keepdims=False)
        return jnp.where(carry.going[:, None], new, held)

    def commit(self, params: Params, state: ModelDrafterState, outcome: Outcome) -> ModelDrafterState:
        """Forget what was drafted beyond `length − 1`."""
        consumed = self.model.consumed(state.cache)
        return replace(state, cache=self.model.rollback(state.cache, jnp.minimum(consumed, outcome.length - 1)))

    def stats(self, state: ModelDrafterState) -> Any:
        return None


def _compared(carry: _Drafting, decision: Decision) -> Array | None:
    """`Draft.stop` with what the policy compared in this slot, in the rows that it was asked for."""
    held = carry.draft.stop
    if held is None or decision.value is None:
        return held
    value = jnp.where(carry.drawing, decision.value, jnp.nan)
    return jax.lax.dynamic_update_slice_in_dim(held, value[:, None], carry.slot, axis=1)
