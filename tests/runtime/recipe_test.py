"""Tests of recipes: the order of their steps, what is skipped, and how a failing step ends."""

import pytest

from speccascade_jax.runtime import recipe
from speccascade_jax.runtime.recipe import Step


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Returns the commands that ran; each writes the file that its last argument names, unless it is `fails`."""
    monkeypatch.chdir(tmp_path)
    ran = []

    def start(command, words):
        ran.append((command, words))
        if command == "fails":
            return 3
        (tmp_path / words[-1]).touch()
        return 0

    monkeypatch.setattr(recipe, "_started", start)
    return ran


def writes(name, command="writes"):
    return Step(name=name, command=command, arguments=("{folder}", "", name), result=name)


def test_complete_steps_are_skipped_and_progress_names_the_step(started, tmp_path, capsys):
    (tmp_path / "a").touch()
    always = Step(name="always", command="resumes", arguments=("c",))
    assert recipe.run(folder="runs", steps=[writes("b"), always], before=[writes("a")]) == 0
    assert started == [("writes", ["runs", "b"]), ("resumes", ["c"])]
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("step 1 of 3, a: complete") and said[1].startswith("step 2 of 3, b: ")
    assert recipe.run(folder="runs", steps=[writes("b"), always]) == 0
    assert [command for command, _ in started] == ["writes", "resumes", "resumes"]


def test_a_failing_step_ends_the_recipe_with_its_status(started, capsys):
    assert recipe.run(folder="runs", steps=[writes("a"), writes("b", "fails"), writes("c")]) == 3
    assert [command for command, _ in started] == ["writes", "fails"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "error: step 2 of 3, b, ended with status 3; the same command continues from this step"


def test_a_step_without_its_result_is_an_error(started, capsys):
    step = Step(name="a", command="writes", arguments=("elsewhere",), result="nowhere")
    assert recipe.run(folder="runs", steps=[step]) == 1
    assert "step 1 of 1, a, did not write" in capsys.readouterr().err


def test_values_fill_each_other_and_files_that_are_empty_are_left_out():
    files, settings = ("{size}", "{none}", "gin/{task}.gin"), {"TASK": "'{task}'", "STEPS": 3}
    step = Step(name="s", command="finetune", files=files, settings=settings)
    values = {"task": "xsum", "size": "sizes/xsum.gin", "none": ""}
    words = ["--gin_file=sizes/xsum.gin", "--gin_file=gin/xsum.gin", "--gin.TASK='xsum'", "--gin.STEPS=3"]
    assert step.words(values) == words


def test_an_unknown_value_is_an_error_before_anything_runs(started):
    with pytest.raises(ValueError, match="step 'b' cannot be filled in .'other'.: the recipe has folder"):
        recipe.run(folder="runs", steps=[writes("a"), Step(name="b", command="c", arguments=("{other}",))])
    assert not started


@pytest.mark.parametrize("places", [{"folder": "gs://bucket/runs", "steps": [writes("b")]},
                                    {"folder": "runs", "steps": [writes("gs://bucket/b")]}])  # fmt: skip
def test_places_in_a_bucket_are_refused_before_anything_runs(started, places):
    with pytest.raises(
        ValueError, match=r"gs://bucket/\w+: a recipe works in local folders only; give a local one, or"
    ):
        recipe.run(**places)
    assert not started and recipe.run(**places, dry_run=True) == 0


def test_a_dry_run_prints_the_commands(started, capsys):
    assert recipe.run(folder="runs", steps=[writes("a")], dry_run=True) == 0 and not started
    assert capsys.readouterr().out == "# a\npython -m experiments.writes runs a\n"


def test_a_step_is_a_command_of_the_project(capfd):
    assert recipe.run(folder="runs/none", steps=[Step(name="a", command="no_such_command")]) == 1
    assert "unknown command 'no_such_command'" in capfd.readouterr().err
