"""Fixtures for calibrations, whose session can be replaced by a fake one."""

import pytest

from speccascade_jax.evaluation import experiment
from tests.support.calibration_fakes import FakeSession


@pytest.fixture(autouse=True)
def _sessions_that_are_fakes_measure_themselves(monkeypatch):
    real = experiment.evaluate

    def evaluate(session, points, **more):
        return session.evaluate(points) if isinstance(session, FakeSession) else real(session, points, **more)

    monkeypatch.setattr(experiment, "evaluate", evaluate)
