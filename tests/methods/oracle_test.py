"""Lemma 2.1's oracle: nothing discarded, a target call per disagreement."""

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.methods.build import assemble
from speccascade_jax.methods.oracle import OracleStopping
from speccascade_jax.models.decoder import tiny
from speccascade_jax.models.early_exit import early_exit, shared_head
from speccascade_jax.stopping.policies import Fixed
from tests.support import conformance, tiny_decoders


def _greedy(table, start, length, stop):
    tokens = []
    while len(tokens) < length and stop not in tokens:
        start = int(np.argmax(table[start]))
        tokens.append(start)
    return tokens


def test_the_oracle_discards_nothing_and_calls_the_target_once_per_disagreement():
    """`N_target = |S ∪ {N}|` row by row, rows that end in a stop id and rows that end at their limit."""
    q_table, p_table = conformance.tables(40, seed=24)
    q_table = np.where(np.arange(40)[:, None] % 3 == 0, q_table, p_table)  # two thirds of the tokens are agreed on
    stop, limit = 4, 14
    out = sc.decode(
        conformance.tabular_pair(q_table, p_table), np.arange(40)[:, None], method="stop_oracle", block_size=limit,
        max_new_tokens=limit, stop_ids=[stop],
    )  # fmt: skip
    ended = 0
    for start in range(40):
        expected = _greedy(p_table, start, limit, stop)
        before = [start, *expected[:-1]]
        disagreements = {i for i, t in enumerate(expected) if np.argmax(q_table[before[i]]) != t}
        assert out.tokens[start, : out.lengths[start]].tolist() == expected
        assert out.stats["rows"]["target_calls"][start] == len(disagreements | {len(expected) - 1})
        ended += len(expected) < limit
    assert out.stats["discarded"] == 0 and out.stats["rejected"] == 0
    assert 0 < ended < 40  # both ways of ending


@pytest.mark.laws
def test_a_cap_costs_calls_and_discards_nothing_still():
    q_table, _ = conformance.tables(9, seed=4)
    pair = conformance.tabular_pair(q_table, q_table)
    out = sc.decode(pair, [[0]], method="stop_oracle", block_size=4, max_new_tokens=14)
    # two models that always agree: 4 drafts and a bonus, twice, and what is left but for the last token
    assert out.stats["rows"]["target_calls"].tolist() == [3]
    assert out.stats["discarded"] == 0


@pytest.mark.parametrize("given", [{"temperature": 0.5}, {"draft_temperature": 1.0}])
def test_the_oracle_is_greedy(given):
    pair = conformance.tabular_pair(*conformance.tables(5, seed=5))
    with pytest.raises(ValueError, match=f"'stop_oracle' is an oracle of greedy decoding, got {[*given][0]}="):
        sc.decode(pair, [[0]], method="stop_oracle", **given)


def test_only_a_policy_that_asks_can_be_told():
    engine, _ = assemble(conformance.tabular_pair(*conformance.tables(5, seed=5)), stop=lambda _: Fixed(3))
    with pytest.raises(ValueError, match="the oracle tells a model's drafts when to stop"):
        OracleStopping(engine)
    with pytest.raises(ValueError, match="method 'stop_oracle' is more than one generation, and so is no engine"):
        assemble(conformance.tabular_pair(*conformance.tables(5, seed=5)), method="stop_oracle")


@pytest.mark.laws
@pytest.mark.parametrize("own_head", [False, True])
def test_an_exit_in_the_targets_cache_is_told_as_a_model_is(own_head):
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


def test_the_oracle_has_no_tail():
    pair = conformance.tabular_pair(*conformance.tables(5, seed=5))
    with pytest.raises(ValueError, match="'stop_oracle' ends blocks where a draft is wrong: leave tail='draft' out"):
        sc.decode(pair, [[0]], method="stop_oracle", tail="draft")
