"""Several drafters, one for each query: rows of a batch have different ones (paper 5, METHODS section 8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core import rngs
from speccascade_jax.core.protocols import Drafter, Outcome, Request, Start, layers_read_by
from speccascade_jax.core.sampling import expand
from speccascade_jax.core.types import Array, Cache, Draft, Laws, Params, PyTree
from speccascade_jax.drafters.chooser import Chooser
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.engine.width_buckets import at_most_once, widths


@flax.struct.dataclass
class SelectedState:
    """`choice` int32 `[B]`, each row's arm from the first round to the last; `arms`: their states.

    `features` `[B, D]`: what the choice was made from, for whoever learns from it; `None` where it reads none.
    """

    choice: Array
    arms: tuple[PyTree, ...]
    features: Array | None


@dataclass(frozen=True)
class SelectedDrafter:
    """Row `b` drafts with `arms[choice[b]]`; `chooser` settles that once, from the target's prefill of the prompt.

    The choice hangs on the prompt and on bits of its own alone, never on a draft, so that tokens have the law that they
    have under whichever arm it is. An arm that no active row has chosen is not called: neither its prefill nor its
    rounds. Parameters are `{"arms": (…), "policy": …}`.

    Attributes:
        tells_arm: whether blocks say who wrote them, for arms with rules of their own (`rules.by_arm`).
    """

    arms: tuple[Drafter, ...]
    chooser: Chooser
    tells_arm: bool = False

    def __post_init__(self) -> None:
        if not self.arms:
            raise ValueError("a selection among no drafters: give it arms")

    @property
    def block(self) -> int:
        return max(arm.block for arm in self.arms)

    @property
    def adaptive(self) -> bool:
        """Whether blocks are often shorter than the longest: where arms have blocks of several lengths they are."""
        return len(self.scored_widths) > 1

    @property
    def scored_widths(self) -> tuple[int, ...]:
        """What blocks are scored at: each arm's own block, so that a short one's rows alone cost no wide call."""
        adaptive = any(arm.adaptive for arm in self.arms)
        return tuple(sorted({arm.block + 1 for arm in self.arms} | set(widths(self.block) if adaptive else ())))

    @property
    def reads_features(self) -> bool:
        return self.chooser.reads_features or any(arm.reads_features for arm in self.arms)

    @property
    def reads_layers(self) -> tuple[int, ...]:
        """All layers that some arm reads, once each; an arm sees its own ones alone."""
        return tuple(sorted({layer for arm in self.arms for layer in layers_read_by(arm)}))

    def _hidden_of(self, arm: Drafter, hidden: Array | None) -> Array | None:
        """Returns an arm's layers among the states `[B, T, L, D]` of all arms' layers."""
        layers = layers_read_by(arm)
        if hidden is None or not layers:
            return None
        return hidden[:, :, jnp.asarray([self.reads_layers.index(layer) for layer in layers])]

    def init(self, params: Params, start: Start) -> SelectedState:
        """Choose for every row; prefill the arms that some row has chosen."""
        rows = start.prompt.tokens.shape[0]
        none = jnp.zeros(rows, jnp.int32)
        keys = rngs.RoundKeys(rngs.row_keys(start.rng, start.example_ids, start.level), round=none, length=none)
        slots = jnp.broadcast_to(jnp.arange(len(self.arms), dtype=jnp.int32), (rows, len(self.arms)))
        asked = self.chooser.reads_features and start.features is not None
        told = jnp.asarray(start.features, jnp.float32) if asked else jnp.zeros((rows, 0))
        choice = self.chooser(params["policy"], told, keys.uniform(slots, rngs.CHOOSE))
        states = [
            _begun(arm, own, replace(start, hidden=self._hidden_of(arm, start.hidden)), jnp.any(choice == place))
            for place, (arm, own) in enumerate(zip(self.arms, params["arms"], strict=True))
        ]
        return SelectedState(choice, tuple(states), told if asked else None)

    def propose(self, params: Params, state: SelectedState, request: Request) -> tuple[Draft, SelectedState, Cache]:
        """Every row's block from its own arm; the arms' turns share the buffers of the laws and the target's cache."""
        cache, draft, states = request.target.cache, _no_draft(self.block, request), list(state.arms)
        shapes = self._all_shapes(params, state, request)
        draft = replace(draft, lawful=self._lawful(shapes, state), stop=self._stop(shapes, draft))
        for place, (arm, own) in enumerate(zip(self.arms, params["arms"], strict=True)):
            turn = _Turn(_leaving_rows_alone(arm, len(request.length)), own, request, state.choice == place)
            if turn.drafter.block:
                states[place], draft, cache = turn.taken(states[place], draft, cache)
        if self.tells_arm:
            draft = replace(draft, arm=state.choice)
        return draft, replace(state, arms=tuple(states)), cache

    def _all_shapes(self, params: Params, state: SelectedState, request: Request) -> list[Draft | None]:
        """The shapes of every arm's block; `None` of one that drafts nothing."""
        each = zip(self.arms, params["arms"], state.arms, strict=True)
        return [_shapes(arm, own, mine, request) if arm.block else None for arm, own, mine in each]

    def _stop(self, shapes: list[Draft | None], draft: Draft) -> Array | None:
        """A first value for `Draft.stop`, where some arm's policy compares something."""
        compares = any(shape is not None and shape.stop is not None for shape in shapes)
        return jnp.full(draft.bad.shape, jnp.nan) if compares else None

    def _lawful(self, shapes: list[Draft | None], state: SelectedState) -> Array | None:
        """A first value for `Draft.lawful`, where some arm has no law at the bonus position or drafts nothing."""
        if all(shape is not None and shape.lawful is None for shape in shapes):
            return None
        silent = [place for place, arm in enumerate(self.arms) if not arm.block]
        return ~jnp.isin(state.choice, jnp.asarray(silent, jnp.int32))

    def commit(self, params: Params, state: SelectedState, outcome: Outcome) -> SelectedState:
        each = zip(self.arms, params["arms"], state.arms, strict=True)
        arms = tuple(
            arm.commit(own, mine, self._as_arm_sees(outcome, arm, state.choice == place))
            for place, (arm, own, mine) in enumerate(each)
        )
        return replace(state, arms=arms)

    def _as_arm_sees(self, outcome: Outcome, arm: Drafter, rows: Array) -> Outcome:
        """Returns the outcome of the arm's rows, with those of the target's states that it reads."""
        features = outcome.features if arm.reads_features else None
        hidden = self._hidden_of(arm, outcome.hidden)
        return replace(outcome, active=outcome.active & rows, features=features, hidden=hidden)

    def stats(self, state: SelectedState) -> Any:
        """Every row's arm, what it was chosen from, and the arms' own statistics."""
        told = [arm.stats(mine) for arm, mine in zip(self.arms, state.arms, strict=True)]
        features = {} if state.features is None else {"features": state.features}
        return {"choice": state.choice, "arms": told, **features}


