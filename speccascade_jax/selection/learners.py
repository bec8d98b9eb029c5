"""Online learners for serving: their state, the numbers they pass to the decoder, and rewards from measured times.

The decoder's compiled program chooses a drafter for each query (`drafters.chooser`). The choice depends on the
learner's numbers, which are arguments of the program, and on random bits of its own. So learning compiles nothing, and
the choice cannot depend on the draft. A reward is minus the logarithm of a query's time per token, relative to the
median of the learner's first queries (`Rewards`). So rewards do not depend on the machine's speed.
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
"""The range of times per token that `Exp3` distinguishes: from a quarter to four times the usual time."""
STEPS = 8.0
"""The factor by which `Exp3` multiplies the learning rate for worst-case losses, √(log K / (K t)).

The losses of drafters vary less than worst-case losses, so a higher rate is safe.
"""
REFERENCE = 16
"""The largest number of a learner's first queries whose median time is the reference of its rewards."""


@dataclass(frozen=True)
class Whitening:
    """The standardisation of features for the regressions: `(x − center) · scale`, float32 `[D]` each.

    The scale gives the feature vector a length of about 1. So λ and σ in `Posterior` mean the same for any target
    model.
    """

    center: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, features: np.ndarray) -> Self:
        """Computes the whitening from a sample of features, `[N, D]`."""
        center, spread = features.mean(0), features.std(0)
        scale = 1.0 / (np.maximum(spread, 1e-6) * np.sqrt(features.shape[1]))
        return cls(center.astype(np.float32), scale.astype(np.float32))

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Returns the whitened features and a constant feature, float64 `[N, D + 1]`."""
        white = (np.asarray(features, np.float64) - self.center) * self.scale
        return np.concatenate([white, np.ones((len(white), 1))], axis=1)


@dataclass
class Posterior:
    """The posterior of a linear bandit over the rewards of all arms; each query shows the reward of one arm only.

    Each arm has a ridge regression on a constant and the whitened features: `A = λI + Σ x xᵀ`, `b = Σ r x`, weights
    `A⁻¹ b`, covariance `σ² A⁻¹` (LinUCB: Li et al., 2010; linear Thompson sampling: Agrawal and Goyal, 2013). With a
    discount below 1, older queries count less, so changed rewards are learnt again (Russac et al., 2019).

    Attributes:
        whitening: the whitening of the features.
        inverse: `A⁻¹`, float64 `[K, D + 1, D + 1]`.
        moment: `b`, float64 `[K, D + 1]`.
        ridge: λ.
        noise: σ, the standard deviation of rewards around the regression line.
        discount: the factor by which each further query reduces the weight of all earlier queries. It reduces λ too, so
            the uncertainty of an arm that was not chosen for long grows, up to `1 / ridge`.
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
        """Updates the posterior with queries in order: features `[N, D]`, chosen arms `[N]` and their rewards `[N]`.

        Each update is a Sherman-Morrison step, because inverting a matrix would take longer than decoding a query.

        Raises:
            ValueError: a reward is not finite; the message names it.
        """
        if len(bad := np.flatnonzero(~np.isfinite(rewards))):
            raise ValueError(f"the reward of query {bad[0]} is {rewards[bad[0]]}: give finite rewards")
        for x, arm, reward in zip(self.whitening(features), arms, rewards, strict=True):
            if self.discount < 1:
                self._forget()
            step = (self.inverse[arm] * x).sum(-1)
            self.inverse[arm] -= np.outer(step, step) / (1 + (x * step).sum())
            self.moment[arm] += float(reward) * x

    def _forget(self) -> None:
        self.moment *= self.discount
        self.inverse /= self.discount
        # Limit an arm's mean variance to the prior's: an arm must not become less certain than without evidence.
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
        posterior: updated in place with each shown reward.
        features: `[N, D]`, the features of the queries.
        rewards: `[N, K]`, the reward of every arm.
        rng: random generator of the order of the queries.
        deviations: the number of standard deviations that are added to an arm's mean score.

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
    """Rewards of a learner's queries, from times per token in the order of the queries: `-log(time / usual)`.

    `usual` is the median time of the first queries (at most `REFERENCE` queries). So one unusually slow query does not
    change the rewards of other queries, and rewards stay comparable over time.
    """

    def __init__(self) -> None:
        self._first: list[float] = []

    def __call__(self, seconds: float) -> float:
        """Returns the reward of the next query; `seconds` is its time per token."""
        if len(self._first) < REFERENCE:
            self._first.append(math.log(seconds))
        return float(np.median(self._first)) - math.log(seconds)


class Learner(Protocol):
    """The protocol of a learner, whose `chooser` is a static part of the decoder's program."""

    @property
    def chooser(self) -> Chooser:
        """The chooser that assigns an arm to every query."""
        ...

    def params(self) -> Params:
        """Returns the chooser's numbers for the next query."""

    def learn(self, features: np.ndarray, arm: int, reward: float) -> None:
        """Updates the learner with a query's features `[D]`, the arm that drafted, and its reward."""


@dataclass
class Fixed:
    """A learner whose choices never change with rewards: a trained policy, always the same arm, or a random arm."""

    chooser: Chooser
    numbers: Params

    def params(self) -> Params:
        """Returns the same numbers for every query."""
        return self.numbers

    def learn(self, features: np.ndarray, arm: int, reward: float) -> None:
        """Does nothing, because the choice is fixed."""


