"""Tests that the README's numbers equal those in its file of records, and tests of the CPU times of recipes."""

import re
import sys

import pytest

from benchmarks import front_page, recipe_times
from speccascade_jax.results.analysis import panels, significance


def test_the_readmes_picture_and_table_come_from_one_store():
    (panel,) = panels.panels(panels.read_points(front_page.STORE))
    page = front_page.PAGE.read_text(encoding="utf-8")
    remedy = "run python -m benchmarks.front_page --draw"
    assert front_page.written(page, front_page.parts(panel)) == page, remedy
    assert significance.trial_noise(panel) < significance.BUSY_TRIAL and significance.noise(panel) < significance.BUSY
    with pytest.raises(ValueError, match="no marker '<!-- measured: claim -->'"):
        front_page.written("# A page", front_page.parts(panel))


HEADER = """# A table.
#
# Command:   python -m experiments.sweep --gin_file=configs/a.gin --gin.sweep.output="'results/a.jsonl'"
#            python -m experiments.plots results/a.jsonl
#            and with --gin.Settings.temperature=0.6
# Published: python -m experiments.sweep --gin_file=configs/published.gin
# Time:      22 s for 60 points on 2 cores (Intel Xeon), while other jobs ran
#            and more
# Writes:    results/a.jsonl
"""


def test_a_recipes_commands_run_cold_and_warm_and_replace_its_time(tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "a.gin"
    recipe.write_text(HEADER)
    words = recipe_times.commands(recipe)
    assert [command[1:3] for command in words] == [["-m", "experiments.sweep"], ["-m", "experiments.plots"]]
    assert words[0][-1] == "--gin.sweep.output='results/a.jsonl'"
    # what fills the cache takes time once; the folder is a new one each time
    program = (
        "import os; c = os.environ['SPECCASCADE_COMPILATION_CACHE']; d = os.listdir(c); assert not os.listdir('.')"
    )
    program += "\nif not d: sum(range(10**7)); open(c + '/a', 'w')"
    monkeypatch.setattr(recipe_times, "commands", lambda recipe: [[sys.executable, "-S", "-c", program]])
    cold, warm = recipe_times.measure(recipe)
    assert cold > warm + 0.05
    assert recipe_times.main([str(recipe), "--write"]) == 0
    (line,) = re.findall(r"^# Time: .*\n", recipe.read_text(), re.MULTILINE)
    assert line in capsys.readouterr().out and "and more" not in recipe.read_text()
    assert re.fullmatch(r"# Time:      CPU time \d+ s cold \(nothing compiled\), \d+ s warm for 60 points, .*\n", line)


def test_a_recipe_without_a_command_is_refused(tmp_path):
    (tmp_path / "a.gin").write_text("# Time: 3 s\n")
    with pytest.raises(ValueError, match="no line '# Command: python -m experiments"):
        recipe_times.commands(tmp_path / "a.gin")
