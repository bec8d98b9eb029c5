"""Sequence-level cascades: who writes what, the scores, the law, and what is counted."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import speccascade_jax as sc
from speccascade_jax.methods import sequence
from tests.support import conformance, reference

STOP, LENGTH = 4, 9


def likelihoods(table, tokens, last=0):
    """Raw `log q` of each token, in NumPy."""
    found = []
    for token in tokens:
        found.append(np.log(reference.softmax(table[last])[token]))
        last = token
    return np.array(found)


def greedy(table, last=0):
    tokens = []
    while len(tokens) < LENGTH and (not tokens or tokens[-1] != STOP):
        last = int(np.argmax(table[last]))
        tokens.append(last)
    return tokens


def decode(pair, method, prompts, **more):
    return sc.decode(pair, prompts, method=method, max_new_tokens=LENGTH, stop_ids=[STOP], **more)


SCORES = {
    "seq_cascade": np.sum,
    "seq_cascade_mean": np.mean,
    "seq_cascade_quantile": lambda logs: np.quantile(logs, 0.1),
}


@pytest.mark.parametrize("method", SCORES)
def test_the_target_writes_anew_where_the_score_is_too_low(method):
    """Row by row, in one batch whose outputs differ in length, and alone."""
    q_table, p_table = conformance.tables(7, seed=71)
    pair, starts = conformance.tabular_pair(q_table, p_table), [0, 1, 2, 3, 5, 6]
    drafts = [greedy(q_table, start) for start in starts]
    assert len({len(draft) for draft in drafts}) > 1
    scores = [SCORES[method](likelihoods(q_table, d, s)) for d, s in zip(drafts, starts, strict=True)]
    threshold = float(np.median(scores))
    expected = [
        greedy(p_table, start) if score < threshold else draft
        for score, draft, start in zip(scores, drafts, starts, strict=True)
    ]
    out = decode(pair, method, [[start] for start in starts], alpha=threshold)
    found = [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]
    assert found == expected
    assert out.stats["deferral_rate"] == 0.5
    alone = decode(pair, method, [[starts[0]]], alpha=threshold)
    assert alone.tokens[0, : alone.lengths[0]].tolist() == expected[0]


def test_the_quantile_is_numpys():
    rng = np.random.default_rng(0)
    logs, lengths = np.log(rng.random((6, 12))).astype(np.float32), np.array([1, 2, 3, 7, 11, 12])
    counted = np.arange(12)[None] < lengths[:, None]
    found = sequence.lowest_tenth(jnp.asarray(logs), jnp.asarray(counted))
    np.testing.assert_allclose(found, [np.quantile(r[:n], 0.1) for r, n in zip(logs, lengths, strict=True)], rtol=1e-5)


def test_ends_are_the_two_models():
    pair = conformance.tabular_pair(*conformance.tables(7, seed=72))
    prompts = [[0], [1], [2]]
    for temperature in (0.0, 1.0):
        kept = decode(pair, "seq_cascade", prompts, alpha=-1e9, temperature=temperature)
        anew = decode(pair, "seq_cascade", prompts, alpha=1.0, temperature=temperature)
        target = decode(pair, "autoregressive", prompts, temperature=temperature)
        assert (anew.tokens == target.tokens).all() and anew.stats["draft_share"] == 0.0
        assert kept.stats["draft_share"] == 1.0 and kept.stats["target_calls"] == 0
        if temperature == 0:
            assert (kept.tokens == decode(pair, "autoregressive_draft", prompts).tokens).all()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_random_allocation_is_a_mixture_of_both_laws(share):
    """Sequences by chi-square: the target's draws repeat no bits of the draft's, nor of chance."""
    q_table, p_table = conformance.tables(3, seed=73)
    rows, length = 20_000, 5
    out = sc.decode(
        conformance.tabular_pair(q_table, p_table), [[0]] * rows, method="random_allocation", alpha=share,
        temperature=1.0, max_new_tokens=length,
    )  # fmt: skip
    expected = np.zeros(3**length)
    for weight, table in ((1 - share, q_table), (share, p_table)):
        law, probability, last = np.stack([reference.softmax(row) for row in table]), np.ones(1), np.array([0])
        for _ in range(length):
            probability = (probability[:, None] * law[last]).reshape(-1)
            last = np.tile(np.arange(3), len(probability) // 3)
        expected += weight * probability
    index = (out.tokens * 3 ** np.arange(length - 1, -1, -1)).sum(-1)
    assert conformance.pooled_p_value(np.bincount(index, minlength=3**length), expected * rows) > 1e-3
    counts = {name: np.asarray(values) for name, values in out.stats["rows"].items()}
    anew = counts["deferred"] > 0
    assert stats.binomtest(int(anew.sum()), rows, share).pvalue > 1e-3
    # one model writes each output, and only that one has worked for it
    for name, expected_of in {"draft_steps": ~anew, "drafted": ~anew, "target_calls": anew}.items():
        np.testing.assert_array_equal(counts[name], np.where(expected_of, length, 0))
    assert not counts["discarded"].any()
    assert int(out.generation.num_rounds) == length * ((share > 0) + (share < 1))  # no call that nobody needs


def test_a_deferred_output_is_the_targets_law_given_that_the_draft_was_unsure():
    """What decides is the draft's output; the target's own tokens must not depend on it."""
    q_table, p_table = conformance.tables(3, seed=74)
    rows = 20_000
    out = sc.decode(
        conformance.tabular_pair(q_table, p_table), [[0]] * rows, method="seq_cascade", alpha=-3.0, temperature=1.0,
        max_new_tokens=4,
    )  # fmt: skip
    anew = np.asarray(out.stats["rows"]["deferred"]) > 0
    assert 0.1 < anew.mean() < 0.9
    law = np.stack([reference.softmax(row) for row in p_table])
    assert conformance.sequence_p_value(out.tokens[anew], law) > 1e-3
    q_law = np.stack([reference.softmax(row) for row in q_table])
    assert conformance.sequence_p_value(out.tokens[~anew], q_law) < 1e-6  # kept outputs are a selection


def test_the_account_balances():
    pair = conformance.tabular_pair(*conformance.tables(6, seed=75))
    out = decode(pair, "seq_cascade", [[i % 4] for i in range(200)], alpha=-4.0, temperature=1.0)
    rows = {name: np.asarray(values) for name, values in out.stats["rows"].items()}
    np.testing.assert_array_equal(rows["drafted"] + rows["target_calls"], rows["committed"] + rows["discarded"])
    np.testing.assert_array_equal(rows["committed"], out.lengths)
    assert set(rows["unverified"].tolist()) == {0, 1} and not out.stats["inconclusive"]


def test_what_has_no_meaning_is_refused():
    pair = conformance.tabular_pair(*conformance.tables(4, seed=1))
    for arguments, message in (
        ({"method": "seq_cascade"}, "'seq_cascade' needs alpha"),
        (
            {"method": "seq_cascade", "alpha": -1.0, "rule": "chow"},
            "'seq_cascade' has no rule, got 'chow': it decides by a score",
        ),
        ({"method": "random_allocation", "alpha": 1.5}, r"alpha=1.5 is outside the domain \[0, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            sc.decode(pair, [[0]], **arguments)
    with pytest.raises(ValueError, match="is more than one generation"):
        sc.stream(pair, [0], method="seq_cascade", alpha=-1.0)
    with pytest.raises(ValueError, match="unknown score 'product': choose one of sum"):
        sequence.SequenceCascade(draft=None, target=None, score="product")


def test_a_broken_draft_is_named():
    q_table, p_table = conformance.tables(4, seed=2)
    with pytest.raises(FloatingPointError, match="the draft model gave NaN"):
        sc.decode(
            conformance.tabular_pair(np.full_like(q_table, np.nan), p_table), [[0]], method="seq_cascade", alpha=0.0
        )
    with pytest.raises(FloatingPointError, match="the target model gave NaN"):
        sc.decode(
            conformance.tabular_pair(q_table, np.full_like(p_table, np.nan)), [[0]], method="seq_cascade", alpha=0.0
        )


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        ([-np.inf, -np.inf, -1.0], -np.inf),
        ([-np.inf, -1.0], -np.inf),
        ([-np.inf], -np.inf),
        ([-3.0] + [-1.0] * 10, -1.0),
        ([-np.inf] + [-1.0] * 10, -1.0),
        ([-3.0] + [-2.0] + [-1.0] * 9, -2.0),
        ([-4.0, -1.0, -2.0], np.quantile([-4.0, -1.0, -2.0], 0.1)),
    ],
)
def test_the_quantile_of_tokens_that_the_draft_excludes_is_a_number(logs, expected):
    """float64's quantile, and where that is the difference of infinities, the lower one."""
    padded, counted = jnp.asarray([logs + [7.0] * 3]), jnp.asarray([[True] * len(logs) + [False] * 3])
    assert float(sequence.lowest_tenth(padded, counted)[0]) == pytest.approx(expected)


def test_a_token_100_below_the_first_has_a_log_likelihood():
    """At temperature 20 it is drawn, at temperature 1 its probability is 0 in float32."""
    q = np.float32([[0.0, -100.0]] * 2)
    pair = sc.Pair(target=sc.TableLM(q), draft=sc.TableLM(q))
    given = {"method": "seq_cascade", "temperature": 20.0, "max_new_tokens": 200, "stop_ids": []}
    kept, anew = (sc.decode(pair, [[0]], alpha=alpha, **given).stats["deferral_rate"] for alpha in (-1e4, -1.0))
    assert (kept, anew) == (0.0, 1.0)
