"""Tests of the short flags: they follow from signatures, become gin bindings, and name the results."""

import re
from pathlib import Path

import gin
import pytest
from absl import flags

from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation.points import ModelPair
from speccascade_jax.evaluation.studies.calibration import calibrating
from speccascade_jax.evaluation.studies.spec_bench import answering
from speccascade_jax.evaluation.studies.survey import surveying
from speccascade_jax.hierarchy import optimizing
from speccascade_jax.runtime import gin_flags, recipe, short_flags, shorthands
from speccascade_jax.selection import make_data, report, serving, train
from speccascade_jax.training import exits
from tests.support.recipes import CONFIGS

QUICKSTART = "--gin_file=configs/quickstart.gin"
TWO = ("--gin_file=configs/paper1_table2.gin", "--gin_file=configs/sizes/tiny.gin")


@pytest.mark.parametrize(("function", "known"), [
    (experiment.sweep, ["task", "pair", "methods", "alphas", "output"]),
    (calibrating.calibrate, ["task", "pair", "methods", "alphas", "output"]),
    (experiment.run, ["task", "pair", "output"]), (surveying.survey, ["task", "pair", "output"]),
    (answering.run, ["pair", "output"]), (serving.serve, ["pair", "output"]), (exits.ExitTrainer, ["pair", "output"]),
    (recipe.run, ["output"]), (train.PolicyTrainer, ["output"]),
])  # fmt: skip
def test_the_signature_says_which_flags_a_command_has(function, known):
    assert list(shorthands.arguments(function)) == known


@pytest.fixture
def read(monkeypatch):
    """Returns a function that reads a command line and returns what gin has then, by parameter."""

    def read(*arguments, function=experiment.sweep, recorded=None, **offered):
        parsed = flags.FlagValues()
        monkeypatch.setattr(flags, "FLAGS", parsed)
        for name in ("DEFINE_string", "DEFINE_multi_string", "DEFINE_bool"):
            define = getattr(flags, name)
            local = lambda *texts, define=define, **_: define(*texts, flag_values=parsed)  # noqa: E731
            monkeypatch.setattr(short_flags.flags, name, local)
        for define, name, default, text in gin_flags._FLAGS:
            define(name, default, text, flag_values=parsed)
        short = short_flags.Offered(function=function, **({"sizes": short_flags.SIZES} | offered))
        short.define()
        monkeypatch.undo()
        monkeypatch.setattr(flags, "FLAGS", parsed)
        parsed(gin_flags.rewrite_arguments(["sweep", *arguments]))
        gin.clear_config()
        gin_flags.read("an example", recorded, short)
        return gin_flags._settings()

    yield read
    gin.clear_config()


def _gin(values):
    return {name: value for name, value in values.items() if not name.startswith("--")}


def test_short_flags_set_what_gin_flags_set(read):
    short = read(QUICKSTART, "--task", "mine.csv", "--methods=chow,my_rules.MINE", "--alphas=my_rules.MINE:0.2,-1",
                 "--alphas=chow:0.3", "--output=a.jsonl")  # fmt: skip
    assert gin_flags.on_command_line("methods") and gin_flags.on_command_line("alphas")
    long = read(QUICKSTART, "--gin.Evaluation.task='mine.csv'", "--gin.sweep.methods=('chow', 'my_rules.MINE')",
                "--gin.sweep.alphas={'my_rules.MINE': (0.2, -1.0), 'chow': (0.3,)}", "--gin.sweep.output='a.jsonl'"
                )  # fmt: skip
    assert _gin(short) == _gin(long)
    assert short["sweep.methods"] == ("chow", "my_rules.MINE") and "sweep.output" in short


def test_a_pair_takes_the_place_of_the_models_of_a_gin_file(read):
    files = ("--gin_file=gin/models/two_checkpoints.gin", "--gin.DTYPE='bfloat16'")
    read(*TWO, *files, "--pair=tatoeba_en_de_large")
    assert gin.get_configurable(ModelPair)() == ModelPair(name="tatoeba_en_de_large", dtype="bfloat16")


def test_a_pair_is_set_in_the_scope_in_which_a_gin_file_binds_it(read):
    values = read("--gin_file=configs/paper5_online.gin", "--pair=some/pair", function=serving.serve)
    assert values["selected/ModelPair.name"] == "some/pair" and "ModelPair.name" not in values
    assert values["serve.output"] == "results/paper5_online_pair"


