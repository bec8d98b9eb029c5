"""Negative controls: planted bugs are found by the tests of laws, and the same runs without them pass."""

from dataclasses import replace

import numpy as np
import pytest

from speccascade_jax.methods.build import assemble
from speccascade_jax.rules import branching
from speccascade_jax.rules.acceptance import Speculative
from tests.support import blocks, conformance, mutants, reference

pytestmark = pytest.mark.laws


@pytest.mark.parametrize("name", list(mutants.MUTANTS))
def test_mutants_are_found(name):
    """Each planted bug gives p < 1e-6, and the same run without it does not."""
    trial = mutants.MUTANTS[name]
    assert trial(mutated=False) > 1e-3
    assert trial(mutated=True) < 1e-6


def test_one_percent_less_chance_to_keep_is_found(monkeypatch):
    """What whole sequences lose in their cells, and an identity that needs no sampling does not see in the engine."""
    kept_at = Speculative.kept_at
    monkeypatch.setattr(Speculative, "kept_at", lambda *arguments: 0.99 * kept_at(*arguments))
    rule = conformance.REPRESENTATIVE["lossy_tuned"]
    with pytest.raises(AssertionError, match="all transitions: p = .*e-"):
        conformance.check_sequence_law(rule, block_size=3, length=8)  # a program of its own


TREE_BUGS = {
    "π is not reduced by a rejected sibling": (branching.laws, "normalise", lambda mass, fallback: fallback),
    "the residual is not normalised": (branching.laws, "normalise", lambda mass, fallback: mass),
    "siblings are verified with replacement": (branching, "without", lambda q_tilde, q, taken: q_tilde),
}


@pytest.mark.parametrize(
    ("way", "bug"),
    [("block", bug) for bug in (None, *blocks.BUGS)] + [("tree", bug) for bug in (None, *TREE_BUGS)],
)
def test_bugs_in_blocks_and_trees_are_found(way, bug, monkeypatch):
    rng = np.random.default_rng(55)  # tables on which the replacement's bug moves the law by 4%, where others give 1%
    q_table, p_table = (rng.normal(size=(3, 3)).astype(np.float32) for _ in range(2))
    law = reference.transitions("spec_decode", q_table, p_table, 0.0, 1.0)
    settings = {"block_size": 4, "verify": "block"} if way == "block" else {"tree": (2, 2)}
    engine, params = assemble(conformance.tabular_pair(q_table, p_table), rule="spec_decode", **settings)
    if bug in blocks.BUGS:
        engine = replace(engine, verifier=blocks.BUGS[bug](engine.verifier.rule))
    elif bug is not None:
        monkeypatch.setattr(*TREE_BUGS[bug])
        engine = replace(engine, stop_ids=(1000 + list(TREE_BUGS).index(bug),))  # a program of its own
    tokens = conformance.run_rows(engine, params, 40_000, 0.0, [(1.0, 1.0)], length=5)
    p_value = conformance.sequence_p_value(tokens[0], law)
    assert p_value > 1e-3 if bug is None else p_value < 1e-6
