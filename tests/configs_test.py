"""Tests that every gin file resolves: each method with each pair and task, and each recipe, up to loading weights."""

import dataclasses
import itertools
import re
from pathlib import Path

import gin
import pytest

from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.data.tasks.table import TASKS, get_task
from speccascade_jax.engine import scoring
from speccascade_jax.evaluation import enumeration, experiment, points
from speccascade_jax.evaluation.session import Session
from speccascade_jax.evaluation.studies.calibration import calibrating
from speccascade_jax.evaluation.studies.profiling import profiling
from speccascade_jax.evaluation.studies.survey import surveying
from speccascade_jax.hierarchy import optimizing
from speccascade_jax.methods import build_drafter
from speccascade_jax.methods.table import METHODS as TABLE
from speccascade_jax.results.store import result_store
from speccascade_jax.rules.deferral import RULES
from speccascade_jax.runtime import gin_flags
from speccascade_jax.training import exits
from speccascade_jax.training.heads import make_data, train
from speccascade_jax.training.heads import report as acceptance_report
from tests.support import text_pair
from tests.support.acceptance_heads import head_for
from tests.support.recipes import CONFIGS, HOLES, ROOT, resolve, stop_before_loading  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("stop_before_loading")

MODELS, TASK_FILES, METHODS, SELECTIONS = (
    sorted(f"gin/{kind}/{path.name}" for path in (ROOT / "gin" / kind).glob("*.gin"))
    for kind in ("models", "tasks", "methods", "selection")
)
SIZES = sorted(f"configs/sizes/{path.name}" for path in (ROOT / "configs/sizes").glob("*.gin"))
QUICKSTART = "configs/quickstart.gin"
SHIPPED = "gin/models/tatoeba_en_de.gin"
SWEEPS = [config for config in CONFIGS if "experiment.sweep:" in (ROOT / config).read_text()]
HEAD, EXITS, POLICY = "gin/train_acceptance_head.gin", "gin/train_exit_heads.gin", "gin/train_policy.gin"
TRAINING = sorted({f"gin/{path.name}" for path in (ROOT / "gin").glob("train_*.gin")} - {HEAD, EXITS, POLICY})
HIERARCHIES = {"hierarchy": "spec_decode"}


@pytest.mark.parametrize("method", METHODS)
def test_each_method_file_resolves_to_a_run(method):
    point = resolve(experiment.run, ["gin/run.gin", SHIPPED, "gin/tasks/tiny_translation.gin", method])
    assert HIERARCHIES.get(Path(method).stem, Path(method).stem) == point.settings.method


@pytest.mark.parametrize(
    ("model", "task"), [*((SHIPPED, task) for task in TASK_FILES), *((model, TASK_FILES[0]) for model in MODELS)]
)
def test_each_pair_and_task_file_resolves_to_a_run(model, task):
    point = resolve(experiment.run, ["gin/run.gin", model, task, "gin/methods/token_v3.gin"])
    assert get_task(point.evaluation.task).name == Path(task).stem


PUBLISHED = [model for model in MODELS if "\nTARGET = '" in (ROOT / model).read_text()]


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_pair_is_loaded_in_the_type_that_it_is_described_in(model):
    point = resolve(experiment.run, ["gin/run.gin", model, TASK_FILES[0], METHODS[0]])
    assert point.pair.dtype == "bfloat16"


def test_a_published_pair_has_its_name_and_the_names_of_its_models():
    point = resolve(experiment.run, ["gin/run.gin", "gin/models/gemma3_270m_27b.gin", TASK_FILES[0], METHODS[0]])
    parts = {"target": "google/gemma-3-27b-it", "draft": "google/gemma-3-270m-it"}
    assert point.pair == points.ModelPair(name="gemma3_270m_27b", dtype="bfloat16", **parts)


