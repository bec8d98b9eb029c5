"""What the rooms ask of each other: models, drafters, stop policies."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import flax.struct

from speccascade_jax.core.rngs import RoundKeys
from speccascade_jax.core.types import Array, Cache, Controls, Draft, LMOutput, Params, Prompt, PyTree


@runtime_checkable
class LanguageModel(Protocol):
    """A next-token model over a functional cache with one length per row.

    Implementations are frozen and hashable (they are static arguments of jit); parameters live
    outside. Invariant between rounds: *a cache has consumed exactly `length - 1` tokens; the last
    committed token is pending.*
    """

    @property
    def vocab_size(self) -> int:
        """Real vocabulary entries, padding excluded."""

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> Cache:
        """A cache of `max_len` slots that has consumed `prompt.length - 1` tokens of each row.

        `max_rollback`: how far behind what was fed the length will ever be set back (`None`: any distance). Only
        models that forget, such as those with windows, need it.
        """

    def extend(self, params: Params, cache: Cache, tokens: Array) -> tuple[LMOutput, Cache]:
        """Feed `tokens` `[B, T]` at each row's own length: `T = 1` steps, `T = G + 1` scores."""

    def rollback(self, cache: Cache, length: Array) -> Cache:
        """The cache as if each row had consumed `length` `[B]` tokens. O(1): sets the length."""

    def consumed(self, cache: Cache) -> Array:
        """int32 `[B]`: how many tokens each row of the cache has consumed."""


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


class DraftStep(NamedTuple):
    """What a policy sees before a token is drawn.

    `q` float32 `[B, V]` (raw), `max_q` `[B]` its maximum; `hidden` `[B, D]` or `None`, the features of the token before
    it, which at slot 0 is the last committed one; `slot` int32 scalar; `position` int32 `[B]`, where in the row the
    drawn token would stand; `drawn` float32 `[B]`, the probability `q̃` that the token before it was drawn with (means
    nothing at slot 0).
    """

    q: Array
    max_q: Array
    hidden: Array | None
    slot: Array
    position: Array
    drawn: Array


class Decision(NamedTuple):
    """bool `[B]` each: draw a token here? and go on after this one?"""

    draw: Array
    proceed: Array


class StopPolicy(Protocol):
    """Frozen and hashable; `block` is the most tokens it ever lets through (static).

    Attributes:
        adaptive: whether blocks may end early; threshold: what it does with `controls.stop_threshold`, in words, or
            empty where it reads none.
    """

    adaptive: ClassVar[bool]
    threshold: ClassVar[str]

    @property
    def block(self) -> int:
        """The longest block."""

    def init(self, batch_size: int) -> PyTree:
        """The policy's own state, carried from round to round."""

    def __call__(self, params: Any, state: PyTree, step: DraftStep, controls: Controls) -> tuple[Decision, PyTree]:
        """Decide for every row."""
