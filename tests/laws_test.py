"""Exactness tests: by sampling, every rule's output has distribution `π` under every verification (METHODS 2)."""

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.methods.settings import Arm, Level
from speccascade_jax.pairs.pair import Pair
from tests.support import conformance, reference

many_rows = pytest.mark.usefixtures("optimised")  # these tests run longer than they compile

ALL = conformance.REPRESENTATIVE
SAMPLED = [rule for rule in ALL.values() if not rule.greedy_only]
WAYS = {"token": {"block_size": 3}, "block": {"block_size": 3, "verify": "block"}, "tree": {"tree": (2, 2)}}

QUICK = [("spec_decode", "token"), ("token_v3", "block")]
# `opt`: alone, a deferral rule that decides for a whole position is traced as such
ALONE = ["opt", *(rule.name for rule in SAMPLED if rule.deferral is None)]
OTHERS = [(name, way) for name in ALONE for way in WAYS if (name, way) not in QUICK]


@pytest.mark.sample(5)
@many_rows
@pytest.mark.parametrize(("name", "way"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.laws) for case in OTHERS)])
def test_whole_sequences_have_the_rules_distribution(name, way):
    conformance.check_sequence_law(ALL[name], **WAYS[way])


@pytest.mark.sample(2)
@many_rows
@pytest.mark.laws
@pytest.mark.parametrize(("way", "rows"), [("token", 4_000), ("block", 3_000), ("tree", 2_000)])
def test_rows_under_different_deferral_rules_have_their_distributions(way, rows):
    rules = [rule for rule in SAMPLED if rule.deferral is not None]
    conformance.check_sequence_laws(rules, rows=rows, **WAYS[way])


@pytest.mark.sample(3)
@many_rows
@pytest.mark.laws
@pytest.mark.parametrize(("name", "engine"), [
    ("spec_decode", {"block_size": 5}),
    ("token_v3", {"block_size": 5}),
    ("token_v3", {"block_size": 7, "verify": "block"}),
    ("token_v3", {"block_size": 7, "verify": "block", "bonus": "none"}),
    ("token_v3", {"tree": (3, 1, 2)}),  # a tree with three siblings at first, deeper than it is wide
    ("token_v3", {"tree": (3, 1, 2), "bonus": "none"}),
])  # fmt: skip
def test_transitions_at_every_position_have_the_rules_distribution(name, engine):
    conformance.check_transition_law(ALL[name], **engine)


@pytest.mark.sample(2)
@pytest.mark.laws
@pytest.mark.parametrize(("name", "engine"), [
    ("token_v3", {"block_size": 1}),
    ("token_v3", {"block_size": 2, "bonus": "none"}),
    ("lossy", {"block_size": 2, "bonus": "none"}),
    ("token_v3", {"block_size": 2, "accept": "deferral"}),
    ("bild_star", {"block_size": 2, "accept": "deferral"}),
])  # fmt: skip
def test_whole_sequences_in_short_blocks_have_the_rules_distribution(name, engine):
    conformance.check_sequence_law(ALL[name], **engine)


@pytest.mark.laws
@pytest.mark.parametrize(("name", "way"), [
    ("spec_decode", "token"),
    ("token_v3", "token"),
    ("bild_star", "token"),
    ("token_v3", "block"),
    ("spec_decode", "tree"),  # further siblings are the next most likely tokens, each as sure as the first
])  # fmt: skip
def test_a_greedy_draft_keeps_the_rules_distribution(name, way):
    conformance.check_cold_draft_law(ALL[name], **WAYS[way])


@pytest.mark.laws
@pytest.mark.parametrize("engine", [
    {"verify": "block", "block_size": 5, "stop": "confidence", "stop_threshold": 0.4},
    {"verify": "block", "block_size": 5, "stop": "cumulative_confidence", "stop_threshold": 0.7},
    {"verify": "block", "block_size": 5, "stop": "entropy", "stop_threshold": 1.0},
    {"tree": (2, 1, 1)},
])  # fmt: skip
def test_stop_ids_and_early_ends_keep_the_rules_distribution(engine):
    """After a stop id only stop ids follow: the distribution is a chain's with an absorbing state."""
    q_table, p_table = conformance.tables(3, seed=31)
    settings = {"rule": "token_v3", "alpha": 0.4, "temperature": 1.0, "max_new_tokens": 6, "stop_ids": [2], "seed": 8}
    out = sc.decode(conformance.tabular_pair(q_table, p_table), [[0]] * 20_000, **settings, **engine)
    assert out.stats["kept"] and out.stats["rejected"]
    assert "stop" not in engine or len(set(np.asarray(out.stats["rows"]["drafted"]))) > 3
    law = reference.transitions("token_v3", q_table, p_table, 0.4, 1.0)
    assert conformance.stopped_p_value(out.tokens, out.lengths, 2, law) > 1e-3


