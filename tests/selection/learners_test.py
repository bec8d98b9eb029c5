"""Tests of learners on streams with a known best arm: they find it, and find it again after a shift."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.drafters import chooser
from speccascade_jax.pairs.policy_files import Card, Policy
from speccascade_jax.selection import learners
from speccascade_jax.selection.learners import Posterior, Whitening
from tests.support import selection_folders

ARMS = 3
CARD = Card(scores="perceptron", features=12, arms=("a", "b", "c"), prints=("1", "2", "3"), target="t")


def stream(phases, queries, seed=0):
    """Returns features `[N, D]`, domains `[N]` and times per token `[N, 3]`, domain after domain.

    A domain's own arm takes half as long as the others.
    """
    features, domain, _ = selection_folders.clusters(4000, seed)
    rng = np.random.default_rng(seed)
    rows = np.concatenate([rng.choice(np.flatnonzero(domain == n), queries) for n in phases])
    times = np.exp(rng.normal(0, 0.1, (len(rows), ARMS))) * np.where(np.eye(ARMS)[domain[rows]] > 0, 1.0, 2.0)
    return features[rows], domain[rows], times


def served(learner, features, times, seed=0):
    """Returns the arms that a learner takes, by its own chooser's random bits of each round."""
    choose, taken = jax.jit(learner.chooser), []
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), np.arange(len(features)))
    bits = np.asarray(jax.vmap(lambda key: jax.random.uniform(key, (1, ARMS)))(keys))
    for uniforms, x, arm_times in zip(bits, features, times, strict=True):
        arm = int(choose(learner.params(), x[None], uniforms)[0])
        learner.learn(x, arm, -float(np.log(arm_times[arm])))
        taken.append(arm)
    return np.asarray(taken)


def test_thompson_finds_each_domains_arm_and_loses_nothing_by_a_shift():
    features, domain, times = stream((0, 1, 0), 200)
    taken = served(learners.thompson(features[:50], ARMS), features, times)
    right = taken == domain
    assert right[:30].mean() < 0.8 and right[100:200].mean() > 0.9, "before the shift"
    assert right[300:400].mean() > 0.9, "after it"
    assert right[400:430].mean() > 0.9, "what was learnt of the first domain is still known"
    regret = times[np.arange(len(times)), taken] - times[np.arange(len(times)), domain]
    assert regret[150:200].mean() < 0.3 * regret[:50].mean()


def test_a_prior_reduces_regret_on_the_first_queries():
    features, domain, times = stream((0, 1), 100)
    centers = np.zeros((ARMS, features.shape[1]))
    for n in set(domain):
        centers[n] = features[domain == n].mean(0)
    numbers = {"layers_0": {"kernel": 3 * centers.T.astype(np.float32),
                            "bias": (-1.5 * (centers**2).sum(1)).astype(np.float32)}}  # fmt: skip
    policy = Policy(numbers, CARD)
    plain, begun = (learners.thompson(features[:64], ARMS) for _ in range(2))
    begun = learners.with_prior(begun, policy, numbers, features[:150:3])
    right = [(served(learner, features, times) == domain)[:40].mean() for learner in (plain, begun)]
    assert right[1] > 0.9 > right[0]


def test_observed_times_overrule_a_wrong_prior():
    features, domain, times = stream((0,), 300)
    numbers = {"layers_0": {"kernel": np.zeros((12, 3), np.float32), "bias": np.array([0, 0, 6.0], np.float32)}}
    begun = learners.with_prior(learners.thompson(features, ARMS), Policy(numbers, CARD), numbers, features[:20])
    taken = served(begun, features, times)
    assert (taken[:10] == 2).mean() > 0.5 and (taken[200:] == domain[200:]).mean() > 0.8


def test_a_prior_is_equally_confident_of_each_arm_for_any_discount():
    features = np.random.default_rng(0).normal(size=(30, 12))
    numbers = {"layers_0": {"kernel": np.zeros((12, 3), np.float32), "bias": np.zeros(3, np.float32)}}
    learner = learners.thompson(features, ARMS, discount=0.9)
    posterior = learners.with_prior(learner, Policy(numbers, CARD), numbers, features).posterior
    white = posterior.whitening(features)
    for inverse in posterior.inverse:
        np.testing.assert_allclose(inverse, np.linalg.inv(white.T @ white + np.eye(13)), atol=1e-9)
    assert posterior.discount == 0.9


def exp3_regret(learner, phases, queries, seed=0):
    """Returns each query's regret against the best arm, in units of its time, without a decoder."""
    rng, spent = np.random.default_rng(seed), []
    for best in np.repeat(phases, queries):
        p = learner.probabilities
        arm = int(np.searchsorted(np.cumsum(p)[:-1], rng.random(), side="right"))
        learner.learn(np.zeros(0), arm, -float(rng.normal(0, 0.1)) - (arm != best) * np.log(2.0))
        spent.append(float(arm != best))
    return np.asarray(spent)


class Constant(learners.Exp3):
    """Wrong learner for a negative control: it never explores less."""

    @property
    def schedule(self):
        return self.rate, self.explore, self.share


@pytest.mark.parametrize("arms", [2, 3])
def test_exp3_regret_falls_towards_zero_on_a_stationary_stream(arms):
    regret = exp3_regret(learners.Exp3(arms), (0,), 20_000)
    first, middle, last = regret[:300].mean(), regret[2000:5000].mean(), regret[-5000:].mean()
    assert last < 0.25 * first and last < 0.6 * middle, (first, middle, last)
    wrong = exp3_regret(Constant(arms), (0,), 20_000)
    assert wrong[-5000:].mean() > 0.7 * wrong[2000:5000].mean(), "numbers that stay show no such thing"