@pytest.mark.parametrize(("arguments", "message"), [
    (["--alphas=chow:0.3,x"], "--alphas=chow:0.3,x: 'x' is not a finite number; write --alphas=token_v3:0.5,0.8"),
    (["--alphas=chow:nan"], "'nan' is not a finite number"), (["--alphas=chow:"], "'' is not a finite number"),
    (["--alphas=0.3"], "'0.3' follows no name"), (["--alphas=:0.3"], "':0.3' follows no name"),
    (["--alphas=chow:0.3", "--alphas=chow:0.4"], "chow occurs twice"),
    (["--methods=chow,,opt"], "--methods=chow,,opt: a name is empty; write"),
    (["--task= "], "--task is empty: give it a value"),
    (["--task=a.csv", "--gin.Evaluation.task='b'"], "--task=a.csv and --gin.Evaluation.task set the same parameter"),
    (["--pair=a", "--gin.points.ModelPair.target='b'"], "--pair=a and --gin.points.ModelPair.target set the same"),
    (["--methods=opt", "--gin.experiment.sweep.methods=('chow',)"], "set the same parameter: leave one of them out"),
    (["--quick", "--full"], "--quick and --full exclude each other"),
])  # fmt: skip
def test_a_flag_without_a_meaning_is_one_clear_line(read, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read(QUICKSTART, *arguments)
    assert "\n" not in str(raised.value)


def test_a_curve_may_have_a_colon_in_its_name():
    assert shorthands.curves("specdecpp:head:0.3, opt: -1,0") == {"specdecpp:head": (0.3,), "opt": (-1.0, 0.0)}


@pytest.mark.parametrize(("arguments", "output"), [
    ([QUICKSTART], "results/quickstart.jsonl"), (["--task=a/mine.csv.gz"], "results/quickstart_mine.jsonl"),
    (["--task=hf:owner/xsum", "--pair=runs/my.pair/"], "results/quickstart_xsum_my_pair.jsonl"),
    (["--methods=chow", "--alphas=chow:0.1", "--quick"], "results/quickstart_selected_quick.jsonl"),
    (["--full", "--output=b.jsonl"], "b.jsonl"), (["--quick", "--gin.sweep.output='c.jsonl'"], "c.jsonl"),
    (["--quick", "--gin.experiment.sweep.output='gs://b/c.jsonl'"], "gs://b/c.jsonl"),
    ([*TWO, "--task=gsm8k:4"], "results/paper1_table2_gsm8k_4.jsonl"),
])  # fmt: skip
def test_results_of_other_settings_have_another_name(read, arguments, output):
    """A recipe's store holds its points alone; only `--output` adds others to it."""
    assert read(*arguments, default="configs/quickstart.gin")["sweep.output"] == output


def test_a_record_is_measured_again_in_its_place(read):
    text = Path("configs/quickstart.gin").read_text()
    values = read("--task=mine.csv", recorded=lambda: text)
    assert (values["Evaluation.task"], values["sweep.output"]) == ("mine.csv", "results/quickstart.jsonl")


def test_a_command_line_without_short_flags_needs_a_gin_file(read):
    with pytest.raises(ValueError, match="name at least one --gin_file"):
        read("--gin.sweep.seeds=(1,)", default="configs/quickstart.gin")


FUNCTIONS = (experiment.sweep, surveying.survey, optimizing.optimize, report.compare, serving.serve)
TRAINED = ("configs/paper5_figure2.gin", "configs/paper5_figure3.gin")
"""Recipes of `experiments.train_policy`, whose data `experiments.make_selection_data` makes."""


@pytest.mark.parametrize("config", [config for config in CONFIGS if config not in TRAINED])
@pytest.mark.parametrize(("size", "quality", "timed"), [("quick", {16}, {0, 8}), ("full", {500}, {0, 300, 500})])
def test_each_recipe_has_a_first_look_and_a_published_size(config, size, quality, timed, read):
    name = re.search(r"\.(\w+):\n  pair =", Path(config).read_text() + ".optimize:\n  pair =")[1]
    function = next(function for function in FUNCTIONS if function.__name__ == name)
    values = read(f"--gin_file={config}", f"--{size}", "--pair=some/pair", *OTHERS.get(size, ()), function=function)
    examples = {key.rpartition(".")[2]: set() for key in ("a.quality_examples", "a.latency_examples")}
    for key, value in values.items():
        if key.rpartition(".")[2] in examples and "Evaluation" in key:
            examples[key.rpartition(".")[2]].add(_value(value))
    assert examples["quality_examples"] == quality and examples["latency_examples"] <= timed
    assert values[f"{name}.output"].partition(".")[0].endswith(f"_pair_{size}")


OTHERS = {"full": ("--gin.Evaluation.task='xsum'",)}


@pytest.mark.parametrize(("size", "queries", "policies"), [("quick", 16, 3), ("full", 500, 5)])
def test_recipes_of_trained_policies_have_both_sizes_too(size, queries, policies, read):
    data = ("--gin_file=gin/selection_data.gin", "--gin_file=gin/selection/tiny_two_ways.gin")
    values = read(*data, f"--{size}", function=make_data.make)
    assert values["QUERIES"] == queries and values["make.output"] == f"runs/selection/data_{size}"
    for config in TRAINED:
        sizes = short_flags.POLICY_SIZES
        values = read(f"--gin_file={config}", f"--{size}", function=train.PolicyTrainer, sizes=sizes)
        assert len(values["weights.alignment_weights"]) == policies and len(values["curves.seeds"]) in (1, 3)
        assert values["PolicyTrainer.run_dir"] == f"runs/selection/{Path(config).stem}_{size}"
        assert values["PolicyTrainer.data"] == f"runs/selection/{Path(config).stem}_data"


def _value(value):
    return value if isinstance(value, int) else gin.query_parameter(f"%{value.config_key[0]}")


def test_a_first_look_fills_in_the_pair_and_the_task_that_a_recipe_leaves_open(read):
    values = read(TWO[0], "--quick")
    assert (values["ModelPair.name"], values["Evaluation.task"]) == ("tatoeba_en_de", "tiny_translation")
    values = read(TWO[0], "--quick", "--task=mine.csv", "--gin.ModelPair.name='mine'")
    assert (values["ModelPair.name"], values["Evaluation.task"]) == ("mine", "mine.csv")
    with pytest.raises(ValueError, match="Evaluation.task has no value"):
        read(TWO[0], "--full", "--pair=some/pair")
