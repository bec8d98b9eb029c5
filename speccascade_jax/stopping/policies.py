"""Stop policies, which end a block before it is full. A new policy is a class here and a row in `STOPS`.

A policy is a stopping time. At each slot it sees that position's `q`, the hidden state of the previous token and its
own state, but never the token about to be drawn. It cannot remove a token that was drawn. So the output has the right
distribution by construction.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from speccascade_jax.core.checks import whole
from speccascade_jax.core.protocols import Decision, DraftStep, StopPolicy
from speccascade_jax.core.types import Array, Controls, PyTree
from speccascade_jax.rules.measures import entropy
from speccascade_jax.stopping import acceptance_head


@dataclass(frozen=True)
class Capped:
    """The base class of stop policies, which allows at most `block` tokens and has no state.

    A token is drawn only if the number that `doubt` returns is at most `stop_threshold`, so a block ends *before* an
    uncertain token. A subclass defines `doubt` or overrides `__call__`.

    Attributes:
        block: the largest number of tokens in a block.
        adaptive, threshold, between, on_rejection: as in `core.protocols.StopPolicy`.

    Raises:
        ValueError: `block` is below 1.

    Examples:
        >>> from dataclasses import dataclass
        >>> from typing import ClassVar
        >>> from speccascade_jax.extend import Capped
        >>> @dataclass(frozen=True)
        ... class Sure(Capped):
        ...     threshold: ClassVar[str] = "it drafts while 1 - max q is at most stop_threshold"
        ...     def doubt(self, state, step):
        ...         return 1.0 - step.max_q, state
        >>> Sure(block=8)  # decode(…, stop="my_rules.Sure", stop_threshold=0.5)
        Sure(block=8)
    """

    block: int
    adaptive: ClassVar[bool] = True
    threshold: ClassVar[str] = ""
    between: ClassVar[tuple[float, float]] = (0.0, 1.0)
    on_rejection: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole("block_size", self.block, 1)

    def init(self, batch_size: int) -> PyTree:
        """Returns an empty state."""
        return ()

    def below_cap(self, step: DraftStep) -> Array:
        """Returns whether the block has room for a token after the one at this slot, bool scalar."""
        return step.slot + 1 < self.block

    def doubt(self, state: PyTree, step: DraftStep) -> tuple[Array, PyTree]:
        """Returns the number that is compared with the threshold, float32 `[B]`, and the next state."""
        raise NotImplementedError

    def __call__(self, params: Any, state: PyTree, step: DraftStep, controls: Controls) -> tuple[Decision, PyTree]:
        """Decides to draw while `doubt` is at most `stop_threshold`; the block ends at `block` tokens."""
        doubt, state = self.doubt(state, step)
        sure = doubt <= controls.stop_threshold
        return Decision(sure, sure & self.below_cap(step), doubt), state


@dataclass(frozen=True)
class Fixed(Capped):
    """A policy that always drafts `block` tokens (γ)."""

    adaptive: ClassVar[bool] = False

    def __call__(self, params: Any, state: PyTree, step: DraftStep, controls: Controls) -> tuple[Decision, PyTree]:
        """Draws every token, and ends the block *after* its last one."""
        yes = jnp.ones(step.q.shape[:1], bool)
        return Decision(draw=yes, proceed=yes & self.below_cap(step)), state


@dataclass(frozen=True)
class Confidence(Capped):
    """A policy that draws while `max q >= 1 − stop_threshold`: Big-Little's fallback (docs/methods.md, section 4)."""

    threshold: ClassVar[str] = "it drafts while max q >= 1 - stop_threshold"

    def doubt(self, state: PyTree, step: DraftStep) -> tuple[Array, PyTree]:
        """Returns `1 − max q`, float32 `[B]`, and the state unchanged."""
        return 1.0 - step.max_q, state  # as in `rules.deferral.chow`, so that rounding affects policy and rule alike


@dataclass(frozen=True)
class Entropy(Capped):
    """A policy that draws while the entropy `H(q)` is at most `stop_threshold` (nats), as in the rule `chow_log`."""

    threshold: ClassVar[str] = "it drafts while the entropy of q is at most stop_threshold (nats)"
    between: ClassVar[tuple[float, float]] = (0.0, math.inf)
    useful: ClassVar[tuple[float, str]] = (0.0, "lnV")

    def doubt(self, state: PyTree, step: DraftStep) -> tuple[Array, PyTree]:
        """Returns the entropy of q in nats, float32 `[B]`, and the state unchanged."""
        return entropy(step.q)[..., 0], state


