"""What is timed was warm before the clock ran, and what a record says of planned blocks."""

import sys
import types
from dataclasses import replace

import numpy as np
import pytest

from speccascade_jax.drafters.model import ModelDrafter
from speccascade_jax.drafters.nested import NestedDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.evaluation import latency, measuring, session
from speccascade_jax.evaluation.points import Point
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.stopping.policies import Fixed
from tests.support import text_pair

LOSSLESS = Speculative(RULES["spec_decode"])
SMALL = text_pair.evaluation(latency_examples=3, latency_trials=2)


@pytest.fixture(scope="module")
def loaded(pair):
    return session.Session(text_pair.SOURCE, SMALL, pair)


def _point(method="spec_decode", **settings) -> Point:
    return text_pair.point(method, SMALL, temperature=1.0, **settings)


def test_every_timed_example_of_every_method_has_run_before_the_clock_does(loaded, monkeypatch):
    ran, prepare, interleave = [], loaded.prepare, latency.interleave

    def noted(point, rows):
        call = prepare(point, rows)
        return lambda seed: ran.append((point.settings.method, point.settings.alpha, *rows)) or call(seed)

    monkeypatch.setattr(loaded, "prepare", noted)
    monkeypatch.setattr(latency, "interleave", lambda *a, **more: ran.append("timed") or interleave(*a, **more))
    points = [_point("opt", alpha=a, block_size=2) for a in (0.1, 0.4)]
    found = measuring.time_beside_target(loaded, points)
    warm, timed = ran[: ran.index("timed")], ran[ran.index("timed") + 1 :]
    assert sorted(warm) == [("autoregressive", None, 0), *(("opt", a, n) for a in (0.1, 0.4) for n in range(3))]
    # two trials, the target beside each example once, and once more where it is the neighbour of both methods
    assert [timed.count(("opt", a, n)) for a in (0.1, 0.4) for n in range(3)] == [2] * 6
    assert [np.shape(each["latency"]["per_example_ms"]) for each in found] == [(2, 3)] * 2


@pytest.mark.laws
def test_records_say_what_lengths_were_planned_and_by_what(loaded):
    """`block_size="auto"`: rounds by length and costs, of quality's batches and of latency's; a file runs it again."""
    point = _point(block_size="auto")
    (record,) = measuring.evaluate(loaded, [point])
    assert record["point"]["block_size"] == "auto" and not record["point"]["swept_block"]
    assert "block_size = 'auto'" in record["configuration"] and "block=auto" in point.label()
    two, one = record["planned"]
    assert (two["rows"], one["rows"]) == (2, 1) and set(two["round_ms"]) == set(two["rounds"])
    assert sum(two["rounds"].values()) + sum(one["rounds"].values()) == record["counts"]["rounds"]
    timed = record["planned_latency"]
    assert timed["rows"] == 6 and timed["prefill_ms"] >= 0 and 0 < timed["acceptance"] < 1
    assert loaded.code(point.settings) != loaded.code(_point(block_size=2).settings)
    assert point.method.details(point.settings) == ("γ auto",)


class OwnStack(NestedDrafter):
    """The engine inside decides with the numbers of the one above."""

    def propose(self, params, state, request):
        controls = replace(request.controls, inner=(request.controls,))
        return super().propose(params, state, replace(request, controls=controls))


def stack_of_ones_own(pair, block):
    """A drafter that is an engine: the pair's draft under itself."""
    bound = pair.draft
    inner = Engine(target=bound.model, drafter=ModelDrafter(bound.model, Fixed(block)), verifier=LOSSLESS)
    return OwnStack(inner, 2), {"target": bound.params, "drafter": {"model": bound.params}}


def test_engines_inside_of_a_drafter_of_ones_own_are_in_the_record(loaded, monkeypatch):
    module = types.ModuleType("ideas_of_ones_own")
    module.stack = stack_of_ones_own
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (record,) = measuring.judge(loaded, [_point(drafters=("ideas_of_ones_own.stack",), block_size=2)])
    (level,) = record["levels"]
    assert level["model"] == "own" and level["target_calls"] > 0
