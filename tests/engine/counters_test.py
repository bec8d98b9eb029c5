"""Tests that compare the counters with a recount in NumPy: deferral rates, unverified blocks, empty blocks."""

from dataclasses import replace

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.names import PER_EXAMPLE
from speccascade_jax.engine.counters import Counters, per_example, summarise
from speccascade_jax.engine.generate import generate
from speccascade_jax.methods import table
from speccascade_jax.methods.build import assemble
from speccascade_jax.methods.settings import Settings
from speccascade_jax.pairs.prompts import make_prompt
from tests.support import conformance, engines, reference
from tests.support.drafters import Repeats

ROWS, LENGTH, VOCAB, STOP = 24, 11, 5, 4
Q, P = conformance.tables(VOCAB, seed=61)
PROMPTS = [[row % 4] for row in range(ROWS)]


def trace(turn):
    return {
        "new": turn.num_new, "drafted": turn.draft.length, "unverified": turn.unverified, "tokens": turn.tokens,
        "active": turn.active, "kept": turn.num_kept, "rejected": turn.rejected, "draft": turn.draft.tokens,
    }  # fmt: skip


METHODS = {
    "token_cascade": {"method": "token_cascade", "alpha": 0.5},
    "token_cascade_log": {"method": "token_cascade_log", "alpha": 1.2},
    "bild": {"method": "bild", "alpha": 0.7, "stop_threshold": 0.7},
    "fuzzy": {"method": "fuzzy", "rule": "fuzzy_tv", "alpha": 0.3, "block_size": 2},
    "target's bonus": {"rule": "token_v3", "alpha": 0.4, "block_size": 2, "bonus": "target"},
    "rule's bonus": {"rule": "token_v3", "alpha": 0.4, "block_size": 2},
    "no bonus": {"rule": "chow", "alpha": 0.5, "block_size": 2, "bonus": "none"},
}


def generated(settings, rows=ROWS):
    """Returns the engine, a generation at temperature 1, and the records of its rounds."""
    pair = conformance.tabular_pair(Q, P)
    sampled_settings = settings | {"temperature": 1.0}
    engine, params = assemble(pair, stop_ids=[STOP], **sampled_settings)
    chosen = Settings.of("test", sampled_settings)
    controls = table.get(chosen.method).controls(chosen, rows)
    prompt = make_prompt(pair, PROMPTS[:rows])
    out = generate(engine, params, prompt, 3, controls=controls, max_new_tokens=LENGTH, record=trace)
    return engine, out, {name: np.asarray(x)[: int(out.num_rounds)] for name, x in out.record.items()}


def recount(name, engine, record, bonus):
    """Returns `η` of every committed position, computed from the rounds' records with the NumPy reference.

    It is the rule's `Σ r q̃`, or 1 if the target wrote the token after a block, or 0 in an unverified block.
    """
    rule, alpha = engine.verifier.rule.name, METHODS[name]["alpha"]
    cold = 0.0 if name == "fuzzy" else None
    etas = []
    for row in range(ROWS):
        last = PROMPTS[row][-1]
        for turn in np.flatnonzero(record["active"][:, row]):
            for slot in range(record["new"][turn, row]):
                if record["unverified"][turn, row]:
                    eta = 0.0
                elif slot >= record["drafted"][turn, row] and bonus == "target":
                    eta = 1.0
                else:
                    r = reference.decision(rule, Q[last], P[last], alpha, 1.0, draft_temperature=cold)
                    eta = (r * reference.scale(Q[last], 1.0 if cold is None else cold)).sum()
                etas.append(eta)
                last = record["tokens"][turn, row, slot]
    return etas


