"""Names of methods for readers."""

import pytest

from speccascade_jax.evaluation.curves import facts
from speccascade_jax.methods.settings import Level, Settings
from speccascade_jax.results.analysis.curve_labels import label, place


def record(**chosen):
    settings = Settings(**chosen)
    return {"point": {"head": settings.head, "stop_threshold": settings.stop_threshold, **facts(settings)}}


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"method": "token_v3"}, "SpecCascade [Token]"),
        ({"method": "fuzzy"}, "FSD [js]"),
        ({"method": "fuzzy", "rule": "fuzzy_kl_top50"}, "FSD [kl_top50]"),
        ({"method": "oracle_cascade", "rule": "opt"}, "Oracle [OPT]"),
        ({"method": "bild", "stop_threshold": 0.3}, "BiLD α_f 0.3"),
        ({"method": "bild", "rule": "fuzzy_tv", "stop_threshold": 0.3}, "BiLD [tv] α_f 0.3"),
        ({"method": "specdecpp", "stop_threshold": 0.7}, "SpecDec++ h 0.7"),
        (
            {"method": "specdecpp", "rule": "opt", "head": "x/depth3_wrej6.msgpack", "stop_threshold": 0.7},
            "SpecDec++ [OPT] depth3_wrej6 h 0.7",
        ),
        ({"method": "seq_cascade"}, "SeqCascade [sum]"),
        (
            {"method": "spec_decode", "drafters": (Level(model="mid", budget=3, rule="opt", alpha=0.2),)},
            "SpecDecode [draft 5 → mid 3 rule opt alpha 0.2]",
        ),
    ],
)
def test_a_curve_is_named_by_its_method_and_by_what_was_chosen_for_it(chosen, text):
    assert label(record(**chosen)) == text


def test_what_sets_it_apart_comes_last_and_a_threshold_may_be_what_the_curve_runs_along():
    stopped = record(method="specdecpp", stop_threshold=0.7)
    assert label(stopped, " (γ = 20)", threshold=False) == "SpecDec++ (γ = 20)"


def test_curves_come_in_the_papers_order():
    given = ["token_v3", "fuzzy", "bild", "opt", "spec_decode"]
    assert sorted(given, key=lambda name: place(record(method=name), name)) == [
        "bild", "spec_decode", "opt", "token_v3", "fuzzy",
    ]  # fmt: skip
