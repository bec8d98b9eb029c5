"""Online learners for serving: their state, the numbers they pass to the decoder, and rewards from measured times.

The decoder chooses in its own program, from numbers that change from query to query and from random bits of the query's
own round (`drafters.chooser`). So learning compiles nothing, and a choice cannot depend on its draft. A reward is minus
the log of a query's time per token, relative to the median of the first ones (`Rewards`): the machine's speed cancels.
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
"""Range of times per token that `Exp3` distinguishes: from a quarter to four times the usual time."""
STEPS = 8.0
"""Factor of `Exp3`'s rate over √(log K / (K t)), the rate for worst-case losses.

The losses of drafters vary less, so a higher rate is safe.
"""
REFERENCE = 16
"""Number of a learner's first queries whose median time is the reference of its rewards."""


@dataclass(frozen=True)
class Whitening:
    """Whitening of the features for the regressions: `(x − center) · scale`, float32 `[D]` each.

    The scale gives the whole vector a length of about 1, so λ and the noise mean the same for any target.
    """

    center: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, features: np.ndarray) -> Self:
        """Returns the whitening of a sample `[N, D]`."""
        center, spread = features.mean(0), features.std(0)
        scale = 1.0 / (np.maximum(spread, 1e-6) * np.sqrt(features.shape[1]))
        return cls(center.astype(np.float32), scale.astype(np.float32))

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Returns whitened features and a constant, float64 `[N, D + 1]`."""
        white = (np.asarray(features, np.float64) - self.center) * self.scale
        return np.concatenate([white, np.ones((len(white), 1))], axis=1)


@dataclass
class Posterior:
    """Posterior of linear bandits: beliefs about each arm's reward after queries that each showed one arm's reward.

    Each arm has a ridge regression on a constant and the features, whitened once: `A = λI + Σ x xᵀ`, `b = Σ r x`,
    weights `A⁻¹ b`, covariance `σ² A⁻¹` (LinUCB: Li et al., 2010; linear Thompson sampling: Agrawal and Goyal, 2013).
    With a discount below 1, older queries count less, so changed rewards are learnt again (Russac et al., 2019).

    The state is `inverse` `A⁻¹`, float64 `[K, D + 1, D + 1]`, and `moment`, `[K, D + 1]`.

    Attributes:
        ridge: λ; noise: σ, the standard deviation of rewards around the line.
        discount: factor on the evidence about every arm, for each further query. It also discounts the ridge, so the
            uncertainty of an arm that was not seen for long grows up to `1 / ridge`.
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
        """Returns a posterior that has not learnt from any query yet.

        Raises:
            ValueError: a number is invalid.
        """
        if not (ridge > 0 and noise > 0 and 0 < discount <= 1):
            raise ValueError(f"ridge={ridge:g} and noise={noise:g} must be above 0, discount={discount:g} in (0, 1]")
        size = len(whitening.center) + 1
        inverse = np.tile(np.eye(size) / ridge, (arms, 1, 1))
        return cls(whitening, inverse, np.zeros((arms, size)), ridge, noise, discount)

    def learn(self, features: np.ndarray, arms: np.ndarray, rewards: np.ndarray) -> None:
        """Updates the posterior with queries `[N, D]`, the arm that each showed `[N]`, and its reward `[N]`, in order.

        Each update is a Sherman-Morrison step: inverting a matrix would take longer than a query.

        Raises:
            ValueError: a reward is not finite (names it).
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
        # cap an arm's mean variance at the prior's: discounting must not make it less certain than no evidence
        largest = np.trace(self.inverse, axis1=1, axis2=2) * self.ridge / self.inverse.shape[1]
        self.inverse /= np.maximum(largest, 1.0)[:, None, None]

    def weights(self) -> np.ndarray:
        """Returns the posterior mean, float64 `[K, D + 1]`."""
        means: np.ndarray = (self.inverse * self.moment[:, None, :]).sum(-1)
        return means

    def params(self) -> Params:
        """Returns the float32 parameters that `drafters.chooser.ridge` reads."""
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
    """Runs LinUCB over known rewards: each query, in random order, shows only the reward of its chosen arm.

    Args:
        posterior: learns from each shown reward, in place.
        features: `[N, D]`, the queries' embeddings.
        rewards: `[N, K]`, the reward of every arm.
        rng: random generator of the order of the queries.
        deviations: standard deviations that are added to an arm's mean score.

    Returns:
        int32 `[N]`, the chosen arms, in the order of the queries.
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
    """Rewards from a learner's times per token, in order: `-log(time / usual)`.

    `usual` is the median of the first `REFERENCE` times at most: one unusually slow query does not change the rewards
    of the others, and rewards stay comparable over time.
    """

    def __init__(self) -> None:
        self._first: list[float] = []

    def __call__(self, seconds: float) -> float:
        """Returns the reward of the next query; `seconds` is its time per token."""
        if len(self._first) < REFERENCE:
            self._first.append(math.log(seconds))
        return float(np.median(self._first)) - math.log(seconds)


