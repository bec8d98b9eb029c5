"""What the protocol promises drafters that the package does not have: turns, no law, features of the target."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import Prompt
from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.engine.generate import generate
from speccascade_jax.models.fake import Fake
from speccascade_jax.models.t5 import T5, T5Config, T5Module
from speccascade_jax.models.teacher_forcing import states
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import Fixed
from tests.support import conformance
from tests.support.drafters import Repeats, Turns, Watching

PROMPT = Prompt(np.array([[3, 4, 5, 0], [7, 0, 0, 0], [2, 2, 9, 1]], np.int32), np.array([3, 1, 4], np.int32))
LOSSLESS = Speculative(RULES["spec_decode"])


def drafting(model, block=3):
    return ModelDrafter(model, Fixed(block), sits_out=True, catches_up=block)


def run(engine, drafter_params, prompt=PROMPT, temperature=1.0, length=24, target=(), **more):
    controls = make_controls(len(prompt.length), alpha=0.3, temperature=temperature, inner=more.pop("inner", ()))
    params = {"target": target, "drafter": drafter_params}
    return generate(engine, params, prompt, 5, controls=controls, max_new_tokens=length, **more)


@pytest.mark.parametrize("rule", ["token_v3", pytest.param("spec_decode", marks=pytest.mark.laws)])
def test_a_model_that_sat_rounds_out_drafts_as_if_it_had_not(rule):
    """Two arms of one model, by turns, are that model: every bit and every count, whatever the others wrote meanwhile.

    The fakes' laws hang on the whole prefix: an arm that caught up wrongly, or wrote over its neighbour's laws, would
    draft other tokens.
    """
    small, large = Fake(16, noise=0.3, seed=1), Fake(16, seed=2)
    plain = Engine(target=large, drafter=ModelDrafter(small, Fixed(3)), verifier=Speculative(RULES[rule]))
    turns = replace(plain, drafter=Turns((drafting(small), drafting(small))))
    alone, both = run(plain, {"model": ()}), run(turns, ({"model": ()}, {"model": ()}))
    np.testing.assert_array_equal(alone.tokens, both.tokens)
    for name in ("rounds", "drafted", "kept", "rejected", "discarded"):
        np.testing.assert_array_equal(getattr(alone.stats, name), getattr(both.stats, name), name)
    assert int(both.stats.kept.sum()) > 20 and int(both.stats.rejected.sum()) > 0


def test_law_of_two_drafts_by_turns():
    """Drafts as far apart as can be: their laws lie in the same buffers, each row's own."""
    q_table, p_table = conformance.tables(3, seed=11)
    arms = tuple(sc.TableLM(table) for table in (q_table, -q_table))
    engine = Engine(
        target=sc.TableLM(p_table).model, drafter=Turns(tuple(drafting(a.model, 2) for a in arms)), verifier=LOSSLESS
    )
    params = {"target": jnp.asarray(p_table), "drafter": tuple({"model": arm.params} for arm in arms)}
    (tokens,) = conformance.run_rows(engine, params, 15_000, 0.0, [(0.8, 1.0)], length=6, conclusive=True)
    law = conformance.law_by_rule(RULES["spec_decode"], q_table, p_table, 0.0, 0.8, 1.0)
    assert conformance.sequence_p_value(tokens, law) > 1e-3


@pytest.mark.laws
def test_two_engines_by_turns_have_numbers_and_bits_of_their_own():
    """Greedy, so what each hands up is its target's output: a stale cache or the other's numbers would show."""
    middle, small, large = Fake(16, noise=0.2, seed=2), Fake(16, noise=0.4, seed=1), Fake(16, seed=3)
    inner = Engine(target=middle, drafter=ModelDrafter(small, Fixed(2)), verifier=LOSSLESS)
    engine = Engine(
        target=large, drafter=Turns((NestedDrafter(inner, 3), NestedDrafter(inner, 3, arm=1))), verifier=LOSSLESS
    )
    one = {"target": (), "drafter": {"model": ()}}
    numbers = tuple(make_controls(3, alpha=0.3) for _ in range(2))
    found = run(engine, (one, one), temperature=0.0, inner=numbers)
    plain = run(Engine(target=large, drafter=ModelDrafter(middle, Fixed(3)), verifier=LOSSLESS), {"model": ()},
                temperature=0.0)  # fmt: skip
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    kept = [int(each["counters"].kept.sum()) for each in found.inner]
    assert min(kept) > 0 and int(found.stats.kept.sum()) > 20
    lossy = replace(inner, verifier=Speculative(RULES["chow"]))
    engine = replace(engine, drafter=Turns((NestedDrafter(lossy, 3), NestedDrafter(lossy, 3, arm=1))))
    low, high = (make_controls(3, alpha=alpha) for alpha in (0.02, 0.98))
    mixed, same = (run(engine, (one, one), temperature=0.0, inner=(low, other)) for other in (high, low))
    rejected = [int(each.inner[1]["counters"].rejected.sum()) for each in (mixed, same)]
    assert rejected[0] != rejected[1], "the second engine reads the first one's numbers"
    with pytest.raises(AssertionError, match="needs its Controls.inner"):
        run(engine, (one, one), temperature=0.0, inner=numbers[:1])


