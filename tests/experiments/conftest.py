"""The scripts as modules, and a store of fake records."""

import importlib
import json

import pytest

from tests.support import fake_records


@pytest.fixture(scope="session")
def script():
    """`script("tables")` is the module experiments/tables.py."""
    return lambda name: importlib.import_module(f"experiments.{name}")


@pytest.fixture(scope="session")
def fake():
    """tests/support/fake_records.py."""
    return fake_records


@pytest.fixture
def store(fake, tmp_path):
    """A small sweep's store: six rules, one task."""
    path = tmp_path / "sweep.jsonl"
    path.write_text("".join(json.dumps(fake.run(point)) + "\n" for point in fake.coordinates()))
    return path


@pytest.fixture
def two_tasks(fake, tmp_path):
    """Two tasks, the second with two seeds."""
    points = [*fake.coordinates(), *fake.coordinates("tatoeba_joined", seeds=(0, 1))]
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps(fake.run(point)) + "\n" for point in points))
    return path