class Learner(Protocol):
    """Protocol of a learner; `chooser` is a static part of the decoder's program."""

    @property
    def chooser(self) -> Chooser:
        """The chooser that assigns an arm to every query."""
        ...

    def params(self) -> Params:
        """Returns the chooser's numbers for the next query."""

    def learn(self, features: np.ndarray, arm: int, reward: float) -> None:
        """Updates the learner with a query's embedding `[D]`, the arm that drafted, and its reward."""


@dataclass
class Fixed:
    """Learner that never changes: a trained policy, one arm always, or a random arm."""

    chooser: Chooser
    numbers: Params

    def params(self) -> Params:
        """Returns the same numbers for every query."""
        return self.numbers

    def learn(self, features: np.ndarray, arm: int, reward: float) -> None:
        """Does nothing."""


@dataclass
class Thompson:
    """Linear Thompson sampling on the target's embedding (`Posterior`)."""

    posterior: Posterior
    chooser: Chooser = Chooser("ridge", "thompson")

    def params(self) -> Params:
        """Returns the posterior's parameters after all queries so far."""
        return self.posterior.params()

    def learn(self, features: np.ndarray, arm: int, reward: float) -> None:
        """Updates the posterior with one query: embedding `[D]`, chosen arm and reward."""
        self.posterior.learn(features[None], np.array([arm]), np.array([reward]))


