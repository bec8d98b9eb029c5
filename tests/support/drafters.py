"""Drafters that the protocol allows and the package lacks: by turns, without a law, with the target's features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from speccascade_jax.core.protocols import Drafter, Outcome, Request, Start
from speccascade_jax.core.types import Draft


@dataclass(frozen=True)
class Turns:
    """Row `b` drafts with `arms[(b + round) % len(arms)]`; the others sit the round out."""

    arms: tuple[Drafter, ...]
    reads_features: ClassVar[bool] = False

    @property
    def block(self) -> int:
        return max(arm.block for arm in self.arms)

    @property
    def adaptive(self) -> bool:
        return any(arm.adaptive for arm in self.arms)

    def init(self, params, start: Start) -> Any:
        return tuple(arm.init(own, start) for arm, own in zip(self.arms, params, strict=True))

    def propose(self, params, state, request: Request) -> Any:
        turn = (jnp.arange(len(request.length)) + request.keys.round) % len(self.arms)
        merged, states = None, []
        for number, (arm, own, mine) in enumerate(zip(self.arms, params, state, strict=True)):
            active = request.active & (turn == number)
            draft, after, _ = arm.propose(own, mine, replace(request, active=active))
            request, states = replace(request, block=draft.laws), [*states, after]
            merged = draft if merged is None else _merge(turn == number, draft, merged)
        laws = {name: getattr(request.block, name) for name in ("q", "q_tilde", "logs")}
        return replace(merged, **laws), tuple(states), request.target.cache

    def commit(self, params, state, outcome: Outcome) -> Any:
        each = zip(self.arms, params, state, strict=True)
        return tuple(arm.commit(own, mine, outcome) for arm, own, mine in each)

    def stats(self, state) -> Any:
        return [arm.stats(mine) for arm, mine in zip(self.arms, state, strict=True)]


def _merge(rows, new: Draft, old: Draft) -> Draft:
    """The small arrays of `new` in its rows; laws are in the shared buffers already."""
    pick = {name: getattr(new, name) for name in ("tokens", "length", "greedy", "steps", "bad")}
    chosen = {
        name: jnp.where(rows.reshape(rows.shape + (1,) * (value.ndim - 1)), value, getattr(old, name))
        for name, value in pick.items()
    }
    return replace(old, **chosen)


@dataclass(frozen=True)
class Repeats:
    """Proposes what followed the last occurrence of the pending token: one-hot laws, and none behind the block."""

    block: int
    vocab_size: int
    adaptive: ClassVar[bool] = False
    reads_features: ClassVar[bool] = False

    def init(self, params, start: Start) -> Any:
        return ()

    def propose(self, params, state, request: Request) -> Any:
        place = jnp.arange(request.tokens.shape[1])[None]
        pending = jnp.take_along_axis(request.tokens, request.length[:, None] - 1, axis=1)
        found = jnp.where((request.tokens == pending) & (place < request.length[:, None] - 1), place, -1).max(-1)
        at = found[:, None] + 1 + jnp.arange(self.block)[None]
        tokens = jnp.take_along_axis(request.tokens, jnp.minimum(at, request.tokens.shape[1] - 1), axis=1)
        length = jnp.clip(request.length - found - 1, 0, jnp.minimum(self.block, request.room))
        length = jnp.where(request.active & (found >= 0), length, 0)
        law = jax.nn.one_hot(jnp.pad(tokens, [(0, 0), (0, 1)]), self.vocab_size, dtype=jnp.float32)
        rows = len(length)
        draft = Draft(
            tokens=tokens, length=length, q=law, q_tilde=law, greedy=jnp.ones((rows,), bool),
            steps=jnp.zeros((rows,), jnp.int32), bad=jnp.zeros((rows, self.block + 1), bool),
            lawful=jnp.zeros((rows,), bool),
        )  # fmt: skip
        return draft, state, request.target.cache

    def commit(self, params, state, outcome: Outcome) -> Any:
        return state

    def stats(self, state) -> Any:
        return None


@dataclass(frozen=True)
class Watching:
    """A drafter that keeps what the target made of the prompt, and its states along what was committed last."""

    inside: Drafter
    reads_features: ClassVar[bool] = True

    @property
    def block(self) -> int:
        return self.inside.block

    @property
    def adaptive(self) -> bool:
        return self.inside.adaptive

    def init(self, params, start: Start) -> Any:
        seen = {"prompt": start.features, "pending": jnp.zeros_like(start.features)}
        return self.inside.init(params, start), seen

    def propose(self, params, state, request: Request) -> Any:
        draft, own, cache = self.inside.propose(params, state[0], request)
        return draft, (own, state[1]), cache

    def commit(self, params, state, outcome: Outcome) -> Any:
        # the state behind the last kept token: what a drafter of features would go on from
        last = jnp.take_along_axis(outcome.features, outcome.num_kept[:, None, None], axis=1)[:, 0]
        seen = state[1] | {"pending": jnp.where(outcome.active[:, None], last, state[1]["pending"])}
        return self.inside.commit(params, state[0], outcome), seen

    def stats(self, state) -> Any:
        return state[1]
