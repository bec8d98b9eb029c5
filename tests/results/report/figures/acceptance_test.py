"""The heat map of acceptance: every number once, the best stack framed, other files refused."""

import json

import numpy as np
import pytest
from matplotlib import pyplot as plt

from experiments import plots
from speccascade_jax.results.report.figures import acceptance

REPORT = {
    "pair": "pairs/tatoeba_en_de",
    "task": "tiny_translation",
    "temperature": 0.5,
    "names": ["copies", "draft", "target"],
    "costs": [1e-5, 2e-4, 3e-3],
    "acceptance": [[1, 0.1, 0.2], [0.1, 1, 0.75], [0.2, 0.75, 1]],
    "rows": [{"models": ["copies", "draft", "target"]}, {"models": ["draft", "target"]}],
}


def test_every_pair_has_its_number_and_the_best_stack_its_frame(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    acceptance.draw([REPORT], tmp_path / "a.png")
    axes = kept[-1].axes[0]
    shown = {tuple(map(int, text.get_position())): text.get_text() for text in axes.texts}
    assert shown == {(1, 0): "0.10", (2, 0): "0.20", (2, 1): "0.75"}
    assert [patch.get_xy() for patch in axes.patches] == [(1.5, 0.5)]
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_every_stack_that_was_run_has_its_bar_of_calls_at_their_cost(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    timed = {"seconds_per_token": 4e-3, "target_seconds_per_token": 5e-3}
    calls = [{"target": 0.5, "draft": 2.0}, {"target": 0.4, "draft": 1.0, "copies": 3.0}]
    rows = [{"name": "best single draft", "models": ["draft", "target"], "calls_per_token": calls[0], **timed}]
    rows.append({"name": "overshoot optimum", "models": ["copies", "draft", "target"], "calls_per_token": calls[1]})
    acceptance.draw(
        [REPORT | {"rows": [*rows, {"name": "with tails", "models": ["draft", "target"]}]}], tmp_path / "a.png"
    )
    heat, bars = kept[-1].axes[:2]
    assert [patch.get_xy() for patch in heat.patches] == [(0.5, -0.5), (1.5, 0.5)]
    widths = np.array([patch.get_width() for patch in bars.patches]).reshape(2, 3)
    np.testing.assert_allclose(widths, [[0, 0.4, 1.5], [0.03, 0.2, 1.2]])
    assert [text.get_text() for text in bars.get_yticklabels()] == ["best single draft", "overshoot optimum"]


def test_the_command_draws_it_and_refuses_other_files(tmp_path, capsys):
    file = tmp_path / "h.json"
    file.write_text(json.dumps(REPORT))
    assert plots.main([str(file), "--acceptance"]) == 0
    assert (tmp_path / "h-acceptance.png").exists()
    file.write_text("{}")
    assert plots.main([str(file), "--acceptance"]) == 1
    assert "h.json is not a file that experiments.optimize_hierarchy wrote" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "not json"])
def test_what_is_no_report_is_refused(tmp_path, content):
    file = tmp_path / "h.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="is not a file that"):
        acceptance.read([file])
