"""Interleaving: who runs when, and what the ratios mean."""

from types import SimpleNamespace

import numpy as np
import pytest

from speccascade_jax.evaluation import latency


class _Bench:
    """Fake runs that advance a fake clock and write down who ran."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def run(self, name, seconds, tokens=4):
        def call(example, trial):
            self.now += seconds * (1 + example) * (1 + trial)
            self.log.append((trial, example, name))
            stats = SimpleNamespace(draft_steps=np.asarray([10 * trial + example]), target_calls=np.asarray([tokens]))
            return SimpleNamespace(lengths=np.asarray([tokens]), stats=stats)

        return call

    def clock(self):
        return self.now


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(latency.jax, "block_until_ready", lambda result: result)
    return _Bench()


def test_every_method_stands_beside_the_baseline_and_the_order_alternates(bench):
    runs = bench.run("target", 1.0), [bench.run("a", 0.5), bench.run("b", 0.25)]
    latency.interleave(*runs, examples=2, trials=2, clock=bench.clock)
    turns = [
        "".join(name[0] for t, e, name in bench.log if (t, e) == turn) for turn in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert turns == ["atb", "bta", "bta", "atb"]


def test_one_method_goes_first_as_often_as_last(bench):
    latency.interleave(bench.run("target", 1.0), [bench.run("a", 0.5)], examples=2, trials=2, clock=bench.clock)
    assert "".join(name[0] for _, _, name in bench.log) == "at" + "ta" + "ta" + "at"


def test_seconds_and_ratios(bench):
    alone, (method,) = latency.interleave(
        bench.run("target", 1.0, 10), [bench.run("a", 0.5, 5)], examples=3, trials=2, clock=bench.clock
    )
    np.testing.assert_allclose(alone.seconds, [[1, 2, 3], [2, 4, 6]])
    relative = latency.relative_latency(method, alone)
    assert relative["value"] == pytest.approx(0.5) and relative["trials"] == pytest.approx([0.5, 0.5])
    assert relative["per_token"] == pytest.approx(1.0)
    measured = latency.latency(alone)
    assert measured["ms_per_example"]["value"] == pytest.approx(3000)
    assert (measured["ms_per_example"]["low"], measured["ms_per_example"]["high"]) == pytest.approx((2000, 4000))
    assert measured["ms_per_token"]["trials"] == pytest.approx([200, 400])
    assert (measured["examples"], measured["trials"], measured["tokens_per_example"]) == (3, 2, 10)
    assert np.sum(measured["per_example_ms"], axis=0).tolist() == [3000, 6000, 9000]  # a row per trial
    assert np.sum(latency.latency(method)["per_example_ms"]) / np.sum(measured["per_example_ms"]) == relative["value"]


def test_counts_stand_beside_the_times_of_the_same_runs(bench):
    alone, (method,) = latency.interleave(
        bench.run("target", 1.0, 10), [bench.run("a", 0.5, 5)], examples=3, trials=2, clock=bench.clock
    )
    found = latency.latency(method)
    assert found["per_example_tokens"] == found["per_example_target_calls"] == [[5] * 3] * 2
    assert found["per_example_draft_steps"] == [[0, 1, 2], [10, 11, 12]]
    assert latency.latency(alone)["per_example_target_calls"] == [[10] * 3] * 2
    as_draft = latency.latency(alone, draft_alone=True)
    assert as_draft["per_example_draft_steps"] == [[10] * 3] * 2 and not np.any(as_draft["per_example_target_calls"])


def test_nothing_is_read_while_the_clock_runs(bench):
    class Late:
        """A result that takes a second to read."""

        def __getattr__(self, name):
            bench.now += 1.0
            return SimpleNamespace(draft_steps=0, target_calls=0) if name == "stats" else np.asarray([1])

    alone, _ = latency.interleave(lambda e, t: Late(), [lambda e, t: Late()], examples=2, trials=1, clock=bench.clock)
    assert not alone.seconds.any()


def test_of_many_methods_each_begins_in_turn(bench):
    methods = [bench.run(name, 1.0) for name in "abc"]
    latency.interleave(bench.run("target", 1.0), methods, examples=8, trials=1, clock=bench.clock)
    turns = ["".join(name[0] for _, e, name in bench.log if e == example) for example in range(8)]
    assert turns[:4] == ["atbc", "cbta", "tbca", "acbt"]
    for place in (0, -1):
        assert sorted(turn[place] for turn in turns) == sorted("aabbcctt"), "first as often as last"


def test_nothing_beside_a_baseline_is_refused(bench):
    with pytest.raises(ValueError, match="0 methods are to be timed"):
        latency.interleave(bench.run("t", 1), [], examples=1, trials=1)
