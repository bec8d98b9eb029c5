"""Tests that engines that draft for engines, and tails of other drafters, keep the output's distribution.

Source: Globerson et al., 2025, Theorem 2.1.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.sampling import argmax
from speccascade_jax.core.types import BoundModel
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.nested import AppendedDrafter, NestedDrafter
from speccascade_jax.models.fake import Fake
from speccascade_jax.models.teacher_forcing import along
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import Confidence, CumulativeConfidence, Fixed
from tests.support import conformance, engines, planning, reference

ROWS = 15_000


def three_tables():
    """Returns the logits of a small, a middle and a large tabular model with 3 tokens."""
    q, middle = conformance.tables(3, seed=21)
    return q, middle, conformance.tables(3, seed=22)[1]


def nested(inner_rule, outer_rule, budget, policy):
    """Returns an engine and its parameters: the small model drafts for the middle one, which drafts for the large."""
    small, middle, large = (sc.TableLM(table) for table in three_tables())
    inner = engines.engine(middle.model, ModelDrafter(small.model, policy), inner_rule)
    inner_params = {"target": middle.params, "drafter": {"model": small.params}}
    engine = engines.engine(large.model, NestedDrafter(inner, budget), outer_rule)
    return engine, {"target": large.params, "drafter": inner_params}


@pytest.mark.sample(2)
@pytest.mark.laws
@pytest.mark.parametrize(
    ("inner_rule", "outer_rule", "budget", "policy"),
    [
        ("spec_decode", "spec_decode", 3, Fixed(2)),
        ("spec_decode", "token_v3", 2, Fixed(1)),
        ("opt", "chow", 2, Fixed(2)),
        ("opt", "token_v3", 3, CumulativeConfidence(3)),  # target calls have one of several widths
    ],
)
def test_two_levels_have_the_targets_distribution(inner_rule, outer_rule, budget, policy):
    engine, params = nested(inner_rule, outer_rule, budget, policy)
    small, middle, large = three_tables()
    inner_alpha, outer_alpha, inner_t, outer_t = 0.2, 0.4, 0.6, 1.0
    inner = make_controls(ROWS, alpha=inner_alpha, temperature=inner_t, stop_threshold=0.7)
    tokens = conformance.run_rows(engine, params, ROWS, outer_alpha, [(outer_t, 1.0)], length=6, inner=(inner,))
    # `handed` is the inner engine's own distribution; the outer rule reads `raw`, which for a lossless inner engine is
    # the raw distribution of its target
    handed = reference.transitions(inner_rule, small, middle, inner_alpha, inner_t)
    raw = middle if RULES[inner_rule].lossless else np.log(np.maximum(handed, 1e-300))
    law = reference.law_over_handed(outer_rule, raw, handed, large, outer_alpha, outer_t)
    assert conformance.sequence_p_value(tokens[0], law) > 1e-3


def test_caches_of_every_level_stay_up_to_date():
    """Uses fake models, whose distributions depend on the whole prefix, so a stale cache changes the greedy output."""
    models = [Fake(16, noise=0.4, seed=1), Fake(16, noise=0.2, seed=2), Fake(16, seed=3)]
    drafter, params = engines.stacked(models[:2], (2, 3))
    deep = engines.engine(models[2], drafter, "token_v3")
    flat = engines.engine(models[2], engines.drafting(models[1], 3), "token_v3")
    out = engines.generated(deep, params, numbers={"alpha": 0.3, "levels": 1})
    # at temperature 0 the inner engine writes the middle model's output, so a plain draft gives the same tokens
    np.testing.assert_array_equal(out.tokens, engines.generated(flat, engines.FAKE, numbers={"alpha": 0.3}).tokens)
    assert int(out.inner["counters"].kept.sum()) > 0


def drafted(turn):
    return {
        "tokens": turn.draft.tokens, "length": turn.draft.length, "kept": turn.num_kept, "start": turn.start,
        "active": turn.active,
    }  # fmt: skip


@pytest.mark.laws
def test_drafts_continue_the_accepted_tokens():
    """Compares the drafts themselves, because a cache error changes drafts, but no output of a verified generation."""
    models = [Fake(16, noise=0.6, seed=n) for n in range(3)] + [Fake(16, seed=3)]
    drafter, params = engines.stacked(models[:3], (2, 3, 3))
    prompt, engine = engines.prompts([3, 4, 5], [7]), engines.engine(models[3], drafter)
    out = engines.generated(engine, params, prompt, 40, numbers={"levels": 2}, record=drafted)
    # the argmax of every model after every prefix of the output
    said = [np.asarray(argmax(along(BoundModel((), model), prompt, out.tokens))) for model in models]
    record = {name: np.asarray(x)[: int(out.num_rounds)] for name, x in out.record.items()}
    rejected = 0
    for turn, row in zip(*np.nonzero(record["active"]), strict=True):
        start = record["start"][turn, row] - int(prompt.length[row])
        kept, length = record["kept"][turn, row], record["length"][turn, row]
        seen = min(kept + 1, length, 40 - start)
        assert record["tokens"][turn, row, :seen].tolist() == said[2][row, start : start + seen].tolist()
        rejected += kept < length
    assert rejected > 5
    # each inner engine accepts about as many tokens of its own drafter as the two models' argmaxes agree
    for level, inner in ((2, out.inner), (1, out.inner["inner"])):
        right = (said[level] == said[level - 1]).mean()
        kept = inner["counters"].kept.sum() / inner["counters"].examined.sum()
        assert kept == pytest.approx(right, abs=0.15), f"level {level} accepts {kept:.2f} of {right:.2f}"


@pytest.mark.laws
def test_reading_the_distribution_after_a_block_costs_a_draft_step():
    """Expects one more call of the inner target per round, except in the last round, which ends at the limit."""
    engine, params = nested("spec_decode", "opt", 2, Fixed(1))
    numbers, prompt = {"alpha": 0.4, "temperature": 1.0, "levels": 1}, engines.prompts(*[[1]] * 5)
    out = engines.generated(engine, params["drafter"], prompt, 12, target=params["target"], numbers=numbers, seed=3)
    assert engine.complete and (out.stats.kept == out.stats.drafted).all()
    looks = out.stats.draft_steps - out.inner["counters"].target_calls
    np.testing.assert_array_equal(looks, out.stats.target_calls - 1)


def test_an_engine_that_plans_its_blocks_cannot_draft():
    engine = planning.planned(21)[0]
    with pytest.raises(ValueError, match="plans its blocks cannot be a drafter: give its own drafter"):
        NestedDrafter(engine, 3)


# --- tails: another drafter continues a block; tests of distribution, random bits and caches


def appended_p_value(drafter_class, policy, bonus="rule"):
    small, middle, large = (sc.TableLM(table) for table in three_tables())
    drafter = drafter_class(ModelDrafter(middle.model, policy), engines.drafting(small.model, 2))
    drafter_params = {"first": {"model": middle.params}, "tail": {"model": small.params}}
    engine = engines.engine(large.model, drafter, bonus=bonus)
    tokens = conformance.run_rows(
        engine, {"target": large.params, "drafter": drafter_params}, ROWS, 0.6, [(1.0, 1.0)], length=6
    )
    law = reference.transitions("spec_decode", three_tables()[1], three_tables()[2], 0.0, 1.0)
    return conformance.sequence_p_value(tokens[0], law)


@pytest.mark.laws
@pytest.mark.parametrize("policy", [Fixed(2), Confidence(3)])
@pytest.mark.parametrize("bonus", ["rule", "none"])
def test_a_tail_keeps_the_targets_distribution(policy, bonus):
    assert appended_p_value(AppendedDrafter, policy, bonus) > 1e-3


class SharesBits(AppendedDrafter):
    """A planted bug: the tail draws with the random bits of the first drafter's slots."""

    slots = 0


