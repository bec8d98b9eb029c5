"""Tests of the methods of the table: their outputs against a naive computation, and the settings they refuse."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.types import Prompt
from speccascade_jax.engine.generate import generate
from speccascade_jax.methods import table
from speccascade_jax.methods.build import assemble, build
from speccascade_jax.methods.generations import SequenceMethod
from speccascade_jax.methods.settings import Settings
from tests.support import conformance, reference
from tests.support.acceptance_heads import head_for

STOP = 5


def run(
    pair, method, rows, *, length=12, seed=0, start=0, stop_ids=None, rule=None, bonus=None, block_size=None, **numbers
):
    """Generates from one-token prompts under a method."""
    engine, params = assemble(pair, method=method, rule=rule, bonus=bonus, block_size=block_size, stop_ids=stop_ids)
    controls = conformance.controls(rows, method=method, rule=rule, **numbers)
    prompt = Prompt(jnp.full((rows, 1), start, jnp.int32), jnp.ones((rows,), jnp.int32))
    return generate(engine, params, prompt, seed, controls=controls, max_new_tokens=length)


def outputs(generation):
    rows = zip(np.asarray(generation.tokens), np.asarray(generation.lengths), strict=True)
    return [row[:length].tolist() for row, length in rows]


# --- one δ, several methods


@pytest.mark.laws
@pytest.mark.parametrize("rule", ["fuzzy_tv"])
def test_methods_of_one_deferral_share_a_distribution_and_order_acceptance(rule):
    """Compares fuzzy decoding, the oracle cascade and the speculative cascade of one δ.

    METHODS section 2, *a second way*.
    """
    q_table, p_table = conformance.tables(3, seed=41)
    pair = conformance.tabular_pair(q_table, p_table)
    alpha = conformance.telling_alpha(sc.RULES[rule], q_table, p_table)
    law = reference.transitions(rule, q_table, p_table, alpha, 1.0)
    rates = {}
    numbers = {"alpha": alpha, "temperature": 1.0, "draft_temperature": 1.0}
    ways = {"speculative": "rule", "fuzzy": "rule", "fuzzy_after_sd": "rule", "oracle_cascade": None}
    for method, bonus in ways.items():
        out = run(pair, method, 20_000, length=6, rule=rule, bonus=bonus, **numbers)
        assert conformance.sequence_p_value(np.asarray(out.tokens), law) > 1e-3, method
        rates[method] = float(out.stats.kept.sum() / out.stats.examined.sum())
    # min(q̃, π) >= (1 − r) q̃ everywhere: replacing from p̃ can only reject more
    assert rates["speculative"] > rates["fuzzy"] + 0.01
    assert abs(rates["speculative"] - rates["fuzzy_after_sd"]) < 0.01
    assert abs(rates["fuzzy"] - rates["oracle_cascade"]) < 0.05  # the methods examine tokens at other prefixes


def test_another_bonus_changes_the_distribution():
    """Negative control: in the published method the bonus comes from the target, and the chi-square test detects it."""
    q_table, p_table = conformance.tables(3, seed=41)
    alpha = conformance.telling_alpha(sc.RULES["fuzzy_tv"], q_table, p_table)
    law = reference.transitions("fuzzy_tv", q_table, p_table, alpha, 1.0)
    numbers = {"alpha": alpha, "temperature": 1.0, "draft_temperature": 1.0}
    pair = conformance.tabular_pair(q_table, p_table)
    out = run(pair, "fuzzy", 20_000, length=6, rule="fuzzy_tv", block_size=1, **numbers)
    assert conformance.sequence_p_value(np.asarray(out.tokens), law) < 1e-6


def test_random_accept_accepts_the_share_alpha():
    q_table, p_table = conformance.tables(4, seed=42)
    out = run(conformance.tabular_pair(q_table, p_table), "random_accept", 4000, alpha=0.7, temperature=1.0)
    rate = float(out.stats.kept.sum() / out.stats.examined.sum())
    assert abs(rate - 0.7) < 4 * np.sqrt(0.7 * 0.3 / float(out.stats.examined.sum()))


@pytest.mark.parametrize(("tau", "end"), [(0.0, "p"), (1.01, "q")])
def test_extreme_thresholds_of_fuzzy_give_the_two_models(tau, end):
    tables = dict(zip("qp", conformance.tables(8, seed=43), strict=True))
    pair = conformance.tabular_pair(tables["q"], tables["p"])
    out = run(pair, "fuzzy", 3, rule="fuzzy_js", bonus="rule", alpha=tau)
    expected, last = [], 0
    for _ in range(12):
        last = int(np.argmax(tables[end][last]))
        expected.append(last)
    assert outputs(out) == [expected] * 3


def test_the_published_baseline_is_not_lossless():
    """A greedy draft divided by the soft `q` has its own distribution, far from the target's (METHODS section 5)."""
    q_table, p_table = conformance.tables(3, seed=44)
    pair = conformance.tabular_pair(q_table, p_table)
    out = run(pair, "sd_reference", 20_000, length=6, bonus="rule", temperature=1.0)
    published = reference.transitions("sd_reference", q_table, p_table, 0.0, 1.0, draft_temperature=0.0)
    target = reference.transitions("spec_decode", q_table, p_table, 0.0, 1.0)
    assert conformance.sequence_p_value(np.asarray(out.tokens), published) > 1e-3
    assert conformance.sequence_p_value(np.asarray(out.tokens), target) < 1e-6


