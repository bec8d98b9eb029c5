"""Tests of methods of whole generations: scores, distributions and counts of sequence cascades, and the oracle."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import speccascade_jax as sc
from speccascade_jax.methods import generations
from speccascade_jax.methods.build import assemble
from speccascade_jax.models.decoder import tiny
from speccascade_jax.models.early_exit import early_exit, shared_head
from speccascade_jax.stopping.policies import Fixed
from tests.support import conformance, reference, tiny_decoders

# --- sequence cascades


STOP, LENGTH = 4, 9


def likelihoods(table, tokens, last=0):
    """Returns the raw `log q` of each token, computed in NumPy."""
    logs = []
    for token in tokens:
        logs.append(np.log(reference.softmax(table[last])[token]))
        last = token
    return np.array(logs)


def greedy(table, last=0, length=LENGTH):
    tokens = []
    while len(tokens) < length and STOP not in tokens:
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


@pytest.mark.parametrize(
    "method", ["seq_cascade_quantile", *(pytest.param(name, marks=pytest.mark.laws) for name in list(SCORES)[:2])]
)
def test_the_target_rewrites_rows_with_a_low_score(method):
    """Compares row by row, in one batch whose outputs differ in length, and for a single prompt."""
    q_table, p_table = conformance.tables(7, seed=71)
    pair, starts = conformance.tabular_pair(q_table, p_table), [0, 1, 2, 3, 5, 6]
    drafts = [greedy(q_table, start) for start in starts]
    assert len({len(draft) for draft in drafts}) > 1
    scores = [SCORES[method](likelihoods(q_table, d, s)) for d, s in zip(drafts, starts, strict=True)]
    threshold = float(np.median(scores))
    scored = zip(scores, drafts, starts, strict=True)
    expected = [greedy(p_table, start) if score < threshold else draft for score, draft, start in scored]
    out = decode(pair, method, [[start] for start in starts], alpha=threshold)
    outputs = [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]
    assert outputs == expected
    assert out.stats["deferral_rate"] == 0.5
    if method == "seq_cascade":  # one method only, because a second program is slow to compile
        alone = decode(pair, method, [[starts[0]]], alpha=threshold)
        assert alone.tokens[0, : alone.lengths[0]].tolist() == expected[0]


def test_the_quantile_equals_numpys():
    rng = np.random.default_rng(0)
    logs, lengths = np.log(rng.random((6, 12))).astype(np.float32), np.array([1, 2, 3, 7, 11, 12])
    counted = np.arange(12)[None] < lengths[:, None]
    quantiles = generations.lowest_tenth(jnp.asarray(logs), jnp.asarray(counted))
    np.testing.assert_allclose(
        quantiles, [np.quantile(r[:n], 0.1) for r, n in zip(logs, lengths, strict=True)], rtol=1e-5
    )


def test_extreme_alphas_give_the_two_models():
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
def test_random_allocation_is_a_mixture_of_both_distributions(share):
    """Sequences by chi-square: neither the target's draws nor the random choice repeat the draft's bits."""
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
    # one model writes each output, and only that model is counted
    for name, expected_of in {"draft_steps": ~anew, "drafted": ~anew, "target_calls": anew}.items():
        np.testing.assert_array_equal(counts[name], np.where(expected_of, length, 0))
    assert not counts["discarded"].any()
    # a model that writes no output is not called
    assert int(out.generation.num_rounds) == length * ((share > 0) + (share < 1))


def test_a_deferred_output_has_the_targets_distribution():
    """The draft's output decides; the target's own tokens must not depend on it."""
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
    # outputs that were kept are a selection, so their distribution differs
    assert conformance.sequence_p_value(out.tokens[~anew], q_law) < 1e-6


def test_counts_of_both_models_add_up():
    pair = conformance.tabular_pair(*conformance.tables(6, seed=75))
    out = decode(pair, "seq_cascade", [[i % 4] for i in range(200)], alpha=-4.0, temperature=1.0)
    rows = {name: np.asarray(values) for name, values in out.stats["rows"].items()}
    np.testing.assert_array_equal(rows["drafted"] + rows["target_calls"], rows["committed"] + rows["discarded"])
    np.testing.assert_array_equal(rows["committed"], out.lengths)
    assert set(rows["unverified"].tolist()) == {0, 1} and not out.stats["inconclusive"]


def test_meaningless_settings_are_refused():
    pair = conformance.tabular_pair(*conformance.tables(4, seed=1))
    for method, arguments, message in (
        ("seq_cascade", {}, "'seq_cascade' needs alpha"),
        ("seq_cascade", {"alpha": -1.0, "rule": "chow"}, "has no rule, got 'chow': it decides by a score"),
        ("random_allocation", {"alpha": 1.5}, r"alpha=1.5 is outside the domain \[0, 1\]"),
        ("stop_oracle", {"temperature": 0.5}, "is an oracle of greedy decoding, got temperature="),
        ("stop_oracle", {"draft_temperature": 1.0}, "is an oracle of greedy decoding, got draft_temperature="),
        ("stop_oracle", {"tail": "draft"}, "cannot end the blocks of a tail: leave tail='draft' out"),
    ):
        with pytest.raises(ValueError, match=message):
            sc.decode(pair, [[0]], method=method, **arguments)
    with pytest.raises(ValueError, match="runs more than one generation"):
        sc.stream(pair, [0], method="seq_cascade", alpha=-1.0)
    with pytest.raises(ValueError, match="unknown score 'product': choose one of sum"):
        generations.SequenceCascade(draft=None, target=None, score="product")


def test_an_error_names_a_broken_draft():
    q_table, p_table = conformance.tables(4, seed=2)
    broken = {"draft": (np.full_like(q_table, np.nan), p_table), "target": (q_table, np.full_like(p_table, np.nan))}
    for name, tables in broken.items():
        with pytest.raises(FloatingPointError, match=f"the {name} model gave NaN"):
            sc.decode(conformance.tabular_pair(*tables), [[0]], method="seq_cascade", alpha=0.0)


@pytest.mark.parametrize(("logs", "expected"), [
    ([-np.inf, -np.inf, -1.0], -np.inf),
    ([-np.inf, -1.0], -np.inf),
    ([-np.inf], -np.inf),
    ([-3.0] + [-1.0] * 10, -1.0),
    ([-np.inf] + [-1.0] * 10, -1.0),
    ([-3.0] + [-2.0] + [-1.0] * 9, -2.0),
    ([-4.0, -1.0, -2.0], np.quantile([-4.0, -1.0, -2.0], 0.1)),
])  # fmt: skip
def test_the_quantile_of_impossible_tokens_is_not_nan(logs, expected):
    """Compares with float64's quantile, and with the lower value if that is a difference of infinities."""
    padded, counted = jnp.asarray([logs + [7.0] * 3]), jnp.asarray([[True] * len(logs) + [False] * 3])
    assert float(generations.lowest_tenth(padded, counted)[0]) == pytest.approx(expected)


