"""Expected rounds and block lengths of a level, if each token is accepted independently with probability `α`.

A round over a block of `t` drafts yields `n + 1` tokens: `n` accepted drafts and one token of the level itself. The
probabilities are `P(n) = α^n (1 − α)` for `n < t`, and `P(t) = α^t`.
"""

import numpy as np

Floats = np.ndarray


def expected_rounds(alpha: Floats, budgets: int) -> Floats:
    """Returns `γ(α, t, T)`, the expected number of rounds over `t` drafts until at least `T` tokens exist.

    Source: docs/methods.md, section 7.

    Args:
        alpha: acceptance rates, any shape `[...]`, in [0, 1].
        budgets: T̄, the largest `t` and `T`.

    Returns:
        float64 `[..., T̄, T̄]`: entry `[t - 1, T - 1]` belongs to `t` and `T`.
    """
    alpha = np.asarray(alpha, np.float64)
    powers = alpha[..., None] ** np.arange(budgets + 1)
    rounds = np.zeros((*alpha.shape, budgets, budgets + 1))  # the last axis: γ at T = 0 … T̄
    for t in range(1, budgets + 1):
        gamma = rounds[..., t - 1, :]
        for needed in range(1, budgets + 1):
            rejected = min(t, needed)  # if n < rejected drafts are accepted, needed − 1 − n tokens are still missing
            later_rounds = gamma[..., needed - rejected : needed][..., ::-1]
            gamma[..., needed] = 1.0 + (1.0 - alpha) * np.sum(powers[..., :rejected] * later_rounds, axis=-1)
            if needed > t + 1:
                gamma[..., needed] += powers[..., t] * gamma[..., needed - t - 1]
    return rounds[..., 1:]


def calls_per_token(alpha: Floats, budgets: int) -> Floats:
    """Returns target calls per token with blocks of `t` drafts, `(1 − α) / (1 − α^(t + 1))`, at entry `t - 1`.

    The result is `[..., T̄]`.
    """
    alpha = np.asarray(alpha, np.float64)[..., None]
    return 1.0 / np.sum(alpha[..., None] ** np.arange(budgets + 1) * _upto(budgets), axis=-1)


def _upto(budgets: int) -> Floats:
    """Returns a mask `[T̄, T̄ + 1]`: row `t - 1` selects the powers 0 to t."""
    return np.arange(budgets + 1)[None] <= np.arange(1, budgets + 1)[:, None]


def yields(lengths: Floats, alpha: Floats) -> Floats:
    """Returns the distribution of the number of tokens that a round over a block of random length yields.

    The number includes the token of the level itself.

    Args:
        lengths: `[..., W]`, probabilities of the lengths 0 … W − 1.
        alpha: `[...]`, the acceptance rate.

    Returns:
        `[..., W + 1]`, probabilities of 0 … W tokens.
    """
    width = lengths.shape[-1]
    longer = np.flip(np.cumsum(np.flip(lengths, -1), -1), -1)  # P(length ≥ y)
    powers = np.asarray(alpha)[..., None] ** np.arange(width)
    probabilities = np.zeros((*lengths.shape[:-1], width + 1))
    probabilities[..., 1:] = powers * lengths  # y tokens, if a block has y − 1 drafts and all of them are accepted
    probabilities[..., 1:width] += powers[..., : width - 1] * (1.0 - np.asarray(alpha)[..., None]) * longer[..., 1:]
    return probabilities


def visits(yielded: Floats, budgets: int) -> Floats:
    """Returns the probability that exactly `s` tokens exist before some round: `[..., T̄]`, entry `s` for 0 … T̄ − 1.

    The sum of the entries up to `T - 1` is the expected number of rounds until at least `T` tokens exist.
    """
    probs = np.zeros((*yielded.shape[:-1], budgets))
    probs[..., 0] = 1.0
    for s in range(1, budgets):
        most = min(s, yielded.shape[-1] - 1)
        probs[..., s] = np.sum(yielded[..., 1 : most + 1] * np.flip(probs[..., s - most : s], -1), axis=-1)
    return probs


def handed_up(yielded: Floats, visited: Floats, budget: int) -> Floats:
    """Returns the distribution of a block's length, if a level passes it on as soon as it has at least `budget` tokens.

    The result is `[..., W]`, probabilities of the lengths 0 … W − 1.
    """
    width = yielded.shape[-1]
    probabilities = np.zeros((*yielded.shape[:-1], budget + width - 1))
    for s in range(budget):
        probabilities[..., budget : s + width] += visited[..., s, None] * yielded[..., budget - s :]
    return probabilities