# --- cascades that are not speculative


def algorithm_2(q_table, p_table, sure, cap, length, last=0):
    """Runs Algorithm 2 of Narasimhan et al., 2024, greedily: `(tokens, target calls)`.

    After `cap` drafted tokens the target writes one.
    """
    tokens, calls, drafted = [], 0, 0
    while len(tokens) < length and (not tokens or tokens[-1] != STOP):
        if sure(q_table[last]) and drafted < cap:
            last, drafted = int(np.argmax(q_table[last])), drafted + 1
        else:
            last, drafted, calls = int(np.argmax(p_table[last])), 0, calls + 1
        tokens.append(last)
    return tokens, calls


@pytest.mark.parametrize(("method", "sure", "alphas"), [
    ("token_cascade", lambda a: lambda row: reference.softmax(row).max() >= 1 - a, (0.0, 0.4, 0.6, 0.75, 1.0)),
    ("token_cascade_log", lambda a: lambda row: reference.entropy(reference.softmax(row)) <= a, (0.0, 1.0, 1.6, 3.0)),
])  # fmt: skip
def test_token_cascade_equals_the_naive_algorithm(method, sure, alphas):
    called = set()
    for seed in range(6):
        q_table, p_table = conformance.tables(9, seed=50 + seed)
        pair = conformance.tabular_pair(q_table, p_table)
        for alpha in alphas:
            out = run(pair, method, 2, length=40, alpha=alpha, stop_ids=[STOP], block_size=4)
            tokens, calls = algorithm_2(q_table, p_table, sure(alpha), 4, 40)
            assert outputs(out) == [tokens] * 2
            assert np.asarray(out.stats.target_calls).tolist() == [calls] * 2
            called.add(calls == 0)
    assert called == {True, False}


def test_token_cascade_samples_from_the_model_that_the_rule_selects():
    """Enumerates sequences of 5 tokens: the draft's distribution if it is sure and under the cap, else the target's."""
    q_table, p_table = conformance.tables(3, seed=45)
    alpha, cap, length = 0.45, 2, 5
    sure = [reference.softmax(row).max() >= 1 - alpha for row in q_table]
    assert set(sure) == {True, False}
    chain = {(0, 0): {(): 1.0}}  # (last token, draft tokens in a row) -> tokens so far -> probability
    for _ in range(length):
        new: dict = {}
        for (last, drafted), paths in chain.items():
            drafts = sure[last] and drafted < cap
            law = reference.softmax((q_table if drafts else p_table)[last])
            for v in range(3):
                to = new.setdefault((v, drafted + 1 if drafts else 0), {})
                for path, mass in paths.items():
                    to[(*path, v)] = to.get((*path, v), 0.0) + mass * law[v]
        chain = new
    expected = np.zeros(3**length)
    for paths in chain.values():
        for path, mass in paths.items():
            expected[int("".join(map(str, path)), 3)] += mass
    pair, rows = conformance.tabular_pair(q_table, p_table), 20_000
    out = run(pair, "token_cascade", rows, length=length, alpha=alpha, temperature=1.0, block_size=cap)
    index = (np.asarray(out.tokens) * 3 ** np.arange(length - 1, -1, -1)).sum(-1)
    assert conformance.pooled_p_value(np.bincount(index, minlength=3**length), expected * rows) > 1e-3


