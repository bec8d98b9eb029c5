"""Tokens of another drafter behind a block: the law stays the target's, bits are not shared, caches follow."""

import dataclasses
from typing import ClassVar

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.types import BoundModel
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.drafters.tail import AppendedDrafter
from speccascade_jax.models.fake import Fake
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.stopping.policies import Confidence, Fixed
from tests.drafters.nested_test import three_tables
from tests.support import conformance, engines, reference

ROWS = 15_000


def law_p_value(drafter_class, policy, bonus="rule"):
    small, middle, large = (sc.TableLM(table) for table in three_tables())
    drafter = drafter_class(ModelDrafter(middle.model, policy), engines.drafting(small.model, 2))
    own = {"first": {"model": middle.params}, "tail": {"model": small.params}}
    engine = engines.engine(large.model, drafter, bonus=bonus)
    tokens = conformance.run_rows(engine, {"target": large.params, "drafter": own}, ROWS, 0.6, [(1.0, 1.0)], length=6)
    law = reference.transitions("spec_decode", three_tables()[1], three_tables()[2], 0.0, 1.0)
    return conformance.sequence_p_value(tokens[0], law)


@pytest.mark.laws
@pytest.mark.parametrize("policy", [Fixed(2), Confidence(3)])
@pytest.mark.parametrize("bonus", ["rule", "none"])
def test_the_law_is_the_targets(policy, bonus):
    assert law_p_value(AppendedDrafter, policy, bonus) > 1e-3


class SharesBits(AppendedDrafter):
    """The planted bug: the tail draws with the bits of the first one's slots."""

    slots = 0


@pytest.mark.laws
def test_shared_bits_are_found():
    assert law_p_value(SharesBits, Fixed(2)) < 1e-6


def fakes():
    """Draft, tail and target whose laws depend on the whole prefix."""
    return [BoundModel((), Fake(16, noise=noise, seed=seed)) for noise, seed in ((0.1, 1), (0.2, 2), (0.0, 3))]


def behind(first, tail, params=engines.FAKE):
    """`tail` behind `first`, whose parameters are `params`, and the parameters of both."""
    return AppendedDrafter(first, tail), {"first": params, "tail": engines.FAKE}


def test_caches_of_both_follow_and_the_tail_is_kept():
    """A stale cache changes no output, for the target verifies: but then hardly any of the tail would be kept."""
    first, tail, target = fakes()
    drafter, params = behind(engines.drafting(first.model, 2), engines.drafting(tail.model, 3))
    out = engines.generated(engines.engine(target.model, drafter), params, engines.prompts([3, 4, 5], [7]), 150)
    alone = sc.decode(Pair(target, first), [[3, 4, 5], [7]], method="autoregressive", max_new_tokens=150)
    np.testing.assert_array_equal(out.tokens, alone.tokens)
    examined, kept = (np.asarray(x).sum(0) for x in (out.stats.examined_at, out.stats.kept_at))
    assert examined[:5].min() > 5
    rates = kept[:5] / examined[:5]
    assert rates[:2].mean() > 0.6 and rates[2:].mean() > 0.4, rates


@dataclasses.dataclass(frozen=True)
class Noting(Fake):
    """Notes how many tokens each call that is compiled takes."""

    widths: ClassVar[set[int]] = set()

    def extend(self, params, cache, tokens):
        self.widths.add(tokens.shape[1])
        return super().extend(params, cache, tokens)


def test_what_a_tail_wrote_is_read_in_one_call():
    """All is kept: every round but the first begins with one call over the tail's tokens, however many these are."""
    Noting.widths.clear()
    sure = Fake(16, seed=3)
    drafter, params = behind(engines.drafting(Noting(16, seed=3), 2), engines.drafting(sure, 4))
    out = engines.generated(engines.engine(sure, drafter), params, engines.prompts([3]), 4 * 7)
    rounds, tails = int(out.stats.rounds.sum()), int(out.inner["tail_steps"].sum())
    assert rounds == 4 and int(out.stats.rejected.sum()) == 0
    assert int(out.stats.draft_steps.sum()) - tails == rounds * 2 + (rounds - 1)
    assert Noting.widths == {1, 5}  # a step, and what the tail wrote with the token behind it


@pytest.mark.laws
@pytest.mark.parametrize("own_tail", [False, True])
def test_so_it_is_at_every_level_below(own_tail):
    """Of the model that drafts for a level, and of this one's own tail: one call over all that it missed."""
    Noting.widths.clear()
    sure, middle = Fake(16, seed=3), Noting(16, seed=3)
    draft, params = engines.drafting(sure, 1), engines.FAKE
    if own_tail:
        draft, params = behind(draft, engines.drafting(sure, 1))
    level = NestedDrafter(engines.engine(middle, draft), 2)
    drafter, params = behind(level, engines.drafting(sure, 4), {"target": (), "drafter": params})
    written = 8 if own_tail else 7  # a draft, its own tail, a bonus, the outer tail of 4, a bonus
    numbers = {"levels": 1}
    out = engines.generated(engines.engine(sure, drafter), params, engines.prompts([3]), 4 * written, numbers=numbers)
    assert int(out.stats.rounds.sum()) == 4 and int(out.stats.rejected.sum()) == 0
    # the draft and its tail each, and the tail reads what the draft wrote in every round
    steps = 2 * (4 * 1 + 3) + 1 if own_tail else 4 * 1 + 3
    assert int(out.inner["counters"].draft_steps.sum()) == steps
    assert own_tail or Noting.widths == {1, 2, 5}  # one token alone, a block of 1 behind it, what the outer tail wrote


@pytest.mark.laws
def test_at_the_front_door_under_levels_and_under_rules_that_read_q():
    first, tail, target = fakes()
    pair = Pair(target, first, others={"cheap": tail})
    level = sc.Level(model="draft", budget=2, block_size=1, drafters=("cheap",), tail="cheap", tail_size=2)
    settings = {"max_new_tokens": 20, "tail": "cheap", "tail_size": 3}
    alone = sc.decode(pair, [[3, 4]], method="autoregressive", max_new_tokens=20)
    for chosen in ({"block_size": 2}, {"drafters": (level,)}):
        np.testing.assert_array_equal(sc.decode(pair, [[3, 4]], **chosen, **settings).tokens, alone.tokens)
    mixed = sc.decode(pair, [[3, 4]], rule="token_v3", alpha=0.5, block_size=2, **settings)
    assert mixed.stats["draft_share"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tail": "cheap"}, "holds no model 'cheap'"),
        ({"tail_size": 3}, "tail_size=3 of .* means nothing without a tail"),
        ({"tail": "draft", "tail_size": 0}, "tail_size"),
        ({"tail": "draft", "block_size": "auto"}, "plans all that is drafted: give a number, or no tail"),
        ({"tail": "draft", "method": "autoregressive"}, "has no tail, got 'draft'"),
    ],
)
def test_tails_that_mean_nothing_are_refused(settings, message):
    first, _, target = fakes()
    with pytest.raises(ValueError, match=message):
        sc.decode(Pair(target, first), [[3]], max_new_tokens=4, **settings)
