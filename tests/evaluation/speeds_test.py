"""Speeds of timed generations, on devices with a known peak and without."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from speccascade_jax.drafters.model import ModelDrafter, NoDrafter
from speccascade_jax.evaluation import speeds
from speccascade_jax.evaluation.latency import Timings
from speccascade_jax.models.operations import generation_flops
from speccascade_jax.models.t5 import T5, T5Config
from speccascade_jax.stopping.policies import Fixed

TARGET, DRAFT = (T5(T5Config(100, 128, width, 2, 8, 16, 1, 1)) for width in (32, 16))
LENGTHS = np.array([9, 5, 7])
COUNTS = {"committed": 6, "target_calls": 3, "drafted": 8, "unverified_tokens": 1, "draft_steps": 10}
PEAK = 197e12


@pytest.fixture
def v5e(monkeypatch):
    monkeypatch.setattr(speeds.jax, "devices", lambda: [SimpleNamespace(device_kind="TPU v5 lite")])


def measured(drafter, devices=1, target=TARGET):
    """Returns the speeds of two trials of the examples 1 and 2, whose counts are those of `COUNTS` times 1 to 4."""
    engine = SimpleNamespace(target=target, drafter=drafter)
    session = SimpleNamespace(
        decoder=lambda settings: SimpleNamespace(engine=engine),
        window=lambda evaluation, count: np.array([1, 2]),
        prompts=SimpleNamespace(length=np.ones(3, int), encoder_length=LENGTHS),
        pair=SimpleNamespace(mesh=None if devices == 1 else SimpleNamespace(size=devices)),
    )
    point = SimpleNamespace(settings=None, evaluation=SimpleNamespace(latency_examples=2))
    counted = [{name: np.array([count * n]) for name, count in COUNTS.items()} for n in (1, 2, 3, 4)]
    generations = [SimpleNamespace(stats=SimpleNamespace(**counts)) for counts in counted]
    ones = np.ones((2, 2))
    timings = Timings(seconds=0.5 * ones, tokens=6 * ones, draft_steps=ones, target_calls=ones)
    return speeds.speeds(session, point, timings, generations)


def operations(model, fed):
    n = np.array([[1, 2], [3, 4]])
    counts = {"prompt": 1, "output": 6 * n, "fed": fed * n, "encoded": LENGTHS[1:]}
    return generation_flops(model.config, **counts).sum()


@pytest.mark.usefixtures("v5e")
def test_the_utilisation_counts_what_both_models_read():
    expected = operations(TARGET, 3 + 8 - 1) + operations(DRAFT, 10)
    drafter = ModelDrafter(DRAFT, Fixed(2))
    assert measured(drafter) == {"tokens_per_second": 12.0, "mfu": pytest.approx(expected / (2 * PEAK))}
    assert measured(drafter, devices=4)["mfu"] == pytest.approx(expected / (2 * PEAK * 4))
    assert measured(NoDrafter())["mfu"] == pytest.approx(operations(TARGET, 10) / (2 * PEAK))


@pytest.mark.usefixtures("v5e")
def test_models_and_drafters_of_unknown_operations_have_no_utilisation():
    for drafter in (
        SimpleNamespace(),
        ModelDrafter(SimpleNamespace(), Fixed(2)),
        ModelDrafter(DRAFT, Fixed(2), False, 2),
    ):
        assert measured(drafter) == {"tokens_per_second": 12.0}
    assert measured(NoDrafter(), target=SimpleNamespace()) == {"tokens_per_second": 12.0}


def test_a_cpu_has_no_utilisation():
    assert measured(NoDrafter()) == {"tokens_per_second": 12.0}
