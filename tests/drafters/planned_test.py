"""Tests of planned block lengths: the output's distribution, no useless draft call, one program for all lengths."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core import rngs
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import Prompt
from speccascade_jax.drafters.model import PlannedDrafter
from speccascade_jax.engine.generate import compilations, generate
from speccascade_jax.engine.loop import one_round
from speccascade_jax.models.fake import Fake
from speccascade_jax.stopping.block_planner import Cheapest
from tests.support import conformance, engines, planning, reference

FEW = (0, 1, 3)


def fakes(plan=None, rule="spec_decode", block=3):
    """Returns an engine of fake models, whose tokens depend on the whole prefix, so that cache errors change drafts."""
    small, large = Fake(16, noise=0.3, seed=1), Fake(16, seed=2)
    return engines.engine(large, engines.drafting(small, block) if plan is None else PlannedDrafter(small, plan), rule)


def run(engine, costs=None, temperature=1.0, reads=True, **more):
    """Runs a generation; `reads` tells whether the draft model's parameters are given."""
    params = (engines.FAKE if reads else {}) | ({} if costs is None else {"costs": costs})
    return engines.generated(engine, params, numbers={"alpha": 0.3, "temperature": temperature}, **more)


@pytest.mark.laws
@pytest.mark.parametrize("rule", ["spec_decode", "token_v3"])
def test_a_constant_plan_equals_a_fixed_block_bit_for_bit(rule):
    alone = run(fakes(rule=rule))
    lengths = FEW[rule != "spec_decode" :]
    planned_run = run(fakes(Cheapest(lengths), rule), planning.forcing(lengths, 3))
    np.testing.assert_array_equal(alone.tokens, planned_run.tokens)
    for name, counted in vars(alone.stats).items():
        # a plan sums float counters phase by phase, which rounds differently
        np.testing.assert_allclose(counted, getattr(planned_run.stats, name), rtol=1e-6, err_msg=name)
    assert (
        planning.aimed(planned_run)[-1] == int(planned_run.stats.rounds.sum())
        and int(planned_run.stats.kept.sum()) > 20
    )


@pytest.mark.parametrize("reads", [pytest.param(True, marks=pytest.mark.laws), False])
def test_a_draft_that_never_pays_is_never_called(reads):
    """Forces block length 0 by costs, or leaves out the draft model's parameters."""
    out = run(fakes(Cheapest(FEW)), planning.forcing(FEW, 0 if reads else 3), reads=reads)
    assert not any(int(getattr(out.stats, name).sum()) for name in ("draft_steps", "drafted", "examined"))
    assert np.asarray(out.stats.target_calls).tolist() == [24] * 3 and planning.aimed(out).tolist() == [72, 0, 0]


@dataclass(frozen=True)
class InTurns(Cheapest):
    """A plan that drafts nothing for `rest` rounds, then drafts for two rounds, whatever the costs are."""

    rest: int = 5

    def init(self, batch_size):
        """Returns the number of phases so far, 0, which replaces the evidence."""
        return jnp.zeros((), jnp.int32)

    def choose(self, costs, evidence, active, room):
        rests = evidence % 2 == 1
        return jnp.where(rests, 0, 2), jnp.where(rests, self.rest, 2)

    def update(self, evidence, counted):
        return evidence + 1


@pytest.mark.sample(1)
@pytest.mark.laws
@pytest.mark.parametrize("rest", [1, 5])
def test_a_draft_catches_up_after_a_rest(rest):
    """Compares the output with that of a run that always drafts, and acceptance with that of a planted bug."""
    engine = fakes(InTurns(FEW, rest=rest))
    out = run(engine, planning.costs([1.0] * 3), temperature=0.0)
    always = run(fakes(), temperature=0.0)
    np.testing.assert_array_equal(out.tokens, always.tokens)
    wrong = replace(engine, drafter=Forgetful(engine.drafter.model, engine.drafter.plan))
    kept, lost = (
        int(generation.stats.kept.sum()) for generation in (out, run(wrong, planning.costs([1.0] * 3), temperature=0.0))
    )
    assert kept > lost, "a cache with holes lowers acceptance, so the comparison detects it"
    aimed = planning.aimed(out)
    assert aimed[0] > 0 and aimed[2] > 0


@dataclass(frozen=True)
class Forgetful(PlannedDrafter):
    """A planted bug: after rounds without drafts, the missed tokens are not fed to the draft model."""

    def settle(self, params, state, tokens, length, room, active):
        late = jnp.maximum(self.model.consumed(state.cache), length - 1)
        cache = self.model.rollback(state.cache, late)
        return super().settle(params, replace(state, cache=cache), tokens, length, room, active)


def everything(turn):
    return turn


