"""Tests of the first line of a command, which a recipe's header provides."""

import sys

import pytest

from speccascade_jax.runtime import recipe_header
from speccascade_jax.runtime.paths import repository_root

RECIPE = """# Narasimhan et al. (2024), Figure 3: quality against
# rejected tokens. One more sentence.
#
# Command:   python -m experiments.sweep --gin_file=a.gin --gin_file=b.gin
#            python -m experiments.plots results/a.jsonl
# Time:      CPU time 6 min 32 s cold (nothing compiled), 56 s warm, on 2 cores
#            (AMD EPYC), while other jobs ran
# Writes:    results/a.jsonl
x = 1
"""
NAMED = "Narasimhan et al. (2024), Figure 3: quality against rejected tokens. 3 points, "
SPENT = "about 6 min 32 s cold (nothing compiled), 56 s warm on 2 cores (AMD EPYC)"


def test_the_first_line_has_title_count_and_times():
    typed = ["--gin_file=b.gin", "--gin_file=a.gin"]
    assert recipe_header.first_line(RECIPE, "3 points", typed) == NAMED + SPENT


@pytest.mark.parametrize(("typed", "named", "time"), [
    (["--quick"], NAMED, ""),
    (["--output=results/b.jsonl", "--notes"], NAMED, SPENT),
    (["--task=mine.csv"], "mine, tiny: Target alone, Chow. 3 points, ", ""),
    (["--gin.sweep.methods=('chow',)"], "mine, tiny: Target alone, Chow. 3 points, ", ""),
    (["--gin.ModelPair.name='tiny'"], "mine, tiny: Target alone, Chow. 3 points, ", ""),
    (["--gin.sweep.output='results/name=b.jsonl'"], NAMED, ""),
])  # fmt: skip
def test_other_settings_have_no_time_and_other_data_another_title(typed, named, time):
    typed = ["--gin_file=a.gin", "--gin_file=b.gin", *typed]
    line = recipe_header.first_line(RECIPE, "3 points", typed, "mine, tiny: Target alone, Chow")
    assert line == (named + time).removesuffix(", ")


@pytest.mark.parametrize(("time", "said"), [
    ("elapsed, with all programs in the compilation cache: 22 min on 2 cores of an AMD EPYC, while other jobs ran",
     "about 22 min warm on 2 cores of an AMD EPYC"),
    ("elapsed, with an empty compilation cache: 1 min 49 s for the sweep on 2 cores (AMD EPYC)",
     "about 1 min 49 s cold (nothing compiled) on 2 cores (AMD EPYC)"),
    ("elapsed, with all programs in the compilation cache: about 31 min per seed on one core (Intel Xeon)",
     "about 31 min per seed warm on one core (Intel Xeon)"),
    ("unknown", ""),
])  # fmt: skip
def test_times_are_those_of_the_header(time, said):
    assert recipe_header.times(f"# Title.\n# Time:      {time}\n# Writes:    a\n") == said


def test_a_recipe_without_header_or_comment_says_little():
    assert recipe_header.first_line("# A title\nx = 1\n", "3 points", []) == "A title. 3 points"
    assert recipe_header.first_line("x = 1\n", "3 points", []) == "3 points"
    assert recipe_header.first_line("# A title.\n", "", []) == "A title"


def test_lines_are_printed_once(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sweep"])
    recipe_header.remember("# A title\n")
    recipe_header.remember_place("results/a.jsonl")
    recipe_header.announce("3 points")
    assert capsys.readouterr().out == "A title. 3 points\n"
    for _ in range(2):
        recipe_header.announce("3 points")
        recipe_header.announce_places()
    assert capsys.readouterr().out == "results go to results/a.jsonl; --output=PATH names another place\n"
    recipe_header.remember("# A title\n")
    recipe_header.remember_place("results/a.jsonl")
    recipe_header.forget()
    recipe_header.announce()
    recipe_header.announce_places()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("path", sorted((repository_root() / "configs").glob("*.gin")), ids=lambda path: path.stem)
def test_every_recipe_has_a_title_and_a_time(path):
    recipe = path.read_text()
    assert recipe_header.title(recipe) and recipe_header.times(recipe) and recipe_header.commands(recipe)
