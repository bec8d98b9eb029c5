"""Tests of the drafter protocol: alternating drafters, drafts without a distribution, and features of the target."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import Prompt
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.models.fake import Fake
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.models.teacher_forcing import states
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import Fixed
from tests.support import conformance, engines, random_t5, reference
from tests.support.drafters import Repeats, Turns, Watching

SAMPLED = {"alpha": 0.3, "temperature": 1.0}


def drafting(model, block=3):
    return ModelDrafter(model, Fixed(block), sits_out=True, catches_up=block)


def test_a_model_that_skipped_rounds_drafts_as_if_it_had_not():
    """Compares two alternating drafters of one model with a single drafter of that model, in every bit and count.

    The tokens of the fake models depend on the whole prefix. So a drafter that missed tokens, or overwrote the other
    drafter's buffers, would draft other tokens.
    """
    small, large = Fake(16, noise=0.3, seed=1), Fake(16, seed=2)
    plain = engines.engine(large, engines.drafting(small, 3), "token_v3")
    turns = replace(plain, drafter=Turns((drafting(small), drafting(small))))
    alone, alternating = (
        engines.generated(plain, engines.FAKE, numbers=SAMPLED),
        engines.generated(turns, (engines.FAKE, engines.FAKE), numbers=SAMPLED),
    )
    np.testing.assert_array_equal(alone.tokens, alternating.tokens)
    for name in ("rounds", "drafted", "kept", "rejected", "discarded"):
        np.testing.assert_array_equal(getattr(alone.stats, name), getattr(alternating.stats, name), name)
    assert int(alternating.stats.kept.sum()) > 20 and int(alternating.stats.rejected.sum()) > 0


def test_two_alternating_drafts_keep_the_targets_distribution():
    """Uses two very different drafts, which share the buffers; each may write only its own rows."""
    q_table, p_table = conformance.tables(3, seed=11)
    arms = tuple(sc.TableLM(table) for table in (q_table, -q_table))
    engine = engines.engine(sc.TableLM(p_table).model, Turns(tuple(drafting(arm.model, 2) for arm in arms)))
    params = {"target": jnp.asarray(p_table), "drafter": tuple({"model": arm.params} for arm in arms)}
    (tokens,) = conformance.run_rows(engine, params, 15_000, 0.0, [(0.8, 1.0)], length=6, conclusive=True)
    law = conformance.law_by_rule(RULES["spec_decode"], q_table, p_table, 0.0, 0.8, 1.0)
    assert conformance.sequence_p_value(tokens, law) > 1e-3


@pytest.mark.laws
def test_two_alternating_engines_have_separate_controls_and_random_bits():
    """Decodes greedily, so that a stale cache, or the controls of the other engine, would change the output."""
    middle, small, large = Fake(16, noise=0.2, seed=2), Fake(16, noise=0.4, seed=1), Fake(16, seed=3)

    def run(rule, *alphas):
        inner = engines.engine(middle, engines.drafting(small, 2), rule)
        turns = Turns((NestedDrafter(inner, 3), NestedDrafter(inner, 3, arm=1)))
        numbers = make_controls(3, alpha=0.3, inner=tuple(make_controls(3, alpha=alpha) for alpha in alphas))
        params = {"target": (), "drafter": engines.FAKE}
        return engines.generated(engines.engine(large, turns), (params, params), numbers=numbers)

    out = run("spec_decode", 0.3, 0.3)
    plain = engines.generated(engines.engine(large, engines.drafting(middle, 3)), engines.FAKE)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert min(int(arm["counters"].kept.sum()) for arm in out.inner) > 0 and int(out.stats.kept.sum()) > 20
    mixed, same = (int(run("chow", 0.02, alpha).inner[1]["counters"].rejected.sum()) for alpha in (0.98, 0.02))
    assert mixed != same, "the second engine reads the first one's numbers"
    with pytest.raises(AssertionError, match="needs its Controls.inner"):
        run("chow", 0.3)


@pytest.mark.laws
def test_two_alternating_engines_keep_the_targets_distribution():
    """Samples sequences over several rounds, because shared random bits would correlate the tokens of two rounds."""
    q_table, p_table = conformance.tables(3, seed=14)
    small, middle, large = (sc.TableLM(table) for table in (q_table, conformance.tables(3, seed=15)[1], p_table))
    inner = engines.engine(middle.model, engines.drafting(small.model, 1), bonus="none")
    engine = engines.engine(large.model, Turns((NestedDrafter(inner, 1), NestedDrafter(inner, 1, arm=1))), bonus="none")
    rows, arm = 20_000, {"target": middle.params, "drafter": {"model": small.params}}
    params = {"target": large.params, "drafter": (arm, arm)}
    inside = tuple(make_controls(rows, temperature=1.0) for _ in range(2))
    (tokens,) = conformance.run_rows(engine, params, rows, 0.0, [(1.0, 1.0)], length=6, inner=inside, conclusive=True)
    law = conformance.law_by_rule(RULES["spec_decode"], q_table, p_table, 0.0, 1.0, 1.0)
    assert conformance.sequence_p_value(tokens, law) > 1e-3


@pytest.mark.laws
@pytest.mark.parametrize("rule", ["spec_decode", "token_v3"])
def test_a_drafter_without_a_distribution_leaves_the_bonus_to_the_target(rule):
    """Expects the token after a kept block to come from `p̃`; drafts have probability 1, so most of them are kept."""
    _, p_table = conformance.tables(4, seed=12)
    engine, target = engines.engine(sc.TableLM(p_table).model, Repeats(2, 4), rule), jnp.asarray(p_table)
    prompt = engines.prompts(*[[1, 2, 3, 1, 2]] * 20_000)
    out = engines.generated(engine, (), prompt, 6, target=target, numbers=SAMPLED, record=_drawn_behind)
    kept_whole, token, previous = (np.asarray(x)[: int(out.num_rounds)].ravel() for x in out.record)
    law = reference.transitions("spec_decode", p_table, p_table, 0.0, 1.0)
    p_values = []
    for v in range(4):
        mine = kept_whole & (previous == v)
        assert mine.sum() > 300
        p_values.append(conformance.pooled_p_value(np.bincount(token[mine], minlength=4), law[v] * mine.sum()))
    assert conformance.holm(p_values) > 1e-3
    if rule == "spec_decode":
        first = np.asarray(out.tokens)[:, 0]
        assert conformance.pooled_p_value(np.bincount(first, minlength=4), law[2] * len(first)) > 1e-3


def _drawn_behind(turn):
    """Returns whether a whole block and a bonus were committed, the bonus token, and the token before the bonus."""
    length = turn.draft.length[:, None]
    whole = turn.active & (turn.draft.length > 0) & ~turn.rejected & (turn.num_new > turn.draft.length)
    next_token = jnp.take_along_axis(turn.tokens, length, axis=1)[:, 0]
    before = jnp.take_along_axis(turn.tokens, jnp.maximum(length - 1, 0), axis=1)[:, 0]
    return whole, next_token, before


@pytest.mark.laws
def test_a_drafter_can_read_the_targets_features():
    """Checks the prompt features at the start, and the target's hidden state after the last kept token of a round."""
    target = random_t5.bound(T5Config(30, 30, 16, 2, 8, 16, 1, 2))
    prompt = Prompt(jnp.zeros((3, 1), jnp.int32), jnp.ones((3,), jnp.int32), jnp.array([[4, 5], [6, 0], [9, 9]]))
    engine = engines.engine(target.model, Watching(engines.drafting(Fake(30, seed=1), 2)))
    record = {"numbers": SAMPLED, "record": lambda turn: turn.num_new - turn.num_kept}
    out = engines.generated(engine, engines.FAKE, prompt, 9, target=target.params, **record)
    cache = target.model.prefill(target.params, prompt, 16)
    np.testing.assert_allclose(out.inner["prompt"], target.model.prompt_features(cache), rtol=1e-5)
    expected_states = np.asarray(states(target.model, target.params, prompt, out.tokens))
    more = np.asarray(out.record)[: int(out.num_rounds)]
    for row in range(3):
        rounds = int(out.stats.rounds[row])
        last = int(out.lengths[row]) - 1 - more[rounds - 1, row]
        np.testing.assert_allclose(out.inner["pending"][row], expected_states[row, last], atol=1e-5)


def test_a_target_without_prompt_features_is_refused_by_name():
    engine = engines.engine(Fake(16), Watching(drafting(Fake(16))))
    with pytest.raises(ValueError, match="reads the target's features, but Fake has no prompt_features"):
        engines.generated(engine, engines.FAKE)
