"""Learning while serving: what a learner believes, what it tells the decoder, what it makes of a measured time.

The decoder chooses in its own program, by numbers that change from query to query and by bits of the query's own round
(`drafters.chooser`), so that learning compiles nothing and no choice can see its draft. A reward is minus the log of a
query's time per token, relative to the median of the first ones (`Rewards`): the scale of the machine drops out.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.types import Params
from speccascade_jax.drafters import chooser
from speccascade_jax.drafters.chooser import Chooser
from speccascade_jax.pairs.policy_files import Policy

EXPLORED = 4.0
"""Times per token from a quarter to four times the usual one are told apart by `Exp3`."""
STEPS = 8.0
"""`Exp3`'s rate over √(log K / (K t)), which the worst of losses would ask for: those of drafters spread less."""
REFERENCE = 16
"""Of how many of a learner's first queries the median is what its rewards are relative to."""


@dataclass(frozen=True)
class Whitening:
    """Features as the regressions read them: `(x − center) · scale`, float32 `[D]` each.

    The scale brings the whole vector to a length of about 1, so that λ and the noise mean the same for any target.
    """

    center: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, features: np.ndarray) -> Self:
        """From a sample `[N, D]`."""
        center, spread = features.mean(0), features.std(0)
        scale = 1.0 / (np.maximum(spread, 1e-6) * np.sqrt(features.shape[1]))
        return cls(center.astype(np.float32), scale.astype(np.float32))

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """float64 `[N, D + 1]`: whitened, with the constant."""
        white = (np.asarray(features, np.float64) - self.center) * self.scale
        return np.concatenate([white, np.ones((len(white), 1))], axis=1)


@dataclass
class Posterior:
    """Linear bandits: what is known of each arm's reward after queries, each of which showed one arm's alone.

    A ridge regression for each arm on the features, whitened once and for all, and a constant: `A = λI + Σ x xᵀ`,
    `b = Σ r x`, weights `A⁻¹ b`, covariance `σ² A⁻¹` (LinUCB: Li et al., 2010; linear Thompson sampling: Agrawal and
    Goyal, 2013). With a discount below 1 older queries count less, so that what has changed is learnt again (Russac et
    al., 2019).

    Known are `inverse` `A⁻¹` float64 `[K, D + 1, D + 1]`, `moment` `[K, D + 1]`.

    Attributes:
        ridge: λ; noise: σ, the standard deviation of rewards around the line.
        discount: of all that is known of an arm, for each further query; the ridge is forgotten with it, so that what
            was not seen for long becomes as uncertain as it likes, but for `1 / ridge`.
    """

    whitening: Whitening
    inverse: np.ndarray
    moment: np.ndarray
    ridge: float = 1.0
    noise: float = 0.1
    discount: float = 1.0

    @classmethod
    def empty(
        cls, whitening: Whitening, arms: int, ridge: float = 1.0, noise: float = 0.1, discount: float = 1.0
    ) -> Self:
        """Nothing is known.

        Raises:
            ValueError: numbers without meaning.
        """
        if not (ridge > 0 and noise > 0 and 0 < discount <= 1):
            raise ValueError(f"ridge={ridge:g} and noise={noise:g} must be above 0, discount={discount:g} in (0, 1]")
        size = len(whitening.center) + 1
        inverse = np.tile(np.eye(size) / ridge, (arms, 1, 1))
        return cls(whitening, inverse, np.zeros((arms, size)), ridge, noise, discount)

    def learn(self, features: np.ndarray, arms: np.ndarray, rewards: np.ndarray) -> None:
        """Take in queries `[N, D]`, the arm that each showed `[N]`, and its reward `[N]`, in their order.

        Each is a step of Sherman and Morrison: no matrix is inverted, which would take longer than a query.

        Raises:
            ValueError: a reward that is not finite (says which).
        """
        if len(bad := np.flatnonzero(~np.isfinite(rewards))):
            raise ValueError(f"the reward of query {bad[0]} is {rewards[bad[0]]}: rewards must be finite")
        for x, arm, reward in zip(self.whitening(features), arms, rewards, strict=True):
            if self.discount < 1:
                self._forget()
            step = (self.inverse[arm] * x).sum(-1)
            self.inverse[arm] -= np.outer(step, step) / (1 + (x * step).sum())
            self.moment[arm] += float(reward) * x

    def _forget(self) -> None:
        self.moment *= self.discount
        self.inverse /= self.discount
        # a variance above that of knowing nothing says nothing: the whole of an arm's is brought back to it
        largest = np.trace(self.inverse, axis1=1, axis2=2) * self.ridge / self.inverse.shape[1]
        self.inverse /= np.maximum(largest, 1.0)[:, None, None]

    def weights(self) -> np.ndarray:
        """float64 `[K, D + 1]`, the mean of what is believed."""
        found: np.ndarray = (self.inverse * self.moment[:, None, :]).sum(-1)
        return found

    def params(self) -> Params:
        """As `drafters.chooser.ridge` reads them, float32."""
        arrays = {"mean": self.weights(), "covariance": self.noise**2 * self.inverse}
        arrays |= {"center": self.whitening.center, "scale": self.whitening.scale}
        return {name: np.asarray(value, np.float32) for name, value in arrays.items()}