def test_a_token_100_nats_below_the_first_has_a_log_likelihood():
    """At temperature 20 it is drawn, at temperature 1 its probability is 0 in float32."""
    q = np.float32([[0.0, -100.0]] * 2)
    pair = sc.Pair(target=sc.TableLM(q), draft=sc.TableLM(q))
    settings = {"method": "seq_cascade", "temperature": 20.0, "max_new_tokens": 200, "stop_ids": []}
    kept, anew = (sc.decode(pair, [[0]], alpha=alpha, **settings).stats["deferral_rate"] for alpha in (-1e4, -1.0))
    assert (kept, anew) == (0.0, 1.0)


# --- lemma 2.1's oracle: nothing discarded, a target call per disagreement


def test_the_oracle_discards_nothing_and_calls_the_target_once_per_disagreement():
    """Checks `N_target = |S ∪ {N}|` row by row, with rows that end in a stop id and rows that end at their limit."""
    q_table, p_table = conformance.tables(40, seed=24)
    # the models agree on two thirds of the tokens
    q_table = np.where(np.arange(40)[:, None] % 3 == 0, q_table, p_table)
    limit = 14
    out = sc.decode(
        conformance.tabular_pair(q_table, p_table), np.arange(40)[:, None], method="stop_oracle", block_size=limit,
        max_new_tokens=limit, stop_ids=[STOP],
    )  # fmt: skip
    ended = 0
    for start in range(40):
        expected = greedy(p_table, start, limit)
        before = [start, *expected[:-1]]
        disagreements = {i for i, t in enumerate(expected) if np.argmax(q_table[before[i]]) != t}
        assert out.tokens[start, : out.lengths[start]].tolist() == expected
        assert out.stats["rows"]["target_calls"][start] == len(disagreements | {len(expected) - 1})
        ended += len(expected) < limit
    assert out.stats["discarded"] == 0 and out.stats["rejected"] == 0
    assert 0 < ended < 40  # some outputs end at the stop id, others at the limit


@pytest.mark.laws
def test_a_cap_adds_calls_but_discards_nothing():
    q_table, _ = conformance.tables(9, seed=4)
    pair = conformance.tabular_pair(q_table, q_table)
    out = sc.decode(pair, [[0]], method="stop_oracle", block_size=4, max_new_tokens=14)
    # two models that always agree: 4 drafts and a bonus, twice, then all remaining tokens except the last
    assert out.stats["rows"]["target_calls"].tolist() == [3]
    assert out.stats["discarded"] == 0


def test_the_oracle_needs_a_model_under_its_policy():
    pair = conformance.tabular_pair(*conformance.tables(5, seed=5))
    with pytest.raises(ValueError, match="the oracle needs a model that drafts under stop policy Oracle"):
        generations.OracleStopping(assemble(pair, stop=lambda _: Fixed(3))[0])
    with pytest.raises(ValueError, match="method 'stop_oracle' runs more than one generation, so it has no engine"):
        assemble(pair, method="stop_oracle")


@pytest.mark.laws
@pytest.mark.parametrize("own_head", [False, True])
def test_the_oracle_works_for_an_exit_in_the_targets_cache(own_head):
    """Greedy output is the target's, nothing is discarded, and something is drafted; with its own head too."""
    target = tiny_decoders.bound(tiny("llama2_7b", vocab_size=40))
    head = shared_head(target) if own_head else None
    if own_head:
        head = head + np.random.default_rng(0).normal(size=head.shape).astype(np.float32) * head.std()
    pair = sc.Pair(target, early_exit(target, 1, head))
    prompts, settings = [[3, 9, 27], [5, 5]], {"max_new_tokens": 24}
    out = sc.decode(pair, prompts, method="stop_oracle", block_size=6, **settings)
    alone = sc.decode(pair, prompts, method="autoregressive", **settings)
    np.testing.assert_array_equal(out.tokens, alone.tokens)
    assert out.stats["discarded"] == 0 and out.stats["draft_share"] > 0