@pytest.mark.parametrize(
    "name", [name if name == "token_cascade" else pytest.param(name, marks=pytest.mark.laws) for name in METHODS]
)
def test_the_deferral_rate_is_the_mean_over_committed_positions(name):
    """Compares with the mean of `η`, the bonus included; in a token cascade this is the target's share of tokens."""
    engine, out, record = generated(METHODS[name])
    measured = summarise(out.stats, out.lengths)
    etas = recount(name, engine, record, engine.bonus)
    assert len(etas) == measured["committed"] == int(out.stats.decided.sum())
    assert measured["deferral_rate"] == pytest.approx(np.mean(etas), abs=1e-5)
    assert 0.02 < measured["deferral_rate"] < 0.98
    if name.startswith("token_cascade"):
        assert measured["unverified_tokens"] > 0
        assert measured["deferral_rate"] == pytest.approx(1 - measured["draft_share"], abs=1e-6)


def test_deferred_drafts_and_those_accepted_anyway_are_counted_by_position():
    """Compares counts of examined drafts that the rule defers, and of those that were kept all the same."""
    _, out, record = generated(METHODS["rule's bonus"])
    deferred, kept = np.zeros(2), np.zeros(2)
    for row in range(ROWS):
        last = PROMPTS[row][-1]
        for turn in np.flatnonzero(record["active"][:, row]):
            before = [last, *record["draft"][turn, row]]
            for slot in range(record["kept"][turn, row] + record["rejected"][turn, row]):
                r = reference.decision("token_v3", Q[before[slot]], P[before[slot]], 0.4, 1.0)[before[slot + 1]]
                deferred[slot] += r
                kept[slot] += r * (slot < record["kept"][turn, row])
            last = record["tokens"][turn, row, record["new"][turn, row] - 1]
    assert (kept > 0).all() and (kept < deferred).all()
    np.testing.assert_allclose(out.stats.deferred_at.sum(0), deferred)
    np.testing.assert_allclose(out.stats.kept_although_deferred_at.sum(0), kept)


def test_target_tokens_after_a_drafter_without_a_distribution_count_as_deferred():
    """Expects that the target's share of tokens is the deferral rate, because at α = 1 all drafts are kept."""
    target, prompt, numbers = sc.TableLM(P), engines.prompts(*[[0, 1, 2, 0]] * 16), {"alpha": 1.0, "temperature": 1.0}
    engine = engines.engine(target.model, Repeats(2, VOCAB), "token_v3")
    out = engines.generated(engine, {}, prompt, LENGTH, target=target.params, numbers=numbers, seed=1)
    measured = summarise(out.stats, out.lengths)
    assert measured["rejected"] == 0 < measured["kept"]
    assert measured["deferral_rate"] == pytest.approx(1 - measured["draft_share"])


@pytest.mark.parametrize("verify", ["token", "block"])
def test_tried_counts_drafts_up_to_the_first_rejection(verify):
    """Compares the count for token-wise and block verification, in rounds that the length limit does not shorten."""
    pair = conformance.tabular_pair(Q, P)
    engine, params = assemble(pair, rule="token_v3", block_size=3, verify=verify)
    out = generate(
        engine, params, make_prompt(pair, PROMPTS), 2, controls=make_controls(ROWS, alpha=0.4, temperature=1.0),
        max_new_tokens=60, most_rounds=8, record=trace,
    )  # fmt: skip
    seen = {name: np.asarray(out.record[name]) for name in ("kept", "rejected", "active")}
    tried = ((seen["kept"] + seen["rejected"]) * seen["active"]).sum(0)
    np.testing.assert_array_equal(out.stats.tried, tried)
    assert (np.asarray(out.stats.examined) == tried).all() == (verify == "token")
    assert (np.asarray(out.stats.examined) <= np.asarray(out.stats.drafted)).all()


# --- measures of METHODS section 9, from counters written by hand


def counters():
    """Returns three rows with blocks of 2; the last row drafted nothing."""
    integers = {
        "rounds": [4, 2, 3], "target_calls": [4, 2, 3], "drafted": [8, 4, 0], "examined": [6, 4, 0], "kept": [5, 3, 0],
        "rejected": [1, 1, 0], "committed": [9, 5, 3], "discarded": [3, 1, 0], "draft_steps": [11, 6, 0],
        "unverified": [0, 0, 0], "unverified_tokens": [0, 0, 0], "decided": [9, 3, 0],
        "examined_at": [[4, 2], [2, 2], [0, 0]], "kept_at": [[3, 2], [2, 1], [0, 0]],
    }  # fmt: skip
    real = {
        "deferred": [2.5, 0.5, 0], "deferred_at": [[2, 1], [0, 1], [0, 0]],
        "kept_although_deferred_at": [[1, 0], [0, 1], [0, 0]],
    }  # fmt: skip
    columns = {name: np.array(column) for name, column in integers.items()}
    return Counters(**columns, **{name: np.array(column, np.float32) for name, column in real.items()})