def test_two_checkpoints_form_a_named_pair():
    files = ["gin/run.gin", "gin/models/two_checkpoints.gin", "gin/tasks/tiny_translation.gin", METHODS[0]]
    point = resolve(experiment.run, files, ["VOCABULARY='some/tokenizer.json'"])
    parts = {"target": "some/target", "draft": "some/draft", "vocabulary": "some/tokenizer.json"}
    assert point.pair == points.ModelPair(name="two", **parts)
    gin.clear_config()
    with pytest.raises(ValueError, match=r"^DRAFT has no value \(%gin.REQUIRED\): add --gin.DRAFT=VALUE"):
        gin_flags.parse_gin([str(ROOT / files[1])], ["PAIR='two'", "TARGET='some/target'"])


def test_the_files_and_the_record_of_a_run_resolve_to_a_profile(tmp_path):
    parts = [SHIPPED, "gin/tasks/tiny_translation.gin", "gin/methods/token_v3.gin"]
    recipe = tmp_path / "recipe.gin"
    recipe.write_text(resolve(experiment.run, ["gin/run.gin", *parts]).configuration())
    for files in (parts, [str(recipe)]):
        gin.clear_config()
        assert resolve(profiling.profile, ["gin/profiling.gin", *files])[0].name == Path(SHIPPED).stem


STUDIES = {"survey": surveying.survey, "optimize_hierarchy": optimizing.optimize, "acceptance_data": make_data.make}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_resolves_to_a_pair_and_a_task(name):
    pair, _ = resolve(STUDIES[name], [f"gin/{name}.gin", SHIPPED, "gin/tasks/tiny_translation.gin"])
    assert pair.name == Path(SHIPPED).stem
    assert name != "survey" or set(gin.query_parameter("survey.rules")) <= set(RULES)


@pytest.mark.parametrize("file", ["gin/calibrate.gin", "gin/calibrate_appendix_d.gin"])
def test_a_calibration_needs_a_pair_a_task_and_a_tolerance(file):
    files = [file, SHIPPED, "gin/tasks/tiny_translation.gin"]
    bindings = ["calibrate.max_loss = 0.01"] if file == "gin/calibrate.gin" else []
    pair, loaded = resolve(calibrating.calibrate, files, bindings)
    assert pair.name == Path(SHIPPED).stem and loaded.quality_examples == 1000
    assert set(gin.query_parameter("calibrate.methods")) <= set(RULES)
    gin.clear_config()
    with pytest.raises(ValueError, match=r"Evaluation.task has no value \(%gin.REQUIRED\)"):
        gin_flags.parse_gin([str(ROOT / name) for name in files[:2]])


def test_every_task_has_a_file_and_every_method_file_sets_more_than_a_name():
    assert {Path(name).stem for name in METHODS} <= {*TABLE, *HIERARCHIES}
    for name in METHODS:
        lines = [line for line in (ROOT / name).read_text().splitlines() if re.match(r"^\s*[\w.]+\s*=", line)]
        assert len(lines) > 1, f"{name}: Settings.method alone needs no file"
    assert {Path(name).stem for name in TASK_FILES} == {*TASKS, "file", "seqio"}


def _tiny(config) -> list[str]:
    """Returns a recipe's files for the shipped pair; the quickstart names its own."""
    return [config] if config == QUICKSTART else [config, "configs/sizes/tiny.gin"]


@pytest.mark.parametrize("config", SWEEPS)
def test_each_recipe_sweeps_the_shipped_pair_and_published_sizes(config):
    end = resolve(experiment.sweep, _tiny(config))
    expected_pair = "tatoeba_en_de_large" if config == QUICKSTART else Path(SHIPPED).stem
    assert end.settings.method == TARGET and end.pair.name == expected_pair
    if config != QUICKSTART:
        gin.clear_config()
        parts = ["configs/sizes/published.gin", "gin/models/directory.gin", "gin/tasks/wmt14_en_de.gin"]
        large = resolve(experiment.sweep, [config, *parts])
        assert large.pair.name == "some/pair" and large.evaluation.quality_examples == 500
        assert large.evaluation.latency_examples in (0, 500)


