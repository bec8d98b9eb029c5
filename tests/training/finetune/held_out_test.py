"""Tests that evaluations use held-out examples: the corpus's own division, refusals, and warnings in one line."""

import os
import warnings

import pytest

from speccascade_jax.data.tasks.file_task import FileTask
from speccascade_jax.training.finetune.corpus import JoinedCorpus, MixedCorpus, SpanCorruption, TaskCorpus, examples_of
from speccascade_jax.training.finetune.evaluations import evaluate
from speccascade_jax.training.finetune.schedule import Schedule
from speccascade_jax.training.finetune.trainer import Trainer


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("held_out") / "mine.csv"
    rows = [f"question {number},answer {number}\n" for number in range(200)]
    path.write_text("source,reference\n" + "".join(rows))
    return str(path)


def trainer(path, corpus, task=None, split="validation", **changes):
    settings = {"run_dir": "run", "init_from": "model", "schedule": Schedule(max_steps=1)}
    return Trainer(corpus=corpus, task=task or path, split=split, **settings | changes)


@pytest.mark.parametrize("held_out", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.filterwarnings("error")
def test_the_scored_examples_are_those_that_the_corpus_holds_out(path, held_out, mixed):
    part = TaskCorpus(task=path, held_out=held_out)
    corpus = MixedCorpus(parts=(TaskCorpus(task="tatoeba"), part)) if mixed else part
    for task, split in ((path, "validation"), (FileTask(path=path), None)):
        chosen = trainer(path, corpus, task, split)
        chosen.check_held_out()
        scored = {example.id for example in examples_of(chosen.scored, split, 1000)}
        assert len(scored) == 200 * held_out
        assert not scored & {example.id for example in part.resolved.load("train")}


def test_two_divisions_of_one_file_are_refused(path):
    other = FileTask(path=path, template="translate: {source}")
    cases = [
        ({"task": other}, "the task has template='translate: {source}', but the corpus has '{source}': give both"),
        ({"task": FileTask(path=path, held_out=0.2)}, "the task holds out 0.2 of .*mine.csv, but the corpus 0.05"),
        ({"validation": TaskCorpus(task=path, split="validation", held_out=0.1)}, "validation corpus holds out 0.1"),
    ]  # fmt: skip
    for changes, said in cases:
        with pytest.raises(ValueError, match=said):
            trainer(path, TaskCorpus(task=path), **changes).check_held_out()


def test_training_examples_that_are_scored_are_told_in_one_line(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where no mine.csv of a reader lies
    folder, alias = os.path.split(path)
    monkeypatch.setenv("SPECCASCADE_DATA", folder)
    whole, held_out = TaskCorpus(task=path, split="all"), TaskCorpus(task=path)
    for corpus, changes, what in (
        (whole, {}, "the task"), (held_out, {"split": "all"}, "the task"), (held_out, {"split": "train"}, "the task"),
        (JoinedCorpus(path=path, widths=(8,)), {}, "the task"),
        (TaskCorpus(task="tatoeba"), {"task": "tatoeba", "split": "train"}, "the task"),
        (whole, {"task": "tatoeba", "validation": whole}, "the validation corpus"),
        (whole, {"task": "tatoeba", "validation": MixedCorpus(parts=(whole,))}, "the validation corpus"),
        (SpanCorruption(text=path, split="all"), {}, "the task"),
        (TaskCorpus(task=alias, split="all"), {}, "the task"),
        (JoinedCorpus(path=alias, widths=(8,)), {}, "the task"),
    ):  # fmt: skip
        with pytest.warns(UserWarning, match=f"^{what} uses examples that the corpus trains on") as told:
            trainer(path, corpus, **changes).check_held_out()
        assert len(told) == 1 and "\n" not in str(told[0].message)


@pytest.mark.filterwarnings("error")
def test_two_names_of_one_file_divide_it_alike(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where no mine.csv of a reader lies
    folder, alias = os.path.split(path)
    monkeypatch.setenv("SPECCASCADE_DATA", folder)
    for corpus in (
        TaskCorpus(task=FileTask(path=alias), held_out=0.2),
        SpanCorruption(text=FileTask(path=alias, held_out=0.2)),
    ):
        chosen = trainer(path, corpus, FileTask(path=path))
        chosen.check_held_out()
        assert chosen.scored.held_out == 0.2


def test_an_evaluation_checks_what_is_held_out(path):
    with pytest.raises(ValueError, match="the task holds out 0.2 of .*mine.csv, but the corpus 0.05"):
        evaluate(trainer(path, TaskCorpus(task=path), FileTask(path=path, held_out=0.2)), "", 1)


def test_other_data_are_not_told(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(path, TaskCorpus(task="tatoeba")).check_held_out()
        trainer(path, TaskCorpus(task="tatoeba"), "tatoeba").check_held_out()
        trainer(path, TaskCorpus(task=path, held_out=0.2), FileTask(path=path, held_out=0.1)).check_held_out()
