"""Tokens of another drafter behind a block: the law stays the target's, bits are not shared, caches follow."""

import dataclasses
from typing import ClassVar

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import BoundModel, Prompt
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.drafters.tail import AppendedDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import generate
from speccascade_jax.models.fake import Fake
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import Confidence, Fixed
from tests.drafters.nested_test import three_tables
from tests.support import conformance, reference

ROWS = 15_000
LOSSLESS = Speculative(RULES["spec_decode"])


def law_p_value(drafter_class, policy, bonus="rule"):
    small, middle, large = (sc.TableLM(t) for t in three_tables())
    drafter = drafter_class(ModelDrafter(middle.model, policy), ModelDrafter(small.model, Fixed(2)))
    engine = Engine(target=large.model, drafter=drafter, verifier=LOSSLESS, bonus=bonus)
    own = {"first": {"model": middle.params}, "tail": {"model": small.params}}
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


def test_caches_of_both_follow_and_the_tail_is_kept():
    """A stale cache changes no output, for the target verifies: but then hardly any of the tail would be kept."""
    first, tail, target = fakes()
    drafter = AppendedDrafter(ModelDrafter(first.model, Fixed(2)), ModelDrafter(tail.model, Fixed(3)))
    engine = Engine(target=target.model, drafter=drafter, verifier=LOSSLESS)
    prompt = Prompt(np.array([[3, 4, 5, 0], [7, 0, 0, 0]], np.int32), np.array([3, 1], np.int32))
    none = {"target": (), "drafter": {"first": {"model": ()}, "tail": {"model": ()}}}
    out = generate(engine, none, prompt, controls=make_controls(2), max_new_tokens=150)
    alone = sc.decode(Pair(target, first), [[3, 4, 5], [7]], method="autoregressive", max_new_tokens=150)
    np.testing.assert_array_equal(out.tokens, alone.tokens)
    examined, kept = (np.asarray(x).sum(0) for x in (out.stats.examined_at, out.stats.kept_at))
    assert examined[:5].min() > 5
    rates = kept[:5] / examined[:5]
    assert rates[:2].mean() > 0.6 and rates[2:].mean() > 0.4, rates


def test_what_a_tail_wrote_is_read_in_one_call():
    """All is kept: every round but the first begins with one call over the tail's tokens, however many these are."""
    sure = BoundModel((), Fake(16, seed=3))
    drafter = AppendedDrafter(ModelDrafter(sure.model, Fixed(2)), ModelDrafter(sure.model, Fixed(4)))
    engine = Engine(target=sure.model, drafter=drafter, verifier=LOSSLESS)
    none = {"target": (), "drafter": {"first": {"model": ()}, "tail": {"model": ()}}}
    prompt = Prompt(np.array([[3]], np.int32), np.array([1], np.int32))
    out = generate(engine, none, prompt, controls=make_controls(1), max_new_tokens=4 * 7)
    rounds, tails = int(out.stats.rounds.sum()), int(out.inner["tail_steps"].sum())
    assert rounds == 4 and int(out.stats.rejected.sum()) == 0
    assert int(out.stats.draft_steps.sum()) - tails == rounds * 2 + (rounds - 1)


@pytest.mark.laws
def test_so_it_is_at_every_level_below():
    """Of the model that drafts for a level, and of this one's own tail: one call over all that it missed."""
    sure = BoundModel((), Fake(16, seed=3))

    def calls(own_tail):
        draft, params = ModelDrafter(sure.model, Fixed(1)), {"model": ()}
        if own_tail:
            draft, params = (
                AppendedDrafter(draft, ModelDrafter(sure.model, Fixed(1))),
                {"first": params, "tail": params},
            )
        level = NestedDrafter(Engine(target=sure.model, drafter=draft, verifier=LOSSLESS), 2)
        drafter = AppendedDrafter(level, ModelDrafter(sure.model, Fixed(4)))
        own = {"first": {"target": (), "drafter": params}, "tail": {"model": ()}}
        engine = Engine(target=sure.model, drafter=drafter, verifier=LOSSLESS)
        prompt = Prompt(np.array([[3]], np.int32), np.array([1], np.int32))
        controls = make_controls(1, inner=(make_controls(1),))
        written = 8 if own_tail else 7  # a draft, its own tail, a bonus, the outer tail of 4, a bonus
        out = generate(engine, {"target": (), "drafter": own}, prompt, controls=controls, max_new_tokens=4 * written)
        assert int(out.stats.rounds.sum()) == 4 and int(out.stats.rejected.sum()) == 0
        return int(out.inner["counters"].draft_steps.sum())

    assert calls(own_tail=False) == 4 * 1 + 3
    # the draft and its tail each, and the tail reads what the draft wrote in every round
    assert calls(own_tail=True) == 2 * (4 * 1 + 3) + 1


@dataclasses.dataclass(frozen=True)
class Noting(Fake):
    """Notes how many tokens each call that is compiled takes."""

    widths: ClassVar[set[int]] = set()

    def extend(self, params, cache, tokens):
        self.widths.add(tokens.shape[1])
        return super().extend(params, cache, tokens)


@pytest.mark.parametrize("nested", [False, pytest.param(True, marks=pytest.mark.laws)])
def test_what_is_counted_as_one_call_is_one(nested, monkeypatch):
    monkeypatch.setattr(Noting, "widths", set())
    noting, plain = Noting(16, seed=3), Fake(16, seed=3)
    params = {"model": ()}
    first = ModelDrafter(plain if nested else noting, Fixed(2))
    if nested:
        inner = Engine(target=noting, drafter=first, verifier=LOSSLESS)
        first, params = NestedDrafter(inner, 2), {"target": (), "drafter": params}
    engine = Engine(target=plain, drafter=AppendedDrafter(first, ModelDrafter(plain, Fixed(6))), verifier=LOSSLESS)
    none = {"target": (), "drafter": {"first": params, "tail": {"model": ()}}}
    prompt = Prompt(np.array([[3]], np.int32), np.array([1], np.int32))
    controls = make_controls(1, inner=(make_controls(1),) if nested else ())
    generate(engine, none, prompt, controls=controls, max_new_tokens=8)
    # a step of its own or, of an engine, a block of 2 and the pending token; and what a tail of 6 wrote, with one more,
    # or that one alone
    assert Noting.widths == ({1, 3, 7} if nested else {1, 7})


@pytest.mark.laws
def test_at_the_front_door_under_levels_and_under_rules_that_read_q():
    first, tail, target = fakes()
    pair = Pair(target, first, others={"cheap": tail})
    level = sc.Level(model="draft", budget=2, block_size=1, drafters=("cheap",), tail="cheap", tail_size=2)
    settings = {"max_new_tokens": 20}
    alone = sc.decode(pair, [[3, 4]], method="autoregressive", **settings)
    for chosen in ({"block_size": 2}, {"drafters": (level,)}):
        out = sc.decode(pair, [[3, 4]], tail="cheap", tail_size=3, **chosen, **settings)
        np.testing.assert_array_equal(out.tokens, alone.tokens)
    mixed = sc.decode(pair, [[3, 4]], rule="token_v3", alpha=0.5, block_size=2, tail="cheap", tail_size=3, **settings)
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
