"""The law of block verification by sampling, through the engine: rules, blocks that end early, stop ids, hierarchies.

`tests/rules/block_wise_test.py` has it exactly, one block at a time.
"""

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.engine.generate import compilations
from speccascade_jax.methods.build import assemble
from speccascade_jax.methods.settings import Arm, Level
from speccascade_jax.pairs.pair import Pair
from tests.support import blocks, conformance, mixed_rules, reference

many_rows = pytest.mark.usefixtures("optimised")  # running costs more there than compiling

ALL = conformance.REPRESENTATIVE
SAMPLED = [rule for rule in ALL.values() if not rule.greedy_only]
QUICK = ("token_v3",)
OTHERS = [
    "spec_decode",
    "opt",
    *(rule.name for rule in SAMPLED if rule.deferral is None and rule.name != "spec_decode"),
]


@many_rows
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.laws) for name in OTHERS)])
def test_whole_sequences(name):
    conformance.check_sequence_law(ALL[name], 3, verify="block")


@many_rows
@pytest.mark.laws
def test_whole_sequences_of_deferral_rules_each_row_under_its_own():
    rules = [rule for rule in SAMPLED if rule.deferral is not None]
    mixed_rules.check_sequence_laws(rules, 3, rows=5_000, verify="block")


@many_rows
@pytest.mark.laws
@pytest.mark.parametrize("bonus", ["none", "rule"])
def test_transitions_at_every_position_in_long_blocks(bonus):
    conformance.check_transition_law(ALL["token_v3"], block=7, verify="block", bonus=bonus)


@pytest.mark.laws
def test_a_greedy_draft_under_a_sampled_target():
    q_table, p_table = conformance.tables(3, seed=7)
    alpha = conformance.telling_alpha(ALL["token_v3"], q_table, p_table)
    pair = conformance.tabular_pair(q_table, p_table)
    engine, params = assemble(pair, rule="token_v3", block_size=3, verify="block")
    tokens = conformance.run_rows(engine, params, 10_000, alpha, [(1.0, 1.0)], length=6, draft_temperature=0.0)
    law = reference.transitions("token_v3", q_table, p_table, alpha, 1.0, draft_temperature=0.0)
    assert conformance.sequence_p_value(tokens[0], law) > 1e-3


@pytest.mark.laws
@pytest.mark.parametrize(("stop", "threshold"), [("confidence", 0.4), ("cumulative_confidence", 0.7), ("entropy", 1.0)])
def test_blocks_that_end_early_and_stop_ids(stop, threshold):
    """Rows end at token 2; behind it stands more of it, here: the law is a chain's with an absorbing state."""
    q_table, p_table = conformance.tables(3, seed=31)
    pair, alpha = conformance.tabular_pair(q_table, p_table), 0.4
    given = {"rule": "token_v3", "alpha": alpha, "temperature": 1.0, "max_new_tokens": 6, "block_size": 5}
    given |= {"stop": stop, "stop_threshold": threshold, "stop_ids": [2], "seed": 8, "verify": "block"}
    out = sc.decode(pair, [[0]] * 20_000, **given)
    beyond = np.arange(6)[None] >= out.lengths[:, None]
    assert beyond.any() and out.stats["kept"] and out.stats["rejected"]
    assert len(set(np.asarray(out.stats["rows"]["drafted"]))) > 3
    law = reference.transitions("token_v3", q_table, p_table, alpha, 1.0)
    law[2] = [0, 0, 1]
    assert conformance.sequence_p_value(np.where(beyond, 2, out.tokens), law) > 1e-3


def three():
    """A smallest, a middle and a largest tabular model over V = 3."""
    q, middle = conformance.tables(3, seed=21)
    large = conformance.tables(3, seed=22)[1]
    models = [sc.TableLM(table) for table in (q, middle, large)]
    return (q, middle, large), Pair(target=models[2], draft=models[0], others={"middle": models[1]})


@pytest.mark.laws
@pytest.mark.parametrize(("above", "below"), [("token", "block"), ("block", "token"), ("block", "block")])
def test_a_block_verified_level_hands_up_its_law(above, below):
    (small, middle, large), pair = three()
    level = Level(model="middle", budget=4, block_size=3, rule="opt", alpha=0.2, temperature=0.7, verify=below)
    given = {"rule": "token_v3", "alpha": 0.4, "drafters": (level,), "temperature": 0.9, "max_new_tokens": 6}
    out = sc.decode(pair, [[0]] * 20_000, verify=above, seed=2, **given)
    handed = reference.transitions("opt", small, middle, 0.2, 0.7)
    law = reference.law_over_handed("token_v3", np.log(np.maximum(handed, 1e-300)), handed, large, 0.4, 0.9)
    assert conformance.sequence_p_value(np.asarray(out.tokens), law) > 1e-3


@pytest.mark.laws
def test_drafters_beside_each_other_and_lengths_that_are_planned():
    (q, _, p), pair = three()
    law = conformance.law_by_rule(ALL["spec_decode"], q, p, 0.0, 1.0, 1.0)
    given = {"temperature": 1.0, "max_new_tokens": 6, "verify": "block"}
    arms = ("draft", Arm(drafter="middle", block_size=2), "autoregressive")
    out = sc.decode(pair, [[0]] * 20_000, drafters=arms, choose="random", **given)
    assert conformance.sequence_p_value(np.asarray(out.tokens), law) > 1e-3
    out = sc.decode(pair, [[0]] * 20_000, block_size="auto", **given)
    assert conformance.sequence_p_value(np.asarray(out.tokens), law) > 1e-3


@pytest.mark.laws
def test_a_stream_is_what_is_decoded_and_neighbours_change_no_row():
    pair = conformance.tabular_pair(*conformance.tables(6, seed=3))
    given = {"rule": "token_v3", "alpha": 0.4, "temperature": 1.0, "verify": "block", "max_new_tokens": 20, "seed": 4}
    out = sc.decode(pair, [[n] for n in range(6)], **given)
    for row in range(6):
        streamed = [token.id for token in sc.stream(pair, [row], example_id=row, **given)]
        assert streamed == out.tokens[row, : out.lengths[row]].tolist()


def test_a_sweep_of_numbers_compiles_once():
    pair = conformance.tabular_pair(*conformance.tables(6, seed=3))
    compiled = None
    for alpha, temperature, seed in ((0.2, 1.0, 0), (0.7, 0.5, 3), (0.4, 0.0, 9)):
        given = {"rule": "token_v3", "alpha": alpha, "temperature": temperature, "seed": seed, "verify": "block"}
        sc.decode(pair, [[0], [1]], max_new_tokens=12, **given)
        compiled = compiled or compilations()
    assert compilations() == compiled


@pytest.mark.laws
@pytest.mark.parametrize("bug", [None, *blocks.BUGS])
def test_planted_bugs_are_found(bug):
    rng = np.random.default_rng(55)  # tables on which the replacement's bug moves the law by 4%, where others give 1%
    q_table, p_table = (rng.normal(size=(3, 3)).astype(np.float32) for _ in range(2))
    law = reference.transitions("spec_decode", q_table, p_table, 0.0, 1.0)
    pair = conformance.tabular_pair(q_table, p_table)
    engine, params = assemble(pair, rule="spec_decode", block_size=4, verify="block")
    engine = engine if bug is None else blocks.with_verifier(engine, blocks.BUGS[bug])
    tokens = conformance.run_rows(engine, params, 40_000, 0.0, [(1.0, 1.0)], length=5)
    found = conformance.sequence_p_value(tokens[0], law)
    assert found > 1e-3 if bug is None else found < 1e-6
