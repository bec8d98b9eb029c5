"""An engine that drafts for an engine: the boundary keeps the law (paper 4, Theorem 2.1)."""

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.sampling import argmax
from speccascade_jax.core.types import BoundModel
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.models.fake import Fake
from speccascade_jax.models.teacher_forcing import along
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import CumulativeConfidence, Fixed
from tests.support import conformance, engines, planning, reference

ROWS = 15_000


def three_tables():
    """Logits of a smallest, a middle and a largest tabular model over V = 3."""
    q, middle = conformance.tables(3, seed=21)
    return q, middle, conformance.tables(3, seed=22)[1]


def nested(inner_rule, outer_rule, budget, policy):
    """Engine and parameters: smallest drafts under `policy` for middle, which collects `budget` for the largest."""
    small, middle, large = (sc.TableLM(table) for table in three_tables())
    inner = engines.engine(middle.model, ModelDrafter(small.model, policy), inner_rule)
    inner_params = {"target": middle.params, "drafter": {"model": small.params}}
    engine = engines.engine(large.model, NestedDrafter(inner, budget), outer_rule)
    return engine, {"target": large.params, "drafter": inner_params}


@pytest.mark.laws
@pytest.mark.parametrize(
    ("inner_rule", "outer_rule", "budget", "policy"),
    [
        ("spec_decode", "spec_decode", 3, Fixed(2)),
        ("spec_decode", "token_v3", 2, Fixed(1)),
        ("opt", "chow", 2, Fixed(2)),
        ("opt", "token_v3", 3, CumulativeConfidence(3)),  # scored in widths at both levels
    ],
)
def test_law_of_two_levels(inner_rule, outer_rule, budget, policy):
    engine, params = nested(inner_rule, outer_rule, budget, policy)
    small, middle, large = three_tables()
    inner_alpha, outer_alpha, inner_t, outer_t = 0.2, 0.4, 0.6, 1.0
    inner = make_controls(ROWS, alpha=inner_alpha, temperature=inner_t, stop_threshold=0.7)
    tokens = conformance.run_rows(engine, params, ROWS, outer_alpha, [(outer_t, 1.0)], length=6, inner=(inner,))
    # what the inner engine hands up: its own law; a lossless one lets the level above read its target's raw law
    handed = reference.transitions(inner_rule, small, middle, inner_alpha, inner_t)
    raw = middle if RULES[inner_rule].lossless else np.log(np.maximum(handed, 1e-300))
    law = reference.law_over_handed(outer_rule, raw, handed, large, outer_alpha, outer_t)
    assert conformance.sequence_p_value(tokens[0], law) > 1e-3


def test_caches_of_every_level_follow():
    """Fakes whose laws depend on the whole prefix: a stale cache at any level would change the greedy output."""
    models = [Fake(16, noise=0.4, seed=1), Fake(16, noise=0.2, seed=2), Fake(16, seed=3)]
    drafter, params = engines.stacked(models[:2], (2, 3))
    deep = engines.engine(models[2], drafter, "token_v3")
    flat = engines.engine(models[2], engines.drafting(models[1], 3), "token_v3")
    out = engines.generated(deep, params, numbers={"alpha": 0.3, "levels": 1})
    # greedy: the middle model's output is what a plain draft of it would be
    np.testing.assert_array_equal(out.tokens, engines.generated(flat, engines.FAKE, numbers={"alpha": 0.3}).tokens)
    assert int(out.inner["counters"].kept.sum()) > 0


def drafted(turn):
    return {
        "tokens": turn.draft.tokens, "length": turn.draft.length, "kept": turn.num_kept, "start": turn.start,
        "active": turn.active,
    }  # fmt: skip


@pytest.mark.laws
def test_what_is_drafted_continues_what_was_kept():
    """A cache that no one rolled back changes no output, for the target verifies; what it drafts is another model's."""
    models = [Fake(16, noise=0.6, seed=n) for n in range(3)] + [Fake(16, seed=3)]
    drafter, params = engines.stacked(models[:3], (2, 3, 3))
    prompt, engine = engines.prompts([3, 4, 5], [7]), engines.engine(models[3], drafter)
    out = engines.generated(engine, params, prompt, 40, numbers={"levels": 2}, record=drafted)
    # what each drafting model says along the output, level by level
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
    # the engines further in: every token that they were given up to the first rejection is the right one too
    for level, inner in ((2, out.inner), (1, out.inner["inner"])):
        right = (said[level] == said[level - 1]).mean()
        kept = inner["counters"].kept.sum() / inner["counters"].examined.sum()
        assert kept == pytest.approx(right, abs=0.15), f"level {level} keeps {kept:.2f} of {right:.2f}"


def test_a_look_at_the_law_behind_a_block_is_a_step_of_the_draft():
    """Rules that read `q` behind the block cost the inner target one call more, in all rounds but one at the limit."""
    engine, params = nested("spec_decode", "opt", 2, Fixed(1))
    numbers, prompt = {"alpha": 0.4, "temperature": 1.0, "levels": 1}, engines.prompts(*[[1]] * 5)
    out = engines.generated(engine, params["drafter"], prompt, 12, target=params["target"], numbers=numbers, seed=3)
    assert engine.complete and (out.stats.kept == out.stats.drafted).all()
    looks = out.stats.draft_steps - out.inner["counters"].target_calls
    np.testing.assert_array_equal(looks, out.stats.target_calls - 1)


def test_an_engine_that_plans_its_blocks_drafts_for_none():
    engine = planning.planned(21)[0]
    with pytest.raises(ValueError, match="plans its blocks cannot draft: give its drafter a block size"):
        NestedDrafter(engine, 3)