@pytest.mark.laws
def test_planted_shared_random_bits_are_found():
    assert appended_p_value(SharesBits, Fixed(2)) < 1e-6


@pytest.mark.laws
def test_no_tail_follows_a_drafted_stop_id():
    bound = sc.TableLM(20 * np.eye(3, dtype=np.float32)[[1, 2, 0]])  # 1 follows 0, and 2 follows 1
    drafter = AppendedDrafter(engines.drafting(bound.model, 2), engines.drafting(bound.model, 3))
    params = {"first": {"model": bound.params}, "tail": {"model": bound.params}}
    engine = engines.engine(bound.model, drafter, stop_ids=(2,))
    out = engines.generated(engine, params, engines.prompts([0]), target=bound.params)
    assert (out.lengths.tolist(), out.inner["tail_steps"].tolist()) == ([2], [0])


def fakes():
    """Returns a draft, a tail and a target model whose distributions depend on the whole prefix."""
    return [BoundModel((), Fake(16, noise=noise, seed=seed)) for noise, seed in ((0.1, 1), (0.2, 2), (0.0, 3))]


def behind(first, tail, params=engines.FAKE):
    """Returns an `AppendedDrafter` of `first` and `tail`, and its parameters; `params` are those of `first`."""
    return AppendedDrafter(first, tail), {"first": params, "tail": engines.FAKE}