# one of each form: programs differ between forms, not between the rules of one form
FORMS = ("spec_decode", "lossy", "lossy_tuned", "lossy_greedy", "opt", "token_v3", "bild_star", "fuzzy_js_top2")


@pytest.mark.laws
@pytest.mark.parametrize("name", FORMS)
def test_greedy_decoding_equals_the_reference(name):
    conformance.check_greedy(ALL[name])


SWEPT = [
    ("token_v3", "block"),
    ("token_v3", "tree"),
    *(pytest.param(n, "token", marks=pytest.mark.laws) for n in FORMS),
]


@pytest.mark.parametrize(("name", "way"), SWEPT)
def test_a_sweep_of_numbers_compiles_once(name, way):
    conformance.check_one_compilation(ALL[name], **WAYS[way])


@pytest.mark.laws
@pytest.mark.parametrize("way", ["block", "tree"])
def test_a_row_is_the_same_streamed_traced_and_among_others(way):
    """A row is the same streamed, traced and next to others; its counts are those of its trace."""
    pair = conformance.tabular_pair(*conformance.tables(6, seed=3))
    settings = {"rule": "token_v3", "alpha": 0.4, "temperature": 1.0, "max_new_tokens": 15, "seed": 4} | WAYS[way]
    out = sc.decode(pair, [[n] for n in range(6)], trace=True, **settings)
    for row, trace in enumerate(out.trace):
        streamed = [token.id for token in sc.stream(pair, [row], example_id=row, **settings)]
        assert streamed == out.tokens[row, : out.lengths[row]].tolist()
        for name in ("rounds", "kept", "rejected", "examined", "committed", "drafted"):
            assert trace.counts()[name] == out.stats["rows"][name][row], name


# --- block verification in hierarchies, next to other drafters, and with planned lengths
# (`tests/rules/block_wise_test.py` checks single blocks exactly)

SMALL, MIDDLE = conformance.tables(3, seed=21)
LARGE = conformance.tables(3, seed=22)[1]


def decoded(**settings):
    """Returns tokens `[20000, 6]` after one prompt."""
    small, middle, large = (sc.TableLM(table) for table in (SMALL, MIDDLE, LARGE))
    pair = Pair(target=large, draft=small, others={"middle": middle})
    return np.asarray(sc.decode(pair, [[0]] * 20_000, max_new_tokens=6, **settings).tokens)


@pytest.mark.laws
@pytest.mark.parametrize(("above", "below"), [("token", "block"), ("block", "token"), ("block", "block")])
def test_a_block_verified_level_passes_up_its_distribution(above, below):
    level = Level(model="middle", budget=4, block_size=3, rule="opt", alpha=0.2, temperature=0.7, verify=below)
    tokens = decoded(rule="token_v3", alpha=0.4, drafters=(level,), temperature=0.9, verify=above, seed=2)
    handed = reference.transitions("opt", SMALL, MIDDLE, 0.2, 0.7)
    law = reference.law_over_handed("token_v3", np.log(np.maximum(handed, 1e-300)), handed, LARGE, 0.4, 0.9)
    assert conformance.sequence_p_value(tokens, law) > 1e-3


ARMS = ("draft", Arm(drafter="middle", block_size=2), "autoregressive")


@pytest.mark.laws
@pytest.mark.parametrize("drafters", [{"drafters": ARMS, "choose": "random"}, {"block_size": "auto"}])
def test_selected_drafters_and_planned_lengths_keep_the_distribution(drafters):
    law = reference.transitions("spec_decode", SMALL, LARGE, 0.0, 1.0)
    assert conformance.sequence_p_value(decoded(temperature=1.0, verify="block", **drafters), law) > 1e-3
