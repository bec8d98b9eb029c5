"""Linear bandits: what is believed of each arm's reward after some queries, each of which showed one arm's alone.

A ridge regression for each arm on the features, whitened once and for all, and a constant: `A = λI + Σ x xᵀ`,
`b = Σ r x`, weights `A⁻¹ b`, covariance `σ² A⁻¹` (LinUCB: Li et al., 2010; linear Thompson sampling: Agrawal and Goyal,
2013). With a discount below 1 older queries count less, so that what has changed is learnt again (Russac et al., 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speccascade_jax.core.types import Params


@dataclass(frozen=True)
class Whitening:
    """Features as the regressions read them: `(x − center) · scale`, float32 `[D]` each.

    The scale brings the whole vector to a length of about 1, so that λ and the noise mean the same for any target.
    """

    center: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, features: np.ndarray) -> Whitening:
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
    """What is known so far: `inverse` `A⁻¹` float64 `[K, D + 1, D + 1]`, `moment` `[K, D + 1]`.

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
    ) -> Posterior:
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