@dataclass
class Thompson:
    """Linear Thompson sampling on the target's features of the prompt (`Posterior`)."""

    posterior: Posterior
    chooser: Chooser = Chooser("ridge", "thompson")

    def params(self) -> Params:
        """Returns the posterior's parameters after all queries so far."""
        return self.posterior.params()

    def learn(self, features: np.ndarray, arm: int, reward: float) -> None:
        """Updates the posterior with one query: its features `[D]`, the chosen arm and the reward."""
        self.posterior.learn(features[None], np.array([arm]), np.array([reward]))


@dataclass
class Exp3:
    """Exp3.S without features and with falling rates: a bandit with small regret against the best fixed arm.

    Exp3.S (Auer et al., 2002) moves some weight from every arm to all arms, so that an arm can recover after a shift.
    With constant rates, the cost of exploration per query would never fall. Here the rates fall with the number
    `t` of learnt queries, as for a regret of order √t against one fixed arm, so the regret per query goes to zero. The
    weight that inferior arms keep also falls. So a later shift takes longer to detect, about in proportion to √t. A
    regret bound against the best arm of every part of the stream needs the number of parts, which this learner does not
    know.

    A loss is the running mean of rewards minus the reward, scaled and limited to [-1/2, 1/2]. Losses are estimated by
    importance weighting: the arm that drafted gets its loss divided by its probability. Without the running mean, an
    arm that was not tried for long would seem good.

    Attributes:
        arms: number of arms.
        rate: largest learning rate; `schedule` gives the current values of `rate`, `explore` and `share`.
        explore: largest share of queries with a random arm.
        share: largest share of every weight that is moved to all arms after each query.
        log_weights: float64 `[K]`, logarithms of the arms' weights.
        usual: the running mean of rewards.
        num_queries: number of learnt queries.
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
        """The values of `rate`, `explore` and `share` for the next query."""
        queries, spread = self.num_queries + 1, math.log(max(self.arms, 2))
        rate = STEPS * math.sqrt(spread / (self.arms * queries))
        explore = math.sqrt(self.arms * spread / queries)
        return min(self.rate, rate), min(self.explore, explore), min(self.share, 1 / queries)

    @property
    def probabilities(self) -> np.ndarray:
        """The probabilities of the arms, float64 `[K]`."""
        weights, explore = np.exp(self.log_weights - self.log_weights.max()), self.schedule[1]
        return (1 - explore) * weights / weights.sum() + explore / self.arms

    def params(self) -> Params:
        """Returns the logarithms of the arms' probabilities as scores, float32 `[K]`."""
        return {"scores": np.log(self.probabilities).astype(np.float32)}

    def learn(self, features: np.ndarray, arm: int, reward: float) -> None:
        """Updates the weight of `arm` by its loss over its probability, then spreads a share of all weights evenly."""
        rate, _, share = self.schedule
        loss = min(max((self.usual - reward) / math.log(EXPLORED), -1.0), 1.0) / 2
        self.log_weights[arm] -= rate * loss / self.probabilities[arm]
        weights = np.exp(self.log_weights - self.log_weights.max())
        self.log_weights = np.log((1 - share) * weights + share * weights.mean())
        self.num_queries += 1
        self.usual -= max(1 / self.num_queries, 0.05) * 2 * math.log(EXPLORED) * loss


LEARNERS = ("thompson", "thompson_prior", "exp3", "greedy", "random")
"""The names of the learners for serving.

"thompson", "thompson_prior" (Thompson sampling with a trained policy as its prior) and "exp3" learn. "greedy" (the
trained policy) and "random" (a random arm) do not learn.
"""


def thompson(
    sample: np.ndarray, arms: int, *, noise: float = 0.3, ridge: float = 1.0, discount: float = 1.0
) -> Thompson:
    """Returns a Thompson sampler that has not learnt from any query yet.

    Args:
        sample: features `[N, D]` that give the spread of the features; their rewards are not known.
        arms: number of arms.
        noise: σ of `Posterior`.
        ridge: λ of `Posterior`.
        discount: factor on older queries, as in `Posterior`.
    """
    return Thompson(Posterior.empty(Whitening.of(sample), arms, noise=noise, ridge=ridge, discount=discount))


def with_prior(learner: Thompson, policy: Policy, numbers: Params, sample: np.ndarray, gain: float = 0.7) -> Thompson:
    """Adds a trained policy as a prior: the posterior learns the reward `gain · (π(a) − 1)` of every arm on a sample.

    A policy does not predict times, only which arm is best. The prior assumes that the best arm takes the usual time
    and the other arms are slower by `gain` (0.7 in natural logarithms: twice the time). Measured queries outweigh the
    prior after a while.

    Args:
        learner: the learner, whose posterior changes in place.
        policy: the trained policy.
        numbers: the policy's parameters, with its arms in the decoder's order.
        sample: features `[N, D]`.
        gain: factor on `π(a) − 1`, in units of the reward.
    """
    scores = chooser.SCORERS[policy.card.scores](numbers, jnp.asarray(sample)).mean
    law = np.asarray(jax.nn.softmax(scores, -1), np.float64)
    posterior, discount = learner.posterior, learner.posterior.discount
    posterior.discount = 1.0  # the arms learn one after the other: a discount would give the last one more evidence
    for arm in range(law.shape[1]):
        posterior.learn(sample, np.full(len(sample), arm), gain * (law[:, arm] - 1.0))
    posterior.discount = discount
    return learner