@dataclass(frozen=True)
class _Turn:
    """One arm's part of a round: the block of its `rows` bool `[B]`."""

    drafter: Drafter
    params: Params
    request: Request
    rows: Array

    def taken(self, state: PyTree, draft: Draft, cache: Cache) -> tuple[PyTree, Draft, Cache]:
        """The arm's state, the block with its rows' part, the target's cache; nothing runs where no row needs it."""
        active = self.request.active & self.rows

        def turn(held: tuple[PyTree, Draft, Cache]) -> tuple[PyTree, Draft, Cache]:
            state, draft, cache = held
            new, state, cache = self.drafter.propose(self.params, state, self._asked(active, draft, cache))
            return state, _merged(self.rows, new, draft, self._protected), cache

        found: tuple[PyTree, Draft, Cache] = at_most_once(jnp.any(active), turn, (state, draft, cache))
        return found

    def _asked(self, active: Array, draft: Draft, cache: Cache) -> Request:
        """The request with this turn's buffers and cache, its bits tied to them (`at_most_once`)."""
        request = self.request
        held = request.tokens, request.length, request.keys.round, draft.length
        tokens, length, rounds, _ = jax.lax.optimization_barrier(held)
        keys = replace(request.keys, round=rounds, length=length)
        target = request.target._replace(cache=cache)
        return replace(request, tokens=tokens, length=length, keys=keys, active=active, target=target, block=draft.laws)

    @property
    def _protected(self) -> bool:
        """Whether the laws of others' rows must be kept from this drafter: one of the package's leaves them alone."""
        return len(self.rows) > 1 and not (getattr(self.drafter, "sits_out", False) or _is_nested(self.drafter))


