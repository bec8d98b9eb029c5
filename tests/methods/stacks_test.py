"""Tests of stacks of three to five models: the target's distribution for any stack, and planted bugs that are found."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.types import BoundModel
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.methods import build_drafter
from speccascade_jax.models import ngrams
from speccascade_jax.models.fake import Fake
from speccascade_jax.pairs.pair import Pair
from tests.support import conformance

ROWS, V = 10_000, 3
BOTTOMS = ("table", "bigrams", "lookup", "max_gram")


def tables(seed, count):
    """Returns logits `[V, V]` of `count` models, all near the last one, the target."""
    rng = np.random.default_rng(seed)
    target = rng.normal(size=(V, V)) * 1.2
    drafts = [target + rng.normal(size=(V, V)) * 0.8 for _ in range(count - 1)]
    return [table.astype(np.float32) for table in (*drafts, target)]


def bottom(kind, logits):
    """Returns the lowest drafter: a model of the table, counted bigrams, or copies from the context."""
    if kind == "table":
        return sc.TableLM(logits)
    counted = {"next": np.tile(np.arange(V, dtype=np.int32), (V, 1)), "logits": logits}
    if kind == "bigrams":
        return ngrams.bigrams(counted, V)
    return ngrams.max_gram(counted, V, 2) if kind == "max_gram" else ngrams.prompt_lookup(V, 2)


def stack(seed, depth, kind="table", lossy=0, adaptive=False, greedy=False, tails=False):
    """Returns a pair of `depth` models and a hierarchy of all below the target.

    Budgets, blocks and temperatures are random.

    Args:
        seed: of the random numbers.
        depth: how many models.
        kind: the lowest drafter, as in `bottom`.
        lossy: the number of the level with a lossy rule, from the lowest up.
        adaptive: whether the lowest blocks end early.
        greedy: whether the lowest draft is greedy.
        tails: whether the lowest model continues the draft at every level.
    """
    rng, logits = np.random.default_rng(seed), tables(seed, depth)
    middle_models = {f"m{n}": sc.TableLM(table) for n, table in enumerate(logits[1:-1], 1)}
    pair = Pair(target=sc.TableLM(logits[-1]), draft=bottom(kind, logits[0]), others=middle_models)
    drafter = "draft"
    for n in range(1, depth - 1):
        first = {"block_size": int(rng.integers(1, 4))} if n == 1 else {}
        if n == 1 and adaptive:
            first |= {"stop": "cumulative_confidence", "stop_threshold": 0.4, "block_size": 3}
        if n == lossy:
            first |= {"rule": "opt", "alpha": 0.2}
        if tails:
            first |= {"tail": "draft", "tail_size": 2}
        if n == 1 and greedy:
            first |= {"draft_temperature": 0.0}
        temperature = float(rng.choice([0.6, 0.8, 1.0, 1.3]))
        budget = int(rng.integers(1, 5))
        drafter = sc.Level(model=f"m{n}", budget=budget, drafters=(drafter,), temperature=temperature, **first)
    return pair, drafter, logits


def p_value(pair, drafter, logits, rule="spec_decode", alpha=None, temperature=1.0, seed=3):
    out = sc.decode(
        pair, [[0]] * ROWS, rule=rule, alpha=alpha, drafters=(drafter,), temperature=temperature,
        max_new_tokens=6, seed=seed,
    )  # fmt: skip
    assert 0.2 < out.stats["acceptance_rate"] < 1.0
    law = conformance.law_by_rule(sc.RULES[rule], logits[-2], logits[-1], alpha or 0.0, temperature, 1.0)
    return conformance.sequence_p_value(np.asarray(out.tokens), law)


@pytest.mark.sample(4)
@pytest.mark.laws
@pytest.mark.parametrize(("seed", "depth", "given", "temperature"), [
    (1, 3, {}, 1.0),
    (2, 4, {}, 0.6),
    (3, 3, {"adaptive": True}, 0.6),
    (4, 4, {"kind": "bigrams", "adaptive": True}, 1.0),
    (5, 3, {"kind": "lookup"}, 1.0),
    (6, 4, {"kind": "max_gram", "lossy": 1}, 0.6),
    (7, 4, {"lossy": 1, "adaptive": True}, 1.0),
    (8, 4, {"greedy": True}, 1.0),
    (9, 5, {"lossy": 2}, 1.0),
    (10, 4, {"tails": True}, 0.6),
    (11, 4, {"tails": True, "lossy": 2, "kind": "bigrams"}, 1.0),
])  # fmt: skip
def test_a_stack_has_the_targets_distribution(seed, depth, given, temperature):
    assert p_value(*stack(seed, depth, **given), temperature=temperature) > 1e-3


@pytest.mark.laws
def test_a_lossy_rule_reads_the_model_of_the_lossless_level_below():
    pair, drafter, logits = stack(8, 4, lossy=1)
    # at one temperature throughout, as `law_by_rule` has it for the two models that it compares
    drafter = replace(drafter, temperature=1.0)
    assert p_value(pair, drafter, logits, rule="token_v3", alpha=0.4) > 1e-3


@pytest.mark.parametrize(("kind", "heats"), [
    pytest.param("fake", (None, None), marks=pytest.mark.laws),
    pytest.param("lookup", (None, None), marks=pytest.mark.laws),
    pytest.param("fake", (0.7, 0.3), marks=pytest.mark.laws),
])  # fmt: skip
def test_a_greedy_stack_of_four_writes_the_targets_output(kind, heats):
    """The models' distributions depend on the whole prefix: a stale cache at any level would change the kept tokens.

    Levels that are sampled, each at its own temperature, change nothing either.
    """
    small, middle, upper, target = (BoundModel((), Fake(16, noise=n, seed=s)) for s, n in enumerate((0.5, 0.3, 0.2, 0)))
    pair = Pair(target, ngrams.prompt_lookup(16, 3) if kind == "lookup" else small, others={"m1": middle, "m2": upper})
    level = sc.Level(model="m1", budget=3, block_size=2, stop="confidence", stop_threshold=0.1, temperature=heats[0])
    drafter = sc.Level(model="m2", budget=4, drafters=(level,), temperature=heats[1])
    prompts, settings = [[3, 4, 5], [7]], {"max_new_tokens": 60}
    out = sc.decode(pair, prompts, drafters=(drafter,), **settings)
    alone = sc.decode(pair, prompts, method="autoregressive", **settings)
    np.testing.assert_array_equal(out.tokens, alone.tokens)
    assert out.stats["acceptance_rate"] > 0.3


class DividesByTheBottom(NestedDrafter):
    """A planted bug: the level above divides by the distribution of the level's drafter, not by the level's own."""

    def _handed(self, pair, law, held):
        return super()._handed(pair, pair.q_tilde, held)


class ForgetsItsTemperature(NestedDrafter):
    """A planted bug: the level above divides by the level's distribution at a temperature of 1."""

    def _handed(self, pair, law, held):
        return super()._handed(pair, pair.p, held)


