"""Training on a micro model: it learns, resumes bit for bit after a kill, and distils."""

import dataclasses
import itertools
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from speccascade_jax import checkpoints
from speccascade_jax.storage.locks import LockedError
from speccascade_jax.training import runs
from speccascade_jax.training.t5 import export, loop, steps
from speccascade_jax.training.t5.schedule import Schedule
from tests.support.killing import KilledError, killed_at


def _leaves(state):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.laws
def test_a_killed_run_resumes_bit_for_bit(trainer, tmp_path):
    whole = loop.Run(trainer)
    result = whole.finish()
    broken = dataclasses.replace(trainer, run_dir=str(tmp_path / "broken"), save_every_minutes=0.0)
    with killed_at(loop.Run, "_step", 7):
        broken.run()
    resumed = loop.Run(broken)
    assert int(resumed.state.step) == 6
    assert resumed.finish() == result
    for wanted, found in zip(_leaves(whole.state), _leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(wanted, found)
    assert [line["step"] for line in _metrics(broken)] == [4, 8, 12, 12]


def _metrics(trainer):
    """What a run logged, without what hangs on the clock."""
    text = (Path(trainer.run_dir) / runs.METRICS_FILE).read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in line.items() if k not in ("minutes", "tokens_per_second")} for line in lines]


@pytest.mark.laws
@pytest.mark.parametrize("deaths", [(1,), (9,), (14, 3), (20, 12), (31, 2, 5), (34,)])
def test_metrics_after_kills_are_those_of_an_unbroken_run(finished, monkeypatch, tmp_path, deaths):
    """Killed before the n-th step, save or record of each process, with reports and evaluations of odd lengths."""
    shared = {"log_every": 5, "evaluate_every": 6, "save_every_minutes": 0.0}
    whole = dataclasses.replace(finished[0], run_dir=str(tmp_path / "whole"), **shared)
    result = whole.run()
    broken = dataclasses.replace(whole, run_dir=str(tmp_path / "broken"))
    for death in (*deaths, None):
        seen = itertools.count(1)

        def watched(plain, seen=seen, death=death):
            def call(*args):
                if next(seen) == death:
                    raise KilledError
                return plain(*args)

            return call

        with monkeypatch.context() as patch:
            for where, name in ((loop.Run, "_step"), (loop.Run, "save"), (runs.MetricsLog, "append")):
                patch.setattr(where, name, watched(getattr(where, name)))
            try:
                found = broken.run()
            except KilledError:
                continue
    assert found == result and _metrics(broken) == _metrics(whole)
    assert [line["step"] for line in _metrics(whole)] == [5, 6, 10, 12, 12]
    assert broken.run() == result and _metrics(broken) == _metrics(whole)  # a finished one logs nothing twice


def test_a_second_trainer_of_a_folder_is_refused(trainer):
    said = rf"run is being written by process {os.getpid()} .*: wait for it, end it, or name another run_dir"
    with runs.alone(Path(trainer.run_dir)), pytest.raises(LockedError, match=said):
        trainer.run()
    assert not Path(trainer.run_dir, runs.METRICS_FILE).exists()


@pytest.mark.laws
def test_a_finished_run_is_not_trained_further(finished):
    trainer, result, _ = finished
    run = loop.Run(trainer)
    before = _leaves(run.state)
    assert run.finish() == result
    assert all(np.array_equal(wanted, found) for wanted, found in zip(before, _leaves(run.state), strict=True))


@pytest.mark.laws
def test_the_loss_falls(trainer):
    schedule = Schedule(peak=3e-2, warmup_steps=5, max_steps=60)
    run = loop.Run(dataclasses.replace(trainer, schedule=schedule, objective=steps.Objective(smoothing=0.0)))
    before = run.evaluate(0)["validation_loss"]
    assert run.finish()["validation_loss"] < 0.7 * before


@pytest.mark.laws
def test_a_time_plan_ends_the_run(trainer):
    schedule = Schedule(peak=1e-3, warmup_steps=1, max_minutes=0.05)
    run = loop.Run(dataclasses.replace(trainer, schedule=schedule))
    run.finish()
    assert 0.05 <= run.minutes() < 1.0
    assert int(run.state.step) > 0


def test_exports_hold_the_saved_state(finished):
    trainer, _, exported = finished
    model, params = checkpoints.load(exported)
    bound, step = export.trained(trainer)
    assert (model.config, step) == (trainer.config, 12)
    for wanted, leaf in zip(_leaves(bound.params), _leaves(params), strict=True):
        np.testing.assert_array_equal(wanted, leaf)
    assert export.evaluate(trainer, str(exported), 2) == export.evaluate(trainer, "", 2)


def test_a_run_without_saved_state_cannot_be_exported(trainer):
    with pytest.raises(FileNotFoundError, match="train first"):
        export.trained(trainer)


def test_a_student_that_starts_as_its_teacher_has_nothing_to_learn(finished, tmp_path):
    trainer, _, exported = finished
    objective = steps.Objective(distill_from=str(exported), distill_weight=1.0)
    changes = {"run_dir": str(tmp_path / "student"), "objective": objective, "init_from": str(exported)}
    run = loop.Run(dataclasses.replace(trainer, **changes))
    assert run._step(next(run.batches()), 0.0)["loss"] == pytest.approx(0.0, abs=1e-5)


def test_a_diverged_run_says_so(trainer):
    run = loop.Run(trainer)
    run.state = run.state.replace(params=jax.tree.map(lambda leaf: leaf * np.nan, run.state.params))
    with pytest.raises(FloatingPointError, match="lower the schedule's peak"):
        run._step(next(run.batches()), 1e-3)


def test_mismatches_are_refused(finished, tmp_path):
    trainer, _, exported = finished
    with pytest.raises(ValueError, match="has 290 pieces, but the model's vocab_size is 300"):
        dataclasses.replace(trainer, config=dataclasses.replace(trainer.config, vocab_size=300, num_embeddings=300))
    narrower = dataclasses.replace(trainer.config, d_model=8)
    other = dataclasses.replace(trainer, config=narrower, init_from=str(exported), run_dir=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="only d_model, num_heads, d_ff, .* may differ"):
        loop.Run(other)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        steps.Objective(distill_weight=1.5)
