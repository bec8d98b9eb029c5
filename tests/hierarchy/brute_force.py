"""Reference for hierarchies: enumeration by METHODS.md section 7, and simulation; slow but independent."""

from functools import cache

import numpy as np


@cache
def expected_rounds(alpha, t, needed):
    """Returns `g(r) = 1 + Σ P(n) g(r − n − 1)`, literally by METHODS."""
    if needed <= 0:
        return 0.0
    accepted = sum(alpha**n * (1 - alpha) * expected_rounds(alpha, t, needed - n - 1) for n in range(t))
    return 1.0 + accepted + alpha**t * expected_rounds(alpha, t, needed - t - 1)


def paper(costs, acceptance, most):
    """Yields `(latency, models, budgets)` of every hierarchy, by Corollary 3.1."""
    target = len(costs) - 1

    def above(models, budgets, block):
        i, t = models[-1], budgets[-1]
        alpha = acceptance[i][target]
        share = 1 / (t + 1) if alpha == 1 else (1 - alpha) / (1 - alpha ** (t + 1))
        yield share * (costs[target] + block), (*models, target), budgets
        for j in range(i + 1, target):
            for budget in range(1, most + 1):
                calls = expected_rounds(acceptance[i][j], t, budget)
                yield from above((*models, j), (*budgets, budget), calls * (costs[j] + block))

    yield costs[target], (target,), ()
    for i in range(target):
        for t in range(1, most + 1):
            yield from above((i,), (t,), t * costs[i])


def one_round(lengths, alpha):
    """Returns `{tokens: probability}` after a round over a block with `{length: probability}`."""
    probabilities = {}
    for length, weight in lengths.items():
        for n in range(length):
            probabilities[n + 1] = probabilities.get(n + 1, 0.0) + weight * alpha**n * (1 - alpha)
        probabilities[length + 1] = probabilities.get(length + 1, 0.0) + weight * alpha**length
    return probabilities


def until(yielded, budget):
    """Returns `(expected rounds, {length: probability})` of a level that stops when it has `budget` tokens."""
    unfinished, calls, lengths = {0: 1.0}, 0.0, {}
    while unfinished:
        calls += sum(unfinished.values())
        later = {}
        for have, weight in unfinished.items():
            for tokens, probability in yielded.items():
                into = lengths if have + tokens >= budget else later
                into[have + tokens] = into.get(have + tokens, 0.0) + weight * probability
        unfinished = later
    return calls, lengths


def overshoot(costs, acceptance, most):
    """Yields `(latency, models, budgets)` of every hierarchy, by the distributions of the block lengths."""
    target = len(costs) - 1

    def above(models, budgets, block, lengths):
        i = models[-1]
        yielded = one_round(lengths, acceptance[i][target])
        tokens = sum(length * weight for length, weight in yielded.items())
        yield (costs[target] + block) / tokens, (*models, target), budgets
        for j in range(i + 1, target):
            for budget in range(1, most + 1):
                calls, up = until(one_round(lengths, acceptance[i][j]), budget)
                yield from above((*models, j), (*budgets, budget), calls * (costs[j] + block), up)

    yield costs[target], (target,), ()
    for i in range(target):
        for t in range(1, most + 1):
            yield from above((i,), (t,), t * costs[i], {t: 1.0})


def simulated(costs, acceptance, models, budgets, rounds, seed):
    """Returns the latency per token of `rounds` target rounds of Algorithm 1 with independent acceptance."""
    rng = np.random.default_rng(seed)

    def block(level, rows):
        """Returns lengths `[rows]` and costs `[rows]` of the blocks that level `level` passes to the level above."""
        if level == 0:
            return np.full(rows, budgets[0]), np.full(rows, budgets[0] * costs[models[0]])
        lengths_so_far, paid = np.zeros(rows, int), np.zeros(rows)
        while (waiting := np.flatnonzero(lengths_so_far < budgets[level])).size:
            tokens, price = verified(level, len(waiting))
            lengths_so_far[waiting] += tokens
            paid[waiting] += price
        return lengths_so_far, paid

    def verified(level, rows):
        lengths, paid = block(level - 1, rows)
        alpha = acceptance[models[level - 1]][models[level]]
        accepted = rng.geometric(max(1 - alpha, 1e-12), rows) - 1
        return np.minimum(accepted, lengths) + 1, paid + costs[models[level]]

    tokens, paid = verified(len(models) - 1, rounds)
    return paid.sum() / tokens.sum()