def test_exp3_recovers_after_a_shift_and_more_slowly_after_a_later_one():
    late = []
    for queries, within in ((300, 150), (1500, 300), (8000, 1500)):
        after = exp3_regret(learners.Exp3(2), (0, 1), queries)[queries:]
        assert after[:50].mean() > 0.5 and after[within:].mean() < 0.1, queries
        late.append(after.sum())
    assert late[0] < late[1] < late[2], "what is lost by a shift grows with what went before, and not as fast"
    assert late[2] < late[0] * 8000 / 300


def test_exp3_learns_with_the_choices_of_the_decoder():
    features, domain, times = stream((0,), 600)
    taken = served(learners.Exp3(ARMS), features, times)
    assert (taken[-200:] == 0).mean() > 0.8


def test_exp3_probabilities_are_correct_and_invalid_numbers_are_refused():
    learner = learners.Exp3(2, rate=0.5, explore=0.1, share=0.0)
    learner.learn(np.zeros(0), 0, -10.0)  # the largest loss, 1/2, at a probability of 1/2
    weights = np.exp([-0.5 * 0.5 / 0.5, 0.0])
    assert learner.usual == pytest.approx(-np.log(4.0)) and learner.num_queries == 1
    np.testing.assert_allclose(learner.probabilities, 0.9 * weights / weights.sum() + 0.05)
    law = np.asarray(jax.nn.softmax(learner.params()["scores"]))
    np.testing.assert_allclose(law, learner.probabilities, rtol=1e-6)
    learner.num_queries = 9_999
    rate, explore, share = learner.schedule
    assert (rate, explore) == pytest.approx((8 * np.sqrt(np.log(2) / 20_000), np.sqrt(2 * np.log(2) / 10_000)))
    assert share == 0.0 and learners.Exp3(2, share=0.5).schedule[2] == 0.5
    assert all(0 < value < 1 for value in learners.Exp3(1).schedule)
    for wrong in ({"rate": 0.0}, {"explore": 0.0}, {"share": 1.0}):
        with pytest.raises(ValueError, match="must be above 0"):
            learners.Exp3(2, **wrong)


def test_one_unusually_slow_query_does_not_devalue_the_others():
    """Covers a slow first query.

    Rewards relative to the first time alone would make every loss 0, and nothing would be learnt.
    """
    rewards, learner, rng = learners.Rewards(), learners.Exp3(2), np.random.default_rng(0)
    taken = []
    for number in range(600):
        arm = int(rng.random() > learner.probabilities[0])
        seconds = 100.0 if number == 0 else 1.0 + (arm == 0)
        learner.learn(np.zeros(0), arm, rewards(seconds))
        taken.append(arm)
    assert np.mean(taken[-200:]) > 0.8


def test_rewards_are_relative_to_the_median_of_the_first_times():
    rewards = learners.Rewards()
    assert rewards(8.0) == 0.0
    assert rewards(2.0) == pytest.approx(np.log(4.0) - np.log(2.0))  # the median of two is their mean in logs
    assert rewards(2.0) == 0.0
    for _ in range(40):
        last = rewards(4.0)
    assert last == 0.0
    first = rewards._first.copy()
    assert len(first) == learners.REFERENCE and rewards(1.0) == pytest.approx(np.log(4.0)) and rewards._first == first


def test_the_posterior_is_ridge_regression():
    rng = np.random.default_rng(0)
    features, rewards, arms = rng.normal(size=(40, 5)), rng.normal(size=40), rng.integers(0, 2, 40)
    posterior = Posterior.empty(Whitening.of(features), 2, ridge=0.7, noise=0.3)
    posterior.learn(features, arms, rewards)
    white = posterior.whitening(features)
    for arm in range(2):
        x, r = white[arms == arm], rewards[arms == arm]
        precision = x.T @ x + 0.7 * np.eye(6)
        np.testing.assert_allclose(posterior.weights()[arm], np.linalg.solve(precision, x.T @ r), rtol=1e-8)
        np.testing.assert_allclose(posterior.inverse[arm], np.linalg.inv(precision), rtol=1e-8, atol=1e-12)
    scores = chooser.ridge(jax.tree.map(jnp.asarray, posterior.params()), jnp.asarray(features, jnp.float32))
    np.testing.assert_allclose(scores.mean, white @ posterior.weights().T, atol=1e-5)
    variances = 0.3**2 * np.einsum("nd,kde,ne->nk", white, posterior.inverse, white)
    np.testing.assert_allclose(scores.deviation, variances**0.5, rtol=1e-4)
    with pytest.raises(ValueError, match="the reward of query 1 is nan"):
        posterior.learn(features[:2], arms[:2], np.array([0.0, np.nan]))
    with pytest.raises(ValueError, match="discount=0 in"):
        Posterior.empty(Whitening.of(features), 2, discount=0.0)


def test_a_discount_forgets_and_stays_bounded():
    rng = np.random.default_rng(1)
    features = rng.normal(size=(2000, 3))
    posterior = Posterior.empty(Whitening.of(features), 1, discount=0.95)
    posterior.learn(features, np.zeros(2000, int), np.r_[np.full(1000, 1.0), np.full(1000, -1.0)])
    np.testing.assert_allclose(posterior.whitening(features[:5]) @ posterior.weights()[0], -1.0, atol=0.2)
    assert np.isfinite(posterior.inverse).all() and np.trace(posterior.inverse[0]) <= 4.0 / 1.0 + 1e-6
