"""Tests of a run's saved state and log of metrics: kills, damage, refused files; numbers for TensorBoard and W&B."""

import errno
import importlib.util
import json
import os
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from speccascade_jax.training import runs
from tests.support import damage


def _state(width: int = 4) -> runs.TrainState:
    params = {"layer": {"kernel": jnp.arange(3.0 * width).reshape(3, width)}, "scale": jnp.ones(width)}
    return runs.TrainState.fresh(params, optax.adam(1e-3))


def test_state_and_position_survive_a_round_trip(tmp_path):
    state = _state().replace(step=jnp.int32(7))
    runs.save_state(tmp_path, state, {"epoch": 2, "minutes": 0.1})
    loaded, position = runs.load_state(tmp_path, _state())
    assert position == {"epoch": 2, "minutes": 0.1}
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for wanted, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(wanted, leaf)
    assert [path.name for path in tmp_path.iterdir()] == [runs.STATE_FILE]


def test_no_state_gives_none_and_another_model_is_refused(tmp_path):
    assert runs.load_state(tmp_path, _state()) is None
    runs.save_state(tmp_path, _state(), {})
    with pytest.raises(ValueError, match="does not fit this configuration .* name another run_dir"):
        runs.load_state(tmp_path, _state(width=8))


def test_a_state_with_a_flipped_bit_is_refused(tmp_path):
    state = _state()
    runs.save_state(tmp_path, state, {"epoch": 2})
    path = tmp_path / runs.STATE_FILE
    for _ in damage.flips(path, 300):
        with pytest.raises(ValueError, match=rf"(?s){runs.STATE_FILE} is damaged.*(remove it and train again)"):
            runs.load_state(tmp_path, state)
    assert runs.load_state(tmp_path, state) is not None  # the damaged file has been restored


def test_a_state_of_an_earlier_version_loads(tmp_path):
    runs.save_state(tmp_path, _state().replace(step=jnp.int32(7)), {"epoch": 2})
    path = tmp_path / runs.STATE_FILE
    path.write_bytes(path.read_bytes().rpartition(b"\nblake2b-128:")[0])
    loaded, position = runs.load_state(tmp_path, _state())
    assert (int(loaded.step), position) == (7, {"epoch": 2})


@pytest.mark.parametrize("content", [b"", b"x", b"\x93\x01\x02\x03", b"\x81\xa5state\x01"])
def test_files_that_are_not_states_are_refused(tmp_path, content):
    (tmp_path / runs.STATE_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=f"{runs.STATE_FILE} is damaged, or is not the state of a run"):
        runs.load_state(tmp_path, _state())


@pytest.mark.parametrize(("logged", "kept"), [(2, [4, 8]), (None, [4, 8, 8])])
def test_the_log_keeps_the_records_before_the_saved_state(tmp_path, logged, kept):
    """Covers two records of one step, the second maybe later than the state, and invalid or torn lines."""
    path = tmp_path / runs.METRICS_FILE
    path.write_text('{"step": 4}\n[1]\n{"step": "x"}\n{"step": 8}\n{"step": 8, "bleu": 1}\n{"step": 9}\n{"st')
    log = runs.MetricsLog(path, resume_step=8, logged=logged)
    assert log.logged == len(kept)
    log.append({"step": 9})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*kept, 9]
    assert log.logged == len(kept) + 1


def test_a_full_disk_leaves_the_log_unchanged(tmp_path, monkeypatch):
    log = runs.MetricsLog(tmp_path / runs.METRICS_FILE, 0)
    log.append({"step": 1})

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"free some space.*metrics\.jsonl"):
        patch.setattr(os, "fsync", full)
        log.append({"step": 2})
    log.append({"step": 3})
    assert log.path.read_text() == '{"step": 1}\n{"step": 3}\n' and log.logged == 2


RECORD = {"step": 3, "loss": 0.5, "name": "x", "well": True, "bad": float("nan"), "heads": {"a": 1.0}}


def with_modules(monkeypatch, **modules):
    """Installs fakes: of tensorboardX and wandb, only `modules` can be imported."""
    find = importlib.util.find_spec
    asked = ("tensorboardX", "wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: (n in modules or None) if n in asked else find(n))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_without_tensorboard_and_wandb_nothing_is_written(tmp_path, monkeypatch):
    with_modules(monkeypatch)
    runs.Scalars(tmp_path, 0).add(RECORD)
    assert [*tmp_path.iterdir()] == []


def test_tensorboard_gets_finite_numbers_and_purges_repeated_steps(tmp_path, monkeypatch):
    scalars, began = [], []

    class Writer:
        def __init__(self, folder, purge_step, flush_secs):
            began.append((folder, purge_step))

        def add_scalar(self, *scalar):
            scalars.append(scalar)

    with_modules(monkeypatch, tensorboardX=types.SimpleNamespace(SummaryWriter=Writer))
    log = runs.MetricsLog(tmp_path / "metrics.jsonl", 2)
    log.append(RECORD | {"bad": None})
    assert began == [(str(tmp_path / "tensorboard"), 3)]
    assert scalars == [("loss", 0.5, 3), ("heads/a", 1.0, 3)]
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 0.5


def test_wandb_gets_numbers_only_during_an_active_run(tmp_path, monkeypatch):
    logged = []
    wandb = types.SimpleNamespace(run=None, log=lambda numbers, step: logged.append((numbers, step)))
    with_modules(monkeypatch, wandb=wandb)
    shown = runs.Scalars(tmp_path, 0)
    shown.add(RECORD)
    with monkeypatch.context() as folder:
        folder.setitem(sys.modules, "wandb", types.SimpleNamespace())  # a folder named wandb imports as an empty module
        shown.add(RECORD)
    wandb.run = object()
    shown.add(RECORD)
    assert logged == [({"loss": 0.5, "heads/a": 1.0}, 3)]


def test_event_files_hold_the_logged_numbers(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install '.[logging]'")
    runs.Scalars(tmp_path, 0).add(RECORD)
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert file.name.startswith("events.out.tfevents")
    end = time.monotonic() + 30  # waits for another thread, which writes the file
    while b"heads/a" not in file.read_bytes() and time.monotonic() < end:
        time.sleep(0.05)
    assert b"heads/a" in file.read_bytes() and b"loss" in file.read_bytes()


def test_a_file_that_is_no_log_is_not_replaced(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"my": "notes"}\n')
    with pytest.raises(ValueError, match="is no trainer's log, so it is not replaced"):
        runs.MetricsLog(file, 0)
    assert file.read_text() == '{"my": "notes"}\n'
    file.write_text('{"step": 1, "lo')
    assert runs.MetricsLog(file, 0).logged == 0
