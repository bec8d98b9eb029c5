"""Selection of a drafter for each prompt; rows of a batch may have different drafters (docs/methods.md, section 8).

Source: Huang et al., 2024 (assistant selection).
"""

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
from speccascade_jax.engine.proposals import proposed
from speccascade_jax.engine.scoring import at_most_once, widths


@flax.struct.dataclass
class SelectedState:
    """The state of a `SelectedDrafter`: the choice, and the states of all arms (the drafters to choose from).

    Attributes:
        choice: int32 `[B]`, each row's arm for the whole generation.
        arms: the arms' states.
        features: `[B, D]`, the chooser's input, for code that learns from it; `None` if the chooser reads none.
    """

    choice: Array
    arms: tuple[PyTree, ...]
    features: Array | None


@dataclass(frozen=True)
class SelectedDrafter:
    """A drafter that contains several drafters, called arms: row `b` drafts with `arms[choice[b]]`.

    `chooser` chooses once per generation, from the target's summary of the prompt. The choice depends only on the
    prompt and on separate random bits, never on drafted tokens, so tokens have the same distribution as under the
    chosen arm alone. An arm that no active row has chosen is called neither for prefill nor for rounds. Parameters are
    `{"arms": (…), "policy": …}`.

    Attributes:
        arms: the drafters.
        chooser: assigns an arm to every row.
        tells_arm: whether drafts record each row's arm, which is needed if arms have different rules
            (`rules.verification.ByArm`).
    """

    arms: tuple[Drafter, ...]
    chooser: Chooser
    tells_arm: bool = False

    def __post_init__(self) -> None:
        if not self.arms:
            raise ValueError("the selection has no drafters to choose from: give at least one arm")

    @property
    def block(self) -> int:
        """The longest block of any arm."""
        return max(arm.block for arm in self.arms)

    @property
    def adaptive(self) -> bool:
        """Whether blocks are often shorter than `block`, as is the case if the arms have different block lengths."""
        return len(self.scored_widths) > 1

    @property
    def scored_widths(self) -> tuple[int, ...]:
        """The numbers of positions for which target calls are compiled, among them the block length of each arm plus 1.

        So the target scores no more positions than the longest block of a round needs.
        """
        adaptive = any(arm.adaptive for arm in self.arms)
        return tuple(sorted({arm.block + 1 for arm in self.arms} | set(widths(self.block) if adaptive else ())))

    @property
    def reads_features(self) -> bool:
        """Whether the chooser or an arm reads the target's features."""
        return self.chooser.reads_features or any(arm.reads_features for arm in self.arms)

    @property
    def reads_layers(self) -> tuple[int, ...]:
        """The target's layers that any arm reads, without duplicates; each arm receives only those it reads."""
        return tuple(sorted({layer for arm in self.arms for layer in layers_read_by(arm)}))

    def _hidden_of(self, arm: Drafter, hidden: Array | None) -> Array | None:
        """Selects the hidden states that an arm reads from the states `[B, T, L, D]` of all arms' layers."""
        layers = layers_read_by(arm)
        if hidden is None or not layers:
            return None
        return hidden[:, :, jnp.asarray([self.reads_layers.index(layer) for layer in layers])]

    def _each(self, params: Params, states: tuple[PyTree, ...]) -> zip[tuple[Drafter, Params, PyTree]]:
        return zip(self.arms, params["arms"], states, strict=True)

    def init(self, params: Params, start: Start) -> SelectedState:
        """Chooses an arm for every row; prefills the arms that some row has chosen."""
        rows = start.prompt.tokens.shape[0]
        none = jnp.zeros(rows, jnp.int32)
        # the choice has its own purpose number, so rounds use the same random bits as without a choice
        keys = rngs.RoundKeys(rngs.row_keys(start.rng, start.example_ids, start.level), round=none, length=none)
        slots = jnp.broadcast_to(jnp.arange(len(self.arms), dtype=jnp.int32), (rows, len(self.arms)))
        asked = self.chooser.reads_features and start.features is not None
        features = jnp.asarray(start.features, jnp.float32) if asked else jnp.zeros((rows, 0))
        choice = self.chooser(params["policy"], features, keys.uniform(slots, rngs.CHOOSE))
        states = [
            _begun(arm, arm_params, replace(start, hidden=self._hidden_of(arm, start.hidden)), jnp.any(choice == place))
            for place, (arm, arm_params) in enumerate(zip(self.arms, params["arms"], strict=True))
        ]
        return SelectedState(choice, tuple(states), features if asked else None)

    def propose(self, params: Params, state: SelectedState, request: Request) -> tuple[Draft, SelectedState, Cache]:
        """Lets every row's arm draft its block; the arms share the buffers and the target's cache."""
        # an arm may write to the target's cache (an early exit does), so each arm gets the cache of the arm before it
        cache, states, zero = request.target.cache, list(state.arms), jnp.zeros_like(request.length)
        draft = in_buffers(request, jnp.zeros((len(zero), self.block), jnp.int32), zero, steps=zero)
        draft = self._with_optional(params, state, request, draft)
        for place, (arm, arm_params, arm_state) in enumerate(self._each(params, state.arms)):
            drafter, rows = _leaving_rows_alone(arm, len(request.length)), state.choice == place
            if drafter.block:  # an arm that drafts nothing leaves its rows empty
                states[place], draft, cache = _turn(drafter, arm_params, request, rows, (arm_state, draft, cache))
        if self.tells_arm:
            draft = replace(draft, arm=state.choice)
        return draft, replace(state, arms=tuple(states)), cache

    def _with_optional(self, params: Params, state: SelectedState, request: Request, draft: Draft) -> Draft:
        """Returns the empty block with initial values for `lawful` and `stop` if an arm's blocks have these fields.

        `lawful` is also needed if an arm drafts nothing, because its rows have no distribution at the bonus position.
        """
        # fields that no arm fills must stay `None`, because the draft keeps one structure from arm to arm
        shapes = [
            jax.eval_shape(partial(arm.propose, arm_params), arm_state, request)[0]
            for arm, arm_params, arm_state in self._each(params, state.arms)
            if arm.block
        ]
        silent = [place for place, arm in enumerate(self.arms) if not arm.block]
        if silent or any(shape.lawful is not None for shape in shapes):
            draft = replace(draft, lawful=~jnp.isin(state.choice, jnp.asarray(silent, jnp.int32)))
        if any(shape.stop is not None for shape in shapes):
            draft = replace(draft, stop=jnp.full(draft.bad.shape, jnp.nan))
        return draft

    def commit(self, params: Params, state: SelectedState, outcome: Outcome) -> SelectedState:
        """Passes the outcome to every arm; only rows that chose an arm count as active in it."""
        arms = tuple(
            arm.commit(arm_params, arm_state, self._as_arm_sees(outcome, arm, state.choice == place))
            for place, (arm, arm_params, arm_state) in enumerate(self._each(params, state.arms))
        )
        return replace(state, arms=arms)

    def _as_arm_sees(self, outcome: Outcome, arm: Drafter, rows: Array) -> Outcome:
        """Returns the outcome restricted to an arm's rows and to the target's states that this arm reads."""
        # an arm that reads no features gets none, even if another arm reads them
        features = outcome.features if arm.reads_features else None
        hidden = self._hidden_of(arm, outcome.hidden)
        return replace(outcome, active=outcome.active & rows, features=features, hidden=hidden)

    def stats(self, state: SelectedState) -> Any:
        """Returns every row's arm, the chooser's input, and the arms' statistics."""
        inner = [arm.stats(arm_state) for arm, arm_state in zip(self.arms, state.arms, strict=True)]
        features = {} if state.features is None else {"features": state.features}
        return {"choice": state.choice, "arms": inner, **features}