@pytest.mark.laws
def test_rounds_of_all_lengths_have_one_shape_and_count_their_passes():
    """Expects three draft passes for three drafted tokens, and two more to feed the tokens missed before.

    The records of shorter blocks must be padded with zeros.
    """
    settings = {"prompt": engines.prompts([3, 4, 5]), "most_rounds": 7, "temperature": 0.0, "record": everything}
    out = run(fakes(InTurns(FEW, rest=6)), planning.costs([1.0] * 3), **settings)
    assert int(out.stats.rounds[0]) == 7 and int(out.stats.drafted[0]) == 3
    assert int(out.stats.draft_steps[0]) == 3 + 2
    long = jax.eval_shape(lambda: run(fakes(), **settings).record)
    assert jax.tree.map(jnp.shape, out.record) == jax.tree.map(jnp.shape, long)
    law, tokens = np.asarray(out.record.law)[:7, 0], np.asarray(out.record.tokens)[:7, 0]
    np.testing.assert_allclose(law[:, 0].sum(-1), 1.0, rtol=1e-5)
    assert not law[:6, 1:].any() and not tokens[:6, 1:].any() and (law[6].sum(-1) > 0.99).all()


@pytest.mark.laws
def test_single_rounds_equal_those_of_the_loop():
    """Expects phases to continue from call to call; otherwise lengths would change sooner and tokens would differ."""
    engine = fakes(Cheapest(FEW, drafting=3, resting=3))
    costs, step = planning.on_edge(engine.drafter.plan), jax.jit(one_round, static_argnums=0)
    whole = run(engine, costs)
    params = {"target": (), "drafter": {"model": (), "costs": costs}}
    controls = make_controls(3, alpha=0.3, temperature=1.0)
    state = engine.init(params, engines.THREE, rngs.root(5), jnp.arange(3), 24)
    while not state.done.all():
        state, _ = step(engine, params, state, controls)
    np.testing.assert_array_equal(state.drafter.chosen, whole.inner["chosen"])
    for row, start in enumerate(engines.THREE.length):
        np.testing.assert_array_equal(state.tokens[row, start : start + 24], whole.tokens[row])
    assert (planning.aimed(whole) > 0).sum() > 1


@pytest.mark.laws
def test_a_limit_of_rounds_ends_a_generation():
    out = run(fakes(), most_rounds=2)
    assert np.asarray(out.stats.rounds).tolist() == [2] * 3 and int(out.num_rounds) == 2
    whole = np.asarray(run(fakes()).tokens)
    for row, length in enumerate(np.asarray(out.lengths)):
        np.testing.assert_array_equal(np.asarray(out.tokens)[row, :length], whole[row, :length])


def test_all_costs_and_acceptances_share_one_program():
    engine = fakes(Cheapest(FEW))
    run(engine, planning.forcing(FEW, 3))
    compiled, aims = compilations(), []
    for cost_values in (planning.forcing(FEW, 0), planning.forcing(FEW, 1), planning.costs([1, 1.2, 1.5], 3.0, 0.2)):
        for temperature in (0.0, 0.7):
            aims.append(planning.aimed(run(engine, cost_values, temperature=temperature)).argmax())
    assert compilations() == compiled and set(aims) >= {0, 1}


# --- distributions


def sequences(engine, params, law, costs, pairs=10_000, length=6, temperature=1.0, seed=0):
    """Returns the p-value of sequences from batches of two rows, and how many rounds had each block length."""

    def two(ids):
        prompt = Prompt(jnp.zeros((2, 1), jnp.int32), jnp.ones((2,), jnp.int32))
        controls = jax.tree.map(lambda x: x[:2], batch_controls)
        out = generate(engine, planned_params, prompt, seed, controls=controls, max_new_tokens=length, example_ids=ids)
        return out.tokens, out.lengths, out.inner["chosen"]

    batch_controls = make_controls(2, alpha=0.4, temperature=temperature)
    planned_params = planning.told(params, costs)
    tokens, lengths, chosen = jax.jit(jax.vmap(two))(jnp.arange(2 * pairs, dtype=jnp.int32).reshape(pairs, 2))
    assert (np.asarray(lengths) == length).all()
    aimed = np.asarray(chosen)[:, 0]  # both rows of a batch have the same block length
    return conformance.sequence_p_value(np.asarray(tokens).reshape(2 * pairs, length), law), aimed


def law_of(rule, q_table, p_table):
    return reference.transitions(rule, q_table, p_table, 0.4, 1.0)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("rule", "more"),
    [
        ("spec_decode", {"rounds": 2}),
        ("spec_decode", {"bonus": "none"}),
        ("spec_decode", {"bonus": "target"}),
        ("token_v3", {}),
        ("lossy", {}),
        ("opt", {"accept": "deferral"}),
    ],
)
@pytest.mark.laws
def test_no_plan_changes_a_rules_distribution(rule, more):
    """Tests sequences of six tokens under plans that change with every kept or rejected token of two rows."""
    lengths = FEW if rule == "spec_decode" else FEW[1:]
    engine, params, q_table, p_table = planning.planned(31, rule=rule, lengths=lengths, **{"rounds": 1} | more)
    p_value, aimed = sequences(engine, params, law_of(rule, q_table, p_table), planning.on_edge(engine.drafter.plan))
    assert p_value > 1e-3
    assert ((aimed > 0).sum(1) > 1).mean() > 0.1, "most plans never changed"
    # in phases of two rounds the longest block may never be chosen, because it no longer fits after the first phase
    assert (aimed.sum(0) > 0).sum() >= len(lengths) - ("rounds" in more), "a length was never planned"
