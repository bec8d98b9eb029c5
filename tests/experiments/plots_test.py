"""experiments/plots.py: what the figures hold."""

import json

import numpy as np
import pytest
from matplotlib import pyplot as plt

from speccascade_jax.results.analysis import histograms
from speccascade_jax.results.report.figures import styles, tradeoff


def _figure(script, store, monkeypatch, *more):
    """The figure that would be written, still open."""
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    assert script("plots").main([str(store), *more]) == 0
    monkeypatch.undo()
    return kept[-1]


def test_a_png_lies_beside_the_store_and_is_named(script, store, capsys):
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


def test_the_figure_names_everything(script, store, monkeypatch):
    figure = _figure(script, store, monkeypatch)
    left, right = figure.axes
    texts = [text.get_text() for text in figure.findobj(plt.Text)]
    assert any(text.startswith("tiny_translation, tatoeba_en_de, T = 1, γ = 5") for text in texts)
    assert any(text.startswith("64 examples for quality, 16 examples × 2 trials") for text in texts)
    assert {"draft alone", "target alone"} <= set(texts)
    assert "SpecCascade [Token], α 0.3 … 1" in texts and "Target's quality" in texts
    assert "relative to the target alone" in left.get_xlabel() and "faster" in left.get_xlabel()
    assert "rejected share" in right.get_xlabel() and left.get_ylabel().startswith("BLEU")
    plt.close(figure)


def test_what_needs_no_method_is_drawn_beside_latencies(script, store, monkeypatch):
    """Requests sent at random from end to end, and the target at a lower temperature."""
    records = [json.loads(line) for line in store.read_text().splitlines()]
    target, draft = (
        next(r for r in records if r["point"]["method"] == name) for name in ("autoregressive", "autoregressive_draft")
    )
    colder = json.loads(json.dumps(target)) | {"key": "colder"}
    colder["point"]["temperature"], colder["quality"]["value"] = 0.5, 77.0
    store.write_text("".join(json.dumps(record) + "\n" for record in [*records, colder]))
    figure = _figure(script, store, monkeypatch)
    (grey,) = (line for line in figure.axes[0].get_lines() if line.get_label() == "Whole requests sent at random")
    first, last = np.column_stack(grey.get_data())[[0, -1]]
    zero = target["quality"]["value"]
    assert first.tolist() == [1.0, pytest.approx(0.0)]
    assert last.tolist() == pytest.approx([draft["relative_latency"]["value"], draft["quality"]["value"] - zero])
    (dash,) = (each for each in figure.axes[0].collections if each.get_label() == "Target alone at T = 0.5")
    assert dash.get_offsets().tolist() == [[1.0, pytest.approx(77.0 - zero)]]
    assert not [line for line in figure.axes[1].get_lines() if line.get_label() == "Whole requests sent at random"]
    plt.close(figure)


def test_speed_ups_stand_above_and_none_over_another():
    figure, axes = plt.subplots(figsize=(6, 5))
    axes.set_xlim(0.02, 1.17)  # where a draft is twenty times as fast
    tradeoff._in_speed_ups(axes)
    figure.canvas.draw()
    (above,) = axes.child_axes
    boxes = sorted((label.get_window_extent() for label in above.get_xticklabels()), key=lambda box: box.x0)
    assert len(boxes) > 3 and all(left.x1 < right.x0 for left, right in zip(boxes, boxes[1:], strict=False))
    assert {label.get_text() for label in above.get_xticklabels()} >= {"1×", "2×"}
    plt.close(figure)


def test_each_rule_has_its_own_colour_and_marker(script, store, monkeypatch):
    figure = _figure(script, store, monkeypatch)
    (legend,) = figure.legends
    curves = [line for line in legend.get_lines() if line.get_marker() not in ("None", "")]
    assert len(curves) == 6
    assert len({(line.get_color(), line.get_marker()) for line in curves}) == 6
    plt.close(figure)


def test_inconclusive_points_are_hollow(script, store, monkeypatch):
    records = [json.loads(line) for line in store.read_text().splitlines()]
    records[-1]["inconclusive"] = True
    store.write_text("".join(json.dumps(record) + "\n" for record in records))
    figure = _figure(script, store, monkeypatch)
    faces = [tuple(face[:3]) for points in figure.axes[0].collections for face in _faces(points)]
    assert faces.count((1.0, 1.0, 1.0)) == 1
    plt.close(figure)


def _faces(collection):
    """Filled markers of a scatter; rings and error bars have none."""
    colours = collection.get_facecolor()
    return colours if hasattr(collection, "get_sizes") and len(colours) else []


def test_the_horizontal_axis_can_be_the_papers(script, store, monkeypatch):
    figure = _figure(script, store, monkeypatch, "--share", "rejections_per_token")
    assert "per generated token" in figure.axes[1].get_xlabel()
    plt.close(figure)


def test_shares_are_plotted_alone_where_nothing_was_timed_and_the_ends_stand_at_theirs(script, store, monkeypatch):
    records = [json.loads(line) for line in store.read_text().splitlines()]
    for record in records:
        for name in ("latency", "relative_latency", "target_latency"):
            del record[name]
        end = {"autoregressive": 0.0, "autoregressive_draft": 1.0}.get(record["point"]["method"])
        record["measures"]["draft_share"] = 0.25 if end is None else end
    store.write_text("".join(json.dumps(record) + "\n" for record in records))
    figure = _figure(script, store, monkeypatch, "--share", "target_share")
    (axes,) = figure.axes
    assert "that the target wrote" in axes.get_xlabel() and axes.get_ylabel().startswith("BLEU")
    places = {text.get_text(): text.xy[0] for text in axes.texts}
    assert places == {"target alone": 1.0, "draft alone": 0.0}
    assert {0.75} in [set(line.get_xdata()) for line in axes.lines]
    plt.close(figure)


def test_unknown_methods_get_a_style_and_their_own_name(fake, store, tmp_path, script):
    records = [json.loads(line) for line in store.read_text().splitlines()]
    for record in records:
        if record["point"]["method"] == "chow":
            record["point"]["method"] = "my_rule"
    store.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert script("plots").main([str(store)]) == 0


def test_histograms_of_surveys_are_one_figure(script, tmp_path, capsys):
    paths = [tmp_path / "wmt.json", tmp_path / "xsum.json"]
    for path in paths:
        counted = histograms.count("js", np.array([0.01, 0.02, 0.5]))
        made = {"pair": "tatoeba_en_de", "task": path.stem, "along": "mixed", "histogram": counted}
        path.write_text(json.dumps(made))
    assert script("plots").main(["--histograms", *map(str, paths)]) == 0
    assert capsys.readouterr().out == f"plot: {tmp_path / 'wmt-histogram.png'}\n"
    assert (tmp_path / "wmt-histogram.png").read_bytes().startswith(b"\x89PNG")
    paths[1].write_text("{}")
    assert script("plots").main(["--histograms", *map(str, paths)]) == 1
    assert "xsum.json holds no histogram" in capsys.readouterr().err


def test_nothing_to_plot_is_said(script, store, capsys):
    store.write_text("\n".join(store.read_text().splitlines()[:2]) + "\n")
    assert script("plots").main([str(store)]) == 1
    assert "nothing to plot" in capsys.readouterr().err


def test_styles_cover_the_papers_methods():
    assert {"spec_decode", "lossy", "chow", "diff", "opt", "token_v3", "bild_star"} <= set(styles.STYLES)
