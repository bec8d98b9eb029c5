"""Drafters whose model is a head that reads the target's hidden states of all committed tokens, such as EAGLE-3.

They draft as `ModelDrafter` and `BranchingDrafter` do; within a block, the head continues from its own states. Only the
beginning and the end of a round differ. After a round, the head reads the target's hidden states of the kept tokens.
The new cache entries replace those of all drafted tokens, so nothing else has to be rolled back.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from speccascade_jax.core.protocols import Outcome, Request, Start, TargetHead
from speccascade_jax.core.types import Cache, Draft, Params
from speccascade_jax.drafters.model import BranchingDrafter, ModelDrafter, ModelDrafterState


def _begun(head: TargetHead, params: Params, start: Start) -> Any:
    """Returns the head's cache after the prompt."""
    assert start.hidden is not None
    return head.begin(params["model"], start.prompt, start.hidden, start.slots)


def _read(head: TargetHead, params: Params, cache: Any, outcome: Outcome, most: int) -> Any:
    """Returns the head's cache after a round in which each row kept at most `most` drafted tokens."""
    assert outcome.hidden is not None
    tokens, hidden = outcome.draft.tokens[:, :most], outcome.hidden[:, : most + 1]
    length = jnp.stack([outcome.length - outcome.num_new, outcome.length], axis=1)
    return head.read(params["model"], cache, tokens, hidden, length, outcome.active)


@dataclass(frozen=True)
class HeadDrafter(ModelDrafter):
    """A drafter of blocks whose `model` is a `TargetHead`; each row must take part in all rounds until it ends."""

    model: Any

    @property
    def reads_layers(self) -> tuple[int, ...]:
        """The target's layers that the head reads."""
        layers: tuple[int, ...] = self.model.reads
        return layers

    def init(self, params: Params, start: Start) -> ModelDrafterState:
        """Returns the head's cache after the prompt, and the policy's initial state."""
        return ModelDrafterState(_begun(self.model, params, start), self.stop.init(start.prompt.tokens.shape[0]))

    def commit(self, params: Params, state: ModelDrafterState, outcome: Outcome) -> ModelDrafterState:
        """Lets the head read the target's states of the kept tokens."""
        return replace(state, cache=_read(self.model, params, state.cache, outcome, self.block))


@dataclass(frozen=True)
class BranchingHeadDrafter(BranchingDrafter):
    """A drafter of token trees whose `model` is a `TargetHead`."""

    model: Any

    @property
    def reads_layers(self) -> tuple[int, ...]:
        """The target's layers that the head reads."""
        layers: tuple[int, ...] = self.model.reads
        return layers

    def init(self, params: Params, start: Start) -> Cache:
        """Returns the head's cache after the prompt."""
        return _begun(self.model, params, start)

    def propose(self, params: Params, state: Any, request: Request) -> tuple[Draft, Cache, Cache]:
        """Draws the whole tree, as a `BranchingDrafter` does."""
        draft, after, cache = super().propose(params, state, request)
        return draft, replace(after, states=state.states), cache

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Cache:
        """Lets the head read the target's states of the kept path."""
        return _read(self.model, params, state, outcome, self.tree.depth)
