"""Tests of edge cases of a round: empty blocks, stop ids, limits, unneeded distributions, engines inside engines."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.drafters.model import NoDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.engine.generate import failures, generate
from speccascade_jax.engine.scoring import widths
from speccascade_jax.methods.build import assemble
from speccascade_jax.models.fake import Fake
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import Confidence
from tests.support import conformance, engines, reference


@pytest.mark.laws
@pytest.mark.parametrize("bonus", ["rule", "target", "none"])
def test_blocks_of_length_zero_under_any_bonus(bonus):
    """Expects one token from the target in each round; with "rule" and "none" it has the rule's distribution."""
    q_table, p_table = conformance.tables(3, seed=51)
    alpha = conformance.telling_alpha(RULES["token_v3"], q_table, p_table)
    pair = conformance.tabular_pair(q_table, p_table)
    engine, params = assemble(pair, rule="token_v3", bonus=bonus, stop=lambda _: Confidence(2))
    tokens = conformance.run_rows(engine, params, 10_000, alpha, [(1.0, 1.0)], length=4, stop_threshold=-1.0)
    rule = "spec_decode" if bonus == "target" else "token_v3"
    law = reference.transitions(rule, q_table, p_table, alpha, 1.0)
    assert conformance.sequence_p_value(tokens[0], law) > 1e-3


def test_nan_after_the_end_of_a_sequence_is_ignored():
    """Gives NaN logits after the stop id, where a block may be drafted and scored, but no token is committed."""
    table = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    table[3] = np.nan
    pair = sc.Pair(target=sc.TableLM(table), draft=sc.TableLM(table))
    out = sc.decode(pair, np.zeros((64, 1), int), temperature=1.0, max_new_tokens=12, stop_ids=[3], block_size=4)
    ended = out.tokens[np.arange(64), out.lengths - 1] == 3
    assert ended.any()
    with pytest.raises(FloatingPointError, match="target model"):
        sc.decode(pair, np.zeros((64, 1), int), temperature=1.0, max_new_tokens=12, block_size=4)


def test_an_error_names_the_target_if_both_models_fail():
    row_failures = failures(np.array([[-1, -1], [5, 6], [-1, 3], [2, -1]]))
    assert row_failures == ((1, "target", 5), (2, "draft", 3), (3, "target", 2))


def test_bild_star_decides_the_same_at_every_position_of_a_block():
    """Tests against a former bug: after the first position, `greedy` was read out of bounds and counted as true."""
    q = np.log(np.tile([[0.5, 0.3, 0.2]], (3, 1)))
    p = np.log(np.tile([[0.05, 0.15, 0.8]], (3, 1)))  # D(q, p) is 2.1, but 5.1 with the former bug
    engine, params = assemble(conformance.tabular_pair(q, p), rule="bild_star", block_size=3)
    tokens = conformance.run_rows(engine, params, 10_000, 3.0, [(1.0, 1.0)], length=6)
    law = reference.transitions("bild_star", q, p, 3.0, 1.0)
    np.testing.assert_allclose(law, np.exp(q), atol=1e-9)
    assert conformance.sequence_p_value(tokens[0], law) > 1e-3


def test_a_rule_that_reads_the_drafts_distribution_needs_a_drafter():
    with pytest.raises(ValueError, match="'chow' reads the draft's distribution, but there is no drafter"):
        engines.engine(Fake(4), NoDrafter(), "chow")


@pytest.mark.laws
@pytest.mark.parametrize(("stops", "bonus"), [((2, 5), "none"), ((), "rule"), ((2, 5), "target")])
def test_three_levels_decode_like_the_target_alone(stops, bonus):
    """Expects the target's output at temperature 0, for prompts of unequal lengths, stop ids and every bonus."""
    models = [Fake(8, noise=0.5, seed=1), Fake(8, noise=0.3, seed=2), Fake(8, noise=0.1, seed=3), Fake(8)]
    drafter, params = engines.stacked(models[:3], (2, 2, 3), bonus=bonus)
    engine = engines.engine(models[3], drafter, stop_ids=stops, bonus=bonus)
    alone = engines.engine(models[3], NoDrafter(), stop_ids=stops, bonus="target")
    prompt = engines.prompts([3, 4, 5], [7], [1, 1])
    deep = engines.generated(engine, params, prompt, 20, numbers={"levels": 2})
    flat = engines.generated(alone, {}, prompt, 20)
    np.testing.assert_array_equal(deep.tokens, flat.tokens)
    np.testing.assert_array_equal(deep.lengths, flat.lengths)
    assert int(deep.stats.kept.sum()) > 0