def learn_by_trying(
    posterior: Posterior,
    features: np.ndarray,
    rewards: np.ndarray,
    *,
    rng: np.random.Generator,
    deviations: float = 2.0,
) -> np.ndarray:
    """LinUCB over known rewards: each query in random order shows the reward of the arm that was chosen for it alone.

    Args:
        features: `[N, D]`; rewards: `[N, K]`; deviations: how far up an arm's score is taken.

    Returns:
        int32 `[N]`, the arms that were tried, in the order of the queries.
    """
    tried, white = np.zeros(len(features), np.int32), posterior.whitening(features)
    for query in rng.permutation(len(features)):
        x = white[query]
        spread = np.sqrt(((posterior.inverse * x).sum(-1) * x).sum(-1))
        mean = (posterior.weights() * x).sum(-1)
        arm = int((mean + deviations * posterior.noise * spread).argmax())
        tried[query] = arm
        posterior.learn(features[query : query + 1], np.array([arm]), rewards[query, arm : arm + 1])
    return tried


class Rewards:
    """A learner's times per token as rewards, in their order: `-log(time / usual)`.

    `usual` is the median of those seen, of the first `REFERENCE` at most: one query that took unusually long makes
    nothing of the others, and what was learnt early stays comparable.
    """

    def __init__(self) -> None:
        self._first: list[float] = []

    def __call__(self, seconds: float) -> float:
        """The reward of the next query, which took so long per token."""
        if len(self._first) < REFERENCE:
            self._first.append(math.log(seconds))
        return float(np.median(self._first)) - math.log(seconds)


class Learner(Protocol):
    """One way of learning; `chooser` is what the decoder is compiled with."""

    @property
    def chooser(self) -> Chooser: ...

    def params(self) -> Params:
        """The chooser's numbers for the next query."""

    def learn(self, features: np.ndarray, arm: int, reward: float) -> None:
        """Take in what became of a query: its embedding `[D]`, the arm that drafted, its reward."""


@dataclass
class Fixed:
    """A chooser and numbers that stay as they are: a trained policy, one arm always, or any arm at random."""

    chooser: Chooser
    numbers: Params

    def params(self) -> Params:
        return self.numbers

    def learn(self, features: np.ndarray, arm: int, reward: float) -> None:
        """Nothing."""


@dataclass
class Thompson:
    """Linear Thompson sampling on the target's embedding (`Posterior`)."""

    posterior: Posterior
    chooser: Chooser = Chooser("ridge", "thompson")

    def params(self) -> Params:
        return self.posterior.params()

    def learn(self, features: np.ndarray, arm: int, reward: float) -> None:
        self.posterior.learn(features[None], np.array([arm]), np.array([reward]))


