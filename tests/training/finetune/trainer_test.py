"""Tests of training a micro model: learning, resumption bit for bit, distillation; the shipped gin files."""

import dataclasses
import itertools
import json
import os
from pathlib import Path

import gin
import jax
import numpy as np
import pytest
from speccascade_jax.training.t5 import loop, steps

from speccascade_jax import checkpoints
from speccascade_jax.runtime import gin_flags, paths
from speccascade_jax.storage.locks import LockedError
from speccascade_jax.training import runs
from tests.support.killing import KilledError


def _leaves(state):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def _left(trainer):
    """Returns a run's results: the leaves of its state, and its log without values that depend on the clock."""
    text = (Path(trainer.run_dir) / runs.METRICS_FILE).read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    metrics = [{k: v for k, v in line.items() if k not in ("minutes", "tokens_per_second")} for line in lines]
    return [leaf.tolist() for leaf in _leaves(loop.Run(trainer).state)], metrics


@pytest.mark.laws
@pytest.mark.parametrize("deaths", [(1,), (9,), (14, 3), (20, 12), (31, 2, 5), (34,)])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(trainer, monkeypatch, tmp_path, deaths):
    """Kills each process before its n-th step, save or record, with reports and evaluations of odd lengths."""
    whole = dataclasses.replace(trainer, log_every=5, evaluate_every=6, save_every_minutes=0.0)
    result, traces = whole.run(), _left(whole)
    assert [line["step"] for line in traces[1]] == [5, 6, 10, 12, 12]
    broken, taken = dataclasses.replace(whole, run_dir=str(tmp_path / "broken")), []
    for death in (*deaths, None):
        seen = itertools.count(1)

        def watched(plain, seen=seen, death=death):
            def call(*args):
                if next(seen) == death:
                    raise KilledError
                taken.append(plain.__name__)
                return plain(*args)

            return call

        with monkeypatch.context() as patch:
            for owner, name in ((loop.Run, "_step"), (loop.Run, "save"), (runs.MetricsLog, "append")):
                patch.setattr(owner, name, watched(getattr(owner, name)))
            try:
                final = broken.run()
            except KilledError:
                continue
    assert final == result and _left(broken) == traces
    assert taken.count("_step") <= 12 + len(deaths), "a resumed run begins at the last save"
    assert broken.run() == result and _left(broken) == traces  # a finished run does not train or log again


def test_a_second_trainer_of_a_folder_is_refused(trainer):
    said = rf"run is being written by process {os.getpid()} .*: wait for it, end it, or name another run_dir"
    with runs.alone(Path(trainer.run_dir)), pytest.raises(LockedError, match=said):
        trainer.run()
    assert not Path(trainer.run_dir, runs.METRICS_FILE).exists()


@pytest.mark.laws
def test_the_loss_falls(trainer):
    schedule = steps.Schedule(peak=3e-2, warmup_steps=5, max_steps=60)
    run = loop.Run(dataclasses.replace(trainer, schedule=schedule, objective=steps.Objective(smoothing=0.0)))
    before = run.evaluate(0)["validation_loss"]
    assert run.finish()["validation_loss"] < 0.7 * before


@pytest.mark.laws
def test_a_time_plan_ends_the_run(trainer):
    schedule = steps.Schedule(peak=1e-3, warmup_steps=1, max_minutes=0.05)
    run = loop.Run(dataclasses.replace(trainer, schedule=schedule))
    run.finish()
    assert 0.05 <= run.minutes() < 1.0
    assert int(run.state.step) > 0


def test_exports_hold_the_saved_state(finished):
    trainer, _, exported = finished
    model, params = checkpoints.load(exported)
    bound, step = loop.trained(trainer)
    assert (model.config, step) == (trainer.config, 12)
    for wanted, leaf in zip(_leaves(bound.params), _leaves(params), strict=True):
        np.testing.assert_array_equal(wanted, leaf)
    assert loop.evaluate(trainer, str(exported), 2) == loop.evaluate(trainer, "", 2)


