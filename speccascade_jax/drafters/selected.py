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
from speccascade_jax.drafters.model import in_buffers, with_laws
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.engine.scoring import at_most_once, widths


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
        tells_arm: whether blocks say who wrote them, for arms with rules of their own (`rules.verification.ByArm`).
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

    def _each(self, params: Params, states: tuple[PyTree, ...]) -> zip[tuple[Drafter, Params, PyTree]]:
        return zip(self.arms, params["arms"], states, strict=True)

    def init(self, params: Params, start: Start) -> SelectedState:
        """Choose for every row; prefill the arms that some row has chosen."""
        rows = start.prompt.tokens.shape[0]
        none = jnp.zeros(rows, jnp.int32)
        # bits with a purpose of their own: rounds draw theirs as they would without a choice
        keys = rngs.RoundKeys(rngs.row_keys(start.rng, start.example_ids, start.level), round=none, length=none)
        slots = jnp.broadcast_to(jnp.arange(len(self.arms), dtype=jnp.int32), (rows, len(self.arms)))
        asked = self.chooser.reads_features and start.features is not None
        features = jnp.asarray(start.features, jnp.float32) if asked else jnp.zeros((rows, 0))
        choice = self.chooser(params["policy"], features, keys.uniform(slots, rngs.CHOOSE))
        states = [
            _begun(arm, own, replace(start, hidden=self._hidden_of(arm, start.hidden)), jnp.any(choice == place))
            for place, (arm, own) in enumerate(zip(self.arms, params["arms"], strict=True))
        ]
        return SelectedState(choice, tuple(states), features if asked else None)

    def propose(self, params: Params, state: SelectedState, request: Request) -> tuple[Draft, SelectedState, Cache]:
        """Every row's block from its own arm; the arms' turns share the buffers of the laws and the target's cache."""
        # an arm may extend the target's cache (an exit does): each takes up what the one before it left
        cache, states, zero = request.target.cache, list(state.arms), jnp.zeros_like(request.length)
        draft = in_buffers(request, jnp.zeros((len(zero), self.block), jnp.int32), zero, steps=zero)
        draft = self._with_optional(params, state, request, draft)
        for place, (arm, own, mine) in enumerate(self._each(params, state.arms)):
            drafter, rows = _leaving_rows_alone(arm, len(request.length)), state.choice == place
            if drafter.block:  # one that drafts nothing leaves its rows as they are: empty
                states[place], draft, cache = _turn(drafter, own, request, rows, (mine, draft, cache))
        if self.tells_arm:
            draft = replace(draft, arm=state.choice)
        return draft, replace(state, arms=tuple(states)), cache

    def _with_optional(self, params: Params, state: SelectedState, request: Request, draft: Draft) -> Draft:
        """The empty block with first values for `lawful` and `stop` where some arm's blocks have them.

        `lawful` is needed too where an arm drafts nothing: its rows have no law at the bonus position.
        """
        # fields that no arm has must stay `None`: what is carried through the arms' turns has one structure
        shapes = [
            jax.eval_shape(partial(arm.propose, own), mine, request)[0]
            for arm, own, mine in self._each(params, state.arms)
            if arm.block
        ]
        silent = [place for place, arm in enumerate(self.arms) if not arm.block]
        if silent or any(shape.lawful is not None for shape in shapes):
            draft = replace(draft, lawful=~jnp.isin(state.choice, jnp.asarray(silent, jnp.int32)))
        if any(shape.stop is not None for shape in shapes):
            draft = replace(draft, stop=jnp.full(draft.bad.shape, jnp.nan))
        return draft

    def commit(self, params: Params, state: SelectedState, outcome: Outcome) -> SelectedState:
        arms = tuple(
            arm.commit(own, mine, self._as_arm_sees(outcome, arm, state.choice == place))
            for place, (arm, own, mine) in enumerate(self._each(params, state.arms))
        )
        return replace(state, arms=arms)

    def _as_arm_sees(self, outcome: Outcome, arm: Drafter, rows: Array) -> Outcome:
        """Returns the outcome of the arm's rows, with those of the target's states that it reads."""
        # as if the others were not there: an arm that reads no features gets none, even if its neighbour does
        features = outcome.features if arm.reads_features else None
        hidden = self._hidden_of(arm, outcome.hidden)
        return replace(outcome, active=outcome.active & rows, features=features, hidden=hidden)

    def stats(self, state: SelectedState) -> Any:
        """Every row's arm, what it was chosen from, and the arms' own statistics."""
        inner = [arm.stats(mine) for arm, mine in zip(self.arms, state.arms, strict=True)]
        features = {} if state.features is None else {"features": state.features}
        return {"choice": state.choice, "arms": inner, **features}


