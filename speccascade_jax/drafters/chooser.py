"""Which of several drafters drafts for a query: a score for each, and how the scores choose (METHODS section 8).

A chooser reads the target's own prefill of the prompt and gives every row of a batch its arm. Its numbers are
parameters: always the same arm, none in particular, and whatever is learnt while serving are one compiled program.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.types import Array, Params

HIGHEST = jax.lax.Precision.HIGHEST
"""Scores are compared: a product in bfloat16, which accelerators default to, can turn a choice."""


class Scores(NamedTuple):
    """float32 `[B, K]` each: how good the arms seem for a row, and the standard deviation of that (`None`: known)."""

    mean: Array
    deviation: Array | None = None


def given(params: Params, features: Array) -> Scores:
    """The same scores for every query: `{"scores": [K]}`."""
    return Scores(jnp.broadcast_to(params["scores"], (len(features), len(params["scores"]))))


def perceptron(params: Params, features: Array) -> Scores:
    """`{"layers_0": {"kernel", "bias"}, …}` with tanh between: paper 5's policy has three, a linear one has one."""
    values = features.astype(jnp.float32)  # a target in bfloat16 gives features in it
    for number in range(len(params)):
        layer = params[f"layers_{number}"]
        values = jnp.dot(jnp.tanh(values) if number else values, layer["kernel"], precision=HIGHEST) + layer["bias"]
    return Scores(values)


def ridge(params: Params, features: Array) -> Scores:
    """A Bayesian linear regression for each arm (LinUCB, Li et al., 2010; Thompson sampling, Agrawal and Goyal, 2013).

    Args:
        params: `center`, `scale` `[D]` of the features; `mean` `[K, D + 1]` and `covariance` `[K, D + 1, D + 1]` of the
            weights, the last of which is the constant's.
    """
    values = (features.astype(jnp.float32) - params["center"]) * params["scale"]
    # a weight for 1 is the constant: it has a mean and a variance like the others
    values = jnp.concatenate([values, jnp.ones_like(values[:, :1])], axis=1)
    mean = jnp.einsum("bd,kd->bk", values, params["mean"], precision=HIGHEST)
    variance = jnp.einsum("bd,kde,be->bk", values, params["covariance"], values, precision=HIGHEST)
    # rounding can leave a variance a little below 0
    return Scores(mean, jnp.sqrt(jnp.maximum(variance, 0.0)))


SCORERS: dict[str, Callable[[Params, Array], Scores]] = {"given": given, "perceptron": perceptron, "ridge": ridge}
"""Name -> `(params, features [B, D]) -> Scores`."""


def greedy(scores: Scores, uniforms: Array) -> Array:
    """The arm with the highest score, the first of equals."""
    return scores.mean.argmax(-1).astype(jnp.int32)


def dynamic(scores: Scores, uniforms: Array) -> Array:
    """An arm drawn from the softmax of the scores."""
    # the last bound is left out: a sum of probabilities that falls short of 1 must not choose an arm too many
    below = jnp.cumsum(jax.nn.softmax(scores.mean, -1), -1)[:, :-1] <= uniforms[:, :1]
    return below.sum(-1).astype(jnp.int32)


def thompson(scores: Scores, uniforms: Array) -> Array:
    """The arm that is best in a world drawn from what is believed: each arm's score from its own normal law."""
    assert scores.deviation is not None, "Thompson sampling needs scores with a deviation"
    # the middles of 2^23 steps: never 0 or 1, whose normal quantiles are infinite
    normal = jax.scipy.special.ndtri(jnp.clip(uniforms + 2.0**-24, 2.0**-24, 1 - 2.0**-24))
    return (scores.mean + scores.deviation * normal).argmax(-1).astype(jnp.int32)


def optimistic(scores: Scores, uniforms: Array) -> Array:
    """The arm with the highest score two standard deviations up (LinUCB, with that as its α)."""
    assert scores.deviation is not None, "an upper confidence bound needs scores with a deviation"
    return (scores.mean + 2.0 * scores.deviation).argmax(-1).astype(jnp.int32)


_ALL_DRAWS = (greedy, dynamic, thompson, optimistic)
DRAWS: dict[str, Callable[[Scores, Array], Array]] = {draw.__name__: draw for draw in _ALL_DRAWS}
"""Name -> `(scores, uniforms [B, K]) -> int32 [B]`."""


@dataclass(frozen=True)
class Chooser:
    """`scores` and `draws` by name (`SCORERS`, `DRAWS`); the numbers come as parameters."""

    scores: str = "given"
    draws: str = "greedy"

    @property
    def reads_features(self) -> bool:
        """Whether the scores depend on the prompt."""
        return self.scores != "given"

    def __call__(self, params: Params, features: Array, uniforms: Array) -> Array:
        """int32 `[B]`: every row's arm.

        Args:
            features: `[B, D]`; of a chooser that reads none, anything with `B` rows.
            uniforms: float32 `[B, K]` in [0, 1), the rows' own.
        """
        with jax.named_scope("choose"):
            return DRAWS[self.draws](SCORERS[self.scores](params, features), uniforms)


def always(arm: int, arms: int) -> tuple[Chooser, Params]:
    """One arm for all queries."""
    return Chooser(), {"scores": np.eye(arms, dtype=np.float32)[arm]}


def at_random(arms: int) -> tuple[Chooser, Params]:
    """Any arm, each as often."""
    return Chooser(draws="dynamic"), {"scores": np.zeros(arms, np.float32)}


def reads(params: Params) -> int | None:
    """How many features a chooser's parameters take; `None`: they read none."""
    if "scores" in params:
        return None
    found: Any = params["center"] if "center" in params else params["layers_0"]["kernel"]
    return int(found.shape[0])