def test_a_run_without_saved_state_cannot_be_exported(trainer):
    with pytest.raises(FileNotFoundError, match="train first"):
        loop.trained(trainer)


def test_a_student_that_starts_as_its_teacher_has_nothing_to_learn(finished, tmp_path):
    trainer, _, exported = finished
    objective = steps.Objective(distill_from=str(exported), distill_weight=1.0)
    changes = {"run_dir": str(tmp_path / "student"), "objective": objective, "init_from": str(exported)}
    run = loop.Run(dataclasses.replace(trainer, **changes))
    assert run._step(next(run.batches()), 0.0)["loss"] == pytest.approx(0.0, abs=1e-5)


def test_a_diverged_run_raises_an_error(finished, tmp_path):
    run = loop.Run(dataclasses.replace(finished[0], run_dir=str(tmp_path / "run")))
    run.state = run.state.replace(params=jax.tree.map(lambda leaf: leaf * np.nan, run.state.params))
    with pytest.raises(FloatingPointError, match="lower the schedule's peak"):
        run._step(next(run.batches()), 1e-3)


def test_mismatches_are_refused(finished):
    trainer = finished[0]
    with pytest.raises(ValueError, match="has 290 pieces, but the model's vocab_size is 300"):
        dataclasses.replace(trainer, config=dataclasses.replace(trainer.config, vocab_size=300, num_embeddings=300))
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        steps.Objective(distill_weight=1.5)


def test_settings_become_bindings():
    argv = ["train", "--gin_file=a.gin", "--gin.MINUTES=5", "--gin.loop.Trainer.seed=3"]
    wanted = ["train", "--gin_file=a.gin", "--gin_bindings=MINUTES = 5", "--gin_bindings=loop.Trainer.seed = 3"]
    assert gin_flags.rewrite_arguments(argv) == wanted


def test_a_setting_without_a_value_is_refused():
    with pytest.raises(ValueError, match="--gin.MINUTES has no value"):
        gin_flags.rewrite_arguments(["train", "--gin.MINUTES"])


def _shipped(name, bindings, monkeypatch):
    # The configurations name a vocabulary that exists only after its training.
    monkeypatch.setattr(loop.Trainer, "__post_init__", lambda self: None)
    gin.clear_config()
    try:
        gin_flags.parse_gin([str(paths.repository_root() / "gin" / f"{name}.gin")], bindings)
        return gin.get_configurable(loop.Trainer)()
    finally:
        gin.clear_config()


@pytest.mark.parametrize("name", ["train_target", "train_draft"])
def test_shipped_configurations_resolve(name, monkeypatch):
    trainer = _shipped(name, ["STEPS = 7", "MINUTES = 3", "loop.Trainer.seed = 5"], monkeypatch)
    assert (trainer.schedule.max_steps, trainer.schedule.max_minutes, trainer.seed) == (7, 3, 5)
    assert trainer.objective.smoothing == 0.0 and not trainer.objective.distill_from
    assert trainer.corpus.tokens_per_batch == trainer.validation.tokens_per_batch
    assert trainer.corpus.max_joined == trainer.validation.max_joined == 4


def test_the_draft_is_narrower_than_the_target_and_shares_its_vocabulary(monkeypatch):
    target, draft = (_shipped(name, [], monkeypatch).config for name in ("train_target", "train_draft"))
    assert (draft.vocab_size, draft.num_embeddings) == (target.vocab_size, target.num_embeddings)
    assert draft.d_model < target.d_model and draft.num_decoder_layers < target.num_decoder_layers


def test_a_draft_can_learn_from_outputs_and_a_teacher(monkeypatch):
    bindings = ["CORPUS = 'x.pieces.gz'", "MAX_JOINED = 1", "TEACHER = 'target'"]
    trainer = _shipped("train_draft", bindings, monkeypatch)
    assert (trainer.corpus.path, trainer.corpus.max_joined) == ("x.pieces.gz", 1)
    assert trainer.objective.distill_from == "target"
    assert trainer.validation.path.endswith("valid.en-de.tsv")