class KeepsBudgetLaws(NestedDrafter):
    """A planted bug: tokens beyond the budget come with the distribution of the last one within it."""

    def propose(self, params, state, request):
        draft, state, cache = super().propose(params, state, request)
        entries = jnp.minimum(jnp.arange(self.block + 1), self.budget - 1)
        return replace(draft, q=draft.q[:, entries], q_tilde=draft.q_tilde[:, entries]), state, cache


class ShiftsByTheOvershoot(NestedDrafter):
    """A planted bug: distributions are counted from the end of the block, as if it had just its budget."""

    def propose(self, params, state, request):
        draft, state, cache = super().propose(params, state, request)
        over = jnp.maximum(draft.length - self.budget, 0)[:, None]
        entries = jnp.minimum(jnp.arange(self.block + 1)[None] + over, self.block)[..., None]
        q, q_tilde = (jnp.take_along_axis(laws, entries, axis=1) for laws in (draft.q, draft.q_tilde))
        return replace(draft, q=q, q_tilde=q_tilde), state, cache


class TakesCopiesForDraws(ModelDrafter):
    """A planted bug: certain tokens (a copy, a greedy draft) count as drawn from the soft distribution.

    The reverse mistake costs acceptance only: any proposed token that is treated as certain leaves the distribution
    intact.
    """

    def propose(self, params, state, request):
        draft, state, cache = super().propose(params, state, request)
        return replace(draft, q_tilde=draft.q, greedy=jnp.zeros_like(draft.greedy)), state, cache


@pytest.mark.laws
@pytest.mark.parametrize(("planted", "seed", "given"), [
    (DividesByTheBottom, 2, {}),
    (ForgetsItsTemperature, 2, {}),
    (KeepsBudgetLaws, 2, {}),
    (ShiftsByTheOvershoot, 2, {}),
    (TakesCopiesForDraws, 8, {"greedy": True}),
])  # fmt: skip
def test_planted_bugs_are_found(planted, seed, given, monkeypatch):
    """Each bug is planted in a stack whose distribution is right without it."""
    monkeypatch.setattr(build_drafter, planted.__base__.__name__, planted)
    assert p_value(*stack(seed, 4, **given)) < 1e-6


def of_probabilities(*probabilities):
    """Returns a model with the same distribution after every token."""
    return sc.TableLM(np.log(np.float32([probabilities] * len(probabilities))))


