"""Drafters that the protocol allows but the package does not have, for tests.

They alternate between drafters, copy earlier tokens, or read the target's hidden states. The module also computes
hidden states by one forward pass without a cache, for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core import rngs
from speccascade_jax.core.arrays import write_slots
from speccascade_jax.core.protocols import Drafter, Outcome, Request, Start
from speccascade_jax.core.sampling import expand, laws_and_token
from speccascade_jax.core.types import Draft
from speccascade_jax.models.layers import EXITS


@dataclass(frozen=True)
class Turns:
    """A drafter whose row `b` drafts with `arms[(b + round) % len(arms)]`; the other arms do not draft in this row."""

    arms: tuple[Drafter, ...]
    reads_features: ClassVar[bool] = False

    @property
    def block(self) -> int:
        return max(arm.block for arm in self.arms)

    @property
    def adaptive(self) -> bool:
        return any(arm.adaptive for arm in self.arms)

    def init(self, params, start: Start) -> Any:
        return tuple(arm.init(arm_params, start) for arm, arm_params in zip(self.arms, params, strict=True))

    def propose(self, params, state, request: Request) -> Any:
        turn = (jnp.arange(len(request.length)) + request.keys.round) % len(self.arms)
        merged, states = None, []
        for number, (arm, arm_params, mine) in enumerate(zip(self.arms, params, state, strict=True)):
            active = request.active & (turn == number)
            draft, after, _ = arm.propose(arm_params, mine, replace(request, active=active))
            request, states = replace(request, block=draft.laws), [*states, after]
            merged = draft if merged is None else _merge(turn == number, draft, merged)
        laws = {name: getattr(request.block, name) for name in ("q", "q_tilde", "logs")}
        return replace(merged, **laws), tuple(states), request.target.cache

    def commit(self, params, state, outcome: Outcome) -> Any:
        arm_states = zip(self.arms, params, state, strict=True)
        return tuple(arm.commit(arm_params, mine, outcome) for arm, arm_params, mine in arm_states)

    def stats(self, state) -> Any:
        return [arm.stats(mine) for arm, mine in zip(self.arms, state, strict=True)]


def _merge(rows, new: Draft, old: Draft) -> Draft:
    """Merges the small arrays of two drafts: `new` in the rows `rows`, `old` elsewhere.

    The distributions need no merging, because both drafters have written theirs into the same buffers.
    """

    def pick(name):
        value = getattr(new, name)
        return jnp.where(expand(rows, value.ndim), value, getattr(old, name))

    return replace(old, **{name: pick(name) for name in ("tokens", "length", "greedy", "steps", "bad")})


@dataclass(frozen=True)
class Repeats:
    """A drafter that repeats the tokens after the pending token's last occurrence, with one-hot distributions."""

    block: int
    vocab_size: int
    adaptive: ClassVar[bool] = False
    reads_features: ClassVar[bool] = False

    def init(self, params, start: Start) -> Any:
        return ()

    def propose(self, params, state, request: Request) -> Any:
        place = jnp.arange(request.tokens.shape[1])[None]
        pending = jnp.take_along_axis(request.tokens, request.length[:, None] - 1, axis=1)
        last_place = jnp.where((request.tokens == pending) & (place < request.length[:, None] - 1), place, -1).max(-1)
        columns = last_place[:, None] + 1 + jnp.arange(self.block)[None]
        tokens = jnp.take_along_axis(request.tokens, jnp.minimum(columns, request.tokens.shape[1] - 1), axis=1)
        length = jnp.clip(request.length - last_place - 1, 0, jnp.minimum(self.block, request.room))
        length = jnp.where(request.active & (last_place >= 0), length, 0)
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


class _Around:
    """A drafter that delegates to the drafter `inside`; the first part of its state is the state of `inside`."""

    inside: Any

    @property
    def block(self) -> int:
        return self.inside.block

    @property
    def adaptive(self) -> bool:
        return self.inside.adaptive

    def propose(self, params, state, request: Request) -> Any:
        draft, inner, cache = self.inside.propose(params, state[0], request)
        return draft, (inner, *state[1:]), cache


@dataclass(frozen=True)
class Watching(_Around):
    """A drafter that stores the target's features of the prompt, and the target's states at committed tokens."""

    inside: Drafter
    reads_features: ClassVar[bool] = True

    def init(self, params, start: Start) -> Any:
        seen = {"prompt": start.features, "pending": jnp.zeros_like(start.features)}
        return self.inside.init(params, start), seen

    def commit(self, params, state, outcome: Outcome) -> Any:
        # the target's state at the last kept token, from which a drafter that reads features would continue
        last = jnp.take_along_axis(outcome.features, outcome.num_kept[:, None, None], axis=1)[:, 0]
        seen = state[1] | {"pending": jnp.where(outcome.active[:, None], last, state[1]["pending"])}
        return self.inside.commit(params, state[0], outcome), seen

    def stats(self, state) -> Any:
        return state[1]