def _turn(
    drafter: Drafter, params: Params, request: Request, rows: Array, held: tuple[PyTree, Draft, Cache]
) -> tuple[PyTree, Draft, Cache]:
    """One arm's part of a round: its state, the block with its `rows` bool `[B]` filled in, the target's cache.

    Nothing runs where no active row is the arm's.
    """
    active, protected = request.active & rows, _needs_protection(drafter, len(rows))

    def turn(held: tuple[PyTree, Draft, Cache]) -> tuple[PyTree, Draft, Cache]:
        state, draft, cache = held
        # tied to what the loop carries: XLA would move the arm's bits and gathers out of it (`at_most_once`)
        tied = request.tokens, request.length, request.keys.round, draft.length
        tokens, length, rounds, _ = jax.lax.optimization_barrier(tied)
        asked = replace(
            request,
            tokens=tokens,
            length=length,
            keys=replace(request.keys, round=rounds, length=length),
            active=active,
            target=request.target._replace(cache=cache),
            block=draft.laws,
        )
        new, state, cache = drafter.propose(params, state, asked)
        return state, _merged(rows, new, draft, protected), cache

    return at_most_once(jnp.any(active), turn, held)


def _needs_protection(drafter: Drafter, rows: int) -> bool:
    """Whether the laws of other arms' rows must be kept from this drafter: one of the package's leaves them alone."""
    # a nested engine writes into active rows only (`put_laws`)
    return rows > 1 and not (getattr(drafter, "sits_out", False) or isinstance(drafter, NestedDrafter))


def _merged(rows: Array, new: Draft, old: Draft, protected: bool) -> Draft:
    """`old` with `new` in `rows`; laws stand in the shared buffers already, unless others' are to be `protected`."""
    # what others have and this arm has not: logs of its laws, a law everywhere, no numbers
    if old.logs is not None and new.logs is None:
        new = replace(new, logs=Laws(jnp.log(new.q), jnp.log(new.q_tilde)))
    if old.lawful is not None and new.lawful is None:
        new = replace(new, lawful=jnp.ones_like(old.lawful))
    if old.stop is not None and new.stop is None:
        new = replace(new, stop=jnp.full(new.bad.shape, jnp.nan))

    def pick(name: str) -> Array | None:
        held, values = getattr(old, name), getattr(new, name)
        if held is None:
            return None
        if held.ndim > 1:  # `[B, G]` or `[B, G + 1]`, of the arm's own block size
            blank = jnp.nan if name == "stop" else 0
            values = jnp.pad(values, [(0, 0), (0, held.shape[1] - values.shape[1])], constant_values=blank)
        return jnp.where(expand(rows, held.ndim), values, held)

    small: dict[str, Any] = {name: pick(name) for name in _SMALL}
    laws = new.laws if old.logs is not None else replace(new.laws, logs=None)
    return with_laws(old, jax.tree.map(partial(_put, rows, protected), laws, old.laws), **small)


_SMALL = ("length", "greedy", "steps", "tokens", "bad", "lawful", "stop")
"""Fields of a draft without the vocabulary's axis."""


def _put(rows: Array, protected: bool, new: Array, held: Array) -> Array:
    """A law's buffer with what an arm wrote: the buffer itself, or an array of its own block's width."""
    if not protected and new.shape == held.shape:
        return new
    width = new.shape[1]
    # a block narrower than the buffers: entries behind it are nobody's in these rows
    return held.at[:, :width].set(jnp.where(rows[:, None, None], new, held[:, :width]))


def _leaving_rows_alone(arm: Any, rows: int) -> Any:
    """The arm told to leave the laws of rows that are not its own alone, where it can be told; a row alone has none."""
    fields = dataclasses.fields(arm) if dataclasses.is_dataclass(arm) else ()
    return replace(arm, sits_out=True) if rows > 1 and any(field.name == "sits_out" for field in fields) else arm


def _begun(arm: Drafter, params: Params, start: Start, wanted: Array) -> PyTree:
    """The arm's state before the first round; zeros of its shapes where it is not wanted (bool scalar)."""

    def make(held: PyTree) -> PyTree:
        # tied to the loop's carry, or the prefill would be moved out of it and run for every arm
        prompt, _ = jax.lax.optimization_barrier((start.prompt, held))
        return arm.init(params, replace(start, prompt=prompt))

    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: arm.init(params, start)))
    return at_most_once(wanted, make, blank) if jax.tree.leaves(blank) else blank


def choices(inner: Any) -> Any:
    """int32 `[B]`, every row's arm (`Generation.inner`); `None` where nothing was chosen."""
    return inner.get("choice") if isinstance(inner, Mapping) else None
