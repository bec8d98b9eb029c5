"""Tests of the command plots: the contents of its figures, including --pareto, for hand-made records."""

import json

import numpy as np
import pytest
from matplotlib import pyplot as plt

from speccascade_jax.results.analysis import histograms
from speccascade_jax.results.report.figures import styles
from tests.support import measured_records as made


def test_a_png_is_written_beside_the_store_and_named(script, store, capsys):
    assert script("plots").main([str(store)]) == 0
    path = store.with_suffix(".png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"plot: {path}\n"
    assert {file.name for file in store.parent.iterdir()} == {"sweep.jsonl", "sweep.png"}


def test_one_figure_per_setting_with_readable_names(script, two_tasks, tmp_path):
    assert script("plots").main([str(two_tasks), "--output", str(tmp_path / "out"), "--format", "svg"]) == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "two-tatoeba_joined-tatoeba_en_de-T1-g5-bonus-rule.svg",
        "two-tiny_translation-tatoeba_en_de-T1-g5-bonus-rule.svg",
    ]


def test_the_figure_labels_everything(figure, store):
    shown = figure(store)
    left_axes, right_axes = shown.axes
    texts = [text.get_text() for text in shown.findobj(plt.Text)]
    assert any(text.startswith("tiny_translation, tatoeba_en_de, T = 1, γ = 5") for text in texts)
    assert any("\n64 examples for quality, 16 examples × 2 trials" in text for text in texts)
    assert "target alone" in texts and any(text.startswith("draft alone: ") for text in texts)
    assert "SpecCascade [Token]" in texts and {"α 0.3", "0.9", "α 1", "Target's quality"} <= set(texts)
    assert left_axes.get_xlabel() == "speed-up over the target alone, batch 1   (faster →)"
    assert "rejected share" in right_axes.get_xlabel() and left_axes.get_ylabel().startswith("BLEU")


def test_baselines_without_a_method_are_drawn_beside_latencies(figure, write, records):
    """Checks the line of requests sent at random, from end to end, and the target at a lower temperature."""
    target, draft = (r for r in records if r["point"]["method"] in ("autoregressive", "autoregressive_draft"))
    colder = json.loads(json.dumps(target)) | {"key": "colder"}
    colder["point"]["temperature"], colder["quality"]["value"] = 0.5, 77.0
    shown = figure(write([*records, colder]))
    (grey,) = (line for line in shown.axes[0].get_lines() if line.get_label().startswith("Coin: "))
    first, last = np.column_stack(grey.get_data())[[0, -1]]
    zero = target["quality"]["value"]
    assert first.tolist() == [1.0, pytest.approx(0.0)]
    assert last.tolist() == pytest.approx([1 / draft["relative_latency"]["value"], draft["quality"]["value"] - zero])
    (dash,) = (dots for dots in shown.axes[0].collections if dots.get_label() == "Target alone at T = 0.5")
    assert dash.get_offsets().tolist() == [[1.0, pytest.approx(77.0 - zero)]]
    assert not [line for line in shown.axes[1].get_lines() if line.get_label().startswith("Coin: ")]


def test_each_rule_has_its_own_colour_and_marker(figure, write, records):
    shown = figure(write([record for record in records if record["point"]["method"] != "lossy"]))
    (legend,) = shown.legends
    looks = [(line.get_color(), line.get_marker()) for line in legend.get_lines() if line.get_linewidth() == 1.8]
    assert len(looks) == len(set(looks)) == 5


def test_inconclusive_points_are_hollow(figure, write, records):
    records[-1]["inconclusive"] = True
    shown = figure(write(records))
    faces = [tuple(face[:3]) for points in shown.axes[0].collections for face in _faces(points)]
    assert faces.count((1.0, 1.0, 1.0)) == 2, "the point and the target alone; the draft alone is beyond the axis"


def _faces(collection):
    """Returns the filled markers of a scatter plot; rings and error bars have none."""
    colours = collection.get_facecolor()
    return colours if hasattr(collection, "get_sizes") and len(colours) else []


def test_the_horizontal_axis_can_be_the_papers(figure, store):
    shown = figure(store, "--share", "rejections_per_token")
    assert "per generated token" in shown.axes[1].get_xlabel()


