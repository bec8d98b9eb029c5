"""Drafters that use one model, or none.

`ModelDrafter` drafts token by token until its stop policy or the block's end stops it. `ExitDrafter` drafts in the same
way with the target's first layers, in the target's cache (self-speculation). `PlannedDrafter` chooses block lengths by
measured costs, and drafts nothing if that is faster (`block_size="auto"`). `BranchingDrafter` drafts a tree level by
level, with several tokens after each token (docs/methods.md, section 10). `NoDrafter` drafts nothing: the target alone
runs through the same loop, so latencies are comparable.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core import logit_laws, rngs
from speccascade_jax.core.arrays import is_stop
from speccascade_jax.core.checks import MOST
from speccascade_jax.core.protocols import (
    BlockModel,
    BranchingModel,
    Counted,
    Decision,
    Drafter,
    DraftStep,
    LanguageModel,
    Outcome,
    Request,
    Start,
    StopPolicy,
)
from speccascade_jax.core.sampling import Laws as SampledLaws
from speccascade_jax.core.sampling import expand, laws_and_token, log_laws, raw_and_scaled, sample
from speccascade_jax.core.trees import Tree, without
from speccascade_jax.core.types import Array, Cache, Draft, Laws, LogitLaws, Params, PyTree, Sampling
from speccascade_jax.models.early_exit import HEAD, EarlyExit, exit_params
from speccascade_jax.models.teacher_forcing import catch_up
from speccascade_jax.runtime import platforms
from speccascade_jax.stopping.block_planner import Cheapest, Evidence
from speccascade_jax.stopping.policies import Fixed


class DrafterDefaults:
    """Defaults for drafters that do not read the target's features and have no statistics."""

    reads_features: ClassVar[bool] = False

    def stats(self, state: PyTree) -> Any:
        """Returns `None`: the drafter has no engine inside."""
        return None


class PolicyDrafter(DrafterDefaults):
    """The base of drafters whose blocks are ended by a stop policy."""

    stop: StopPolicy

    @property
    def block(self) -> int:
        """The longest block that the stop policy allows."""
        return self.stop.block

    @property
    def adaptive(self) -> bool:
        """Whether the stop policy may end blocks early."""
        return self.stop.adaptive


def with_laws(draft: Draft, laws: Laws | LogitLaws, **changes: Any) -> Draft:
    """Returns `draft` with its distributions replaced by `laws`, and the fields named in `changes` replaced too."""
    if isinstance(laws, LogitLaws):
        return replace(draft, logits=laws, **changes)
    return replace(draft, q=laws.q, q_tilde=laws.q_tilde, logs=laws.logs, **changes)


def in_buffers(request: Request, tokens: Array, length: Array, steps: Array | None = None) -> Draft:
    """Returns a `Draft` that uses the round's buffers, into which no distribution of the block is written yet.

    Args:
        request: the request, which holds the buffers.
        tokens: int32 `[B, G]`.
        length: int32 `[B]`.
        steps: int32 `[B]`, passes of the draft model so far, 0 by default.
    """
    rows, block = tokens.shape
    logits = request.block if isinstance(request.block, LogitLaws) else None
    stub = None if logits is None else jnp.zeros((rows, 1, 1), jnp.float32)
    buffers = request.block if stub is None else Laws(stub, stub)
    return Draft(
        tokens=tokens,
        length=length,
        q=buffers.q,
        q_tilde=buffers.q_tilde,
        greedy=request.controls.draft.temperature <= 0,
        steps=jnp.zeros((rows,), jnp.int32) if steps is None else steps,
        bad=jnp.zeros((rows, block + 1), bool),  # one entry more than tokens, for the bonus position
        logs=buffers.logs,
        logits=logits,
    )


@dataclass(frozen=True)
class NoDrafter(DrafterDefaults):
    """A drafter that drafts nothing, so that the target gives one token per round."""

    block: ClassVar[int] = 0
    adaptive: ClassVar[bool] = False

    def init(self, params: Params, start: Start) -> PyTree:
        """Returns an empty state."""
        return ()

    def propose(self, params: Params, state: PyTree, request: Request) -> tuple[Draft, PyTree, Cache]:
        """Returns an empty block without distributions; rules that read `q` cannot be used with this drafter."""
        zero = jnp.zeros_like(request.length)
        # the buffers are stubs `[B, 1, 1]`; they are passed on, so that the state has the same structure in every round
        return in_buffers(request, zero[:, None][:, :0], zero, steps=zero), state, request.target.cache

    def commit(self, params: Params, state: PyTree, outcome: Outcome) -> PyTree:
        """Returns the state unchanged."""
        return state


