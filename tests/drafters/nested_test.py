"""An engine that drafts for an engine: the boundary keeps the law (paper 4, Theorem 2.1)."""

from dataclasses import replace

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.sampling import argmax
from speccascade_jax.core.types import BoundModel, Prompt
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import generate
from speccascade_jax.models.fake import Fake
from speccascade_jax.models.teacher_forcing import along
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import CumulativeConfidence, Fixed
from tests.support import conformance, planning, reference

ROWS = 15_000


def three_tables():
    """Logits of a smallest, a middle and a largest tabular model over V = 3."""
    q, middle = conformance.tables(3, seed=21)
    return q, middle, conformance.tables(3, seed=22)[1]


def nested(inner_rule, outer_rule, budget, policy):
    """Engine and parameters: smallest drafts under `policy` for middle, which collects `budget` for the largest."""
    small, middle, large = (sc.TableLM(t) for t in three_tables())
    inner = Engine(
        target=middle.model,
        drafter=ModelDrafter(small.model, policy),
        verifier=Speculative(RULES[inner_rule]),
    )
    engine = Engine(
        target=large.model,
        drafter=NestedDrafter(inner, budget),
        verifier=Speculative(RULES[outer_rule]),
    )
    inner_params = {"target": middle.params, "drafter": {"model": small.params}}
    return engine, {"target": large.params, "drafter": inner_params}


def logs(laws):
    with np.errstate(divide="ignore"):
        return np.log(laws)


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
    raw = middle if RULES[inner_rule].lossless else logs(handed)
    law = reference.law_over_handed(outer_rule, raw, handed, large, outer_alpha, outer_t)
    assert conformance.sequence_p_value(tokens[0], law) > 1e-3


@pytest.mark.parametrize("outer_rule", ["token_v3", pytest.param("spec_decode", marks=pytest.mark.laws)])
def test_caches_of_every_level_follow(outer_rule):
    """Fakes whose laws depend on the whole prefix: a stale cache at any level would change the greedy output."""
    models = [Fake(16, noise=0.4, seed=1), Fake(16, noise=0.2, seed=2), Fake(16, seed=3)]
    inner = Engine(
        target=models[1], drafter=ModelDrafter(models[0], Fixed(2)), verifier=Speculative(RULES["spec_decode"])
    )
    engine = Engine(target=models[2], drafter=NestedDrafter(inner, 3), verifier=Speculative(RULES[outer_rule]))
    plain = Engine(target=models[2], drafter=ModelDrafter(models[1], Fixed(3)), verifier=Speculative(RULES[outer_rule]))
    prompt = Prompt(np.array([[3, 4, 5, 0], [7, 0, 0, 0]], np.int32), np.array([3, 1], np.int32))
    controls = make_controls(2, alpha=0.3, inner=(make_controls(2),))
    none = {"target": (), "drafter": {"model": ()}}
    deep = generate(engine, {"target": (), "drafter": none}, prompt, controls=controls, max_new_tokens=24)
    flat = generate(plain, none, prompt, controls=replace(controls, inner=()), max_new_tokens=24)
    # greedy: the middle model's output is what a plain draft of it would be
    np.testing.assert_array_equal(deep.tokens, flat.tokens)
    assert int(deep.inner["counters"].kept.sum()) > 0


def drafted(turn):
    return {
        "tokens": turn.draft.tokens, "length": turn.draft.length, "kept": turn.num_kept, "start": turn.start,
        "active": turn.active,
    }  # fmt: skip


@pytest.mark.laws
def test_what_is_drafted_continues_what_was_kept():
    """A cache that no one rolled back changes no output, for the target verifies; what it drafts is another model's."""
    models = [Fake(16, noise=0.6, seed=n) for n in range(3)] + [Fake(16, seed=3)]
    lossless, params = Speculative(RULES["spec_decode"]), {"model": ()}
    drafter = ModelDrafter(models[0], Fixed(2))
    for model in models[1:3]:
        drafter = NestedDrafter(Engine(target=model, drafter=drafter, verifier=lossless), 3)
        params = {"target": (), "drafter": params}
    engine = Engine(target=models[3], drafter=drafter, verifier=lossless)
    prompt = Prompt(np.array([[3, 4, 5, 0], [7, 0, 0, 0]], np.int32), np.array([3, 1], np.int32))
    controls = make_controls(2, inner=(make_controls(2, inner=(make_controls(2),)),))
    out = generate(
        engine, {"target": (), "drafter": params}, prompt, controls=controls, max_new_tokens=40, record=drafted
    )
    # what each drafting model says along the output, level by level
    said = [np.asarray(argmax(along(BoundModel((), model), prompt, out.tokens))) for model in models]
    record = {name: np.asarray(x)[: int(out.num_rounds)] for name, x in out.record.items()}
    rejected = 0
    for turn, row in zip(*np.nonzero(record["active"]), strict=True):
        at = record["start"][turn, row] - int(prompt.length[row])
        kept, length = record["kept"][turn, row], record["length"][turn, row]
        seen = min(kept + 1, length, 40 - at)
        assert record["tokens"][turn, row, :seen].tolist() == said[2][row, at : at + seen].tolist()
        rejected += kept < length
    assert rejected > 5
    # the engines further in: every token that they were given up to the first rejection is the right one too
    for level, inner in ((2, out.inner), (1, out.inner["inner"])):
        counts = inner["counters"]
        right = (said[level] == said[level - 1]).mean()
        kept = counts.kept.sum() / counts.examined.sum()
        assert kept == pytest.approx(right, abs=0.15), (
            f"level {level} keeps {kept:.2f}; its draft is right in {right:.2f}"
        )


def test_a_look_at_the_law_behind_a_block_is_a_step_of_the_draft():
    """Rules that read `q` behind the block cost the inner target one call more, in all rounds but one at the limit."""
    engine, params = nested("spec_decode", "opt", 2, Fixed(1))
    inner = make_controls(5, temperature=1.0)
    controls = make_controls(5, alpha=0.4, temperature=1.0, inner=(inner,))
    prompt = Prompt(np.ones((5, 1), np.int32), np.ones(5, np.int32))
    out = generate(engine, params, prompt, 3, controls=controls, max_new_tokens=12)
    assert engine.complete and (out.stats.kept == out.stats.drafted).all()
    looks = out.stats.draft_steps - out.inner["counters"].target_calls
    np.testing.assert_array_equal(looks, out.stats.target_calls - 1)


def test_an_engine_that_plans_its_blocks_drafts_for_none():
    engine = planning.planned(21)[0]
    with pytest.raises(ValueError, match="plans its blocks cannot draft: give its drafter a block size"):
        NestedDrafter(engine, 3)