def test_caches_of_both_stay_up_to_date_and_the_tail_is_accepted():
    """Checks acceptance rates too: a stale cache changes no output, but hardly any token of the tail would be kept."""
    first, tail, target = fakes()
    drafter, params = behind(engines.drafting(first.model, 2), engines.drafting(tail.model, 3))
    out = engines.generated(engines.engine(target.model, drafter), params, engines.prompts([3, 4, 5], [7]), 150)
    alone = sc.decode(Pair(target, first), [[3, 4, 5], [7]], method="autoregressive", max_new_tokens=150)
    np.testing.assert_array_equal(out.tokens, alone.tokens)
    examined, kept = (np.asarray(x).sum(0) for x in (out.stats.examined_at, out.stats.kept_at))
    assert examined[:5].min() > 5
    rates = kept[:5] / examined[:5]
    assert rates[:2].mean() > 0.6 and rates[2:].mean() > 0.4, rates


@dataclass(frozen=True)
class Noting(Fake):
    """A model that records the number of tokens of each compiled call."""

    widths: ClassVar[set[int]] = set()

    def extend(self, params, cache, tokens):
        self.widths.add(tokens.shape[1])
        return super().extend(params, cache, tokens)


@pytest.mark.laws
def test_the_first_drafter_reads_the_tail_in_one_call():
    """Expects every round but the first to begin with one call over all of the tail's tokens; all tokens are kept."""
    Noting.widths.clear()
    sure = Fake(16, seed=3)
    drafter, params = behind(engines.drafting(Noting(16, seed=3), 2), engines.drafting(sure, 4))
    out = engines.generated(engines.engine(sure, drafter), params, engines.prompts([3]), 4 * 7)
    rounds, tails = int(out.stats.rounds.sum()), int(out.inner["tail_steps"].sum())
    assert rounds == 4 and int(out.stats.rejected.sum()) == 0
    assert int(out.stats.draft_steps.sum()) - tails == rounds * 2 + (rounds - 1)
    assert Noting.widths == {1, 5}  # single steps, and calls over the 4 tokens of the tail and the bonus


@pytest.mark.laws
@pytest.mark.parametrize("own_tail", [False, True])
def test_every_level_reads_missed_tokens_in_one_call(own_tail):
    """Expects one call over all missed tokens by the inner engine's drafter and by that drafter's own tail."""
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
    # 4 drafted tokens and 3 calls over missed tokens, for the draft and for its tail; the tail makes one more call
    steps = 2 * (4 * 1 + 3) + 1 if own_tail else 4 * 1 + 3
    assert int(out.inner["counters"].draft_steps.sum()) == steps
    assert own_tail or Noting.widths == {1, 2, 5}  # single tokens, blocks of 1, the outer tail's tokens


@pytest.mark.laws
def test_decode_takes_tails_under_levels_and_under_rules_that_read_q():
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
        ({"tail": "cheap"}, "has no model 'cheap'"),
        ({"tail_size": 3}, "tail_size=3 of .* has no effect without a tail"),
        ({"tail": "draft", "tail_size": 0}, "tail_size"),
        ({"tail": "draft", "block_size": "auto"}, "allows no tail: give a number, or leave tail out"),
        ({"tail": "draft", "method": "autoregressive"}, "has no tail, got 'draft'"),
    ],
)
def test_meaningless_tails_are_refused(settings, message):
    first, _, target = fakes()
    with pytest.raises(ValueError, match=message):
        sc.decode(Pair(target, first), [[3]], max_new_tokens=4, **settings)