@dataclass
class Exp3:
    """Exp3.S with a schedule, without features: small regret against the best arm of a stream, and of its parts.

    Exp3.S (Auer et al., 2002) shares weight between arms, so that an arm can recover. With constant rates, exploration
    costs the same in every query for ever. Here the rates fall with the number `t` of learnt queries, as for a regret
    of order √t against one fixed arm: the regret per query goes to zero. The weight that other arms keep also falls, so
    a later shift takes longer to detect, about in proportion to √t. A bound against the best arm of every part needs
    the number of parts, which this learner does not know.

    Losses are in [-1/2, 1/2] around a running mean of rewards and estimated by importance: the arm that drafted gets
    its loss divided by its probability. Without the mean, an arm that was not tried for long would seem good.

    Attributes:
        rate: largest learning rate; explore: largest share of random queries; share: largest share of every weight that
            is spread over all arms after each query; `schedule` gives their values after `num_queries` queries.
        usual: the running mean of rewards.
    """

    arms: int
    rate: float = 0.3
    explore: float = 0.05
    share: float = 0.001
    log_weights: np.ndarray = field(default_factory=lambda: np.zeros(0))
    usual: float = 0.0
    num_queries: int = 0
    chooser: Chooser = Chooser(draws="dynamic")

    def __post_init__(self) -> None:
        if not (self.rate > 0 and 0 < self.explore <= 1 and 0 <= self.share < 1):
            wanted = f"must be above 0, explore={self.explore:g} in (0, 1] and share={self.share:g} in [0, 1)"
            raise ValueError(f"rate={self.rate:g} {wanted}")
        self.log_weights = np.zeros(self.arms)

    @property
    def schedule(self) -> tuple[float, float, float]:
        """Values of `rate`, `explore` and `share` for the next query."""
        queries, spread = self.num_queries + 1, math.log(max(self.arms, 2))
        rate = STEPS * math.sqrt(spread / (self.arms * queries))
        explore = math.sqrt(self.arms * spread / queries)
        return min(self.rate, rate), min(self.explore, explore), min(self.share, 1 / queries)

    @property
    def probabilities(self) -> np.ndarray:
        """Probabilities of the arms, float64 `[K]`."""
        weights, explore = np.exp(self.log_weights - self.log_weights.max()), self.schedule[1]
        return (1 - explore) * weights / weights.sum() + explore / self.arms

    def params(self) -> Params:
        """Returns the logs of the arms' probabilities as scores, float32 `[K]`."""
        return {"scores": np.log(self.probabilities).astype(np.float32)}

    def learn(self, features: np.ndarray, arm: int, reward: float) -> None:
        """Updates the weight of `arm` by its loss over its probability, then spreads a share of all weights."""
        rate, _, share = self.schedule
        loss = min(max((self.usual - reward) / math.log(EXPLORED), -1.0), 1.0) / 2
        self.log_weights[arm] -= rate * loss / self.probabilities[arm]
        weights = np.exp(self.log_weights - self.log_weights.max())
        self.log_weights = np.log((1 - share) * weights + share * weights.mean())
        self.num_queries += 1
        self.usual -= max(1 / self.num_queries, 0.05) * 2 * math.log(EXPLORED) * loss


LEARNERS = ("thompson", "thompson_prior", "exp3", "greedy", "random")
"""Names of the learners for serving.

Thompson sampling, with or without a trained policy as its prior, and Exp3 learn; the trained policy ("greedy") and a
random arm do not.
"""


def thompson(
    sample: np.ndarray, arms: int, *, noise: float = 0.3, ridge: float = 1.0, discount: float = 1.0
) -> Thompson:
    """Returns a Thompson sampler that has not learnt from any query yet.

    Args:
        sample: embeddings `[N, D]` that give the spread of the features; their rewards are not known.
        arms: number of arms.
        noise: σ of `Posterior`.
        ridge: λ of `Posterior`.
        discount: factor on older evidence, as in `Posterior`.
    """
    return Thompson(Posterior.empty(Whitening.of(sample), arms, noise=noise, ridge=ridge, discount=discount))


def with_prior(learner: Thompson, policy: Policy, numbers: Params, sample: np.ndarray, gain: float = 0.7) -> Thompson:
    """Adds a trained policy as prior: each query of a sample shows every arm with reward `gain · (π(a) − 1)`.

    A policy does not predict times, only which arm is best. The prior assumes that the best arm is as fast as the usual
    query and the others are slower by `gain` (0.7 in logs: twice the time), until measured queries outweigh it.

    Args:
        learner: the learner, whose posterior changes in place.
        policy: the trained policy.
        numbers: the policy's parameters, its arms in the decoder's order.
        sample: embeddings `[N, D]`.
        gain: factor on `π(a) − 1`, in units of the reward.
    """
    scores = chooser.SCORERS[policy.card.scores](numbers, jnp.asarray(sample)).mean
    law = np.asarray(jax.nn.softmax(scores, -1), np.float64)
    posterior, discount = learner.posterior, learner.posterior.discount
    posterior.discount = 1.0  # the arms learn one after the other, and a discount would favour the last one
    for arm in range(law.shape[1]):
        posterior.learn(sample, np.full(len(sample), arm), gain * (law[:, arm] - 1.0))
    posterior.discount = discount
    return learner
