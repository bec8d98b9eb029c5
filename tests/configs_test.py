"""Every gin file resolves: each method with each pair and task, and each result's recipe, up to loading weights."""

import re
from pathlib import Path

import gin
import pytest

from speccascade_jax import evaluation, experiment, gin_flags, methods, points, profiling, surveying
from speccascade_jax.data.directory import repository_root
from speccascade_jax.data.tasks import TASKS, get_task
from speccascade_jax.rules import RULES

ROOT = repository_root()
MODELS, TASK_FILES, METHODS = (
    sorted(f"gin/{kind}/{path.name}" for path in (ROOT / "gin" / kind).glob("*.gin"))
    for kind in ("models", "tasks", "methods")
)
CONFIGS = sorted(f"configs/{path.name}" for path in (ROOT / "configs").glob("*.gin"))
TRAINING = sorted(f"gin/{path.name}" for path in (ROOT / "gin").glob("train_*.gin"))
HOLES = {
    "gin/models/directory.gin": ["PAIR='some/pair'"],
    "gin/tasks/seqio.gin": [
        "SeqioTask.name='seqio'",
        "SeqioTask.module='some.module'",
        "SeqioTask.max_input_length=512",
        "SeqioTask.max_output_length=64",
    ],
}


class _Resolved(BaseException):
    """Raised where weights would be loaded."""


@pytest.fixture(autouse=True)
def _stop_before_loading(monkeypatch):
    def stop(point):
        raise _Resolved(point)

    monkeypatch.setattr(experiment, "_evaluator", stop)
    gin.clear_config()
    yield
    gin.clear_config()


def _resolve(function, files, bindings=()):
    holes = [binding for name in files for binding in HOLES.get(name, ())]
    gin_flags.parse_gin([str(ROOT / name) for name in files], [*holes, *bindings])
    with pytest.raises(_Resolved) as stopped:
        gin.get_configurable(function)()
    return stopped.value.args[0]


@pytest.mark.parametrize("method", METHODS)
def test_each_method_file_is_a_run(method):
    point = _resolve(experiment.run, ["gin/run.gin", MODELS[-1], "gin/tasks/tiny_translation.gin", method])
    assert point.method.name == Path(method).stem


@pytest.mark.parametrize("task", TASK_FILES)
@pytest.mark.parametrize("model", MODELS)
def test_each_pair_and_task_file_is_a_run(model, task):
    point = _resolve(experiment.run, ["gin/run.gin", model, task, "gin/methods/token_v3.gin"])
    assert get_task(point.evaluation.task).name == Path(task).stem


def test_the_files_of_a_run_and_the_recipe_in_a_record_are_a_profile_too(monkeypatch, tmp_path):
    def stop(pair, evaluation):
        raise _Resolved(pair, evaluation)

    monkeypatch.setattr(evaluation, "Evaluator", stop)
    parts = [MODELS[-1], "gin/tasks/tiny_translation.gin", "gin/methods/token_v3.gin"]
    recipe = tmp_path / "recipe.gin"
    recipe.write_text(_resolve(experiment.run, ["gin/run.gin", *parts]).configuration())
    for files in (parts, [str(recipe)]):
        gin.clear_config()
        assert _resolve(profiling.profile, ["gin/profile.gin", *files]).name == Path(MODELS[-1]).stem


def test_the_survey_is_of_a_pair_and_a_task(monkeypatch):
    def stop(pair, evaluation):
        raise _Resolved(pair, evaluation)

    monkeypatch.setattr(evaluation, "Evaluator", stop)
    pair = _resolve(surveying.survey, ["gin/survey.gin", MODELS[-1], "gin/tasks/tiny_translation.gin"])
    assert pair.name == Path(MODELS[-1]).stem and set(gin.query_parameter("survey.rules")) <= set(RULES)


def test_every_rule_and_task_has_its_file():
    rules = {name for name in RULES if not name.startswith("fuzzy_")}  # those are settings of `fuzzy`
    assert {Path(name).stem for name in METHODS} == rules | set(methods.METHODS) - {"speculative"}
    assert {Path(name).stem for name in TASK_FILES} == {*TASKS, "seqio"}


@pytest.mark.parametrize("config", CONFIGS)
def test_each_recipe_is_a_sweep(config):
    assert _resolve(experiment.sweep, [config]).method.name == points.TARGET


@pytest.mark.parametrize("config", CONFIGS)
def test_each_recipe_says_command_time_and_expected_numbers(config):
    text = (ROOT / config).read_text()
    for word in ("Command:", "Time:", "Expected:"):
        assert word in text, f"{config} lacks {word}"
    assert config in text


def test_the_quickstart_stays_small():
    gin_flags.parse_gin([str(ROOT / "configs/quickstart.gin")])
    alphas = gin.query_parameter("sweep.alphas")
    assert len(gin.query_parameter("sweep.rules")) <= 6 and all(len(grid) <= 5 for grid in alphas.values())


def test_a_run_with_a_hole_names_it():
    with pytest.raises(ValueError, match=r"Method.name set to `%gin.REQUIRED`"):
        gin_flags.parse_gin([str(ROOT / name) for name in ("gin/run.gin", MODELS[-1], "gin/tasks/tatoeba.gin")])


def test_no_file_of_a_run_overrides_another():
    """A name is given a value by one of the four files of a run only, REQUIRED being no value."""
    bound = re.compile(r"^\s*([\w.]+)\s*=(?!\s*%gin.REQUIRED)")
    for folders in (MODELS, TASK_FILES, METHODS):
        others = [name for names in (MODELS, TASK_FILES, METHODS) if names is not folders for name in names]
        elsewhere = {name for file in ["gin/run.gin", *others] for name in _bindings(bound, file)}
        for file in folders:
            assert not _bindings(bound, file) & elsewhere


def _bindings(pattern, file) -> set[str]:
    """Full names, block syntax included (`points.Method:` and its indented lines)."""
    names, block = set(), ""
    for line in (ROOT / file).read_text().splitlines():
        if re.match(r"^[\w./]+:$", line):
            block = line[:-1] + "."
        elif match := pattern.match(line):
            names.add((block if line[0].isspace() else "") + match[1])
    return names


def test_every_gin_file_is_one_that_these_tests_know():
    known = {"gin/run.gin", "gin/profile.gin", "gin/survey.gin", *MODELS, *TASK_FILES, *METHODS, *CONFIGS, *TRAINING}
    found = {str(path.relative_to(ROOT)) for folder in ("gin", "configs") for path in (ROOT / folder).rglob("*.gin")}
    assert found == known


@pytest.mark.parametrize("file", TRAINING)
def test_each_training_file_resolves(file):
    gin_flags.parse_gin([str(ROOT / file)])


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("Method.alfa=1", "doesn't have a parameter named 'alfa'"),
        ("Metod.alpha=1", "No configurable matching 'Metod'"),
        ("Method.alpha=", "line 1"),
    ],
)
def test_misspelt_settings_fail_when_read(binding, message):
    with pytest.raises(ValueError, match=message):
        _resolve(experiment.run, ["gin/run.gin", MODELS[-1], TASK_FILES[0], METHODS[0]], [binding])


def test_a_missing_gin_file_is_named_with_the_remedy():
    with pytest.raises(OSError, match=r"no gin file 'nothing.gin' in .*--gin_search_paths"):
        gin_flags.parse_gin(["nothing.gin"])
