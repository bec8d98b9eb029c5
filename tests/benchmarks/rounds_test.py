"""What the section `rounds` makes of times that are known."""

from unittest import mock

import numpy as np
import pytest

from benchmarks import command, measure, rounds
from benchmarks.setting import SPEC_DECODE, Bench

TURNS = {
    "engine": (0.5, 0.7, 0.6),
    "prefill": (0.1, 0.1, 0.2),
    "draft": (0.01, 0.02, 0.03),
    "target": (0.05, 0.06, 0.04),
}


def test_calls_are_counted_steps_times_measured_ones(tabular):
    settings = command.Sizes(pair="tabular", max_new_tokens=4, examples=1, batches=(1,), loop_seconds=1e-4)
    loop = measure.Loop(lambda count: None, 1)
    with (
        mock.patch.object(rounds, "call_loops", lambda bench, block: {"draft": loop, "target": loop}),
        mock.patch.object(
            measure, "interleave", lambda calls, repeats: {name: np.array(TURNS[name]) for name in calls}
        ),
    ):
        row = rounds._row(Bench(settings, tabular), SPEC_DECODE, 0.0)
    expected = [
        row["draft_steps"] * d + row["target_calls"] * t for d, t in zip(TURNS["draft"], TURNS["target"], strict=True)
    ]
    inside = np.subtract(TURNS["engine"], TURNS["prefill"])
    assert row["draft_steps"] >= row["target_calls"] >= 1
    assert row["calls_ms"]["value"] == pytest.approx(1e3 * np.median(expected))  # no sum of medians
    assert row["engine_ms"]["value"] == pytest.approx(1e3 * np.median(inside))
    assert row["ratio"] == pytest.approx(measure.spread(inside / np.array(expected)))
