"""Tests that gin files of fine-tuning resolve: each model family with each data file, each command of a recipe."""

import dataclasses
import itertools
import re
import shlex

import gin
import pytest

from speccascade_jax.runtime import cli, gin_flags, recipe
from speccascade_jax.training.finetune import trainer
from speccascade_jax.training.finetune.optimizers import Adafactor, AdamW
from tests.support.recipes import ROOT

FAMILIES = ("t5", "t5_small", "t5_base", "t5_large", "t5_xl", "t5_xxl", "decoder")
DATA = {"wmt14_en_de": 250_000, "xsum": 100_000, "cnn_dailymail": 200_000, "span_corruption": 100_000, "file": 2000}
TASKS = ("wmt14_en_de", "xsum", "cnn_dailymail")
HOLES = {"file": ["TASK='mine.csv'"], "span_corruption": ["TEXT='c4.txt.gz'"]}
REHEARSAL = "configs/paper1/sizes/rehearsal.gin"
PUBLIC = ["DRAFT='small'", "TARGET='xl'", "TEXT='c4.txt.gz'"]


@pytest.fixture(autouse=True)
def cleared(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    gin.clear_config()
    yield
    gin.clear_config()


def resolved(family, data, *more, bindings=()):
    gin.clear_config()
    files = [str(ROOT / f"gin/finetune/{name}.gin") for name in (family, data, *more)]
    gin_flags.parse_gin(files, ["MODEL='model'", "RUN_DIR='run'", *HOLES.get(data, ()), *bindings])
    return gin.get_configurable(trainer.Trainer)()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_trains_on_each_data_by_its_recipe(family):
    for data, steps in DATA.items():
        chosen = resolved(family, data)
        assert chosen.schedule.max_steps == steps
        assert chosen.corpus.rows % (chosen.accumulate * chosen.mesh[0]) == 0
        assert type(chosen.optimizer) is (AdamW if family == "decoder" else Adafactor)


def test_t5s_recipe_is_the_published_one():
    chosen = resolved("t5_small", "xsum")
    rates = {chosen.schedule.rate(step, 0.0) for step in (0, 1, 99_999)}
    assert (rates, chosen.corpus.rows, chosen.dropout, chosen.dtype) == ({1e-3}, 128, 0.1, "bfloat16")
    assert (chosen.objective.z_loss, chosen.objective.smoothing) == (1e-4, 0.0)
    further = resolved("t5_small", "span_corruption").schedule
    assert further.rate(0, 0.0) == pytest.approx(1e-3, rel=1e-5)
    assert further.rate(99_999, 0.0) == pytest.approx(1e-2 * (10_000 / 1_100_000) ** 0.5, rel=1e-5)


def test_a_teacher_is_added_by_one_file():
    chosen = resolved("t5_small", "xsum", "distillation", bindings=["TEACHER='target'", "OUTPUTS='mixed'"])
    assert (chosen.distillation.teacher, chosen.distillation.outputs) == ("target", "mixed")


def test_a_draft_is_distilled_and_fine_tuned_alone_by_one_file():
    runs = []
    for bindings in ([], ["DISTILLATION=@distillation.Distillation()"]):
        gin.clear_config()
        gin_flags.parse_gin([str(ROOT / "gin/finetune/distill_draft.gin")], ["RUN_DIR='run'", *bindings])
        runs.append(gin.get_configurable(trainer.Trainer)())
    alone, distilled = runs
    assert distilled.distillation.outputs == "student"
    assert distilled.distillation.teacher == distilled.acceptance_of
    assert dataclasses.replace(distilled, distillation=None) == alone, "both ways differ in the teacher only"


@pytest.mark.parametrize(("task", "size"), itertools.product(TASKS, ("", REHEARSAL)))
def test_every_command_of_a_recipe_resolves(task, size, capsys):
    files = [f"configs/paper1/t5_{task}.gin", *filter(None, [size])]
    gin_flags.parse_gin([str(ROOT / name) for name in files], [] if size else PUBLIC)
    assert gin.get_configurable(recipe.run)(dry_run=True) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    assert len(commands) == (11 if size else 8)
    for words in commands:
        assert words[2].removeprefix("experiments.") in cli.commands()
        names = [word.partition("=")[2] for word in words if word.startswith("--gin_file=")]
        bindings = [word.removeprefix("--gin.") for word in words if word.startswith("--gin.")]
        gin.clear_config()
        if names:
            gin_flags.parse_gin([str(ROOT / name) for name in names], bindings)
        if words[2] == "experiments.finetune":
            gin.get_configurable(trainer.Trainer)()


def test_the_files_of_sizes_leave_the_steps_of_a_recipe_as_they_are(capsys):
    outlines = []
    for size, bindings in (("", PUBLIC), (REHEARSAL, [])):
        gin.clear_config()
        names = ["configs/paper1/t5_xsum.gin", *filter(None, [size])]
        gin_flags.parse_gin([str(ROOT / name) for name in names], bindings)
        gin.get_configurable(recipe.run)(dry_run=True)
        outlines.append(re.findall(r"^# (.*)$", capsys.readouterr().out, re.MULTILINE))
    assert outlines[1][-8:] == outlines[0]
