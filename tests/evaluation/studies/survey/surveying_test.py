"""Tests of surveys of a task: printed results, comparison with real runs, and planning of a sweep."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.evaluation import experiment, session
from speccascade_jax.evaluation.points import Point, Settings
from speccascade_jax.evaluation.studies.survey import surveying
from tests.support import text_pair

SOURCE = text_pair.SOURCE
SMALL = text_pair.evaluation(max_new_tokens=8, quality_examples=16, quality_batch=16)
SHARED = {"pair": SOURCE, "evaluation": SMALL}


@pytest.fixture(scope="module")
def loaded(pair):
    return session.Session(SOURCE, SMALL, pair)


@pytest.fixture(autouse=True)
def _this_evaluator(monkeypatch, loaded):
    monkeypatch.setattr(surveying, "Session", lambda *_: loaded)
    monkeypatch.setattr(experiment, "open_session", lambda points: loaded)


def test_estimates_are_printed_written_and_checked(tmp_path, capsys):
    arguments = {"rules": ("diff",), "settings": Settings(temperature=1.0), "check": (0.55,), "block_size": 2}
    rows = surveying.survey(**SHARED, **arguments, along="target", output=str(tmp_path / "new" / "survey.json"))
    said = capsys.readouterr().out
    assert "positions of the target outputs" in said and "rejected in a run" in said
    assert [(row["rule"], row["alpha"]) for row in rows] == [("diff", 0.1)]
    assert json.loads((tmp_path / "new" / "survey.json").read_text())["rows"] == rows
    for row in rows:
        assert 0.02 < row["rejection"] < 0.9 and row["error"] == row["rejection"] - row["real_rejection"]
        # about 100 examined positions each: four standard errors
        assert abs(row["error_along_its_own_outputs"]) < 0.2


def test_a_padded_batch_counts_no_row_twice(loaded):
    odd = replace(SMALL, quality_batch=12)  # 16 examples: one batch, then four rows that are repeated to fill another
    point = text_pair.point("diff", odd, alpha=0.1, block_size=2, temperature=1.0)
    written = surveying.write(loaded, point)
    assert [batch.counts.sum() for batch in written] == [12, 4]
    lengths = [np.asarray(batch.generation.lengths) for batch in written]
    surveyed = surveying.read(loaded, point, written, {"diff": (0.1,)})
    positions = lengths[0].sum() + lengths[1][:4].sum()
    assert {len(values) for values in surveyed.positions.values()} == {positions}
    assert surveying.rates(written)["committed"] == positions


def _written(session, along):
    """Returns the point, its writer's greedy generation, and those outputs `[16, 8]`."""
    point = Point(pair=SOURCE, evaluation=SMALL, settings=surveying.WRITERS[along])
    (written,) = surveying.write(session, point)
    return point, written, np.asarray(written.generation.tokens)


@pytest.mark.parametrize("along", ["target", "draft"])
def test_outputs_with_failed_logits_are_left_out_of_a_survey(loaded, along, capsys):
    """Checks failures of the writer, which ends there, and of the other model, which reads on.

    All other outputs give the values of a healthy model.
    """
    point, _, outputs = _written(loaded, along)
    whole = surveying.take(loaded, point, {"diff": (0.1, 0.5)})
    pair, lost = text_pair.damaged(loaded.pair, outputs, "target")
    opened = session.Session(SOURCE, SMALL, pair)
    if along == "target":
        surveyed = surveying.take(opened, point, {"diff": (0.1, 0.5)})
        assert f"{len(lost)} outputs are left out: the target model gave NaN" in capsys.readouterr().out
        assert surveying.rates(surveying.write(opened, point))["committed"] == len(surveyed.rows)
    else:
        with pytest.warns(UserWarning, match=f"{len(lost)} outputs are left out: the target model gives NaN"):
            surveyed = surveying.take(opened, point, {"diff": (0.1, 0.5)})
    well = ~np.isin(whole.rows, lost)
    assert 0 < well.sum() < len(well) and surveyed.rows.tolist() == whole.rows[well].tolist()
    for name, values in whole.positions.items():
        np.testing.assert_array_equal(surveyed.positions[name], values[well], err_msg=name)
    np.testing.assert_array_equal(surveyed.curves["diff"].rejection, whole.curves["diff"].rejection[:, well])
    assert np.isfinite(surveyed.estimate("diff", 0.3)).all()


def test_a_survey_of_nothing_is_refused(loaded):
    broken = sc.TableLM(np.full((text_pair.PIECES, text_pair.PIECES), np.nan))
    for model, along in (("target", "target"), ("target", "mixed"), ("draft", "target")):
        opened = session.Session(SOURCE, SMALL, replace(loaded.pair, **{model: broken}))
        point = replace(_written(loaded, "target")[0], settings=surveying.WRITERS[along])
        with warnings.catch_warnings(), pytest.raises(FloatingPointError, match="no output is left to survey: "):
            warnings.simplefilter("ignore")
            surveying.take(opened, point, {"diff": (0.1,)})