@pytest.mark.laws
def test_law_of_two_engines_by_turns():
    """Sequences of several rounds: bits that the engines share would tie one round's tokens to the next's."""
    q_table, p_table = conformance.tables(3, seed=14)
    small, middle, large = (sc.TableLM(table) for table in (q_table, conformance.tables(3, seed=15)[1], p_table))
    inner = Engine(target=middle.model, drafter=ModelDrafter(small.model, Fixed(1)), verifier=LOSSLESS, bonus="none")
    arms = Turns((NestedDrafter(inner, 1), NestedDrafter(inner, 1, arm=1)))
    engine = Engine(target=large.model, drafter=arms, verifier=LOSSLESS, bonus="none")
    one = {"target": middle.params, "drafter": {"model": small.params}}
    rows = 20_000
    params = {"target": large.params, "drafter": (one, one)}
    inside = tuple(make_controls(rows, temperature=1.0) for _ in range(2))
    (tokens,) = conformance.run_rows(engine, params, rows, 0.0, [(1.0, 1.0)], length=6, inner=inside, conclusive=True)
    law = conformance.law_by_rule(RULES["spec_decode"], q_table, p_table, 0.0, 1.0, 1.0)
    assert conformance.sequence_p_value(tokens, law) > 1e-3


@pytest.mark.laws
@pytest.mark.parametrize("rule", ["spec_decode", "token_v3"])
def test_a_drafter_without_a_law_leaves_the_bonus_to_the_target(rule):
    """What it proposes is sure of itself, so a rule that asks the draft mostly keeps it; behind it stands `p̃`."""
    _, p_table = conformance.tables(4, seed=12)
    engine = Engine(
        target=sc.TableLM(p_table).model, drafter=Repeats(2, 4), verifier=Speculative(RULES[rule]), bonus="rule"
    )
    prompt = Prompt(jnp.tile(jnp.array([[1, 2, 3, 1, 2]], jnp.int32), (20_000, 1)), jnp.full((20_000,), 5, jnp.int32))
    out = run(engine, (), prompt=prompt, length=6, target=jnp.asarray(p_table), record=_drawn_behind)
    kept_whole, token, previous = (np.asarray(each)[: int(out.num_rounds)].ravel() for each in out.record)
    law = np.exp(p_table - p_table.max(-1, keepdims=True))
    law /= law.sum(-1, keepdims=True)
    found = []
    for v in range(4):
        mine = kept_whole & (previous == v)
        assert mine.sum() > 300
        found.append(conformance.pooled_p_value(np.bincount(token[mine], minlength=4), law[v] * mine.sum()))
    assert conformance.holm(found) > 1e-3
    if rule == "spec_decode":
        first = np.asarray(out.tokens)[:, 0]
        assert conformance.pooled_p_value(np.bincount(first, minlength=4), law[2] * len(first)) > 1e-3


def _drawn_behind(turn):
    """Of a block kept whole with room for one more: whether, the token behind it, and the one before that."""
    length = turn.draft.length[:, None]
    whole = turn.active & (turn.draft.length > 0) & ~turn.rejected & (turn.num_new > turn.draft.length)
    at = jnp.take_along_axis(turn.tokens, length, axis=1)[:, 0]
    before = jnp.take_along_axis(turn.tokens, jnp.maximum(length - 1, 0), axis=1)[:, 0]
    return whole, at, before


@pytest.mark.laws
def test_a_drafter_may_see_what_the_target_saw():
    """Prompt features at the start, and after a round the target's state behind the last kept token."""
    model, token = T5(T5Config(30, 30, 16, 2, 8, 16, 1, 2)), jnp.ones((1, 2), jnp.int32)
    target = sc.BoundModel(T5Module(model.config).init(jax.random.key(4), token, token)["params"], model)
    prompt = Prompt(jnp.zeros((3, 1), jnp.int32), jnp.ones((3,), jnp.int32), jnp.array([[4, 5], [6, 0], [9, 9]]))
    draft = Fake(30, seed=1)
    engine = Engine(target=target.model, drafter=Watching(ModelDrafter(draft, Fixed(2))), verifier=LOSSLESS)
    given = {"prompt": prompt, "length": 9, "target": target.params}
    out = run(engine, {"model": ()}, **given, record=lambda turn: turn.num_new - turn.num_kept)
    cache = target.model.prefill(target.params, prompt, 16)
    np.testing.assert_allclose(out.inner["prompt"], target.model.prompt_features(cache), rtol=1e-5)
    behind = np.asarray(states(target.model, target.params, prompt, out.tokens))
    more = np.asarray(out.record)[: int(out.num_rounds)]
    for row in range(3):
        rounds = int(out.stats.rounds[row])
        last = int(out.lengths[row]) - 1 - more[rounds - 1, row]
        np.testing.assert_allclose(out.inner["pending"][row], behind[row, last], atol=1e-5)


def test_a_target_that_says_nothing_of_the_prompt_is_refused_by_name():
    engine = Engine(target=Fake(16), drafter=Watching(drafting(Fake(16))), verifier=LOSSLESS)
    with pytest.raises(ValueError, match="reads the target's features, but Fake has no prompt_features"):
        run(engine, {"model": ()})