@flax.struct.dataclass
class ModelDrafterState:
    """The draft model's cache and the stop policy's state."""

    cache: Cache
    policy: PyTree


class _Drafting(NamedTuple):
    """The state of the loop that drafts one block.

    `going`, bool `[B]`, marks rows that take part in the next forward pass. `drawing`, bool `[B]`, marks rows that may
    draw a token from its distribution. `drawn`, float32 `[B]`, is the probability with which the current token was
    drawn.
    """

    slot: Array
    going: Array
    drawing: Array
    current: Array
    drawn: Array
    state: ModelDrafterState
    draft: Draft


@dataclass(frozen=True)
class ModelDrafter(PolicyDrafter):
    """A drafter that drafts with `model` until `stop` ends the block.

    Parameters are `{"model": …}`, with an entry `"stop"` if the policy has parameters.

    Attributes:
        model: the draft model.
        stop: the policy that ends blocks.
        sits_out: whether other drafters draft in some rounds or rows. If so, this drafter writes only its own rows of
            the shared buffers.
        catches_up: how many missed tokens one call feeds to the model. More than 1 is faster if other drafters write
            tokens that this model has not read. It must not exceed the engine's longest block, because caches have no
            room for more.
    """

    model: LanguageModel
    stop: StopPolicy
    sits_out: bool = False
    catches_up: int = 1
    leaves_logits: ClassVar[bool] = True  # `propose` also fills buffers of logits (`core.logit_laws`)

    def init(self, params: Params, start: Start) -> ModelDrafterState:
        """Returns the draft model's cache, filled by its prefill of the prompt, and the policy's initial state."""
        cache = self.model.prefill(params["model"], start.prompt, start.slots, start.max_rollback)
        return ModelDrafterState(cache=cache, policy=self.stop.init(start.prompt.tokens.shape[0]))

    def propose(
        self, params: Params, state: ModelDrafterState, request: Request
    ) -> tuple[Draft, ModelDrafterState, Cache]:
        """Draws up to `block` tokens per row; see `Drafter.propose`.

        If `request.complete`, a row that drew its last token takes one more pass, which gives the distribution at the
        bonus position and feeds the last token to the cache. Otherwise that token is fed in the next round.
        """
        if not self._may_use_one_kernel(params, state, request):
            return self._in_steps(params, state, request)
        sampling = request.controls.draft
        # the kernel cannot apply top-k or top-p, and feeds at most one token that the cache lacks; in a hierarchy, a
        # cache may lack two: the draft's last token, and the bonus token of the engine above
        uncut = (sampling.top_k <= 0) & (sampling.top_p >= 1.0)
        near = ~request.active | (request.length - 2 <= self.model.consumed(state.cache))
        # The kernel always makes all passes. If no row has room for a second token, single steps need one or two.
        worth = jnp.any(request.active & (request.room > 1))
        at_once, in_steps = partial(self._in_one_kernel, params), partial(self._in_steps_alone, params)
        with jax.named_scope("in_one_kernel"):
            draft, state = jax.lax.cond(jnp.all(uncut & near) & worth, at_once, in_steps, state, request)
        return draft, state, request.target.cache

    def _in_steps_alone(
        self, params: Params, state: ModelDrafterState, request: Request
    ) -> tuple[Draft, ModelDrafterState]:
        return self._in_steps(params, state, request)[:2]

    def _in_steps(
        self, params: Params, state: ModelDrafterState, request: Request
    ) -> tuple[Draft, ModelDrafterState, Cache]:
        """Drafts in a loop with one call of the model per token."""
        # Missed tokens are counted before they are fed, because the calls that feed them are draft steps too.
        spared = int(self.feeds_two(request.complete))  # the first pass feeds this many missed tokens
        missed = jnp.maximum(request.length - (1 + spared) - self.model.consumed(state.cache), 0)
        with jax.named_scope("catch_up"):
            cache = catch_up(
                self.model, params["model"], state.cache, request.tokens, request.length, request.active,
                block=self.catches_up, spared=spared,
            )  # fmt: skip
        pending = jnp.take_along_axis(request.tokens, request.length[:, None] - 1, axis=1)[:, 0]
        start = _Drafting(
            slot=jnp.zeros((), jnp.int32),
            # if the distribution at the bonus position is wanted, rows without room also take one pass, without drawing
            going=request.active & ((request.room > 0) | request.complete),
            drawing=request.active & (request.room > 0),
            current=pending,  # the first pass reads the last committed token, which is not in the cache yet
            drawn=jnp.ones(pending.shape, jnp.float32),
            state=replace(state, cache=cache),
            draft=self._empty(request, steps=jnp.where(request.active, -(-missed // self.catches_up), 0)),
        )

        uniforms = self._uniforms(request)

        def body(carry: _Drafting) -> _Drafting:
            return self._step(params, carry, request, uniforms)

        if spared:
            with jax.named_scope("first"):
                start = self._step(params, start, request, uniforms, partial(self._forward_two, request=request))
        end = jax.lax.while_loop(lambda carry: jnp.any(carry.going), body, start)
        return end.draft, end.state, request.target.cache

    def feeds_two(self, complete: bool) -> bool:
        """Returns whether the first pass feeds the last two committed tokens, in case the cache lacks the first.

        This saves a separate pass for a missed token: on a GPU, starting a pass takes longer than processing a second
        token. `complete` is `Request.complete`.
        """
        single = not self.sits_out and self.catches_up == 1 and not complete
        # an early exit shares the target's cache, in which no token is missing
        return platforms.uses_gpu_kernels() and single and self.block > 0 and not isinstance(self.model, EarlyExit)

    def _uniforms(self, request: Request) -> Array:
        """Returns the random numbers `[B, G]` of the block's draws."""
        # one call makes the random bits of all slots, because a slot's bits do not depend on when the loop reaches it
        slots = jnp.broadcast_to(jnp.arange(self.block, dtype=jnp.int32), (request.length.shape[0], self.block))
        return request.keys.uniform(slots, rngs.DRAFT)

    def _may_use_one_kernel(self, params: Params, state: ModelDrafterState, request: Request) -> bool:
        # a policy that ends blocks early must see each distribution before the next pass; a drafter that sits out may
        # lack more than one token
        usual = isinstance(self.stop, Fixed) and not self.sits_out and self.catches_up == 1
        model, turns = self.model, self.block + request.complete
        return usual and isinstance(model, BlockModel) and model.can_draft(params["model"], state.cache, turns)

    def _in_one_kernel(
        self, params: Params, state: ModelDrafterState, request: Request
    ) -> tuple[Draft, ModelDrafterState]:
        """Drafts with one call of the model for the whole block; computes the distributions from all its logits."""
        model, sampling, turns = self.model, request.controls.draft, self.block + request.complete
        assert isinstance(model, BlockModel)
        consumed = model.consumed(state.cache)
        missed = request.active & (request.length - 1 > consumed)
        places = jnp.stack([consumed, request.length - 1], axis=1)
        known = jnp.take_along_axis(request.tokens, places, axis=1)
        logits, drawn, cache = model.draft(
            params["model"], state.cache, known, missed, self._uniforms(request), sampling.temperature, turns
        )
        draws, going = self._taken(request, drawn[:, : self.block])
        fed = missed + jnp.sum(going, axis=1, dtype=jnp.int32)
        with jax.named_scope("sampling"):
            laws, logits = self._laws_of_block(request, logits)
        draft = in_buffers(
            request, jnp.where(draws, drawn[:, : self.block], 0), jnp.sum(draws, 1, dtype=jnp.int32), fed
        )
        written: Laws = jax.tree.map(lambda buffer, new: buffer.at[:, :turns].set(new), draft.laws, laws)
        bad = draft.bad.at[:, :turns].set(~jnp.isfinite(logits.max(-1)) & going)
        cache = model.rollback(cache, consumed + fed)
        return with_laws(draft, written, bad=bad), replace(state, cache=cache)

    def _laws_of_block(self, request: Request, logits: Array) -> tuple[Laws | LogitLaws, Array]:
        """Returns a block's distributions in the form of its buffers, and its logits, to check that they are finite."""
        sampling, size = request.controls.draft, self.model.vocab_size
        if isinstance(request.block, LogitLaws):
            return self._cut(logit_laws.of_logits(logits, sampling)), logits
        logits = logits[..., :size]
        q, q_tilde, _ = raw_and_scaled(logits, sampling)
        logs = None if request.block.logs is None else log_laws(logits, q_tilde, sampling)
        return Laws(q, q_tilde, logs), logits

    def _cut(self, laws: LogitLaws) -> LogitLaws:
        """Cuts the vocabulary's padding off the logits; XLA does this in the pass that writes them into a buffer."""
        return replace(laws, logits=laws.logits[..., : self.model.vocab_size])

    def _taken(self, request: Request, drawn: Array) -> tuple[Array, Array]:
        """Returns which of the `drawn` tokens belong to the block, bool `[B, G]`, and which passes count, `[B, turns]`.

        Tokens after a stop id or beyond the row's room do not belong to the block, and passes after them do not count.
        """
        slots = jnp.arange(self.block)
        ends = is_stop(drawn, request.stop_ids) | (slots + 1 >= request.room[:, None])
        before = jnp.cumsum(ends, axis=1) - ends  # 0 up to and including the token that ends the block
        draws = (request.active & (request.room > 0))[:, None] & (before == 0)
        after = (draws & ~ends)[:, : self.block - 1 + request.complete]
        begins = request.active & ((request.room > 0) | request.complete)
        return draws, jnp.concatenate([begins[:, None], after], axis=1)

    def _empty(self, request: Request, steps: Array) -> Draft:
        rows = request.length.shape[0]
        draft = in_buffers(request, jnp.zeros((rows, self.block), jnp.int32), jnp.zeros((rows,), jnp.int32), steps)
        return replace(draft, stop=jnp.full(draft.bad.shape, jnp.nan)) if self.stop.threshold else draft

    def _forward(self, params: Params, carry: _Drafting) -> tuple[Array, Array | None, Cache]:
        """Feeds the current token; returns logits `[B, V]`, hidden states, and the cache (longer in `going` rows)."""
        cache = carry.state.cache
        before = self.model.consumed(cache)
        out, cache = self.model.extend(params["model"], cache, carry.current[:, None])
        # all rows are fed, because the program has one shape; rows that do not take part are rolled back at once
        cache = self.model.rollback(cache, jnp.where(carry.going, before + 1, before))
        hidden = None if out.hidden is None else out.hidden[:, 0]
        return out.logits[:, 0, : self._width(carry.draft)], hidden, cache

    def _width(self, draft: Draft) -> int | None:
        """Returns how many logits per position to read; `None` (all) if the buffers store logits and cut them later."""
        return self.model.vocab_size if draft.logits is None else None

    def _forward_two(self, params: Params, carry: _Drafting, request: Request) -> tuple[Array, Array | None, Cache]:
        """Does the same as `_forward`, but also feeds the token before the current one, even if the cache has it."""
        cache, length = carry.state.cache, request.length
        before = self.model.consumed(cache)
        # a token that is fed again gets the same cache entry; in a row of one token, the second token that is fed is
        # meaningless and is rolled back
        first = jnp.minimum(before, jnp.maximum(length - 2, 0))
        places = jnp.minimum(first[:, None] + jnp.arange(2)[None], request.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(request.tokens, places, axis=1)
        out, cache = self.model.extend(params["model"], self.model.rollback(cache, first), tokens)
        cache = self.model.rollback(cache, jnp.where(carry.going, length, before))
        current = (length - 1 - first).clip(0, 1)[:, None, None]

        def of_current(values: Array) -> Array:
            return jnp.take_along_axis(values, current, axis=1)[:, 0]

        hidden = None if out.hidden is None else of_current(out.hidden)
        return of_current(out.logits)[:, : self._width(carry.draft)], hidden, cache

    def _step(
        self,
        params: Params,
        carry: _Drafting,
        request: Request,
        uniforms: Array,
        forward: Callable[[Params, _Drafting], tuple[Array, Array | None, Cache]] | None = None,
    ) -> _Drafting:
        """Runs one forward pass and draws one token in each row whose stop policy allows it."""
        logits, hidden, cache = (forward or self._forward)(params, carry)
        with jax.named_scope("sampling"):
            draw_slot = jnp.minimum(carry.slot, self.block - 1)  # the bonus slot draws nothing, so it may use any bits
            uniform = jax.lax.dynamic_index_in_dim(uniforms, draw_slot, axis=1, keepdims=False)
            # the token is drawn before the policy is called, but the policy does not see it and cannot depend on it
            if isinstance(request.block, LogitLaws):
                (q, q_tilde, max_q), token, kept = self._from_logits(logits, request.controls.draft, uniform)
            else:
                (q, q_tilde, max_q), token = laws_and_token(logits, request.controls.draft, uniform)
                kept = None
        seen = DraftStep(q, max_q, hidden, carry.slot, position=request.length + carry.slot, drawn=carry.drawn)
        decision, policy = self.stop(params.get("stop"), carry.state.policy, seen, request.controls)
        # each row has its own policy state, which changes only while the row draws
        policy = jax.tree.map(
            lambda new, old: jnp.where(expand(carry.drawing, new.ndim), new, old), policy, carry.state.policy
        )
        draws = carry.drawing & decision.draw & (carry.slot < self.block)
        ends = is_stop(token, request.stop_ids) | (carry.slot + 1 >= request.room)
        laws = Laws(q, q_tilde) if kept is None else kept
        # logs are computed from logits, because a float32 probability is 0 if its logit is 87 below the largest
        if isinstance(laws, Laws) and request.block.logs is not None:
            laws = replace(laws, logs=log_laws(logits, q_tilde, request.controls.draft))
        draft = self._record(carry, laws, token, draws, ~jnp.isfinite(logits.max(-1)))
        draft = replace(draft, stop=_compared(carry, decision))
        return _Drafting(
            slot=carry.slot + 1,
            # no distribution is needed after a stop id or at the limit: if that token is kept, no bonus follows it
            going=draws & ~ends & (decision.proceed | request.complete),
            drawing=draws & ~ends & decision.proceed,
            current=jnp.where(draws, token, carry.current),
            drawn=self._drawn(q_tilde, laws, token),
            state=replace(carry.state, cache=cache, policy=policy),
            draft=draft,
        )

    def _from_logits(self, logits: Array, sampling: Sampling, uniform: Array) -> tuple[SampledLaws, Array, LogitLaws]:
        """Returns the distributions as `laws_and_token` does, a token, and the logits as the buffers hold them."""
        laws, token = logit_laws.drawn(logits, sampling, uniform)
        size = self.model.vocab_size
        total = logit_laws.raw_total(laws, sampling)
        # XLA computes these arrays only for a stop policy that reads them
        q, q_tilde = logit_laws.raw(laws, total)[..., :size], logit_laws.scaled(laws)[..., :size]
        return SampledLaws(q, q_tilde, 1.0 / total[..., 0]), token, self._cut(laws)

    def _record(self, carry: _Drafting, laws: Laws | LogitLaws, token: Array, draws: Array, bad: Array) -> Draft:
        old, slot = carry.draft, carry.slot
        write = jax.lax.dynamic_update_slice_in_dim
        # there are `G` tokens but `G + 1` distributions: in the bonus slot the last token is overwritten by itself
        token_slot = jnp.minimum(slot, max(self.block - 1, 0))
        kept = jax.lax.dynamic_slice_in_dim(old.tokens, token_slot, 1, axis=1)[:, 0]
        tokens = write(old.tokens, jnp.where(draws, token, kept)[:, None], token_slot, axis=1)
        if self.sits_out:
            laws = jax.tree.map(partial(self._own_rows, carry), old.laws, laws)
        # slots that a row does not reach get numbers that nothing reads, because a select over V would cost more
        written: Laws = jax.tree.map(lambda buffer, new: write(buffer, new[:, None], slot, axis=1), old.laws, laws)
        return with_laws(
            old,
            written,
            tokens=tokens,
            length=old.length + draws,
            steps=old.steps + carry.going,
            bad=write(old.bad, (bad & carry.going)[:, None], slot, axis=1),
        )

    def _drawn(self, q_tilde: Array, laws: Laws | LogitLaws, token: Array) -> Array:
        """Returns the probability `[B]` with which each row's token was drawn."""
        if isinstance(laws, LogitLaws):
            return logit_laws.at_tokens(laws, token)[:, 0]
        return jnp.take_along_axis(q_tilde, token[:, None], axis=1)[:, 0]

    def _own_rows(self, carry: _Drafting, buffer: Array, new: Array) -> Array:
        """Returns `new` `[B, V]` in the rows that take part, and the buffer's values in the others."""
        previous = jax.lax.dynamic_index_in_dim(buffer, carry.slot, axis=1, keepdims=False)
        return jnp.where(carry.going[:, None], new, previous)

    def commit(self, params: Params, state: ModelDrafterState, outcome: Outcome) -> ModelDrafterState:
        """Rolls the draft model's cache back to `outcome.length − 1` tokens."""
        # the cache may have consumed fewer tokens than were committed, and a rollback must not increase its length
        consumed = self.model.consumed(state.cache)
        return replace(state, cache=self.model.rollback(state.cache, jnp.minimum(consumed, outcome.length - 1)))


def _compared(carry: _Drafting, decision: Decision) -> Array | None:
    """Returns `Draft.stop` after writing the numbers that the policy compared with its threshold at this slot."""
    recorded = carry.draft.stop  # `None` if the policy has no threshold; traces then show no numbers
    if recorded is None or decision.value is None:
        return recorded
    value = jnp.where(carry.drawing, decision.value, jnp.nan)
    return jax.lax.dynamic_update_slice_in_dim(recorded, value[:, None], carry.slot, axis=1)


@dataclass(frozen=True)
class ExitDrafter(PolicyDrafter):
    """A drafter that drafts with an early exit of the target, in the target's cache, until `stop` ends the block.

    Parameters are `{}` or `{"head": …}`, with an entry `"stop"` if the policy has parameters. The exit writes into the
    lower layers of the target's cache. When the target scores the block, it writes the same numbers there, because it
    reads the same tokens at the same positions. So the cache is returned with its previous length.

    Attributes:
        exit: an early exit of the target model; its parameters are read from the request.
        stop: the policy that ends blocks.
        sits_out: as in `ModelDrafter`.
    """

    exit: EarlyExit
    stop: StopPolicy
    sits_out: bool = False

    def init(self, params: Params, start: Start) -> PyTree:
        """Returns the policy's initial state; the exit has no cache of its own."""
        return self.stop.init(start.prompt.tokens.shape[0])

    def propose(self, params: Params, state: PyTree, request: Request) -> tuple[Draft, PyTree, Cache]:
        """Drafts as a `ModelDrafter` does, with the target's parameters and cache."""
        whole = request.target.cache
        exit_parameters: dict[str, Any] = {
            "model": exit_params(request.target.params, self.exit.layer, params.get(HEAD))
        }
        if "stop" in params:
            exit_parameters["stop"] = params["stop"]
        # the exit's cache is part of the target's, so it has missed no tokens and need not be kept for the next round
        began = ModelDrafterState(cache=self.exit.view(whole), policy=state)
        draft, ended, _ = ModelDrafter(self.exit, self.stop, self.sits_out).propose(exit_parameters, began, request)
        return draft, ended.policy, self.exit.put(whole, ended.cache)

    def commit(self, params: Params, state: PyTree, outcome: Outcome) -> PyTree:
        """Returns the state unchanged: the target's engine rolls its own cache back."""
        return state


# --- blocks of planned length


@flax.struct.dataclass
class PlannedState:
    """The state of a `PlannedDrafter`: the draft model's cache, and the counts that decide about block lengths.

    A phase is a run of rounds with one block length.

    Attributes:
        cache: the draft model's cache; `()` if nothing is ever drafted.
        place: int32 scalar, the index of the current phase's block length.
        turns: int32 scalar, how many rounds of the phase are left.
        evidence: the counts of earlier phases, discounted by age.
        counted: the counts of the current phase so far.
        chosen: int32 `[B, N]`, how many rounds each row had with each of the `N` block lengths.
    """

    cache: Cache
    place: Array
    turns: Array
    evidence: Evidence
    counted: Counted
    chosen: Array


@dataclass(frozen=True)
class PlannedDrafter(DrafterDefaults):
    """A `Planner` that drafts with `model`; `plan` chooses the block length before each phase of several rounds.

    Parameters are `{"model": …, "costs": Costs}`. The plan reads finished rounds only, never the tokens about to be
    drafted, so none of its choices changes the distribution. A round of length 0 does not call the model.

    Without the model's parameters nothing is ever drafted, and the program contains the target alone.
    `methods.block_costs.ready` leaves the parameters out if drafting is never faster.
    """

    model: LanguageModel
    plan: Cheapest
    adaptive: ClassVar[bool] = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """The block lengths that the plan chooses from."""
        return self.plan.lengths

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """One drafter of fixed-length blocks for each of `lengths`; `NoDrafter` for length 0."""
        return tuple(ModelDrafter(self.model, Fixed(length)) if length else NoDrafter() for length in self.lengths)

    @property
    def block(self) -> int:
        """The longest of the block lengths."""
        return self.lengths[-1]

    def init(self, params: Params, start: Start) -> PlannedState:
        """Returns the state before the first phase; the draft model reads the prompt if its parameters are given.

        Raises:
            ValueError: the parameters contain no costs.
        """
        if "costs" not in params:
            raise ValueError(
                "the parameters have no costs of block lengths: add them with methods.block_costs.ready, or by hand"
            )
        # without the model's parameters the cache stays empty, so the program allocates none
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
        """Returns the indices of all lengths; without the model's parameters, only the index of length 0."""
        return tuple(range(len(self.lengths))) if "model" in params else (self.lengths.index(0),)

    def settle(
        self, params: Params, state: PlannedState, tokens: Array, length: Array, room: Array, active: Array
    ) -> tuple[PlannedState, Array]:
        """Chooses the next phase's block length, and feeds missed tokens to the draft model if the phase drafts."""
        if "model" not in params:  # nothing can be drafted, so one phase lasts for the whole generation
            return replace(state, turns=jnp.full_like(state.turns, MOST)), jnp.zeros_like(length)
        # the last phase's counts are added first, because the choice depends on all finished rounds
        evidence = self.plan.update(state.evidence, state.counted)
        place, turns = self.plan.choose(params["costs"], evidence, active, room)
        drafts = active & (jnp.asarray(self.lengths, jnp.int32)[place] > 0)
        with jax.named_scope("catch_up"):
            missed = length - 1 - self.model.consumed(state.cache)
            late = drafts & (missed > 1)  # in rounds without drafts, the model reads no tokens
            cache = catch_up(self.model, params["model"], state.cache, tokens, length, late, block=self.block)
        settled = replace(
            state,
            cache=cache,
            place=place,
            turns=turns,
            evidence=evidence,
            counted=jax.tree.map(jnp.zeros_like, state.counted),  # `evidence` contains these counts now
        )
        return settled, jnp.where(late, -(-missed // self.block), 0)

    def entered(self, state: PlannedState, place: int) -> PyTree:
        """Returns the draft model's cache as the state of a `ModelDrafter`; an empty state for length 0."""
        return ModelDrafterState(state.cache, ()) if self.lengths[place] else ()

    def left(self, state: PlannedState, place: int, own: PyTree, counted: Counted) -> PlannedState:
        """Returns the state with the phase's counts, which become evidence when the next phase is chosen."""
        return replace(
            state,
            cache=own.cache if self.lengths[place] else state.cache,
            # rows that ended took part in fewer rounds, so the largest count is the number of rounds of the phase
            turns=state.turns - counted.rounds.max(),
            counted=jax.tree.map(jnp.add, state.counted, counted),
            chosen=state.chosen.at[:, place].add(counted.rounds),
        )

    def stats(self, state: PlannedState) -> Any:
        """Returns `chosen`: how many rounds each row had with each block length."""
        return {"chosen": state.chosen}


# --- trees


@dataclass(frozen=True)
class BranchingDrafter(DrafterDefaults):
    """A drafter that draws the tokens of `tree` with `model`; parameters are `{"model": …}`.

    A node's children are drawn one after the other without replacement (`core.trees.without`). One call of the model
    feeds one level of the tree. The last level is fed only if the distribution after it is wanted.
    """

    model: BranchingModel
    tree: Tree
    adaptive: ClassVar[bool] = False

    @property
    def block(self) -> int:
        """The number of the tree's tokens."""
        return self.tree.size

    def init(self, params: Params, start: Start) -> Cache:
        """Returns the model's cache after the prefill; it keeps all slots, so that any rollback is correct."""
        return self.model.prefill(params["model"], start.prompt, start.slots, None)

    def propose(self, params: Params, state: Cache, request: Request) -> tuple[Draft, Cache, Cache]:
        """Draws the whole tree; rows without room get no tokens."""
        weights, missed = params["model"], jnp.maximum(request.length - 1 - self.model.consumed(state), 0)
        cache = catch_up(self.model, weights, state, request.tokens, request.length, request.active)
        before = self.model.consumed(cache)
        rows = request.active & ((request.room > 0) | request.complete)
        draws = request.active & (request.room > 0)
        pending = jnp.take_along_axis(request.tokens, request.length[:, None] - 1, axis=1)
        # if `complete`, the last level is fed too, for the distributions after its nodes; the number of levels is
        # static
        draft, levels = self._empty(request, draws), self.tree.depth + request.complete
        entries = jnp.concatenate([pending, draft.tokens], axis=1)
        # random bits differ by node and not only by depth, because siblings must be drawn with different bits
        nodes = jnp.broadcast_to(jnp.arange(self.block, dtype=jnp.int32), draft.tokens.shape)
        uniforms = request.keys.uniform(nodes, rngs.DRAFT)
        for depth in range(levels):
            first, end = self.tree.level(depth)
            logits, cache = self._fed(weights, cache, entries[:, first:end], first, end)
            draft, laws = self._record(draft, logits, request, first)
            entries = self._drawn(entries, laws, uniforms, first, end)
        # the tree's entries stay in the cache until `commit`; only rows that did not take part are rolled back here
        cache = self.model.rollback(cache, jnp.where(rows, self.model.consumed(cache), before))
        steps = jnp.where(rows, levels, 0) + jnp.where(request.active, missed, 0)
        return replace(draft, tokens=entries[:, 1:], steps=steps), cache, request.target.cache

    def _empty(self, request: Request, draws: Array) -> Draft:
        tokens = jnp.zeros((request.length.shape[0], self.block), jnp.int32)
        draft = in_buffers(request, tokens, length=jnp.where(draws, self.tree.depth, 0))  # the path's length
        return replace(draft, spent=jnp.where(draws, self.block, 0))

    def _fed(self, params: Params, cache: Cache, tokens: Array, first: int, end: int) -> tuple[Array, Cache]:
        """Feeds the entries of a level; returns the logits `[B, T, V]` after them, and the cache."""
        if first == 0:  # the root is the last committed token, so feeding it is an ordinary step
            out, cache = self.model.extend(params, cache, tokens)
        else:
            out, cache = self.model.extend_branch(params, cache, tokens, self.tree.branch(first, end))
        return out.logits[..., : self.model.vocab_size], cache

    def _record(self, draft: Draft, logits: Array, request: Request, first: int) -> tuple[Draft, Laws]:
        """Writes the distributions after a level's entries into the draft; returns the draft and the distributions."""
        with jax.named_scope("sampling"):
            q, q_tilde, _ = raw_and_scaled(logits, request.controls.draft)
        laws = Laws(q, q_tilde)
        if draft.logs is not None:
            laws = replace(laws, logs=log_laws(logits, q_tilde, request.controls.draft))

        def write(buffer: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(buffer, new, first, axis=1)

        # entry `n + 1` is the distribution after node `n`, so the entries of a level are contiguous
        written: Laws = jax.tree.map(write, draft.laws, laws)
        bad = write(draft.bad, ~jnp.isfinite(logits.max(-1)))
        return with_laws(draft, written, bad=bad), laws

    def _drawn(self, entries: Array, laws: Laws, uniforms: Array, first: int, end: int) -> Array:
        """Draws the children of a level's entries; returns all entries with these tokens filled in."""
        children, taken = self.tree.children[first:end], jnp.zeros(laws.q.shape, bool)
        # all first children are drawn at once, then all second children, which exclude the tokens of the first
        for turn in range(children.shape[1]):
            parents = np.flatnonzero(children[:, turn])  # the level's entries with more than `turn` children
            if not len(parents):
                break
            child_nodes = children[parents, turn]
            with jax.named_scope("sampling"):
                law = without(laws.q_tilde[:, parents], laws.q[:, parents], taken[:, parents])
                tokens = sample(law, uniforms[:, child_nodes - 1])
            entries = entries.at[:, child_nodes].set(tokens)
            taken = taken.at[:, parents].set(taken[:, parents] | (jnp.arange(laws.q.shape[-1]) == tokens[..., None]))
        return entries

    def commit(self, params: Params, state: Cache, outcome: Outcome) -> Cache:
        """Keeps the accepted path in the cache, as far as it was fed, and drops all other entries."""
        assert outcome.path is not None, "a drafter of trees needs the accepted path"
        before, consumed = outcome.length - outcome.num_new, self.model.consumed(state)
        last, _ = self.tree.level(self.tree.depth)  # leaves are fed only if the distribution after them was wanted
        deepest = jnp.where(consumed - (before - 1) > last, self.tree.depth, self.tree.depth - 1)
        cache = self.model.keep(state, before - 1, outcome.path[:, : self.tree.depth + 1])
        kept = before + jnp.minimum(outcome.num_kept, deepest)
        return self.model.rollback(cache, jnp.minimum(jnp.where(outcome.active, kept, consumed), outcome.length - 1))
