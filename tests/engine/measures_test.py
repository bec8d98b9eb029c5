"""The measures of METHODS section 9 from counters written by hand."""

from dataclasses import replace

import numpy as np
import pytest

from speccascade_jax.core.names import PER_EXAMPLE
from speccascade_jax.engine.counters import Counters
from speccascade_jax.engine.measures import per_example, summarise


def counters():
    """Three rows with blocks of 2; the last row drafted nothing."""
    return Counters(
        rounds=np.array([4, 2, 3]),
        target_calls=np.array([4, 2, 3]),
        drafted=np.array([8, 4, 0]),
        examined=np.array([6, 4, 0]),
        kept=np.array([5, 3, 0]),
        rejected=np.array([1, 1, 0]),
        committed=np.array([9, 5, 3]),
        discarded=np.array([3, 1, 0]),
        draft_steps=np.array([11, 6, 0]),
        unverified=np.zeros(3, int),
        unverified_tokens=np.zeros(3, int),
        deferred=np.array([2.5, 0.5, 0.0], np.float32),
        decided=np.array([9, 3, 0]),
        examined_at=np.array([[4, 2], [2, 2], [0, 0]]),
        kept_at=np.array([[3, 2], [2, 1], [0, 0]]),
        deferred_at=np.array([[2.0, 1.0], [0.0, 1.0], [0, 0]], np.float32),
        kept_although_deferred_at=np.array([[1.0, 0.0], [0.0, 1.0], [0, 0]], np.float32),
    )


def test_ratios_by_hand():
    found = summarise(counters())
    sums = ("drafted", "examined", "kept", "rejected", "committed", "target_calls", "discarded", "draft_steps")
    expected = {name: getattr(counters(), name).sum() for name in sums} | {
        "acceptance_rate": 8 / 10,
        "rejection_rate": 2 / 10,
        "draft_utilisation": 8 / 12,
        "rejections_per_token": 2 / 17,
        "deferral_rate": 3 / 12,
        "block_efficiency": 17 / 9,
        "average_accepted_length": 8 / 9,
        "verification_rate": 9 / 17,
        "discard_rate": 4 / 17,
        "draft_share": 8 / 17,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value), name
    assert found["drafted"] + found["target_calls"] == found["committed"] + found["discarded"]
    assert not found["inconclusive"]
    assert all(type(v) in (int, float, bool, dict, type(None)) for v in found.values()), "no JSON"
    assert all(type(v) in (int, float) for column in found["by_position"].values() for v in column), "no JSON"
    assert found["by_position"] == {
        "examined": [6, 4],
        "kept": [5, 3],
        "deferred": [2.0, 2.0],
        "kept_although_deferred": [1.0, 1.0],
    }


def test_rows_choose():
    by_mask = summarise(counters(), rows=[True, False, False])
    assert by_mask["acceptance_rate"] == pytest.approx(5 / 6) and by_mask["rounds"] == 4
    assert summarise(counters(), rows=[1, 0])["committed"] == 14
    assert summarise(counters(), rows=[1])["by_position"]["kept_although_deferred"] == [0.0, 1.0]


def test_counts_of_single_examples_sum_to_the_whole_and_a_draft_alone_takes_draft_steps():
    found, whole = per_example(counters()), summarise(counters())
    assert set(found) == set(PER_EXAMPLE) and all(sum(found[name]) == whole[name] for name in PER_EXAMPLE)
    alone, whole = per_example(counters(), draft_alone=True), summarise(counters(), draft_alone=True)
    assert sum(alone["draft_steps"]) == whole["draft_steps"] == 9 and alone["target_calls"] == [0, 0, 0]
    assert whole["verification_rate"] == 0.0


def test_nothing_drafted_is_inconclusive():
    found = summarise(counters(), rows=[2])
    assert found["inconclusive"]
    for name in ("acceptance_rate", "rejection_rate", "draft_utilisation", "deferral_rate"):
        assert found[name] is None
    assert found["block_efficiency"] == 1.0 and found["draft_share"] == 0.0
    nothing = summarise(counters(), rows=[False] * 3)
    assert nothing["inconclusive"] and nothing["block_efficiency"] is None


def test_counters_of_another_generation_are_refused():
    assert summarise(counters(), np.array([9, 5, 3]))["committed"] == 17
    with pytest.raises(ValueError, match="committed tokens and lengths disagree"):
        summarise(counters(), np.array([9, 5, 4]))


def test_unverified_tokens_are_the_drafts_and_nobody_examined_them():
    given = replace(counters(), unverified=np.array([1, 0, 0]), unverified_tokens=np.array([2, 0, 0]))
    with_them, without = summarise(given), summarise(counters())
    assert with_them["draft_share"] == (8 + 2) / 17 and without["draft_share"] == 8 / 17
    assert with_them["acceptance_rate"] == without["acceptance_rate"] and with_them["unverified"] == 1
