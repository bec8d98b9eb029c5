"""Choosers, which score several drafters for each prompt and choose one of them (docs/methods.md, section 8).

A chooser reads the target's summary of the prompt and assigns an *arm* (one of the drafters) to each row of a batch.
A chooser's numbers are parameters of the compiled program, so the program is not compiled again when they change, for
example while the chooser learns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.types import Array, Params

HIGHEST = jax.lax.Precision.HIGHEST
"""The precision of products in scores; in bfloat16, the default on accelerators, rounding could change a choice."""


class Scores(NamedTuple):
    """Scores of the arms (the drafters to choose from), float32 `[B, K]`, and the scores' standard deviations.

    `deviation` is `None` if the scores are exact.
    """

    mean: Array
    deviation: Array | None = None


def given(params: Params, features: Array) -> Scores:
    """Returns the same scores for every prompt, from the parameters `{"scores": [K]}`."""
    return Scores(jnp.broadcast_to(params["scores"], (len(features), len(params["scores"]))))


def perceptron(params: Params, features: Array) -> Scores:
    """Computes scores with a network of tanh layers; parameters are `{"layers_0": {"kernel", "bias"}, …}`.

    The policy of Huang et al. (2024, assistant selection) has three layers; a linear policy has one.
    """
    values = features.astype(jnp.float32)  # a target in bfloat16 returns features in bfloat16
    for number in range(len(params)):
        layer = params[f"layers_{number}"]
        values = jnp.dot(jnp.tanh(values) if number else values, layer["kernel"], precision=HIGHEST) + layer["bias"]
    return Scores(values)


def ridge(params: Params, features: Array) -> Scores:
    """Computes scores with one Bayesian linear regression per arm.

    Sources: LinUCB (Li et al., 2010); Thompson sampling (Agrawal and Goyal, 2013).

    Args:
        params: `center` and `scale` `[D]` of the features; `mean` `[K, D + 1]` and `covariance` `[K, D + 1, D + 1]` of
            the weights; the last weight is the intercept.
        features: `[B, D]`.
    """
    values = (features.astype(jnp.float32) - params["center"]) * params["scale"]
    # a feature that is always 1 makes the intercept an ordinary weight with a mean and a variance
    values = jnp.concatenate([values, jnp.ones_like(values[:, :1])], axis=1)
    mean = jnp.einsum("bd,kd->bk", values, params["mean"], precision=HIGHEST)
    variance = jnp.einsum("bd,kde,be->bk", values, params["covariance"], values, precision=HIGHEST)
    # rounding can make a variance slightly negative
    return Scores(mean, jnp.sqrt(jnp.maximum(variance, 0.0)))


SCORERS: dict[str, Callable[[Params, Array], Scores]] = {"given": given, "perceptron": perceptron, "ridge": ridge}
"""The functions that compute scores, by name: `(params, features [B, D]) -> Scores`."""


def greedy(scores: Scores, uniforms: Array) -> Array:
    """Returns the arm (the index of a drafter) with the highest score, int32 `[B]`; ties go to the first."""
    return scores.mean.argmax(-1).astype(jnp.int32)


def dynamic(scores: Scores, uniforms: Array) -> Array:
    """Samples an arm (the index of a drafter) from the softmax of the scores, int32 `[B]`."""
    # the last cumulative sum is left out: if rounding made it less than 1, an arm beyond the last could be chosen
    below = jnp.cumsum(jax.nn.softmax(scores.mean, -1), -1)[:, :-1] <= uniforms[:, :1]
    return below.sum(-1).astype(jnp.int32)


def thompson(scores: Scores, uniforms: Array) -> Array:
    """Samples every arm's score from its normal distribution; returns the arm with the highest sample, int32 `[B]`."""
    assert scores.deviation is not None, "Thompson sampling needs scores with a standard deviation"
    # uniforms move to the middles of their 2^23 steps, because the normal quantiles of 0 and 1 are infinite
    normal = jax.scipy.special.ndtri(jnp.clip(uniforms + 2.0**-24, 2.0**-24, 1 - 2.0**-24))
    return (scores.mean + scores.deviation * normal).argmax(-1).astype(jnp.int32)


def optimistic(scores: Scores, uniforms: Array) -> Array:
    """Returns the arm whose score plus two standard deviations is highest, int32 `[B]` (LinUCB with α = 2)."""
    assert scores.deviation is not None, "an upper confidence bound needs scores with a standard deviation"
    return (scores.mean + 2.0 * scores.deviation).argmax(-1).astype(jnp.int32)


_ALL_DRAWS = (greedy, dynamic, thompson, optimistic)
DRAWS: dict[str, Callable[[Scores, Array], Array]] = {draw.__name__: draw for draw in _ALL_DRAWS}
"""The functions that choose arms from scores, by name: `(scores, uniforms [B, K]) -> int32 [B]`."""


@dataclass(frozen=True)
class Chooser:
    """A chooser of arms: `scores` names a function of `SCORERS`, and `draws` a function of `DRAWS`."""

    scores: str = "given"
    draws: str = "greedy"

    @property
    def reads_features(self) -> bool:
        """Whether the scores depend on the prompt."""
        return self.scores != "given"

    def __call__(self, params: Params, features: Array, uniforms: Array) -> Array:
        """Returns int32 `[B]`, every row's arm (the index of its drafter).

        Args:
            params: the parameters of the scores.
            features: `[B, D]`; if the chooser reads no features, any array with `B` rows.
            uniforms: float32 `[B, K]` in [0, 1), independent per row.
        """
        with jax.named_scope("choose"):
            return DRAWS[self.draws](SCORERS[self.scores](params, features), uniforms)


def always(arm: int, arms: int) -> tuple[Chooser, Params]:
    """Returns a chooser that chooses the same arm for all prompts, and its parameters."""
    return Chooser(), {"scores": np.eye(arms, dtype=np.float32)[arm]}


def at_random(arms: int) -> tuple[Chooser, Params]:
    """Returns a chooser that chooses every arm with equal probability, and its parameters."""
    return Chooser(draws="dynamic"), {"scores": np.zeros(arms, np.float32)}


def reads(params: Params) -> int | None:
    """Returns the number of features that a chooser with these parameters reads, or `None` if it reads none."""
    if "scores" in params:
        return None
    weights: Any = params["center"] if "center" in params else params["layers_0"]["kernel"]
    return int(weights.shape[0])
