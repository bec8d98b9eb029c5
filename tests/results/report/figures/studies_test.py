"""Tests of histograms of divergences and of the heat map of acceptance: counts, drawings, refused input."""

import json

import numpy as np
import pytest
from matplotlib import pyplot as plt

from experiments import plots
from speccascade_jax.results.analysis import histograms
from speccascade_jax.results.report.figures import studies
from speccascade_jax.rules import divergences


def survey(quantity="js", values=(0.005, 0.015, 0.016, 0.4), **more):
    """Returns the entries of a file of `experiments/survey.py` that a figure needs."""
    study = {"pair": "pairs/tatoeba_en_de/", "task": "tiny_translation", "along": "mixed", **more}
    return study | {"histogram": histograms.count(quantity, np.float32(values))}


@pytest.fixture
def drawn(monkeypatch):
    """Draws a figure, and returns it before it is closed."""

    def draw(how, reports, path):
        kept = []
        monkeypatch.setattr(plt, "close", kept.append)
        how(reports, path)
        monkeypatch.undo()
        return kept[-1]

    return draw


def test_every_value_is_counted_once():
    histogram = histograms.count("js", np.float32([0.0, 0.005, 0.015, 0.016, 0.2999, 0.31, 1.0]))
    assert len(histogram["edges"]) == 31 and histogram["edges"][0] == 0 and histogram["edges"][-1] == 0.3
    assert [(n, count) for n, count in enumerate(histogram["counts"]) if count] == [(0, 2), (1, 2), (29, 1)]
    assert histogram["above"] == 2 and histogram["median"] == pytest.approx(0.016)


def test_values_at_the_last_edge_and_infinity_are_counted_as_above():
    histogram = histograms.count("kl", np.array([1.5, np.inf, np.inf, 1.0]))
    assert histogram["above"] == 3 and sum(histogram["counts"]) == 1 and histogram["median"] is None
    assert "median infinite, 75.0% of 4 positions at 1.5 or above" in histograms.line(histogram)
    json.dumps(histogram, allow_nan=False)


def test_every_divergence_has_edges():
    known = {f"{name}{form}" for name in divergences.DIVERGENCES for form in ("", "_scaled")}
    assert set(histograms.LAST_EDGES) == known
    assert histograms.LAST_EDGES["js"] == histograms.LAST_EDGES["tv_scaled"] == 0.3


def test_a_histogram_is_described_in_one_line():
    line = histograms.line(survey()["histogram"])
    assert line == "js (bits) of draft and target: median 0.0155, 25.0% of 4 positions at 0.3 or above"
    assert histograms.name_of("kl_scaled") == "kl (nats, p̃, q̃)" and histograms.name_of("tv") == "tv"


def test_the_figure_has_a_panel_per_survey_with_its_tail(tmp_path, drawn):
    surveys = [survey(), survey(values=[0.1, 0.5], task="xsum"), *(survey(task=name) for name in "ab")]
    figure = drawn(studies.draw_histograms, surveys, tmp_path / "new" / "figure.png")
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


@pytest.mark.parametrize(("call", "message"), [
    (lambda: histograms.count("max_p", np.ones(3)), "no histogram of 'max_p': .*choose one of js, js_scaled, tv"),
    (lambda: histograms.check("jss"), "did you mean js"),
    (lambda: histograms.count("js", np.ones(0)), "no positions for a histogram of js"),
])  # fmt: skip
def test_invalid_quantities_and_empty_values_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("text", ["", "[1]", '{"rows": []}', '{"key": 1}\n{"key": 2}'])
def test_a_file_without_a_histogram_is_named_with_the_remedy(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other.json holds no histogram: .*--gin.survey.output"):
        histograms.read([path])


def test_histograms_of_different_quantities_are_refused(tmp_path):
    for name in ("js", "tv"):
        (tmp_path / f"{name}.json").write_text(json.dumps(survey(name)))
    assert len(histograms.read([tmp_path / "js.json"] * 2)) == 2
    with pytest.raises(ValueError, match=r"different quantities \(js in .*js.json, tv in .*tv.json\)"):
        histograms.read([tmp_path / "js.json", tmp_path / "tv.json"])


REPORT = {
    "pair": "pairs/tatoeba_en_de", "task": "tiny_translation", "temperature": 0.5,
    "names": ["copies", "draft", "target"], "costs": [1e-5, 2e-4, 3e-3],
    "acceptance": [[1, 0.1, 0.2], [0.1, 1, 0.75], [0.2, 0.75, 1]],
    "rows": [{"models": ["copies", "draft", "target"]}, {"models": ["draft", "target"]}],
}  # fmt: skip


def test_the_heat_map_shows_every_acceptance_and_frames_the_best_stack(tmp_path, drawn):
    axes = drawn(studies.draw_acceptance, [REPORT], tmp_path / "a.png").axes[0]
    shown = {tuple(map(int, text.get_position())): text.get_text() for text in axes.texts}
    assert shown == {(1, 0): "0.10", (2, 0): "0.20", (2, 1): "0.75"}
    assert [patch.get_xy() for patch in axes.patches] == [(1.5, 0.5)]
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_every_stack_that_was_run_has_a_bar_of_calls_times_cost(tmp_path, drawn):
    timed = {"seconds_per_token": 4e-3, "target_seconds_per_token": 5e-3}
    calls = [{"target": 0.5, "draft": 2.0}, {"target": 0.4, "draft": 1.0, "copies": 3.0}]
    rows = [{"name": "best single draft", "models": ["draft", "target"], "calls_per_token": calls[0], **timed}]
    rows.append({"name": "overshoot optimum", "models": ["copies", "draft", "target"], "calls_per_token": calls[1]})
    report = REPORT | {"rows": [*rows, {"name": "with tails", "models": ["draft", "target"]}]}
    heat, bars = drawn(studies.draw_acceptance, [report], tmp_path / "a.png").axes[:2]
    assert [patch.get_xy() for patch in heat.patches] == [(0.5, -0.5), (1.5, 0.5)]
    widths = np.array([patch.get_width() for patch in bars.patches]).reshape(2, 3)
    np.testing.assert_allclose(widths, [[0, 0.4, 1.5], [0.03, 0.2, 1.2]])
    assert [text.get_text() for text in bars.get_yticklabels()] == ["best single draft", "overshoot optimum"]


@pytest.mark.parametrize("content", ["[]", "not json", "{}"])
def test_the_command_draws_the_heat_map_and_refuses_other_files(tmp_path, capsys, content):
    file = tmp_path / "h.json"
    file.write_text(json.dumps(REPORT))
    assert plots.main([str(file), "--acceptance"]) == 0
    assert (tmp_path / "h-acceptance.png").exists()
    file.write_text(content)
    assert plots.main([str(file), "--acceptance"]) == 1
    assert "h.json is not a file that experiments.optimize_hierarchy wrote" in capsys.readouterr().err
