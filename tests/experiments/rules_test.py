"""Tests of the command that measures a user's rule beside those of the paper."""

import os
import subprocess
import sys

import pytest

from experiments import rules
from speccascade_jax.runtime import gin_flags
from speccascade_jax.runtime.paths import repository_root

ROOT = repository_root()
RULE = """
import speccascade_jax as sc

MINE = sc.Rule(name="mine", deferral=lambda pair, alpha: pair.q.max(-1, keepdims=True) < alpha)
"""


@pytest.fixture
def call(tmp_path):
    """Returns a function that runs the program `speccascade rules` in a folder with a rule in my_rules.py."""
    (tmp_path / "my_rules.py").write_text(RULE)

    def call(*arguments):
        program = [sys.executable, "-c", "from speccascade_jax.runtime.cli import main; main()", "rules"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        return subprocess.run(
            [*program, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )

    return call


def test_a_rule_is_measured_beside_all_rules_of_the_paper_on_a_file(call, tmp_path):
    (tmp_path / "mine.csv").write_text("source,reference\n" + "Tom sleeps.,Tom schläft.\n" * 16)
    arguments = ("my_rules.MINE", "--task", "mine.csv", "--alphas=my_rules.MINE:0.2,0.8", "--quick")
    done = call(*arguments, "--notes", "--gin.sweep.dry_run=True")
    assert done.returncode == 0, done.stderr
    title, said, *points = done.stdout.splitlines()
    assert title.startswith("mine, tatoeba_en_de_large: Target alone, Draft alone, mine, SpecDecode, ")
    assert title.endswith(f"… {len(points)} points")
    assert said.startswith("results go to results/rules_MINE_mine_selected_quick.jsonl; ")
    methods = list(dict.fromkeys(line.split()[1] for line in points))
    assert methods[2] == "my_rules.MINE" and sum("my_rules.MINE" in line for line in points) == 2
    surveyed = (ROOT / "gin/survey.gin").read_text().partition("rules = (")[2].partition(")")[0]
    assert {f"'{method}'" for method in methods[3:]} == {name.strip() for name in surveyed.split(",")}


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "error: name your rules before all flags; for example: python -m experiments.rules my_rules.FAVOURITE"),
    (("my_rules.MIEN", "--gin.sweep.dry_run=True"), "module 'my_rules' has no 'MIEN'"),
    (("my_rules.MINE", "--coordinator_address=localhost:1", "--process_count=2", "--process_index=1"),
     "runs in one process: leave --coordinator_address=localhost:1"),
])  # fmt: skip
def test_mistakes_end_in_one_line(call, arguments, message):
    done = call(*arguments)
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["--methods=chow"], ["my_rules.MINE", "--methods", "chow"]])
def test_a_choice_of_methods_is_refused_in_one_line_with_the_remedy(arguments):
    with pytest.raises(SystemExit) as ended:
        rules.main(["rules", *arguments])
    message = str(ended.value)
    assert message.startswith("error: rules has no flag --methods, because it measures all rules of the paper: name")
    assert "`sweep --methods=…` measures chosen methods" in message and "\n" not in message


def test_the_first_words_become_a_setting_and_the_name_of_the_results(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(gin_flags, "main", lambda *arguments, **offered: seen.append(offered["about"]))
    rules.main(["rules", "my_rules.A", "my_rules.B", "other.C", "--quick"])
    assert sys.argv == ["rules", "--gin.MINE=('my_rules.A', 'my_rules.B', 'other.C')", "--quick"]
    assert seen == [["A", "B", "C"]]
