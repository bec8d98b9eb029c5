"""Tests that gin files of fine-tuning resolve: each model family with each data file, each command of a recipe."""

import dataclasses
import itertools
import re
import shlex
from pathlib import Path

import gin
import pytest
from flax.traverse_util import unflatten_dict

from speccascade_jax import checkpoints
from speccascade_jax.data import directory
from speccascade_jax.data.tasks.file_task import FileTask
from speccascade_jax.data.tasks.table import TASKS
from speccascade_jax.data.tasks.task import Example, Task
from speccascade_jax.data.vocabularies.load import load_vocabulary
from speccascade_jax.models.decoder import DecoderLM, tiny
from speccascade_jax.runtime import cli, gin_flags, recipe
from speccascade_jax.training.finetune import trainer
from speccascade_jax.training.finetune.optimizers import Adafactor, AdamW
from speccascade_jax.training.finetune.run import train
from tests.support import tiny_decoders, tokenizer_files
from tests.support.recipes import ROOT

FAMILIES = ("t5", "t5_small", "t5_base", "t5_large", "t5_xl", "t5_xxl", "decoder")
DATA = {"wmt14_en_de": 250_000, "xsum": 100_000, "cnn_dailymail": 200_000, "span_corruption": 100_000, "file": 2000}
DECODER_STEPS = {
    "wmt14_en_de": 40_000,
    "xsum": 13_000,
    "cnn_dailymail": 18_000,
    "span_corruption": 10_000,
    "file": 2000,
}
TRAINED = ("wmt14_en_de", "xsum", "cnn_dailymail")
HOLES = {"file": ["TASK='mine.csv'"], "span_corruption": ["TEXT='text.txt'"]}
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
    for data, steps in (DECODER_STEPS if family == "decoder" else DATA).items():
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


def test_decoders_keep_their_rate_on_all_data():
    for data in DATA:
        chosen = resolved("decoder", data)
        plan = chosen.schedule
        assert (plan.peak, plan.warmup_steps, plan.decay, plan.first_step) == (2e-5, 100, "cosine", 0), data
        assert chosen.dropout is None


@pytest.mark.parametrize("family", ["t5", "decoder"])
def test_every_setting_has_one_name_in_all_files(family):
    settings = {"STEPS": 7, "PEAK": 3e-4, "WARMUP": 5, "DECAY": "linear", "FIRST_STEP": 2, "MINUTES": 9.0}
    settings |= {"ROWS": 64, "SEED": 3, "DTYPE": "float32", "ACCUMULATE": 2, "DROPOUT": 0.0, "VOCABULARY": "v"}
    for data in DATA:
        chosen = resolved(family, data, bindings=[f"{name} = {value!r}" for name, value in settings.items()])
        plan = chosen.schedule
        assert [plan.max_steps, plan.peak, plan.warmup_steps, plan.decay, plan.first_step, plan.max_minutes] == [
            settings[name] for name in ("STEPS", "PEAK", "WARMUP", "DECAY", "FIRST_STEP", "MINUTES")
        ]
        values = (chosen.corpus.rows, chosen.seed, chosen.dtype, chosen.accumulate, chosen.dropout, chosen.vocabulary)
        assert [*values] == [
            settings[name] for name in ("ROWS", "SEED", "DTYPE", "ACCUMULATE", "DROPOUT", "VOCABULARY")
        ]
        if data not in ("file", "span_corruption"):
            assert chosen.task == chosen.corpus.task == chosen.validation.task == data


def full_length(name):
    """Returns a task with the lengths of a shipped one, whose prompts and answers have their full length."""
    lengths = {"max_input_length": TASKS[name].max_input_length, "max_output_length": TASKS[name].max_output_length}
    # letters that the vocabulary has as bytes only, so that few letters are many tokens
    room = [f"{'xyz ' * (length // 4 + 1)}" for length in lengths.values()]
    examples = [Example(n, f"{n} {room[0]}", f"{n} {room[1]}") for n in range(2)]
    return Task(name=name, splits=("validation", "train"), read=lambda split: examples, metrics=("rouge2",), **lengths)


@pytest.fixture
def decoder(tmp_path, monkeypatch):
    """Writes a micro decoder-only model, and data for every data file; returns bindings that train it for one step."""
    path = tokenizer_files.llama2c(tmp_path / "tok.bin")
    config = dataclasses.replace(tiny("llama2_7b", vocab_size=load_vocabulary(path).vocab_size), max_length=4096)
    checkpoints.save(
        tmp_path / "model", DecoderLM(config), unflatten_dict(tiny_decoders.flat_parameters(config), sep="/")
    )
    (tmp_path / "model" / "tok.bin").write_bytes(path.read_bytes())
    (tmp_path / "mine.csv").write_text("source,reference\n" + "Once,upon\n" * 9 + "a,time\n" * 9)
    (tmp_path / "text.txt").write_text("Once upon a time there was a king.\n" * 200)
    for name in TRAINED:
        monkeypatch.setitem(TASKS, name, full_length(name))
    return ["ROWS=2", "STEPS=1", "DROPOUT=0.0", "DTYPE='float32'", "trainer.Trainer.examples=2"]


def test_prompts_and_answers_of_decoders_fit_the_widths_of_every_data_file(decoder):
    for data in DATA:
        chosen = resolved("decoder", data, bindings=decoder)
        batches = chosen.corpus.tokens(chosen.text, False)
        longest = sum(batches.source.limits)
        assert batches.shapes[-1].width == longest and batches.epoch(0, 0)
        if data in TRAINED:
            assert batches.source.longest == (0, longest), "the examples have the full length"


@pytest.mark.laws
@pytest.mark.parametrize("data", ["wmt14_en_de", "span_corruption", "file"])
def test_a_decoder_trains_by_every_data_file(decoder, data):
    result = train(resolved("decoder", data, bindings=decoder))
    metrics = {"wmt14_en_de": "rouge2", "file": "bleu"}
    assert result["step"] == 1 and metrics.get(data, "step") in result
    assert (Path("run") / trainer.MODEL / "tok.bin").is_file()


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


@pytest.mark.parametrize("task", ["xsum", "cnn_dailymail"])
def test_rehearsals_score_articles_that_they_do_not_train_on(task):
    gin_flags.parse_gin([str(ROOT / f"configs/paper1/sizes/{task}_sweep.gin")], [])
    scored = gin.get_configurable(FileTask)()
    if not (directory.data_directory() / scored.path).exists():
        pytest.skip("needs the data directory")
    prompts = [{example.source for example in scored.load(split)} for split in (scored.splits[0], "train")]
    assert len(prompts[0]) >= 32 and len(prompts[1]) >= 50 and prompts[0].isdisjoint(prompts[1])


@pytest.mark.parametrize(("task", "size"), itertools.product(TRAINED, ("", REHEARSAL)))
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