def _turn(
    drafter: Drafter, params: Params, request: Request, rows: Array, carry: tuple[PyTree, Draft, Cache]
) -> tuple[PyTree, Draft, Cache]:
    """Lets one arm draft for its rows; does nothing if none of its rows is active.

    Returns:
        The arm's state, the block with its `rows` bool `[B]` filled in, and the target's cache.
    """
    active, protected = request.active & rows, _needs_protection(drafter, len(rows))

    def turn(carry: tuple[PyTree, Draft, Cache]) -> tuple[PyTree, Draft, Cache]:
        state, draft, cache = carry
        # these inputs are made to depend on the loop's carry; otherwise XLA would move the arm's random bits and
        # gathers out of the loop (see `at_most_once`)
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
        new, state, cache = proposed(drafter, params, state, asked)
        return state, _merged(rows, new, draft, protected), cache

    return at_most_once(jnp.any(active), turn, carry)


def _needs_protection(drafter: Drafter, rows: int) -> bool:
    """Returns whether a drafter may overwrite other arms' rows of the buffers; the package's own drafters do not."""
    # a nested engine writes only into active rows (`put_laws`)
    return rows > 1 and not (getattr(drafter, "sits_out", False) or isinstance(drafter, NestedDrafter))


def _merged(rows: Array, new: Draft, old: Draft, protected: bool) -> Draft:
    """Returns the draft `old` with the arm's draft `new` in `rows`; distributions are copied only if `protected`."""
    # optional fields that only other arms fill get defaults: logs of the distributions, `lawful` true, `stop` NaN
    if old.logs is not None and new.logs is None:
        new = replace(new, logs=Laws(jnp.log(new.q), jnp.log(new.q_tilde)))
    if old.lawful is not None and new.lawful is None:
        new = replace(new, lawful=jnp.ones_like(old.lawful))
    if old.stop is not None and new.stop is None:
        new = replace(new, stop=jnp.full(new.bad.shape, jnp.nan))

    def pick(name: str) -> Array | None:
        previous, values = getattr(old, name), getattr(new, name)
        if previous is None:
            return None
        if previous.ndim > 1:  # `[B, G]` or `[B, G + 1]`, where the arm's own `G` may be smaller
            blank = jnp.nan if name == "stop" else 0
            values = jnp.pad(values, [(0, 0), (0, previous.shape[1] - values.shape[1])], constant_values=blank)
        return jnp.where(expand(rows, previous.ndim), values, previous)

    small: dict[str, Any] = {name: pick(name) for name in _SMALL}
    laws = new.laws if old.logs is not None else replace(new.laws, logs=None)
    return with_laws(old, jax.tree.map(partial(_put, rows, protected), laws, old.laws), **small)


