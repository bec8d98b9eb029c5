"""Tests of drafts that branch, through the engine: the distribution, tokens of real caches, and refusals."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.trees import Tree, without
from speccascade_jax.methods.build import assemble
from speccascade_jax.methods.settings import Settings
from speccascade_jax.models.decoder import tiny
from speccascade_jax.models.fake import FakeLM, Table
from speccascade_jax.pairs.pair import Pair
from tests.support import conformance, reference, tiny_decoders

ALL = conformance.REPRESENTATIVE


def test_transitions_under_a_small_tree_have_the_rules_distribution():
    conformance.check_transition_law(ALL["spec_decode"], rows=1_500, length=6, tree=(2,))


# --- caches


def decoders(kind, noise=0.05):
    target = tiny_decoders.bound(tiny(kind))
    return Pair(target=target, draft=tiny_decoders.bound(tiny(kind), noise=noise))


@pytest.mark.laws
def test_a_draft_equal_to_the_target_stays_exact_after_leaves_that_it_did_not_read():
    """The last level is fed only if the distribution after it is wanted; the next round must feed a kept leaf."""
    out = sc.decode(Pair(target=FakeLM(12), draft=FakeLM(12)), [[3, 4, 5]], tree=(2, 1), max_new_tokens=30)
    assert (out.stats["rejected"], out.stats["target_calls"]) == (0, 10)
    assert out.stats["draft_steps"] == 10 * 2 + 9  # two levels a round, and a leaf before every round but the first


def test_a_greedy_drafts_next_sibling_is_its_next_most_likely_token():
    """Its distribution is one-hot, so nothing of it remains; any token is legal, and the likeliest is kept most."""
    q, first = jnp.asarray([0.1, 0.2, 0.4, 0.3]), jnp.asarray([False, False, True, False])
    assert without(jnp.eye(4)[2], q, first).tolist() == [0, 0, 0, 1]
    np.testing.assert_allclose(without(q, q, first), [1 / 6, 1 / 3, 0, 1 / 2], rtol=1e-6)


PAIRS = {
    "fakes": lambda: Pair(target=FakeLM(12), draft=FakeLM(12, noise=0.3, seed=1)),
    "gemma2, with windows": lambda: decoders("gemma2_2b"),
    "llama3.1": lambda: decoders("llama3.1_8b"),
    "the shipped pair": lambda: sc.load_pair("tatoeba_en_de"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["fakes", *(pytest.param(name, marks=pytest.mark.laws) for name in list(PAIRS)[1:])])
def test_greedy_tokens_equal_those_of_chains(name):
    """A slot in the wrong place, in either cache, would change all later text; rows keep different paths."""
    pair = PAIRS[name]()
    texts = ["A dog is running on the beach.", "The weather was cold yesterday.", "He sings."]
    prompts = [[3, 4, 5, 2], [7, 1], [2, 2, 6]] if pair.vocabulary is None else texts
    settings = {"rule": "token_v3", "alpha": 0.5, "max_new_tokens": 24}
    chain = sc.decode(pair, prompts, block_size=3, **settings)
    tree = sc.decode(pair, prompts, tree=(3, 2, 1), **settings)
    np.testing.assert_array_equal(chain.tokens, tree.tokens)
    assert tree.stats["kept"] > 5
    assert tree.stats["target_calls"] <= chain.stats["target_calls"]


@pytest.mark.laws
def test_sampled_tokens_with_a_real_cache_have_the_targets_distribution():
    """Compares two tokens after one prompt with the target alone; 8,000 rows, top-k 3."""
    pair = decoders("llama3.1_8b", noise=0.3)
    settings = {"temperature": 1.0, "top_k": 3, "max_new_tokens": 3}
    tree = np.asarray(sc.decode(pair, [[3, 4, 5]] * 8_000, tree=(2, 2), **settings).tokens)
    alone = np.asarray(sc.decode(pair, [[3, 4, 5]] * 8_000, method="autoregressive", seed=9, **settings).tokens)
    sequences, counts = np.unique(np.concatenate([tree, alone]), axis=0, return_inverse=True)
    two_counts = np.stack([np.bincount(half, minlength=len(sequences)) for half in np.split(counts.ravel(), 2)])
    common = two_counts.sum(0) >= 20
    expected = two_counts[:, common].sum(0) / 2
    statistic = ((two_counts[:, common] - expected) ** 2 / expected).sum()
    assert conformance.stats.chi2.sf(statistic, common.sum() - 1) > 1e-3 and common.sum() > 5


# --- everything else that a method must do


def pair_of_tables(vocab_size=6):
    return conformance.tabular_pair(*conformance.tables(vocab_size, seed=3))


def test_a_tree_without_branches_is_a_chain():
    assert assemble(pair_of_tables(), tree=(1, 1, 1))[0] == assemble(pair_of_tables(), block_size=3)[0]
    settings = {"rule": "token_v3", "alpha": 0.3, "temperature": 1.0, "max_new_tokens": 12, "seed": 2}
    ways = ({"block_size": 3}, {"tree": (1, 1, 1)})
    chain, tree = (sc.decode(pair_of_tables(), [[0], [1]], **settings, **how) for how in ways)
    np.testing.assert_array_equal(chain.tokens, tree.tokens)


@pytest.mark.laws
def test_a_bonus_from_the_target_follows_only_leaves():
    """Only the token after a leaf comes from `p̃`: a tree of depth 1 writes one or two tokens a round."""
    q_table, p_table = conformance.tables(3, seed=7)
    alpha = conformance.telling_alpha(ALL["token_v3"], q_table, p_table)
    pair, settings = (
        conformance.tabular_pair(q_table, p_table),
        {"rule": "token_v3", "alpha": alpha, "temperature": 1.0},
    )
    out = sc.decode(pair, [[0]] * 40_000, tree=(2,), bonus="target", max_new_tokens=2, **settings)
    law = reference.transitions("token_v3", q_table, p_table, alpha, 1.0)
    target = np.stack([reference.softmax(row) for row in p_table])
    tokens, first_kept = np.asarray(out.tokens), np.asarray(out.stats["rows"]["rounds"]) == 1
    # the first token obeys π; if it was kept, a second one of the same round is the target's
    assert conformance.pooled_p_value(np.bincount(tokens[:, 0], minlength=3), 40_000 * law[0]) > 1e-3
    p_values = []
    for kept, next_law in ((True, target), (False, law)):
        for before in range(3):
            second = tokens[(first_kept == kept) & (tokens[:, 0] == before), 1]
            if len(second) > 100:
                p_values.append(
                    conformance.pooled_p_value(np.bincount(second, minlength=3), len(second) * next_law[before])
                )
    assert len(p_values) > 3 and conformance.holm(p_values) > 1e-3


@pytest.mark.laws
@pytest.mark.parametrize("longest", [1, 2, 4])
def test_rows_end_at_a_limit_below_the_trees_depth(longest):
    """Rows end at the limit and not beyond; drafts after it change nothing before it."""
    settings = {"rule": "spec_decode", "max_new_tokens": longest}
    tree = sc.decode(pair_of_tables(), [[n] for n in range(6)], tree=(2, 1, 1), **settings)
    alone = sc.decode(pair_of_tables(), [[n] for n in range(6)], method="autoregressive", max_new_tokens=longest)
    np.testing.assert_array_equal(tree.tokens, alone.tokens)
    assert (tree.lengths == longest).all()


@pytest.mark.parametrize("failing", ["draft", "target"])
def test_nan_logits_are_found(failing):
    q, p = conformance.tables(5, seed=4)
    {"draft": q, "target": p}[failing][3] = np.nan
    settings = {"temperature": 1.0, "max_new_tokens": 12, "tree": (2, 2)}
    with pytest.warns(UserWarning, match="rows failed"):
        out = sc.decode(conformance.tabular_pair(q, p), [[n % 3] for n in range(100)], **settings)
    assert out.failed and {failure.model for failure in out.failed} == {failing}
    assert all(row.min() >= 0 and row.max() < 5 for row in np.asarray(out.tokens))
    if failing == "target":
        assert not any((row[: length - 1] == 3).any() for row, length in zip(out.tokens, out.lengths, strict=True))


@pytest.mark.parametrize(("given", "said"), [
    ({"tree": ()}, r"tree=\(\) drafts nothing"),
    ({"tree": (2, 0)}, "tree=0"),
    ({"tree": (9, 9, 9, 9)}, "has 7380 tokens, more than 1024: use fewer branches"),
    ({"tree": (1,) * 2000}, r"tree=\(1, 1, 1, 1, 1, 1, 1, 1, \.\.\.\) has 2000 tokens, more than 1024"),
    ({"tree": (33,)}, "has more than 32 tokens after one"),
    ({"tree": (2, *[1] * 29), "max_new_tokens": 5}, "the depth of tree=30 is longer than an output"),
    ({"tree": (2, 2), "block_size": 3}, "cannot be combined with block_size=3"),
    ({"tree": (2, 2), "verify": "block"}, "cannot be combined with verify='block'"),
    ({"tree": (2, 2), "stop": "confidence", "stop_threshold": 0.3}, "cannot be combined with stop='confidence'"),
    ({"tree": (2, 2), "method": "fuzzy", "alpha": 0.3}, "cannot be combined with accept='deferral'"),
    ({"tree": (2, 2), "method": "autoregressive"}, r"'autoregressive' has no tree, got \(2, 2\)"),
])  # fmt: skip
def test_impossible_trees_are_refused_in_one_line(given, said):
    with pytest.raises(ValueError, match=said):
        sc.decode(pair_of_tables(), [[0]], **given)


def test_an_error_names_a_model_that_does_not_support_trees():
    bound = sc.TableLM(jnp.zeros((4, 4)))

    class Plain:
        vocab_size = 4
        prefill, extend, rollback, consumed = Table.prefill, Table.extend, Table.rollback, Table.consumed

    pair = Pair(target=bound, draft=replace(bound, model=Plain()))
    with pytest.raises(ValueError, match="'draft' is a Plain, which does not support trees"):
        sc.decode(pair, [[0]], tree=(2, 1))


@pytest.mark.laws
def test_more_branches_accept_more_and_counts_add_up():
    settings = {"rule": "token_v3", "alpha": 0.3, "temperature": 1.0, "max_new_tokens": 24}
    efficiency = {}
    for tree in ((1, 1), (2, 1), (3, 2)):
        stats = sc.decode(pair_of_tables(), [[n % 6] for n in range(200)], tree=tree, **settings).stats
        efficiency[tree] = stats["block_efficiency"]
        assert stats["examined"] == stats["kept"] + stats["rejected"] and stats["committed"] == 200 * 24
        assert stats["drafted"] <= Tree.of_branching(tree).size * stats["rounds"]
    assert efficiency[1, 1] < efficiency[2, 1] < efficiency[3, 2]


def test_a_tree_that_compiles_for_a_minute_says_so():
    with pytest.warns(UserWarning, match=r"tree=\(32, 31\) has 1024 tokens: its first call compiles for"):
        Settings(tree=(32, 31))