@dataclass(frozen=True)
class CumulativeConfidence(Capped):
    """A policy that draws a token at a position while the product `Π max q` is at least `1 − stop_threshold`.

    The product runs over the block's positions up to and including that position.
    """

    threshold: ClassVar[str] = "it drafts while the product of max q over the block is at least 1 - stop_threshold"
    on_rejection: ClassVar[bool] = True

    def init(self, batch_size: int) -> PyTree:
        """Returns the product before the first token, 1 in every row, float32 `[B]`."""
        return jnp.ones((batch_size,), jnp.float32)

    def doubt(self, state: PyTree, step: DraftStep) -> tuple[Array, PyTree]:
        """Returns `1 − Π max q`, float32 `[B]`, and the product as the next state."""
        product = jnp.where(step.slot == 0, 1.0, state) * step.max_q
        return 1.0 - product, product


@dataclass(frozen=True)
class AcceptanceHead(Capped):
    """The policy of SpecDec++, which stops once `1 − Π P_i` exceeds `stop_threshold`, the paper's `h`.

    A head predicts `P_i`, the probability that token `y_i` is kept if all tokens before it are kept.

    Source: Huang et al., 2024 (SpecDec++), Algorithm 2; docs/methods.md, section 6. The parameters are those of the
    head (`stopping.acceptance_head`), which may also read two numbers about a token's distribution. A block has at
    least `least` and at most `block` tokens (the authors' 2 and 20), unless a stop id or the length limit ends it.

    With `lag=1`, the product over `i < k` decides whether `y_k` is the last token. A token is then drawn from every
    pass of the draft. With `lag=0`, `P_k` belongs to the product too. It is known only after the pass that reads `y_k`,
    so a round takes one more pass, unless the rule needs `q` at the bonus position anyway.
    """

    block: int = 20
    least: int = 2
    lag: int = 1
    threshold: ClassVar[str] = "it drafts until the predicted chance of a rejection exceeds stop_threshold (h)"
    on_rejection: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("least", self.least, 0)
        if self.lag not in (0, 1):
            raise ValueError(f"lag={self.lag!r} is not 0 or 1, the number of tokens by which the product lags behind")

    def init(self, batch_size: int) -> PyTree:
        """Returns the initial state: the product and the previous token's `max q`, float32 `[B]` each, both 1."""
        ones = jnp.ones((batch_size,), jnp.float32)
        return ones, ones

    def __call__(self, params: Any, state: PyTree, step: DraftStep, controls: Controls) -> tuple[Decision, PyTree]:
        """Ends the block after (`lag=1`) or before (`lag=0`) the token with which a rejection becomes too likely."""
        assert step.hidden is not None, "the draft model returns no hidden states, which an acceptance head needs"
        (product, max_q), inputs = state, step.hidden
        if acceptance_head.reads_law(params, step.hidden.shape[-1]):
            inputs, max_q = acceptance_head.with_law(step.hidden, max_q, step.drawn), step.max_q
        kept = jax.nn.sigmoid(acceptance_head.logits(params, inputs))
        product = jnp.where(step.slot == 0, 1.0, product * kept)  # at slot 0 the previous token is already committed
        rejection = 1.0 - product
        sure = rejection <= controls.stop_threshold
        if self.lag:
            draw, proceed = jnp.ones_like(sure), sure | (step.slot + 1 < self.least)
        else:
            draw = proceed = sure | (step.slot < self.least)
        return Decision(draw, proceed & self.below_cap(step), rejection), (product, max_q)


@dataclass(frozen=True)
class Oracle(Capped):
    """The oracle of Huang et al., 2024 (SpecDec++), Lemma 2.1, which stops before every token that will not be kept.

    Its parameters are bool `[B, L]`, True at positions before which a block must end. `methods.generations` computes
    them before the generation.
    """

    def __call__(self, params: Any, state: PyTree, step: DraftStep, controls: Controls) -> tuple[Decision, PyTree]:
        """Draws if the token will be kept; proceeds if the next one will be too."""

        def stops_at(position: Array) -> Array:
            return jnp.take_along_axis(params, position[:, None], axis=1, mode="fill", fill_value=True)[:, 0]

        draw = ~stops_at(step.position)
        return Decision(draw, draw & ~stops_at(step.position + 1) & self.below_cap(step)), state


STOPS: dict[str, Callable[[int], StopPolicy]] = {
    "fixed": Fixed,
    "confidence": Confidence,
    "cumulative_confidence": CumulativeConfidence,
    "entropy": Entropy,
    "acceptance_head": AcceptanceHead,
    "acceptance_head_lag0": partial(AcceptanceHead, lag=0),
    "oracle": Oracle,
}
"""Functions that make a stop policy for a block size, by name; `stop` takes these names in `decode` and gin."""
