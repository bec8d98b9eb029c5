"""Tests that a row's output depends on its prompt, its id and its settings, but never on other rows of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.arrays import right_pad
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.types import Prompt
from speccascade_jax.engine.counters import COUNTS
from speccascade_jax.engine.generate import generate
from speccascade_jax.methods.build import assemble
from tests.support import conformance

# the sizes, the block and the stop id of support/front_door.py, so that both files share their compiled programs
ROWS, LENGTH, VOCAB, STOP, BLOCK = 16, 14, 9, 4, 3
INTEGERS = [*COUNTS, "decided", "examined_at", "kept_at"]


def pairs(name):
    """Returns a pair of tabular models, or of fake models that agree on some tokens."""
    if name == "table":
        return conformance.tabular_pair(*conformance.tables(VOCAB, seed=0))
    return sc.Pair(target=sc.FakeLM(VOCAB), draft=sc.FakeLM(VOCAB, noise=0.7, seed=3))


def prompts(rows=ROWS, seed=0):
    """Returns prompts of 1 to 8 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, 9)).tolist() for _ in range(rows)]


def settings(rule, rows=ROWS):
    """Returns α, temperatures (including 0 and 1) and top-p that differ from row to row."""
    low, high = (0.0, 0.0) if rule.alpha is None else rule.alpha.bounds(VOCAB)
    if rule.alpha is not None and np.isfinite(rule.alpha.domain[1]):
        high = 0.9
    return {
        "alpha": np.linspace(low, high, rows),
        "temperature": np.zeros(rows) if rule.greedy_only else np.tile([0.0, 1.0, 0.5, 1.0], rows // 4),
        "top_p": np.tile([1.0, 1.0, 1.0, 0.8, 0.8], rows)[:rows],
    }


def run(built, tokens, chosen, ids, values):
    """Generates outputs for the rows `chosen`, with every prompt padded to 8 tokens."""
    rows = [tokens[i] for i in chosen]
    prompt = Prompt(jnp.asarray(right_pad(rows, 8)), jnp.asarray([len(r) for r in rows], jnp.int32))
    controls = make_controls(len(rows), **{name: column[list(chosen)] for name, column in values.items()})
    out = generate(
        *built, prompt, 7, controls=controls, max_new_tokens=LENGTH, example_ids=np.asarray(ids)[list(chosen)]
    )
    return jax.tree.map(np.asarray, out)


def assert_same_rows(out, at, other, there, what):
    """Compares tokens, lengths and integer counters of rows `at` of `out` and `there` of `other`, bit for bit."""
    np.testing.assert_array_equal(out.tokens[at], other.tokens[there], err_msg=what)
    np.testing.assert_array_equal(out.lengths[at], other.lengths[there], err_msg=what)
    for name in INTEGERS:
        np.testing.assert_array_equal(getattr(out.stats, name)[at], getattr(other.stats, name)[there], err_msg=name)


@pytest.mark.parametrize(
    ("models", "rule", "bonus"),
    [
        ("table", "token_v3", "rule"),
        ("table", "spec_decode", "rule"),
        pytest.param("fake", "lossy_tuned", "none", marks=pytest.mark.laws),
        ("fake", "opt_log", "target"),
    ],
)
def test_a_row_is_the_same_alone_in_a_batch_and_permuted(models, rule, bonus):
    built = assemble(pairs(models), rule=rule, block_size=BLOCK, stop_ids=[STOP], bonus=bonus)
    tokens, values = prompts(), settings(sc.RULES[rule])
    ids = np.random.default_rng(2).permutation(1000)[:ROWS]
    together = run(built, tokens, range(ROWS), ids, values)
    order = np.random.default_rng(3).permutation(ROWS)
    permuted = run(built, tokens, order, ids, values)
    assert_same_rows(permuted, np.arange(ROWS), together, order, "permuted")
    for row in range(ROWS):
        alone = run(built, tokens, [row], ids, values)
        assert_same_rows(alone, 0, together, row, f"row {row} alone")
    assert len({tuple(t) for t in together.tokens}) > ROWS // 2  # most rows differ from each other
    assert together.stats.rejected.sum() > 0 < together.stats.kept.sum()
    assert len(set(together.lengths)) > 1


def test_greedy_speculation_equals_the_target_alone():
    """Uses fake models, whose cache is a hash of all tokens fed, so any cache error changes all later tokens."""
    pair, tokens, zero = pairs("fake"), prompts(seed=5), {"temperature": np.zeros(ROWS)}
    alone = assemble(pair, method="autoregressive", stop_ids=[STOP])
    expected = run(alone, tokens, range(ROWS), np.arange(ROWS), zero)
    for block, bonus in ((1, "none"), (2, "target"), (5, "rule")):
        built = assemble(pair, rule="spec_decode", block_size=block, bonus=bonus, stop_ids=[STOP])
        out = run(built, tokens, range(ROWS), np.arange(ROWS), zero)
        np.testing.assert_array_equal(out.tokens, expected.tokens)
        np.testing.assert_array_equal(out.lengths, expected.lengths)
        assert 0 < out.stats.kept.sum() < out.stats.drafted.sum()
        assert (out.stats.target_calls <= expected.stats.target_calls).all()
