"""Costs made by hand for planned drafters, and tabular engines that have one."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from speccascade_jax.drafters.model import PlannedDrafter
from speccascade_jax.methods.build import assemble
from speccascade_jax.stopping.block_planner import Costs
from tests.support import conformance


def costs(rounds, prefill=0.0, acceptance=0.75, length=50.0):
    each = (jnp.asarray(value, jnp.float32) for value in (rounds, prefill, acceptance, length))
    return Costs(*each)


def forcing(lengths, length):
    """Costs under which every round aims at `length`."""
    return costs([1.0 if each == length else 1e9 for each in lengths])


def on_edge(plan, acceptance=0.6):
    """Costs at which all lengths but for a hair are worth the same where nothing was seen: any token that is kept makes
    the longest the best, any that is rejected the shortest."""
    each = [
        plan.tokens(length, jnp.full(1, acceptance), jnp.full(1, 10**6))[0] * (1.0 if n != 1 else 1.0 - 1e-4)
        for n, length in enumerate(plan.lengths)
    ]
    return costs(jnp.stack(each), acceptance=acceptance)


def told(params, found):
    return {**params, "drafter": {**params["drafter"], "costs": found}}


def planned(seed, vocab_size=3, rule="spec_decode", lengths=None, rounds=None, **more):
    """Engine, parameters without costs, and the tables of a tabular pair; `rounds`: of each phase."""
    q_table, p_table = conformance.tables(vocab_size, seed=seed)
    engine, params = assemble(conformance.tabular_pair(q_table, p_table), rule=rule, block_size="auto", **more)
    if lengths is not None:
        plan = replace(engine.drafter.plan, lengths=lengths)
        plan = plan if rounds is None else replace(plan, drafting=rounds, resting=rounds)
        engine = replace(engine, drafter=PlannedDrafter(engine.drafter.model, plan))
    return engine, params, q_table, p_table


def aimed(generation):
    """Rounds by the length aimed at, over all rows."""
    return np.asarray(generation.inner["chosen"]).sum(0)
