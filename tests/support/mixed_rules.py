"""The law of many deferral rules by sampling, in one program: compiling costs more than running it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from speccascade_jax.methods.build import assemble
from speccascade_jax.rules.rule import Rule
from tests.support import conformance

_APART = 64.0


def mixed(rules):
    """Deferral rules as one: of index `i`, with its own α, where the control reads `_APART · i + α`.

    What is traced is the same for every deferral rule but the decision itself; so one program runs them all.
    """

    def deferral(pair, alpha):
        index = jnp.round(alpha / _APART)
        own = alpha - _APART * index
        decisions = [jnp.broadcast_to(rule.deferral(pair, own), pair.q.shape) for rule in rules]
        return jnp.select([index == i for i in range(len(rules))], decisions)

    return Rule(name="mixed", deferral=deferral)


def check_sequence_laws(rules, *, rows=10_000, length=7, seed=5, **engine):
    """`conformance.check_sequence_law` of several deferral rules in one program, `rows` each per sampling setting."""
    q_table, p_table = conformance.tables(3, seed=seed)
    shift = _APART * np.arange(len(rules), dtype=np.float32)
    coded = shift + np.float32([conformance.telling_alpha(rule, q_table, p_table) for rule in rules])
    built, params = assemble(conformance.tabular_pair(q_table, p_table), rule=mixed(rules), **engine)
    alpha = np.tile(np.repeat(coded, rows), len(conformance.SAMPLINGS))
    tokens = conformance.run_rows(
        built, params, rows * len(rules), alpha, conformance.SAMPLINGS, length=length, seed=seed, conclusive=True
    )
    tokens = tokens.reshape(len(conformance.SAMPLINGS), len(rules), rows, length)
    samples = {
        (rule.name, *s): (tokens[n, i], conformance.law_by_rule(rule, q_table, p_table, float(own), *s))
        for i, (rule, own) in enumerate(zip(rules, coded - shift, strict=True))
        for n, s in enumerate(conformance.SAMPLINGS)
    }
    conformance.check_laws(samples)