@pytest.mark.parametrize(
    "name", ["paper1_table2", "paper1_figure5", "paper1_figure8", "paper3_figure4", "paper3_oracle"]
)
def test_recipes_of_the_larger_pair_use_it(name):
    end = resolve(experiment.sweep, [f"configs/{name}.gin", "configs/sizes/large.gin"])
    assert end.pair.name == "tatoeba_en_de_large" and end.evaluation.latency_trials == 3
    assert "configs/sizes/large.gin" in (ROOT / f"configs/{name}.gin").read_text()


def test_the_ablation_uses_the_heads_that_training_writes():
    gin_flags.parse_gin([str(ROOT / f"gin/{name}.gin") for name in ("train_acceptance_head", "models/tatoeba_en_de")])
    grid = {name: gin.query_parameter(f"HeadTrainer.{name}") for name in ("run_dir", "depths", "w_rejs", "laws")}
    written = [train.head_name(*head) for head in itertools.product(grid["depths"], grid["w_rejs"], grid["laws"])]
    gin.clear_config()
    gin_flags.parse_gin([str(ROOT / name) for name in _tiny("configs/paper3_ablation.gin")])
    assert list(gin.query_parameter("%HEADS")) == [f"{grid['run_dir']}/heads/{name}.msgpack" for name in written]


# two examples, and more tokens than a block of 5 can give in one round
SMALL = {"quality_examples": 2, "quality_batch": 2, "max_new_tokens": 9, "resamples": 2, "latency_examples": 0}
SMALL |= {"keep_outputs": False, "keep_traces": 0}


@pytest.fixture(scope="module")
def tabular(tmp_path_factory):
    """Returns a session that all recipes share, so that a method in several of them is compiled once."""
    pair = text_pair.make(tmp_path_factory.mktemp("pair"))
    pair = dataclasses.replace(pair, head=head_for(pair, depth=1, law=True))
    sizes = points.Evaluation(task="tiny_translation", **SMALL)
    return Session(points.ModelPair(name="tabular"), sizes, pair)


@pytest.fixture
def one_deferral_rule(monkeypatch):
    """Lets deferral rules decide as `token_v3`, so that recipes share a program; laws_test.py runs them as themselves.

    Rules over the likeliest tokens of a larger vocabulary stay, because it has no such variant.
    """

    def stand_in(rule):
        return rule if rule.deferral is None or "_top" in rule.name else RULES["token_v3"]

    for ways in ("VERIFIERS", "JOINT"):
        known = getattr(build_drafter, ways).items()
        verifier = {name: lambda rule, verifier=verifier: verifier(stand_in(rule)) for name, verifier in known}
        monkeypatch.setattr(build_drafter, ways, verifier)
    # one program per width is slow to compile; tests/engine/edges_test.py tests the widths
    monkeypatch.setattr(scoring, "WIDTHS", ())


HEAVY = [pytest.param(config, marks=pytest.mark.tools) for config in SWEEPS if config != QUICKSTART]


@pytest.mark.sample(12)
@pytest.mark.parametrize("config", [QUICKSTART, *HEAVY])
@pytest.mark.usefixtures("one_deferral_rule")
def test_each_recipe_runs_for_two_rounds_and_makes_its_tables_and_figures(config, tabular, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "open_session", lambda points: tabular)
    bindings = [f"Evaluation.{name} = {value}" for name, value in SMALL.items()]
    output = f"sweep.output = {str(tmp_path / 'store.jsonl')!r}"
    blocks = "sweep.block_sizes = (5,)"  # most recipes use it; each further size is a program per rule
    own_head = ["HEADS = ()"] if "HEADS = (" in (ROOT / config).read_text() else []
    gin_flags.parse_gin([str(ROOT / name) for name in _tiny(config)], [*bindings, output, blocks, *own_head])
    gin.get_configurable(experiment.sweep)()
    records = result_store.read_records(tmp_path / "store.jsonl")
    with_blocks = [r for r in records if r["point"]["block_size"] is not None]
    assert {r["point"]["method"] for r in records} > {TARGET, DRAFT} and with_blocks
    # an output takes one round only if a stop id cuts it short or it fits into one block
    long = [
        r["counts"]["committed"] == 2 * 9 and not r["counts"]["unverified"] and r["point"]["block_size"] < 9
        for r in with_blocks
    ]
    assert any(long) or all(r["point"]["block_size"] >= 9 for r in with_blocks)
    assert all(r["counts"]["rounds"] >= 2 * 2 for r, is_long in zip(with_blocks, long, strict=True) if is_long)
    assert list(tmp_path.glob("store*.png"))


