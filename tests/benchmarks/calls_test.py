"""What a call costs outside its program is the difference of the two, each turn's own."""

import numpy as np
import pytest

from benchmarks import calls, measure
from benchmarks.setting import Bench, Sizes, quick


@pytest.mark.laws
def test_outside_is_the_median_of_the_turns_own_differences(tabular, monkeypatch):
    program = np.array([1.0, 5.0, 2.0, 9.0]) * 1e-3
    seconds = {"decode": program + np.array([0.4, 0.1, 0.2, 0.3]) * 1e-3, "program": program}
    monkeypatch.setattr(measure, "interleave", lambda given, repeats: {name: seconds[name] for name in given})
    rows = calls.run(Bench(quick(Sizes()), tabular))["calls"]
    assert [row["method"] for row in rows] == ["autoregressive", "spec_decode"]
    for row in rows:
        assert row["outside_ms"] == pytest.approx({"value": 0.25, "low": 0.1, "high": 0.4})
        assert row["program_ms"]["value"] == pytest.approx(3.5) and row["calls"] == 4


def test_a_call_and_a_program_that_differ_are_not_compared(tabular, monkeypatch):
    wrong = type("Wrong", (), {"tokens": np.zeros(1)})()
    monkeypatch.setattr(calls, "_programs", lambda bench, method, texts: [lambda: wrong] * len(texts))
    with pytest.raises(RuntimeError, match="different tokens for example 0: nothing to compare"):
        calls.run(Bench(quick(Sizes()), tabular))
