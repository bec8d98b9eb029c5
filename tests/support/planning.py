"""Made-up costs for drafters with planned block lengths (`block_size="auto"`), and engines with such drafters."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from speccascade_jax.drafters.model import PlannedDrafter
from speccascade_jax.methods.build import assemble
from speccascade_jax.stopping.block_planner import Costs
from tests.support import conformance


def costs(rounds, prefill=0.0, acceptance=0.75, length=50.0):
    value_array = (jnp.asarray(value, jnp.float32) for value in (rounds, prefill, acceptance, length))
    return Costs(*value_array)


def forcing(lengths, length):
    """Returns costs for which the plan chooses the block length `length` in every round."""
    return costs([1.0 if candidate == length else 1e9 for candidate in lengths])


def on_edge(plan, acceptance=0.6):
    """Returns costs for which all block lengths are nearly equally good before any round.

    Then any kept token makes the longest length the best one, and any rejected token the shortest.
    """
    values = [
        plan.tokens(length, jnp.full(1, acceptance), jnp.full(1, 10**6))[0] * (1.0 if n != 1 else 1.0 - 1e-4)
        for n, length in enumerate(plan.lengths)
    ]
    return costs(jnp.stack(values), acceptance=acceptance)


def told(params, found):
    return {**params, "drafter": {**params["drafter"], "costs": found}}


def planned(seed, vocab_size=3, rule="spec_decode", lengths=None, rounds=None, **more):
    """Returns an engine, its parameters without costs, and the tables of its two models.

    `rounds` is the number of rounds in each phase of the plan.
    """
    q_table, p_table = conformance.tables(vocab_size, seed=seed)
    engine, params = assemble(conformance.tabular_pair(q_table, p_table), rule=rule, block_size="auto", **more)
    if lengths is not None:
        plan = replace(engine.drafter.plan, lengths=lengths)
        plan = plan if rounds is None else replace(plan, drafting=rounds, resting=rounds)
        engine = replace(engine, drafter=PlannedDrafter(engine.drafter.model, plan))
    return engine, params, q_table, p_table


def aimed(generation):
    """Returns the number of rounds for which the plan chose each length, over all rows."""
    return np.asarray(generation.inner["chosen"]).sum(0)