def test_the_histogram_comes_from_a_survey():
    assert resolve(surveying.survey, _tiny("configs/paper2_figure3.gin"))[0].name == Path(SHIPPED).stem
    gin.clear_config()
    large = ["configs/sizes/published.gin", "gin/models/directory.gin", "gin/tasks/xsum.gin"]
    assert resolve(surveying.survey, ["configs/paper2_figure3.gin", *large])[0].name == "some/pair"
    assert gin.query_parameter("Evaluation.quality_examples") == 500


def _points(config):
    """Returns the configurations of a recipe's points, which keys distinguish."""
    configurations = set()

    def listed(**given):
        groups = enumeration.enumerate_points(**given)
        configurations.update(point.configuration() for group in groups for point in group)
        return groups

    gin.clear_config()
    gin_flags.parse_gin([str(ROOT / name) for name in _tiny(config)], ["sweep.dry_run = True"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "enumerate_points", listed)
        gin.get_configurable(experiment.sweep)()
    return configurations


@pytest.mark.parametrize(("config", "shared"), [("figure6", 2 * 18), ("figure8", 18), ("figure10", 8)])
def test_recipes_that_reuse_table_2_share_its_points(config, shared):
    path = f"configs/paper1_{config}.gin"
    assert "reuse = ('results/paper1_table2.jsonl',)" in (ROOT / path).read_text()
    assert len(_points(path) & _points("configs/paper1_table2.gin")) == shared


def test_an_error_names_the_missing_setting_of_a_run():
    with pytest.raises(
        ValueError, match=r"^Settings.method has no value .*: add --gin.Settings.method=VALUE \(strings"
    ):
        gin_flags.parse_gin([str(ROOT / name) for name in ("gin/run.gin", SHIPPED, "gin/tasks/tatoeba.gin")])


def test_no_file_of_a_run_overrides_another():
    """Only one of the four files of a run gives a name its value; REQUIRED is no value."""
    bound = re.compile(r"^\s*([\w.]+)\s*=(?!\s*%gin.REQUIRED)")
    for folders in (MODELS, TASK_FILES, METHODS):
        other_files = [name for names in (MODELS, TASK_FILES, METHODS) if names is not folders for name in names]
        elsewhere = {name for file in ["gin/run.gin", *other_files] for name in _bindings(bound, file)}
        for file in folders:
            assert not _bindings(bound, file) & elsewhere


def _bindings(pattern, file) -> set[str]:
    """Returns full names, block syntax included (`points.Settings:` and its indented lines)."""
    names, block = set(), ""
    for line in (ROOT / file).read_text().splitlines():
        if re.match(r"^[\w./]+:$", line):
            block = line[:-1] + "."
        elif match := pattern.match(line):
            names.add((block if line[0].isspace() else "") + match[1])
    return names


def test_these_tests_know_every_gin_file():
    single = (
        "run",
        "profiling",
        "spec_bench",
        "calibrate",
        "calibrate_appendix_d",
        "selection_data",
        "compiled_costs",
        *STUDIES,
    )
    known = {*(f"gin/{name}.gin" for name in single), HEAD, EXITS, POLICY}
    known |= {*SELECTIONS, *MODELS, *TASK_FILES, *METHODS, *CONFIGS, *SIZES, *TRAINING}
    files = {str(path.relative_to(ROOT)) for folder in ("gin", "configs") for path in (ROOT / folder).rglob("*.gin")}
    elsewhere = ("gin/finetune/", "configs/paper1/")  # tests/configs_finetuning_test.py covers these folders
    assert {file for file in files if not file.startswith(elsewhere)} == known


@pytest.mark.parametrize("table", ["table3", "table4"])
def test_the_searches_for_stacks_have_several_drafts(table):
    config = f"configs/paper4_{table}.gin"
    pair, loaded = resolve(optimizing.optimize, _tiny(config))
    assert pair.name == Path(SHIPPED).stem and len(pair.others) >= 2 and loaded.latency_examples == 12
    gin.clear_config()
    parts = ["configs/sizes/published.gin", "gin/models/two_checkpoints.gin", "gin/tasks/cnn_dailymail.gin"]
    pair, loaded = resolve(optimizing.optimize, [config, *parts])
    assert pair.target == "some/target" and loaded.quality_examples == loaded.latency_examples == 500


def test_acceptance_heads_belong_to_a_pair_and_are_reported_on_a_task(tmp_path):
    gin_flags.parse_gin([str(ROOT / name) for name in (HEAD, SHIPPED, "gin/tasks/tiny_translation.gin")])
    report = gin.get_configurable(acceptance_report.HeadReport)()
    assert report.trainer == gin.get_configurable(train.HeadTrainer)() and len(report.trainer.grid) == 20
    assert (report.trainer.pair.name, report.evaluation.task) == (Path(SHIPPED).stem, "tiny_translation")
    with pytest.raises(FileNotFoundError, match="runs/acceptance/data holds no acceptance data"):
        report.run()


def test_heads_of_exits_are_trained_for_a_pair():
    gin_flags.parse_gin([str(ROOT / EXITS), str(ROOT / SHIPPED)])
    trainer = gin.get_configurable(exits.ExitTrainer)()
    assert trainer.pair.name == Path(SHIPPED).stem and (trainer.peak, trainer.epochs, trainer.warmup) == (2e-4, 2, 0.05)


@pytest.mark.parametrize("file", TRAINING)
def test_each_training_file_resolves(file):
    gin_flags.parse_gin([str(ROOT / file)])


@pytest.mark.parametrize(("binding", "message"), [
    ("Settings.alfa=1", r"^--gin.Settings.alfa=1: Settings has no 'alfa': did you mean alpha, tail\?$"),
    ("Metod.alpha=1", r"^--gin.Metod.alpha=1: unknown name 'Metod': did you mean ModelPair"),
    ("Settings.alpha=", r"^--gin.Settings.alpha=: Unable to parse value."),
    ("Settings.method='bild", r"^--gin.Settings.method='bild: "),
    ("Settings.drafters=(1", "a bracket or a quotation mark is never closed"),
    ("Settings.method=bild", "^--gin.Settings.method=bild: bild is not a value; a string needs quotes"),
    ("Settings.method=3", "^method=3 is not a text"),
    ("Settings.alpha=True", "^alpha=True is not a finite number or None"),
    ("Evaluation.execute_code='False'", "execute_code='False' is not True or False; write it without quotes"),
    ("Settings.method=%NOWHERE", "^%NOWHERE is used but never set: .*add --gin.NOWHERE=VALUE"),
    ("Settings.method=(%gin.REQUIRED,)", "^points.Settings.method has no value"),
    ("run.pair=@Evaluation()", r"^experiment.run.pair=@Evaluation\(\) is not a ModelPair$"),
    ("run.pair=@ModelPair", r"^experiment.run.pair=@ModelPair \(to call it: @ModelPair\(\)\) is not a ModelPair$"),
])  # fmt: skip
def test_misspelt_settings_fail_when_read(binding, message):
    with pytest.raises(ValueError, match=message):
        resolve(experiment.run, ["gin/run.gin", SHIPPED, TASK_FILES[0], METHODS[0]], [binding])


def test_a_missing_gin_file_is_named_with_the_remedy():
    with pytest.raises(OSError, match=r"no gin file 'nothing.gin' in .*--gin_search_paths"):
        gin_flags.parse_gin(["nothing.gin"])