# at temperature 0 this level defers nothing, so it passes up the tokens of its drafter
KEEPS_ALL = {"budget": 2, "temperature": 0.0, "rule": "chow", "alpha": 0.9}
SAMPLED = sc.Level(model="m1", block_size=2, draft_temperature=1.0, **KEEPS_ALL)
LOSSLESS = replace(SAMPLED, rule="spec_decode", alpha=None)
CERTAIN = sc.Level(model="m1", drafters=("m2",), block_size=2, **KEEPS_ALL)
# this level's tokens are certain too, but the tokens after its drafts are sampled
WARM = replace(CERTAIN, temperature=1.0, draft_temperature=0.0)
# a coin decides whether the token of draft or target is kept; both are certain
TOSSED = {"rule": "random_accept", "accept": "deferral", "alpha": 0.6}


@pytest.mark.laws
@pytest.mark.parametrize(("drafting", "deferral_rate", "second_token"), [
    ({"drafters": (sc.Level(model="m1", drafters=(SAMPLED,), **KEEPS_ALL),)}, 0, 0.4),
    ({"drafters": (sc.Level(model="m2", block_size=2, **KEEPS_ALL | TOSSED),)}, 0, 0.4),
    ({"drafters": (LOSSLESS,)}, 1, 0.7),
    ({"drafters": (CERTAIN,), "tail": "m1", "tail_size": 2}, 1 / 4, 3.7 / 4),
    ({"drafters": (WARM,), "tail": "m1", "tail_size": 2}, 0, 3.3 / 4),
])  # fmt: skip
def test_a_stack_is_greedy_only_if_all_tokens_that_it_passes_up_are_certain(drafting, deferral_rate, second_token):
    """Reads the flag by `bild_star` with α = 1, under a target of (0.3, 0.7).

    The cross entropy of (0.6, 0.4) is 0.87, and its greedy form, taken of both tokens, is 1.56. Of the lossless level's
    (0.7, 0.3) they are 0.95 and 1.20, and so for the tail, which writes the last of four tokens.
    """
    others = {"m1": of_probabilities(0.7, 0.3), "m2": of_probabilities(0.3, 0.7)}
    pair = Pair(of_probabilities(0.3, 0.7), of_probabilities(0.6, 0.4), others=others)
    settings = {"rule": "bild_star", "alpha": 1.0, "temperature": 1.0, "max_new_tokens": 4}
    out = sc.decode(pair, [[0]] * 2_000, **drafting, **settings)
    assert out.stats["deferral_rate"] == deferral_rate
    assert np.asarray(out.tokens).mean() == pytest.approx(second_token, abs=0.03)  # more than five standard errors


COOLED = sc.Level(model="same", budget=2, block_size=2, temperature=0.4)
TAILED = {"block_size": 1, "tail": "same", "tail_size": 2, "draft_temperature": 0.4}


@pytest.mark.laws
@pytest.mark.parametrize(("rule", "alpha", "deferral_rate"), [("chow", 0.33, 1), ("fuzzy_kl", 0.3, 0)])
@pytest.mark.parametrize("drafting", [{"drafters": (COOLED,)}, TAILED])
def test_a_rule_reads_the_raw_distribution_of_a_level_or_tail_at_any_temperature(drafting, rule, alpha, deferral_rate):
    """The largest of (0.6, 0.4) is below 1 − α, and that at temperature 0.4, 0.73, is not; KL is 0.18 and 0.41."""
    draft = of_probabilities(0.6, 0.4)
    pair = Pair(of_probabilities(0.3, 0.7), draft, others={"same": draft})
    out = sc.decode(pair, [[0]] * 20, rule=rule, alpha=alpha, temperature=1.0, max_new_tokens=9, **drafting)
    assert out.stats["kept"] > 0 and out.stats["deferral_rate"] == deferral_rate


@pytest.mark.laws
@pytest.mark.parametrize("rule", [None, "chow"])
def test_nan_after_a_levels_block_is_an_error_only_if_a_rule_reads_this_position(rule):
    """The level writes 1 and 2 and has no distribution after 2; the target alone does without it."""
    follows = 20 * np.eye(4, dtype=np.float32)[[1, 2, 3, 0]]
    broken = np.where(np.arange(4)[:, None] == 2, np.nan, follows)
    pair = Pair(sc.TableLM(follows), sc.TableLM(follows), others={"level": sc.TableLM(broken)})
    settings = {"drafters": (sc.Level(model="level", budget=1, block_size=1),), "max_new_tokens": 3}
    if rule is None:
        assert np.asarray(sc.decode(pair, [[0]], **settings).tokens).tolist() == [[1, 2, 3]]
        return
    with pytest.raises(FloatingPointError, match="the draft model gave NaN .* at position 3 of"):
        sc.decode(pair, [[0]], rule=rule, alpha=0.5, **settings)
