"""Scalars of a run where TensorBoard's writer or W&B is there, and without them."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import types

import pytest

from speccascade_jax.training import runs, scalars

RECORD = {"step": 3, "loss": 0.5, "name": "x", "well": True, "bad": float("nan"), "heads": {"a": 1.0}}


def with_modules(monkeypatch, **modules):
    """Only these are installed, of those that are asked for."""
    find = importlib.util.find_spec
    asked = ("tensorboardX", "wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: (n in modules or None) if n in asked else find(n))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_without_either_nothing_is_written(tmp_path, monkeypatch):
    with_modules(monkeypatch)
    scalars.Scalars(tmp_path, 0).add(RECORD)
    assert [*tmp_path.iterdir()] == []


def test_tensorboard_gets_finite_numbers_and_forgets_what_comes_again(tmp_path, monkeypatch):
    told, began = [], []

    class Writer:
        def __init__(self, folder, purge_step, flush_secs):
            began.append((folder, purge_step))

        def add_scalar(self, *scalar):
            told.append(scalar)

    with_modules(monkeypatch, tensorboardX=types.SimpleNamespace(SummaryWriter=Writer))
    log = runs.MetricsLog(tmp_path / "metrics.jsonl", 2)
    log.append(RECORD | {"bad": None})
    assert began == [(str(tmp_path / "tensorboard"), 3)]
    assert told == [("loss", 0.5, 3), ("heads/a", 1.0, 3)]
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 0.5


def test_wandb_gets_them_only_while_a_run_of_its_own_is_active(tmp_path, monkeypatch):
    told = []
    wandb = types.SimpleNamespace(run=None, log=lambda numbers, step: told.append((numbers, step)))
    with_modules(monkeypatch, wandb=wandb)
    shown = scalars.Scalars(tmp_path, 0)
    shown.add(RECORD)
    with monkeypatch.context() as folder:
        folder.setitem(sys.modules, "wandb", types.SimpleNamespace())  # what importing a mere folder gives
        shown.add(RECORD)
    wandb.run = object()
    shown.add(RECORD)
    assert told == [({"loss": 0.5, "heads/a": 1.0}, 3)]


def test_event_files_are_read_back_by_tensorboards_own_format(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install '.[logging]'")
    scalars.Scalars(tmp_path, 0).add(RECORD)
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert file.name.startswith("events.out.tfevents")
    end = time.monotonic() + 30  # a thread of its own writes
    while b"heads/a" not in file.read_bytes() and time.monotonic() < end:
        time.sleep(0.05)
    assert b"heads/a" in file.read_bytes() and b"loss" in file.read_bytes()