@dataclass
class Exp3:
    """Little regret against the best arm of a stream, and of each part of it, without features: Exp3.S by a schedule.

    Exp3.S (Auer et al., 2002) shares weight, so that an arm can come back. With numbers that stay as they are it pays
    for its exploration in every query for ever; here they fall with the queries `t` that were told, as they do where
    regret against one fixed arm is to grow with √t alone: per query it goes to zero. What weight the other arms keep
    falls too, so that the later a shift comes the longer it takes to be noticed, about in proportion to √t: against the
    best arm of every part there is a bound where the number of parts is known, and this knows it not.

    Losses are in [-1/2, 1/2] around a running mean of rewards and estimated by importance: the arm that drafted pays
    its loss over its probability. Without the mean whoever was not tried for long would look good.

    Attributes:
        rate: of learning, at most; explore: share of queries at random, at most; share: of every weight that goes to
            all arms after each query, at most; `schedule` says what they are after `told` queries.
        usual: the running mean of rewards.
    """

    arms: int
    rate: float = 0.3
    explore: float = 0.05
    share: float = 0.001
    log_weights: np.ndarray = field(default_factory=lambda: np.zeros(0))
    usual: float = 0.0
    told: int = 0
    chooser: Chooser = Chooser(draws="dynamic")

    def __post_init__(self) -> None:
        if not (self.rate > 0 and 0 < self.explore <= 1 and 0 <= self.share < 1):
            wanted = f"must be above 0, explore={self.explore:g} in (0, 1] and share={self.share:g} in [0, 1)"
            raise ValueError(f"rate={self.rate:g} {wanted}")
        self.log_weights = np.zeros(self.arms)

    @property
    def schedule(self) -> tuple[float, float, float]:
        """`rate`, `explore` and `share` of the next query."""
        queries, spread = self.told + 1, math.log(max(self.arms, 2))
        rate = STEPS * math.sqrt(spread / (self.arms * queries))
        explore = math.sqrt(self.arms * spread / queries)
        return min(self.rate, rate), min(self.explore, explore), min(self.share, 1 / queries)

    @property
    def probabilities(self) -> np.ndarray:
        """float64 `[K]`."""
        weights, explore = np.exp(self.log_weights - self.log_weights.max()), self.schedule[1]
        return (1 - explore) * weights / weights.sum() + explore / self.arms

    def params(self) -> Params:
        return {"scores": np.log(self.probabilities).astype(np.float32)}

    def learn(self, features: np.ndarray, arm: int, reward: float) -> None:
        rate, _, share = self.schedule
        loss = min(max((self.usual - reward) / math.log(EXPLORED), -1.0), 1.0) / 2
        self.log_weights[arm] -= rate * loss / self.probabilities[arm]
        weights = np.exp(self.log_weights - self.log_weights.max())
        self.log_weights = np.log((1 - share) * weights + share * weights.mean())
        self.told += 1
        self.usual -= max(1 / self.told, 0.05) * 2 * math.log(EXPLORED) * loss


LEARNERS = ("thompson", "thompson_prior", "exp3", "greedy", "random")
"""What can be served with: two ways to learn, Thompson sampling with a trained policy as its prior, and that policy, or
any arm at random, without learning."""


def thompson(
    sample: np.ndarray, arms: int, *, noise: float = 0.3, ridge: float = 1.0, discount: float = 1.0
) -> Thompson:
    """Thompson sampling from nothing.

    Args:
        sample: embeddings `[N, D]` that say how features are spread; their rewards are not known.
        noise, ridge, discount: as of `Posterior`.
    """
    return Thompson(Posterior.empty(Whitening.of(sample), arms, noise=noise, ridge=ridge, discount=discount))


def with_prior(learner: Thompson, policy: Policy, numbers: Params, sample: np.ndarray, gain: float = 0.7) -> Thompson:
    """Begin with what a trained policy says: as if each query of a sample had shown every arm, at `gain · (π(a) − 1)`.

    A policy is no forecast of times. It says which arm is the best: that one is taken to be as fast as the usual
    query, the others slower by `gain` (0.7 in logs: twice the time), until measured queries overrule it.

    Args:
        numbers: the policy's parameters, its arms in the decoder's order; sample: embeddings `[N, D]`.
    """
    scores = chooser.SCORERS[policy.card.scores](numbers, jnp.asarray(sample)).mean
    law = np.asarray(jax.nn.softmax(scores, -1), np.float64)
    posterior, discount = learner.posterior, learner.posterior.discount
    posterior.discount = 1.0  # the arms are told one after the other, and none is to be forgotten meanwhile
    for arm in range(law.shape[1]):
        posterior.learn(sample, np.full(len(sample), arm), gain * (law[:, arm] - 1.0))
    posterior.discount = discount
    return learner
