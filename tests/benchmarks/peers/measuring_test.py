"""Tests of timing in turns, of comparisons of outputs, and of the choice of settings, with fake workers."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import contenders, measuring
from benchmarks.peers.contenders import LOSSLESS, PLAIN, Contender
from benchmarks.peers.pairs import Prepared
from benchmarks.peers.protocol import WorkerError

PREPARED = Prepared(
    name="made", folder=Path("nowhere"), family="t5", ours=None, prompts=[[n] for n in range(2, 34)], new_tokens=3,
    stop=[1], alone=2, turns=9, batch_turns=2, largest_batch=8,
    task=None, parameters=(7, 5), uneven=(False, True),
)  # fmt: skip


class Fake:
    """A worker in memory: `seconds` per batch, tokens that count from the prompt, `wrong` from the second on."""

    def __init__(self, seconds, wrong=False, fails=()):
        self.seconds, self.wrong, self.fails, self.asked = seconds, wrong, fails, []

    def ask(self, op, **request):
        self.asked.append((op, request))
        if op == "gaps":
            return [0.25 * n for n in range(len(request["given"]["rows"]))]
        if op != "run":
            return None
        if request["options"].get("mode") in self.fails:
            raise WorkerError("IndexError: no")
        prompts = [prompt for batch in request["batches"] for prompt in batch]
        tokens = [[p[-1], p[-1] + (9 if self.wrong else 1), p[-1] + 2] for p in prompts]
        return {"seconds": [self.seconds] * len(request["batches"]), "tokens": tokens}


def test_times_are_measured_in_turns_relative_to_our_plain_decoding(monkeypatch):
    monkeypatch.setattr(contenders, "BLOCKS", (3,))
    monkeypatch.setattr(contenders, "HELD", {})
    monkeypatch.setattr(measuring, "SETTLE", 0.0)
    workers = {"ours": Fake(0.6), "transformers 5": Fake(1.2, wrong=True, fails=("lookup",))}
    settings = {"batches": [1, 8, 32], "turns": 3, "batch_turns": 3, "examples": 5}
    lines = []
    measured = measuring.measure(workers, PREPARED, settings, lines.append)
    assert lines == [
        "made, batch 1: 18 settings, first run", "made, batch 1: 16 settings, 3 turns",
        "made, batch 8: 4 settings, first run", "made, batch 8: 4 settings, 2 turns",
    ]  # fmt: skip
    plain, lossless = [row for row in measured["rows"] if row["library"] == "ours" and row["batch"] == 1]
    assert plain["kind"] == PLAIN and lossless["kind"] == LOSSLESS
    assert plain["ms_per_token"]["value"] == pytest.approx(200.0)  # two calls of 0.6 s for six tokens
    assert plain["turns"] == 3 and plain["equal_outputs"] == 1.0 and plain["gap"] is None
    theirs = [row for row in measured["rows"] if row["library"] == "transformers 5" and row["batch"] == 1]
    # as released, and patched if the draft's encoder and decoder differ in depth; in two dtypes of weights
    assert [row["label"] for row in theirs][:3] == ["plain", "assisted, 3", "assisted, 3, patched"]
    assert len(theirs) == 2 * 7
    assert theirs[0]["ratio"]["value"] == pytest.approx(2.0)
    assert theirs[0]["equal_outputs"] == 0.0 and theirs[0]["equal_tokens"] == pytest.approx(1 / 3)
    assert theirs[0]["gap"] == 0.25
    batch = [row for row in measured["rows"] if row["batch"] == 8]
    labels = {("ours", "plain"), ("ours", "spec_decode, γ 3"), ("transformers 5", "plain")}
    assert {(row["library"], row["label"]) for row in batch} == labels
    assert batch[0]["turns"] == 2 and batch[0]["ms_per_token"]["value"] == pytest.approx(25.0)
    assert {(row["label"], row["reason"]) for row in measured["left_out"]} == {("prompt lookup", "IndexError: no")}


def test_the_logit_gap_is_computed_at_the_first_different_token():
    ours = Fake(1.0)
    comparison = measuring.compare(ours, [[5], [6], [7]], [[1, 2, 3], [4, 5, 6], [7, 8]], [[1, 2, 3], [4, 9, 9], [7]])
    ((op, request),) = ours.asked
    assert op == "gaps" and request["given"] == {"prompts": [[6]], "rows": [[4, 5]], "others": [9]}
    assert comparison == {"equal_outputs": pytest.approx(1 / 3), "equal_tokens": pytest.approx(5 / 8), "gap": 0.0}


def test_an_output_that_ends_early_does_not_count_as_a_tie():
    comparison = measuring.compare(Fake(1.0), [[5]], [[1, 2, 3]], [[1, 2]])
    assert comparison == {"equal_outputs": 0.0, "equal_tokens": pytest.approx(2 / 3), "gap": None}


def test_the_order_of_turns_alternates():
    names = ("a", "b")
    chosen = [Contender(library=n, weights="float32", kind=PLAIN, label=PLAIN, options={}) for n in names]
    order = []

    class Noting(Fake):
        def ask(self, op, **request):
            order.append(self.seconds)
            return super().ask(op, **request)

    pauses = []
    workers = {"a": Noting(1.0), "b": Noting(2.0)}
    seconds = measuring.interleave(workers, chosen, [[[1]]], 3, sleep=pauses.append)
    assert len(pauses) == 4  # before the first and wherever another library's turn begins
    assert order == [1.0, 2.0, 2.0, 1.0, 1.0, 2.0]
    np.testing.assert_array_equal(seconds[chosen[1]], [2.0, 2.0, 2.0])


def test_the_best_lossy_point_has_the_fewest_calls_at_the_kept_quality():
    def point(rule, alpha, quality, calls):
        return {"rule": rule, "alpha": alpha, "quality": quality, "tokens_per_call": calls}

    target = point(None, None, 40.0, 1.0)
    points = [point("a", 0.1, 40.2, 2.0), point("a", 0.5, 39.6, 3.0), point("a", 0.9, 39.4, 4.0)]
    assert measuring.best_lossy([target, *points, point("b", 0.5, 30.0, 5.0)]) == [points[1]]


def test_our_weights_in_other_types_are_compared_with_float32():
    ours = contenders.contenders(["ours"], "t5", (False, False))
    assert {(c.weights, c.label) for c in ours if c.options["dtype"] == "int8"} == {
        ("int8", "plain"), ("int8", "spec_decode, γ 2"), ("int8", "spec_decode, γ 3"), ("int8", "spec_decode, γ 5"),
    }  # fmt: skip
    batched = [(c.weights, c.label) for c in ours if c.largest_batch == 32]
    exact = [("float32", label) for label in ("plain", "spec_decode, γ 2", "spec_decode, γ 3")]
    assert batched == [*exact, ("float16", "plain"), ("int8", "plain")]
    seconds = {c: np.full(2, 0.5 if c.weights == "float32" else 0.25) for c in ours if c.kind == PLAIN}
    tokens = {c: [[5, 6], [7, 8]] if c.weights == "float32" else [[5, 6], [7, 9]] for c in seconds}
    table = measuring.rows(Fake(0.0), PREPARED, 1, seconds, tokens)
    kept = [(r["weights"], r["ratio"]["value"], r["equal_tokens"]) for r in table]
    assert kept == [("float32", 1.0, 1.0), ("float16", 0.5, 0.75), ("int8", 0.5, 0.75)]


def test_each_library_has_its_settings():
    def labels(name, family="llama", uneven=(False, False)):
        return [c.label for c in contenders.contenders([name], family, uneven)]

    assert labels("llama.cpp", "t5") == []
    assert len(labels("llama.cpp")) == 6 and len(labels("CTranslate2", "t5")) == 4
    plain = ["plain", "assisted, 3", "assisted, 5", "assisted, default schedule", "prompt lookup"]
    assert labels("transformers 4") == 2 * plain
    five = labels("transformers 5", "t5", (True, True))
    assert five[:5] == ["plain", "plain, patched", "assisted, 3", "assisted, 3, target patched", "assisted, 3, patched"]
    settings = contenders.contenders(["transformers 5"], "t5", (True, True))
    assert [c.options["mended"] for c in settings[:5]] == [[], ["target"], [], ["target"], ["target", "draft"]]
    four = labels("transformers 4", "t5", (True, True))
    assert four[:4] == ["plain", "plain, patched", "assisted, 3", "assisted, 3, patched"]
    assert "prompt lookup, patched" not in four
    assert {c.largest_batch for c in settings if c.options["mode"] != "plain"} == {1}
    assert dataclasses.replace(settings[0]) in settings