def _merged(rows: Array, new: Draft, old: Draft, protected: bool) -> Draft:
    """`old` with `new` in `rows`; laws stand in the shared buffers already, unless others' are to be `protected`."""
    whole = new
    if old.logs is not None and new.logs is None:
        whole = replace(new, logs=Laws(jnp.log(new.q), jnp.log(new.q_tilde)))
    if old.lawful is not None and new.lawful is None:
        whole = replace(whole, lawful=jnp.ones_like(old.lawful))
    if old.stop is not None and new.stop is None:
        whole = replace(whole, stop=jnp.full(new.bad.shape, jnp.nan))

    def pick(name: str, padded: bool = False) -> Array:
        held, found = getattr(old, name), getattr(whole, name)
        if padded:
            blank = jnp.nan if name == "stop" else 0
            found = jnp.pad(found, [(0, 0), (0, held.shape[1] - found.shape[1])], constant_values=blank)
        return jnp.where(expand(rows, held.ndim), found, held)

    small: dict[str, Any] = {name: pick(name) for name in ("length", "greedy", "steps")}
    small |= {name: pick(name, padded=True) for name in ("tokens", "bad")}
    if old.lawful is not None:
        small["lawful"] = pick("lawful")
    if old.stop is not None:
        small["stop"] = pick("stop", padded=True)
    laws = whole.laws if old.logs is not None else replace(whole.laws, logs=None)
    laws = jax.tree.map(partial(_put, rows, protected), laws, old.laws)
    return replace(old, **small, q=laws.q, q_tilde=laws.q_tilde, logs=laws.logs)


def _put(rows: Array, protected: bool, found: Array, held: Array) -> Array:
    """A law's buffer with what an arm found: the buffer itself, or an array of its own block's width."""
    if not protected and found.shape == held.shape:
        return found
    width = found.shape[1]
    return held.at[:, :width].set(jnp.where(rows[:, None, None], found, held[:, :width]))


def _no_draft(block: int, request: Request) -> Draft:
    """An empty block of every row, in the round's buffers."""
    zero = jnp.zeros_like(request.length)
    return Draft(
        tokens=jnp.zeros((len(zero), block), jnp.int32),
        length=zero,
        q=request.block.q,
        q_tilde=request.block.q_tilde,
        greedy=request.controls.draft.temperature <= 0,
        steps=zero,
        bad=jnp.zeros((len(zero), block + 1), bool),
        logs=request.block.logs,
    )


def _leaving_rows_alone(arm: Drafter, rows: int) -> Drafter:
    """The arm told to leave the laws of rows that are not its own alone, where it can be told; a row alone has none."""
    told: Any = arm
    if rows > 1 and dataclasses.is_dataclass(arm) and any(each.name == "sits_out" for each in dataclasses.fields(arm)):
        told = replace(told, sits_out=True)
    drafter: Drafter = told
    return drafter


def _is_nested(drafter: Drafter) -> bool:
    return isinstance(drafter, NestedDrafter)  # it writes into active rows only (`put_laws`)


def _shapes(arm: Drafter, params: Params, state: PyTree, request: Request) -> Draft:
    return jax.eval_shape(lambda state, request: arm.propose(params, state, request)[0], state, request)


def _begun(arm: Drafter, params: Params, start: Start, wanted: Array) -> PyTree:
    """The arm's state before the first round; zeros of its shapes where it is not wanted (bool scalar)."""

    def make(held: PyTree) -> PyTree:
        prompt, _ = jax.lax.optimization_barrier((start.prompt, held))
        return arm.init(params, replace(start, prompt=prompt))

    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: arm.init(params, start)))
    return at_most_once(wanted, make, blank) if jax.tree.leaves(blank) else blank


def choices(inner: Any) -> Any:
    """int32 `[B]`, every row's arm (`Generation.inner`); `None` where nothing was chosen."""
    return inner.get("choice") if isinstance(inner, Mapping) else None