@pytest.mark.laws
def test_nested_stop_ids_under_a_rule_that_reads_q():
    """Expects the right distribution up to the stop id, because inner engines use the outer engine's stop ids."""
    q_table, p_table = conformance.tables(3, seed=52)
    large = conformance.tables(3, seed=53)[1]
    small, middle, top = (sc.TableLM(table) for table in (q_table, p_table, large))
    inner = engines.engine(middle.model, engines.drafting(small.model, 2), stop_ids=(1,))
    engine = engines.engine(top.model, NestedDrafter(inner, 2), "chow", stop_ids=(2,))
    alpha, prompt = conformance.telling_alpha(RULES["chow"], p_table, large), engines.prompts(*[[0]] * 10_000)
    params = {"target": middle.params, "drafter": {"model": small.params}}
    numbers = {"alpha": alpha, "temperature": 1.0, "levels": 1}
    out = engines.generated(engine, params, prompt, 5, target=top.params, numbers=numbers, seed=1)
    law = reference.transitions("chow", p_table, large, alpha, 1.0)
    assert conformance.stopped_p_value(out.tokens, out.lengths, 2, law) > 1e-3


# --- target calls are no wider than the batch's longest draft needs; outputs must not depend on the width


@given(st.integers(0, 60))
def test_width_buckets_rise_to_the_whole_block(block):
    choices = widths(block)
    assert choices[-1] == block + 1
    assert list(choices) == sorted(set(choices))


@dataclass(frozen=True)
class ScoredWhole(Confidence):
    """A stop policy under which the target always scores the full block width."""

    adaptive: ClassVar[bool] = False


def trace(turn):
    """Returns the counts, tokens and `η` of a round, `[B, …]` each."""
    return turn.num_new, turn.num_kept, turn.tokens, turn.eta


@pytest.mark.parametrize("bonus", ["rule", pytest.param("target", marks=pytest.mark.laws)])
def test_outputs_do_not_depend_on_the_width_buckets(bonus):
    """Compares with target calls of full width, for a rule that reads `q`, blocks of 0 to 9 tokens and a stop id."""
    q_table, p_table = conformance.tables(6, seed=41)
    pair = conformance.tabular_pair(q_table, p_table)
    engine, params = assemble(pair, rule="token_v3", bonus=bonus, stop=lambda _: Confidence(9), stop_ids=[5])
    whole, _ = assemble(pair, rule="token_v3", bonus=bonus, stop=lambda _: ScoredWhole(9), stop_ids=[5])
    assert engine.drafter.adaptive and not whole.drafter.adaptive
    prompt = engines.prompts(*[[0]] * 8)
    controls = make_controls(8, alpha=0.4, temperature=1.0, stop_threshold=np.linspace(0.3, 1.0, 8))
    narrow, wide = (
        generate(built, params, prompt, 3, controls=controls, max_new_tokens=24, record=trace)
        for built in (engine, whole)
    )
    drafted = np.asarray(narrow.stats.drafted)
    assert drafted.min() < drafted.max()
    assert (np.asarray(narrow.tokens) == np.asarray(wide.tokens)).all()
    rounds = int(narrow.num_rounds)
    for got, expected in zip(narrow.record[:3], wide.record[:3], strict=True):
        assert (np.asarray(got)[:rounds] == np.asarray(expected)[:rounds]).all()
    for name in ("target_calls", "discarded", "deferred", "decided", "kept_at", "deferred_at"):
        np.testing.assert_allclose(getattr(narrow.stats, name), getattr(wide.stats, name), rtol=1e-6)
