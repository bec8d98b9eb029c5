"""Surveys of a task: printed, held against real runs, and planning a sweep."""

import json

import numpy as np
import pytest

from speccascade_jax import evaluation, experiment, surveying
from speccascade_jax.points import Evaluation, ModelPair, Sampling
from tests import text_pair

SOURCE = ModelPair(name="tabular")
SMALL = Evaluation(
    task="tiny_translation", max_new_tokens=8, quality_examples=16, quality_batch=16, latency_examples=0, resamples=10
)
SHARED = {"pair": SOURCE, "evaluation": SMALL}


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory):
    return evaluation.Evaluator(SOURCE, SMALL, text_pair.make(tmp_path_factory.mktemp("pair")))


@pytest.fixture(autouse=True)
def _this_evaluator(monkeypatch, evaluator):
    monkeypatch.setattr(evaluation, "Evaluator", lambda *_: evaluator)


def test_estimates_are_printed_written_and_checked(tmp_path, capsys):
    given = {"rules": ("diff",), "sampling": Sampling(temperature=1.0), "check": (0.55,), "block_size": 2}
    rows = surveying.survey(**SHARED, **given, along="target", output=str(tmp_path / "new" / "survey.json"))
    said = capsys.readouterr().out
    assert "positions of the target outputs" in said and "really rejected" in said
    assert [(row["rule"], row["alpha"]) for row in rows] == [("diff", 0.1)]
    assert json.loads((tmp_path / "new" / "survey.json").read_text())["rows"] == rows
    for row in rows:
        assert 0.02 < row["rejection"] < 0.9 and row["error"] == row["rejection"] - row["real_rejection"]
        # some 100 examined positions each: four standard errors
        assert abs(row["error_along_its_own_outputs"]) < 0.2


def test_a_sweep_is_planned_where_its_curves_move(tmp_path, evaluator):
    store = tmp_path / "sweep.jsonl"
    experiment.sweep(
        **SHARED, rules=("token_v3", "chow"), alphas={"chow": (0.5,)}, temperatures=(1.0,), plan=4, output=str(store)
    )
    records = [json.loads(line) for line in store.read_text().splitlines()]
    found = {name: [r for r in records if r["point"]["method"] == name] for name in ("token_v3", "chow")}
    assert [r["point"]["alpha"] for r in found["chow"]] == [0.5]
    rates = [r["measures"]["rejection_rate"] for r in sorted(found["token_v3"], key=lambda r: r["point"]["alpha"])]
    assert len(rates) == 4 and np.abs(np.diff(rates)).max() < 0.75 * (max(rates) - min(rates))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"along": "nobody"}, "along='nobody' is not one of target, draft, mixed"),
        ({"check": (1.5,)}, "must be shares of a rule's range"),
        ({"rules": ("chw",)}, "unknown rule 'chw': did you mean chow"),
        ({"sampling": Sampling(temperature=-1.0)}, "is negative"),
    ],
)
def test_what_has_no_meaning_is_refused(changes, message):
    given = {"rules": ("chow",), "sampling": Sampling()} | changes
    with pytest.raises(ValueError, match=message):
        surveying.survey(**SHARED, **given)