_SMALL = ("length", "greedy", "steps", "tokens", "bad", "lawful", "stop")
"""Fields of a draft without the vocabulary axis."""


def _put(rows: Array, protected: bool, new: Array, buffer: Array) -> Array:
    """Returns the shared buffer with an arm's distributions `new`, which may be narrower than the buffer."""
    if not protected and new.shape == buffer.shape:
        return new
    width = new.shape[1]
    # if the arm's block is narrower than the buffer, the entries after it are unused in these rows
    return buffer.at[:, :width].set(jnp.where(rows[:, None, None], new, buffer[:, :width]))


def _leaving_rows_alone(arm: Any, rows: int) -> Any:
    """Sets the field `sits_out` of an arm that has one, so that the arm does not change other arms' rows."""
    fields = dataclasses.fields(arm) if dataclasses.is_dataclass(arm) else ()
    return replace(arm, sits_out=True) if rows > 1 and any(field.name == "sits_out" for field in fields) else arm


def _begun(arm: Drafter, params: Params, start: Start, wanted: Array) -> PyTree:
    """Returns the arm's initial state if `wanted` (bool scalar), otherwise zeros of the same shapes."""

    def make(carry: PyTree) -> PyTree:
        # the prompt is made to depend on the loop's carry; otherwise XLA would move the prefill out of the loop and
        # run it for every arm
        prompt, _ = jax.lax.optimization_barrier((start.prompt, carry))
        return arm.init(params, replace(start, prompt=prompt))

    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: arm.init(params, start)))
    return at_most_once(wanted, make, blank) if jax.tree.leaves(blank) else blank


def choices(inner: Any) -> Any:
    """Returns every row's arm, int32 `[B]`, from `Generation.inner`; `None` if the drafter has no arms."""
    return inner.get("choice") if isinstance(inner, Mapping) else None