def big_little(q_table, p_table, fallback, rollback, cap, length):
    """Runs Big-Little greedily: `(tokens, target calls, unverified)`."""
    tokens, calls, last = [], 0, 0
    while len(tokens) < length and (not tokens or tokens[-1] != STOP):
        block, token = [], last
        while len(block) < min(cap, length - len(tokens)) and reference.softmax(q_table[token]).max() >= 1 - fallback:
            token = int(np.argmax(q_table[token]))
            block.append(token)
            if token == STOP:
                break
        if block and (block[-1] == STOP or len(tokens) + len(block) == length):
            return tokens + block, calls, True
        calls += 1
        for x in block:
            if -np.log(reference.softmax(p_table[last])[x]) > rollback:
                break
            tokens.append(x)
            last = x
        last = int(np.argmax(p_table[last]))
        tokens.append(last)
    return tokens[:length], calls, False


def test_bild_equals_the_naive_algorithm():
    seen = set()
    for seed in range(8):
        q_table, p_table = conformance.tables(9, seed=60 + seed)
        pair = conformance.tabular_pair(q_table, p_table)
        for fallback, rollback in ((0.5, 1.0), (0.7, 1.5), (0.8, 0.3), (1.0, 2.5)):
            numbers = {"alpha": rollback, "stop_threshold": fallback}
            out = run(pair, "bild", 1, length=25, stop_ids=[STOP], block_size=4, **numbers)
            tokens, calls, unverified = big_little(q_table, p_table, fallback, rollback, 4, 25)
            assert outputs(out) == [tokens]
            assert int(out.stats.target_calls[0]) == calls and bool(out.stats.unverified[0]) == unverified
            seen.add((unverified, int(out.stats.rejected[0]) > 0))
    assert seen == {(a, b) for a in (False, True) for b in (False, True)}


# --- unverified blocks


@pytest.mark.parametrize("method", ["token_cascade", "bild"])
def test_unverified_tokens_are_counted(method):
    q_table, p_table = conformance.tables(6, seed=46)
    numbers = {"alpha": 0.6, "temperature": 1.0} | ({"stop_threshold": 0.6} if method == "bild" else {})
    out = run(conformance.tabular_pair(q_table, p_table), method, 500, stop_ids=[STOP], block_size=4, **numbers)
    s = {name: np.asarray(getattr(out.stats, name)) for name in out.stats.__dataclass_fields__}
    assert 0 < s["unverified"].sum() < 500 and s["unverified"].max() == 1
    np.testing.assert_array_equal(s["drafted"] + s["target_calls"], s["committed"] + s["discarded"])
    np.testing.assert_array_equal(s["target_calls"] + s["unverified"], s["rounds"])
    np.testing.assert_array_equal(s["kept"] + s["rejected"], s["examined"])
    by_target = s["committed"] - s["kept"] - s["unverified_tokens"]  # the target writes at most one token per call
    assert (by_target >= 0).all() and (by_target <= s["target_calls"]).all()
    assert ((s["unverified_tokens"] > 0) == (s["unverified"] > 0)).all()


def test_an_unverified_final_block_calls_no_target():
    """A draft that is always sure ends its row at once: a broken target is never called."""
    q_table, p_table = conformance.tables(6, seed=47)
    pair = conformance.tabular_pair(q_table, np.full_like(p_table, np.nan))
    out = run(pair, "token_cascade", 3, length=4, alpha=1.0, block_size=4)
    assert np.asarray(out.stats.target_calls).tolist() == [0, 0, 0] and (np.asarray(out.failed_at) == -1).all()
    assert np.asarray(out.lengths).tolist() == [4, 4, 4]
    verified = run(pair, "speculative", 1, length=4)
    assert (np.asarray(verified.failed_at) >= 0).any()


# --- meaningless settings


