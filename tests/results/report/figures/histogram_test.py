"""Histograms of divergences: what is counted, what is drawn, what is refused."""

import json

import numpy as np
import pytest
from matplotlib import pyplot as plt

from speccascade_jax.results.analysis import histograms
from speccascade_jax.results.report.figures import histogram
from speccascade_jax.rules import divergences


def survey(quantity="js", values=(0.005, 0.015, 0.016, 0.4), **more):
    """What experiments/survey.py writes, as far as a figure needs it."""
    made = {"pair": "pairs/tatoeba_en_de/", "task": "tiny_translation", "along": "mixed", **more}
    return made | {"histogram": histograms.count(quantity, np.float32(values))}


def drawn(surveys, path, monkeypatch):
    """The figure that was written, still open."""
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    histogram.draw(surveys, path)
    monkeypatch.undo()
    return kept[-1]


def test_every_value_is_counted_once():
    found = histograms.count("js", np.float32([0.0, 0.005, 0.015, 0.016, 0.2999, 0.31, 1.0]))
    assert len(found["edges"]) == 31 and found["edges"][0] == 0 and found["edges"][-1] == 0.3
    assert [(n, count) for n, count in enumerate(found["counts"]) if count] == [(0, 2), (1, 2), (29, 1)]
    assert found["above"] == 2 and found["median"] == pytest.approx(0.016)


def test_the_last_edge_and_infinity_are_above():
    found = histograms.count("kl", np.array([1.5, np.inf, np.inf, 1.0]))
    assert found["above"] == 3 and sum(found["counts"]) == 1 and found["median"] is None
    assert "median infinite, 75.0% of 4 positions from 1.5 on" in histograms.line(found)
    json.dumps(found, allow_nan=False)


def test_every_divergence_has_edges():
    assert set(histograms.LAST_EDGES) == {
        f"{name}{form}" for name in divergences.DIVERGENCES for form in ("", "_scaled")
    }
    assert histograms.LAST_EDGES["js"] == histograms.LAST_EDGES["tv_scaled"] == 0.3


def test_a_survey_is_one_line():
    line = histograms.line(survey()["histogram"])
    assert line == "js (bits) of draft and target: median 0.0155, 25.0% of 4 positions from 0.3 on"
    assert histograms.name_of("kl_scaled") == "kl (nats, p̃, q̃)" and histograms.name_of("tv") == "tv"


def test_a_panel_per_survey_with_its_tail(tmp_path, monkeypatch):
    surveys = [survey(), survey(values=[0.1, 0.5], task="xsum"), *(survey(task=name) for name in "ab")]
    figure = drawn(surveys, tmp_path / "new" / "figure.png", monkeypatch)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert len(panels) == 4
    assert [bar.get_height() for bar in panels[0].patches if bar.get_height()] == [0.25, 0.5]
    assert panels[0].patches[1].get_x() == pytest.approx(0.01) and len(panels[0].patches) == 30
    assert panels[0].get_title() == "tiny_translation, tatoeba_en_de\nalong mixed outputs"
    assert "25.0% beyond 0.3" in panels[0].texts[0].get_text() and "(dashed)" in panels[0].texts[0].get_text()
    assert panels[1].get_title().startswith("xsum") and "50.0% beyond 0.3" in panels[1].texts[0].get_text()
    assert len(panels[0].lines) == 1 and not panels[1].lines  # the second's median, 0.3, is not below the last edge
    assert figure.get_supxlabel() == "js (bits) of draft and target"
    plt.close(figure)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["figure.png"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: histograms.count("max_p", np.ones(3)), "no histogram of 'max_p': .*choose one of js, js_scaled, tv"),
        (lambda: histograms.check("jss"), "did you mean js"),
        (lambda: histograms.count("js", np.ones(0)), "no positions to count js at"),
    ],
)
def test_what_has_no_meaning_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("text", ["", "[1]", '{"rows": []}', '{"key": 1}\n{"key": 2}'])
def test_a_file_without_a_histogram_is_named_with_the_remedy(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other.json holds no histogram: .*--gin.survey.output"):
        histograms.read([path])


def test_different_quantities_are_no_figure(tmp_path):
    for name in ("js", "tv"):
        (tmp_path / f"{name}.json").write_text(json.dumps(survey(name)))
    assert len(histograms.read([tmp_path / "js.json"] * 2)) == 2
    with pytest.raises(ValueError, match=r"different quantities \(js in .*js.json, tv in .*tv.json\)"):
        histograms.read([tmp_path / "js.json", tmp_path / "tv.json"])