def test_only_shares_are_plotted_without_timings_and_the_ends_keep_their_shares(figure, write, records):
    records = made.untimed(records)
    for record in records:
        end = {"autoregressive": 0.0, "autoregressive_draft": 1.0}.get(record["point"]["method"])
        record["measures"]["draft_share"] = 0.25 if end is None else end
    shown = figure(write(records), "--share", "target_share")
    (axes,) = shown.axes
    assert "that the target wrote" in axes.get_xlabel() and axes.get_ylabel().startswith("BLEU")
    places = {text.get_text(): text.xy[0] for text in axes.texts if "alone" in text.get_text()}
    assert places == {"target alone": 1.0, "draft alone": 0.0}
    assert {0.75} in [set(line.get_xdata()) for line in axes.lines]


def test_unknown_methods_get_a_style_and_their_own_name(script, write, records):
    for record in records:
        if record["point"]["method"] == "chow":
            record["point"]["method"] = "my_rule"
    assert script("plots").main([str(write(records))]) == 0


def test_histograms_of_surveys_are_one_figure(script, tmp_path, capsys):
    paths = [tmp_path / "wmt.json", tmp_path / "xsum.json"]
    for path in paths:
        counted = histograms.count("js", np.array([0.01, 0.02, 0.5]))
        survey = {"pair": "tatoeba_en_de", "task": path.stem, "along": "mixed", "histogram": counted}
        path.write_text(json.dumps(survey))
    assert script("plots").main(["--histograms", *map(str, paths)]) == 0
    assert capsys.readouterr().out == f"plot: {tmp_path / 'wmt-histogram.png'}\n"
    assert (tmp_path / "wmt-histogram.png").read_bytes().startswith(b"\x89PNG")
    paths[1].write_text("{}")
    assert script("plots").main(["--histograms", *map(str, paths)]) == 1
    assert "xsum.json holds no histogram" in capsys.readouterr().err


def test_a_store_without_points_to_plot_gives_a_message(script, write, records, capsys):
    assert script("plots").main([str(write(records[:2]))]) == 1
    assert "nothing to plot" in capsys.readouterr().err


def test_styles_cover_the_papers_methods():
    assert {"spec_decode", "lossy", "chow", "diff", "opt", "token_v3", "bild_star"} <= set(styles.STYLES)


def test_a_pareto_figure_per_task(script, write, capsys):
    store = write([*made.sweep(), *made.of_task("xsum", made.sweep())])
    assert script("plots").main([str(store), "--pareto", "--format", "svg"]) == 0
    names = sorted(path.name for path in store.parent.glob("*.svg"))
    assert len(names) == 2 and all(name.startswith("sweep-pareto-") for name in names)
    assert capsys.readouterr().out.count("plot: ") == 2


def test_the_pareto_figure_has_curves_stars_and_lines_of_equal_time(figure, write):
    store = write([*made.sweep(), made.record("stop_oracle", 0.2, 0.0)])
    axes = figure(store, "--pareto").axes[0]
    assert (store.parent / "sweep-pareto.png").read_bytes().startswith(b"\x89PNG")
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["SpecDecode, γ 2 … 8", "SpecDec++, h 0.1 … 0.9", "SpecDecode [oracle]"]
    lines = {line.get_label(): line for line in axes.get_lines()}
    fixed, star = lines[names[0]], lines["SpecDecode [oracle]"]
    assert [fixed.get_xdata()[0], fixed.get_ydata()[0]] == pytest.approx([0.3, 0.45], abs=0.02)
    assert star.get_xdata() == [0] and star.get_ydata()[0] == pytest.approx(0.2, abs=0.01)
    grey = [line for line in axes.get_lines() if line.get_color() == "0.85"]
    (x0, x1), (y0, y1) = grey[0].get_xdata(), grey[0].get_ydata()
    assert len(grey) == 7 and (y1 - y0) / (x1 - x0) == pytest.approx(-0.002 / 0.009)
    assert {"2", "8", "0.1", "0.9"} <= {text.get_text() for text in axes.texts}


def test_without_times_there_are_no_lines_of_equal_time(figure, write):
    axes = figure(write(made.untimed(made.sweep())), "--pareto").axes[0]
    assert not [line for line in axes.get_lines() if line.get_color() == "0.85"]
    assert not any("equal time" in text.get_text() for text in axes.texts)
