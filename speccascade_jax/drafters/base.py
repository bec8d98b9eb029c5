"""★ What the engine asks of a drafter: anything that writes a block and says what each token was drawn from."""

from __future__ import annotations

from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.models.base import Cache, LanguageModel, Params, Prompt
from speccascade_jax.rngs import RoundKeys
from speccascade_jax.types import Array, Controls, Draft, PyTree


@flax.struct.dataclass
class DraftRequest:
    """What a drafter gets to see at the start of a round.

    Attributes:
        tokens: int32 `[B, L]`, all committed tokens; length: int32 `[B]`, how many (the last one is pending).
        room: int32 `[B]`, the most tokens worth drafting: what still fits under the length limit.
        active: bool `[B]`, rows that still generate; the others get an empty draft.
        keys: this round's bits.
    """

    tokens: Array
    length: Array
    room: Array
    active: Array
    keys: RoundKeys


class Drafter(Protocol):
    """Frozen and hashable; `block` is the longest block it may hand over (static)."""

    @property
    def block(self) -> int:
        """`G`."""

    def init(
        self,
        params: Params,
        prompt: Prompt,
        max_len: int,
        max_rollback: int,
        rng: Array,
        example_ids: Array,
        level: int,
    ) -> PyTree:
        """The drafter's state before the first round; `max_len` and `max_rollback` as in `LanguageModel.prefill`."""

    def propose(
        self,
        params: Params,
        state: PyTree,
        request: DraftRequest,
        target_cache: Cache,
        controls: Controls,
        *,
        complete: bool,
        stop_ids: tuple[int, ...],
    ) -> tuple[Draft, PyTree, Cache]:
        """Write a block. `complete` asks for the law at the bonus position too (`draft.q[:, length]`).

        The target's cache is threaded through for drafters that share it; most hand it back untouched.
        """

    def commit(self, state: PyTree, draft: Draft, num_kept: Array, length: Array) -> PyTree:
        """Roll back (and adapt) after a round that left the rows at `length` `[B]`."""

    def stats(self, state: PyTree) -> Any:
        """Statistics of engines inside this drafter, or `None`."""


def catch_up(model: LanguageModel, params: Params, cache: Cache, tokens: Array, length: Array) -> Cache:
    """Feed committed tokens until every row has consumed `length − 1` of `tokens` `[B, L]`.

    A block that was kept whole leaves the draft's cache one token behind. No iteration runs where nothing is missing.
    """

    def behind(cache: Cache) -> Array:
        return model.consumed(cache) < length - 1

    def feed(cache: Cache) -> Cache:
        at, missing = model.consumed(cache), behind(cache)
        _, fed = model.extend(params, cache, jnp.take_along_axis(tokens, at[:, None], axis=1))
        return model.rollback(fed, jnp.where(missing, at + 1, at))

    return jax.lax.while_loop(lambda cache: jnp.any(behind(cache)), feed, cache)


def is_stop(tokens: Array, stop_ids: tuple[int, ...]) -> Array:
    """bool, the shape of `tokens`: whether each is one of the stop ids."""
    hit = jnp.zeros(tokens.shape, bool)
    for stop in stop_ids:
        hit |= tokens == stop
    return hit
