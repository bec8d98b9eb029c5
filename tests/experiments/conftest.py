"""The scripts as modules, and a store of fake records."""

import importlib.util
import json
from pathlib import Path

import pytest

from speccascade_jax.data.directory import repository_root


def _load(path: Path):
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def script():
    """`script("tables")` is the module experiments/tables.py."""
    return lambda name: _load(repository_root() / "experiments" / f"{name}.py")


@pytest.fixture(scope="session")
def fake():
    """tests/experiments/fake_records.py."""
    return _load(Path(__file__).parent / "fake_records.py")


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
