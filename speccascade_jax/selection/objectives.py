"""What a policy is trained by: REINFORCE, as the paper, and what it can be held against (METHODS section 8).

Each objective is a loss `[B]` of queries, from their scores `[B, K]`, rewards and the arms that were drawn. The rewards
of all arms are known beforehand, so the expectation whose gradient REINFORCE estimates is known too.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from speccascade_jax.core.types import Array


def reinforce(scores: Array, rewards: Array, drawn: Array) -> Array:
    """`−r(q, a) log π(a|q)`: its gradient is an unbiased estimate of that of `expected`.

    Args:
        scores: `[B, K]`, logits of the policy; rewards: `[B, K]`; drawn: int32 `[B]`, an arm `a ~ π` for each query.
    """
    log_policy = jax.nn.log_softmax(scores, -1)
    at = drawn[:, None]
    return -jnp.take_along_axis(rewards * log_policy, at, axis=1)[:, 0]


def expected(scores: Array, rewards: Array, drawn: Array) -> Array:
    """`−Σ_a π(a|q) r(q, a)`: the paper's `J`, exactly."""
    return -(jax.nn.softmax(scores, -1) * rewards).sum(-1)


def best_arm(scores: Array, rewards: Array, drawn: Array) -> Array:
    """Cross-entropy to the arm with the highest reward; arms that share it share the weight."""
    best = rewards >= rewards.max(-1, keepdims=True)
    weight = best / best.sum(-1, keepdims=True)
    return -(weight * jax.nn.log_softmax(scores, -1)).sum(-1)


OBJECTIVES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "reinforce": reinforce,
    "expected": expected,
    "best_arm": best_arm,
}
"""Name -> `(scores, rewards, drawn) -> losses [B]`."""
