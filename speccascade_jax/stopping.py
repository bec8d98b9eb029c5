"""★ Stop policies: when a drafter stops before its block is full.

A policy is a stopping time. It is asked at each slot with that position's `q`, the hidden state behind it and its
own state, never the token about to be drawn, and it can't take a token back: the law holds by construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from speccascade_jax.controls import whole
from speccascade_jax.rules import entropy
from speccascade_jax.types import Array, Controls, PyTree


class DraftStep(NamedTuple):
    """What a policy sees: `q` float32 `[B, V]` (raw), `hidden` `[B, D]` or `None`, `slot` int32 scalar."""

    q: Array
    hidden: Array | None
    slot: Array


class Decision(NamedTuple):
    """bool `[B]` each: draw a token here? and go on after this one?"""

    draw: Array
    proceed: Array


class StopPolicy(Protocol):
    """Frozen and hashable; `block` is the most tokens it ever lets through (static)."""

    @property
    def block(self) -> int:
        """The longest block."""

    def init(self, batch_size: int) -> PyTree:
        """The policy's own state, carried from round to round."""

    def __call__(self, params: Any, state: PyTree, step: DraftStep, controls: Controls) -> tuple[Decision, PyTree]:
        """Decide for every row."""


@dataclass(frozen=True)
class Fixed:
    """Always `block` tokens (γ)."""

    block: int

    def __post_init__(self) -> None:
        whole("block_size", self.block, 1)

    def init(self, batch_size: int) -> PyTree:
        """No state."""
        return ()

    def __call__(self, params: Any, state: PyTree, step: DraftStep, controls: Controls) -> tuple[Decision, PyTree]:
        """End *after* the last token of the block."""
        yes = jnp.ones(step.q.shape[:1], bool)
        return Decision(draw=yes, proceed=yes & (step.slot + 1 < self.block)), state


@dataclass(frozen=True)
class _WhileSure:
    """Draw only where the draft is sure, at most `block` tokens; the block ends *before* the unsure token.

    What sure means, a subclass says: `sure(q, threshold)`, of the raw law `[B, V]` and `controls.stop_threshold`.
    """

    block: int

    def __post_init__(self) -> None:
        whole("block_size", self.block, 1)

    @staticmethod
    def sure(q: Array, threshold: Array) -> Array:
        """bool `[B]`."""
        raise NotImplementedError

    def init(self, batch_size: int) -> PyTree:
        """No state."""
        return ()

    def __call__(self, params: Any, state: PyTree, step: DraftStep, controls: Controls) -> tuple[Decision, PyTree]:
        """Draw only where the draft is sure."""
        sure = self.sure(step.q, controls.stop_threshold)
        return Decision(draw=sure, proceed=sure & (step.slot + 1 < self.block)), state


@dataclass(frozen=True)
class Confidence(_WhileSure):
    """Draft while `max q >= 1 − stop_threshold`, at most `block` tokens: Big-Little's fallback (METHODS section 4)."""

    @staticmethod
    def sure(q: Array, threshold: Array) -> Array:
        """`max q >= 1 − threshold`."""
        return q.max(-1) >= 1.0 - threshold


@dataclass(frozen=True)
class Entropy(_WhileSure):
    """Draft while `H(q) <= stop_threshold` (nats), at most `block` tokens: `Confidence` with ChowLog's measure."""

    @staticmethod
    def sure(q: Array, threshold: Array) -> Array:
        """`H(q) <= threshold`."""
        return entropy(q)[..., 0] <= threshold


STOP_POLICIES = {"fixed": Fixed, "confidence": Confidence, "entropy": Entropy}