def test_fuzzy_rules_are_run_and_compared_with_their_bound(tmp_path, capsys, monkeypatch):
    asked, take = [], surveying.take
    monkeypatch.setattr(
        surveying, "take", lambda loaded, point, grids: asked.append(point) or take(loaded, point, grids)
    )
    path, rules = tmp_path / "survey.json", ("spec_decode", "fuzzy_tv_scaled", "fuzzy_kl_scaled")
    arguments = {"rules": rules, "alphas": 2, "bounds": (0.5, 0.9), "block_size": 2, "histogram": "tv"}
    surveying.survey(**SHARED, **arguments, settings=Settings(temperature=1.0), output=str(path))
    said, kept = capsys.readouterr().out, json.loads(path.read_text())
    chosen = [point.settings for point in asked]
    writers = [(run.method, run.rule, run.alpha, run.bonus, run.draft_temperature) for run in chosen]
    assert writers[1:3] == [("fuzzy", "fuzzy_tv_scaled", tau, "rule", 1.0) for tau in (0.5, 0.9)]
    assert {writer[0] for writer in writers[3:]} == {"autoregressive"}  # for kl, the surveyed outputs are the target's
    assert [(row["rule"], row["tau"], row["along"]) for row in kept["bounds"]] == [
        (rule, tau, along) for rule, along in zip(rules[1:], ("rule", "target"), strict=True) for tau in (0.5, 0.9)
    ]
    for row in kept["bounds"]:
        assert row["standing"] == "proven" and row["share"] <= 1 and row["incurred"] <= row["bound"]
        assert row["bound"] == pytest.approx(row["tokens"] * row["share"] * row["tau"])
    # the larger threshold keeps a part of the draft's tokens
    assert all(row["share"] > 0 and row["incurred"] > 0 for row in kept["bounds"][1::2])
    assert "Divergence from the target" in said and "tv of draft and target: median" in said
    assert (kept["pair"], kept["task"], kept["temperature"]) == ("tabular", "tiny_translation", 1.0)
    assert kept["histogram"]["quantity"] == "tv"
    assert sum(kept["histogram"]["counts"]) + kept["histogram"]["above"] == kept["positions"]


def test_a_greedy_draft_is_run_and_named_on_request(tmp_path, capsys):
    greedy, path = Settings(temperature=1.0, draft_temperature=0.0), tmp_path / "survey.json"
    arguments = {"rules": ("fuzzy_tv_scaled",), "alphas": 2, "bounds": (0.6,), "block_size": 2}
    surveying.survey(**SHARED, **arguments, settings=greedy, output=str(path))
    (row,) = json.loads(path.read_text())["bounds"]
    assert row["standing"].startswith("proven (") and "one-hot" in capsys.readouterr().out


@pytest.mark.laws
def test_a_sweep_gets_alphas_where_its_curves_change(tmp_path, loaded):
    store = tmp_path / "sweep.jsonl"
    arguments = {"methods": ("token_v3", "chow"), "alphas": {"chow": (0.5,)}, "temperatures": (1.0,), "plan": 4}
    experiment.sweep(**SHARED, **arguments, output=str(store))
    records = [json.loads(line) for line in store.read_text().splitlines()]
    by_method = {name: [r for r in records if r["point"]["method"] == name] for name in ("token_v3", "chow")}
    assert [r["point"]["alpha"] for r in by_method["chow"]] == [0.5]
    rates = [r["measures"]["rejection_rate"] for r in sorted(by_method["token_v3"], key=lambda r: r["point"]["alpha"])]
    assert len(rates) == 4 and np.abs(np.diff(rates)).max() < 0.75 * (max(rates) - min(rates))


@pytest.mark.parametrize(("changes", "message"), [
    ({"along": "nobody"}, "along='nobody' is not one of target, draft, mixed"),
    ({"rules": ()}, "rules=.. is empty"),
    ({"bounds": 0.1}, "bounds=0.1 is one value where a tuple is meant"),
    ({"check": (1.5,)}, "must be shares of a rule's range"),
    ({"bounds": (0.1,)}, r"bounds=\(0.1,\) need a fuzzy rule: add one to rules"),
    ({"bounds": (0.0,), "rules": ("fuzzy_js",)}, r"bounds=\(0.0,\) must be thresholds above 0"),
    ({"histogram": "max_p"}, "no histogram of 'max_p'"),
    ({"rules": ("chw",)}, "unknown rule 'chw': did you mean chow"),
    ({"settings": Settings(temperature=-1.0)}, "is negative"),
])  # fmt: skip
def test_invalid_values_are_refused(changes, message):
    arguments = {"rules": ("chow",), "settings": Settings()} | changes
    with pytest.raises(ValueError, match=message):
        surveying.survey(**SHARED, **arguments)