def test_ratios_by_hand():
    measures = summarise(counters())
    sums = ("drafted", "examined", "kept", "rejected", "committed", "target_calls", "discarded", "draft_steps")
    expected = {name: getattr(counters(), name).sum() for name in sums} | {
        "acceptance_rate": 8 / 10, "rejection_rate": 2 / 10, "draft_utilisation": 8 / 12,
        "rejections_per_token": 2 / 17, "deferral_rate": 3 / 12, "block_efficiency": 17 / 9,
        "average_accepted_length": 8 / 9, "verification_rate": 9 / 17, "discard_rate": 4 / 17, "draft_share": 8 / 17,
    }  # fmt: skip
    for name, value in expected.items():
        assert measures[name] == pytest.approx(value), name
    assert measures["drafted"] + measures["target_calls"] == measures["committed"] + measures["discarded"]
    assert not measures["inconclusive"]
    assert all(type(v) in (int, float, bool, dict, type(None)) for v in measures.values()), "not valid in JSON"
    assert all(type(v) in (int, float) for column in measures["by_position"].values() for v in column), (
        "not valid in JSON"
    )
    assert measures["by_position"] == {
        "examined": [6, 4], "kept": [5, 3], "deferred": [2.0, 2.0], "kept_although_deferred": [1.0, 1.0],
    }  # fmt: skip


def test_ratios_of_chosen_rows():
    by_mask = summarise(counters(), rows=[True, False, False])
    assert by_mask["acceptance_rate"] == pytest.approx(5 / 6) and by_mask["rounds"] == 4
    assert summarise(counters(), rows=[1, 0])["committed"] == 14
    assert summarise(counters(), rows=[1])["by_position"]["kept_although_deferred"] == [0.0, 1.0]


def test_counts_per_example_sum_to_the_total():
    counts, whole = per_example(counters()), summarise(counters())
    assert set(counts) == set(PER_EXAMPLE) and all(sum(counts[name]) == whole[name] for name in PER_EXAMPLE)
    alone, whole = per_example(counters(), draft_alone=True), summarise(counters(), draft_alone=True)
    assert sum(alone["draft_steps"]) == whole["draft_steps"] == 9 and alone["target_calls"] == [0, 0, 0]
    assert whole["verification_rate"] == 0.0


def test_nothing_drafted_is_inconclusive():
    measures = summarise(counters(), rows=[2])
    assert measures["inconclusive"]
    for name in ("acceptance_rate", "rejection_rate", "draft_utilisation", "deferral_rate"):
        assert measures[name] is None
    assert measures["block_efficiency"] == 1.0 and measures["draft_share"] == 0.0
    nothing = summarise(counters(), rows=[False] * 3)
    assert nothing["inconclusive"] and nothing["block_efficiency"] is None


def test_counters_of_another_generation_are_refused():
    assert summarise(counters(), np.array([9, 5, 3]))["committed"] == 17
    with pytest.raises(ValueError, match="belong to different generations"):
        summarise(counters(), np.array([9, 5, 4]))


def test_unverified_tokens_count_as_drafted_and_not_examined():
    unverified_counters = replace(counters(), unverified=np.array([1, 0, 0]), unverified_tokens=np.array([2, 0, 0]))
    with_them, without = summarise(unverified_counters), summarise(counters())
    assert with_them["draft_share"] == (8 + 2) / 17 and without["draft_share"] == 8 / 17
    assert with_them["acceptance_rate"] == without["acceptance_rate"] and with_them["unverified"] == 1
