"""Drafters whose model is a Gemma 4 assistant, which reads the target's cache, embedding and final hidden state.

They draft as `ModelDrafter` and `BranchingDrafter` do. The assistant gets the target's cache as one of its parameters.
The drafting loop does not change parameters, so memory holds no second copy of the cache. The assistant writes to no
cache, so rolling back only means choosing the target's hidden state at the last kept token.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import flax.struct
import jax.numpy as jnp

from speccascade_jax.core.protocols import Outcome, Request, Start, StopPolicy
from speccascade_jax.core.types import Array, Cache, Draft, Params, PyTree
from speccascade_jax.drafters.model import BranchingDrafter, ModelDrafter, ModelDrafterState, PolicyDrafter
from speccascade_jax.models.gemma4_assistant import Assistant, AssistantCache


def _lent(params: Params, request: Request) -> Params:
    """Returns a drafter's parameters, with the target's parameters and cache added to those of the assistant."""
    return {**params, "model": (params["model"], request.target)}


def _begun(state: Array, request: Request) -> tuple[AssistantCache, Request, Array]:
    """Returns the assistant's cache, the request, and which rows have a hidden state of the target, bool `[B]`.

    After a prompt of one token there is no hidden state, because the target has not read a token yet. Such rows are
    not active in the returned request: nothing is drafted for them, and the target writes their first token.
    """
    known = request.length > 1
    begun = AssistantCache(length=request.length - 1, states=state[:, None])
    return begun, replace(request, active=request.active & known), known


def _lawful(draft: Draft, known: Array, request: Request) -> Draft:
    """Returns the draft, marked as having no distribution at the bonus position in rows that are not `known`."""
    # If the distribution was not requested, nothing reads it, and `lawful=None` saves the verifier a pass over the
    # vocabulary.
    return replace(draft, lawful=known) if request.complete else draft


def _after(state: Array, outcome: Outcome) -> Array:
    """Returns the target's final hidden state `[B, D]` at the last token that the target has read, after a round."""
    assert outcome.features is not None, "an assistant drafts for its target only"
    last = jnp.maximum(outcome.num_new - 1, 0)[:, None, None]
    return jnp.where(outcome.active[:, None], jnp.take_along_axis(outcome.features, last, axis=1)[:, 0], state)


@flax.struct.dataclass
class AssistantState:
    """The target's final hidden state `[B, D]` at the last token that it has read, and the stop policy's state."""

    hidden: Array
    policy: PyTree


@dataclass(frozen=True)
class AssistantDrafter(PolicyDrafter):
    """A drafter of blocks whose model is an assistant, a draft model that reads the cache of a Gemma 4 target.

    Parameters are `{"model": …}`, with an entry `"stop"` if the policy has parameters.

    Attributes:
        model: the assistant.
        stop: the policy that ends blocks.
        sits_out: as in `ModelDrafter`.
    """

    model: Assistant
    stop: StopPolicy
    sits_out: bool = False
    reads_features: ClassVar[bool] = True

    def init(self, params: Params, start: Start) -> AssistantState:
        """Returns the target's state before each prompt's last token, and the policy's initial state."""
        assert start.features is not None
        return AssistantState(start.features, self.stop.init(start.prompt.tokens.shape[0]))

    def propose(self, params: Params, state: AssistantState, request: Request) -> tuple[Draft, AssistantState, Cache]:
        """Draws up to `block` tokens per row, as a `ModelDrafter` does; the target's cache is unchanged."""
        begun, asked, known = _begun(state.hidden, request)
        inside = ModelDrafter(self.model, self.stop, self.sits_out)
        draft, ended, cache = inside.propose(_lent(params, request), ModelDrafterState(begun, state.policy), asked)
        return _lawful(draft, known, request), replace(state, policy=ended.policy), cache

    def commit(self, params: Params, state: AssistantState, outcome: Outcome) -> AssistantState:
        """Keeps the target's state at the last token that it has read."""
        return replace(state, hidden=_after(state.hidden, outcome))


@dataclass(frozen=True)
class BranchingAssistantDrafter(BranchingDrafter):
    """A drafter of token trees whose model is an assistant.

    The drafter's state is the target's final hidden state `[B, D]` at the last token that the target has read.
    """

    model: Any
    reads_features: ClassVar[bool] = True

    def init(self, params: Params, start: Start) -> Array:
        """Returns the target's state before each prompt's last token."""
        assert start.features is not None
        return start.features

    def propose(self, params: Params, state: Array, request: Request) -> tuple[Draft, Array, Cache]:
        """Draws the whole tree, as a `BranchingDrafter` does; the target's cache is unchanged."""
        begun, asked, known = _begun(state, request)
        draft, _, cache = super().propose(_lent(params, request), begun, asked)
        return _lawful(draft, known, request), state, cache

    def commit(self, params: Params, state: Array, outcome: Outcome) -> Array:
        """Keeps the target's state at the last token that it has read."""
        return _after(state, outcome)