@dataclass(frozen=True)
class Remembering(_Around):
    """A drafter that lets `inside` draft and keeps the target's states `[B, S, L, D]` by position.

    Attributes:
        rolls_back: if false, the states of rejected tokens are kept, a planted bug.
    """

    inside: Any
    reads_layers: tuple[int, ...]
    rolls_back: bool = True
    reads_features: ClassVar[bool] = False

    @property
    def tree(self) -> Any:
        return getattr(self.inside, "tree", None)

    def init(self, params, start: Start) -> Any:
        assert start.hidden is not None and start.target is not None
        width = start.prompt.tokens.shape[1]
        states = jnp.pad(start.hidden, [(0, 0), (0, start.slots - width), (0, 0), (0, 0)])
        return self.inside.init(params, start), states, start.prompt.length - 1

    def commit(self, params, state, outcome: Outcome) -> Any:
        inner, states, end = state
        begin = outcome.length - outcome.num_new - 1 if self.rolls_back else end
        written = write_slots(states, outcome.hidden, begin, axis=1)
        states = jnp.where(outcome.active[:, None, None, None], written, states)
        end = jnp.where(outcome.active, end + outcome.draft.length + 1, end)
        return self.inside.commit(params, inner, outcome), states, end

    def stats(self, state) -> Any:
        return {"states": state[1], "inside": self.inside.stats(state[0])}


@dataclass(frozen=True)
class RandomHead:
    """A drafter that drafts from the target's states at the last token that the target read.

    `params` is a random matrix `[L * D, D]`.
    """

    model: Any
    reads_layers: tuple[int, ...]
    block: int
    adaptive: ClassVar[bool] = False
    reads_features: ClassVar[bool] = False

    def init(self, params, start: Start) -> Any:
        return _entry(start.hidden, jnp.maximum(start.prompt.length - 2, 0))

    def propose(self, params, state, request: Request) -> Any:
        weights, sampling = request.target.params, request.controls.draft
        pending = jnp.take_along_axis(request.tokens, request.length[:, None] - 1, axis=1)[:, 0]
        slots = jnp.broadcast_to(jnp.arange(self.block + 1), (len(pending), self.block + 1))

        def draw(carry, uniform):
            guess, token = carry
            guess = (guess + self.model.embed(weights, token[:, None])[:, 0]) * 0.7
            (q, q_tilde, _), token = laws_and_token(
                self.model.unembed(weights, guess[:, None])[:, 0], sampling, uniform
            )
            return (guess, token), (token, q, q_tilde)

        start = state.reshape(len(pending), -1) @ params
        _, drawn = jax.lax.scan(draw, (start, pending), request.keys.uniform(slots, rngs.DRAFT).T)
        tokens, q, q_tilde = (jnp.swapaxes(values, 0, 1) for values in drawn)
        length = jnp.where(request.active, jnp.minimum(self.block, request.room), 0)
        bad = jnp.zeros((len(pending), self.block + 1), bool)
        greedy = sampling.temperature <= 0
        draft = Draft(tokens[:, :-1], length, q, q_tilde, greedy, steps=length + 1, bad=bad)
        return draft, state, request.target.cache

    def commit(self, params, state, outcome: Outcome) -> Any:
        read = _entry(outcome.hidden, jnp.maximum(outcome.num_new - 1, 0))
        return jnp.where(outcome.active[:, None, None], read, state)

    def stats(self, state) -> Any:
        return state


def _entry(hidden, place):
    return jnp.take_along_axis(hidden, place[:, None, None, None], axis=1)[:, 0]


def by_forward(bound, prompt, tokens, layers) -> np.ndarray:
    """Returns states `[B, P + T, L, D]` of a row's prompt and of its output, by an uncached pass."""
    lengths, new = np.asarray(prompt.length), np.asarray(tokens)
    whole = np.zeros((len(new), prompt.tokens.shape[1] + new.shape[1]), np.int32)
    for row, length in enumerate(lengths):
        whole[row, :length] = np.asarray(prompt.tokens)[row, :length]
        whole[row, length : length + new.shape[1]] = new[row]
    fed = (whole,) if prompt.encoder_tokens is None else (np.asarray(prompt.encoder_tokens), whole)
    outputs = _all_layers(bound.model.module, bound.params, fed)
    return np.stack([np.asarray(outputs[layer]) for layer in layers], axis=2)


@partial(jax.jit, static_argnums=0)
def _all_layers(module, params, fed):
    embedded = module.apply({"params": params}, fed[-1], method="embed")
    _, sown = module.apply({"params": params}, *fed, mutable=[EXITS])
    return (embedded, *sown[EXITS]["decoder"]["hidden"])