@pytest.mark.parametrize(("arguments", "message"), [
    ({"method": "fuzy"}, "unknown method 'fuzy': did you mean fuzzy"),
    ({"method": "bild", "alpha": 1.0}, "'bild' needs stop_threshold"),
    ({"method": "fuzzy", "alpha": 0.1, "stop_threshold": 0.5}, r"'fuzzy' has no stop_threshold \(0.5\)"),
    ({"method": "token_cascade", "alpha": 0.1, "stop_threshold": 0.5}, "its alpha is the threshold"),
    ({"method": "token_cascade", "alpha": 0.1, "rule": "diff"}, "'token_cascade' takes rule chow, not 'diff'"),
    ({"method": "oracle_cascade", "alpha": 0.1, "block_size": 3}, "'oracle_cascade' has a fixed block size of 1"),
    ({"method": "oracle_cascade", "alpha": 0.1, "rule": "lossy"}, "is not a deferral rule"),
    ({"method": "random_accept", "alpha": 1.5}, r"alpha=1.5 is outside the domain \[0, 1\] of rule 'random_accept'"),
    ({"method": "fuzzy"}, "'fuzzy_js' needs alpha"),
    ({"method": "stop_confidence", "stop_threshold": -0.1}, "stop_threshold=-0.1 is outside 0 … 1"),
    ({"method": "stop_confidence", "stop_threshold": [1.5]}, "stop_threshold=1.5 is outside 0 … 1"),
    ({"method": "stop_confidence", "stop_threshold": "no"}, "stop_threshold='no' is not a number"),
    ({"accept": "soft_ratio"}, "'soft_ratio' works only with rule 'sd_reference', got 'spec_decode'"),
])  # fmt: skip
def test_meaningless_settings_are_refused_before_compiling(arguments, message):
    pair = conformance.tabular_pair(*conformance.tables(4, seed=1))
    with pytest.raises(ValueError, match=message):
        sc.decode(pair, [[0]], **arguments)


@pytest.mark.parametrize(
    ("method", "outside", "inside", "said"),
    [
        *(
            (method, (70, -0.01, [0.5, 1.01]), (0, 1), rf"is outside 0 … 1; method '{method}': it drafts")
            for method in ("specdecpp", "specdecpp_lag0", "stop_confidence", "stop_cumulative_confidence")
        ),
        ("stop_entropy", (-1,), (0, 12), r"is outside 0 … inf; .* the entropy of q .*\(nats\)"),
    ],
)
def test_a_threshold_outside_the_range_of_its_policy_is_refused(method, outside, inside, said):
    for value in outside:
        with pytest.raises(ValueError, match=rf"stop_threshold=.* {said}"):
            conformance.controls(2, method=method, stop_threshold=value)
    assert conformance.controls(2, method=method, stop_threshold=[*inside]).stop_threshold.tolist() == [*inside]


def test_every_method_can_be_built():
    pair = conformance.tabular_pair(*conformance.tables(5, seed=48))
    pair = dataclasses.replace(pair, head=head_for(pair))
    for name, method in table.METHODS.items():
        settings = Settings(method=name)
        assert method.name == name and method.heading(settings)
        whole_outputs = isinstance(method, SequenceMethod)
        assert set(build(pair, settings).params) == ({"draft"} if whole_outputs else {"drafter"}) | {"target"}
        alpha = None if method.alpha(settings) is None else 0.4
        threshold = 0.5 if method.threshold(settings) else None
        conformance.controls(2, method=name, alpha=alpha, stop_threshold=threshold)
    out = sc.decode(pair, [[0]], method="bild", alpha=2.0, stop_threshold=1.0, temperature=1.0, max_new_tokens=9)
    assert out.lengths.tolist() == [9] and out.stats["draft_share"] > 0


def test_every_rule_is_a_method():
    pair = conformance.tabular_pair(*conformance.tables(5, seed=48))
    assert set(sc.RULES) <= set(sc.METHODS)
    # these two baselines are methods that differ from the rules of the same name
    different = {"sd_reference", "random_accept"}
    for name, rule in sc.RULES.items():
        if name not in different:
            engine, _ = assemble(pair, method=name)
            same, _ = assemble(pair, rule=name)
            assert engine == same and engine.verifier.rule is rule
