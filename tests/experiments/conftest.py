"""Fixtures: the scripts as modules, stores of fake records, and the figure that a script draws."""

import importlib
import json

import pytest
from matplotlib import pyplot as plt

from tests.support import fake_records


@pytest.fixture(scope="session")
def script():
    """Returns a function: `script("tables")` is the module experiments/tables.py."""
    return lambda name: importlib.import_module(f"experiments.{name}")


@pytest.fixture(scope="session")
def fake():
    """Returns the module tests/support/fake_records.py."""
    return fake_records


@pytest.fixture
def write(tmp_path):
    """Returns a function: `write(records, name)` writes a store of them."""

    def write(records, name="sweep"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


@pytest.fixture
def records(fake):
    """Returns the records of a small sweep: six rules, one task."""
    return [fake.run(point) for point in fake.coordinates()]


@pytest.fixture
def store(write, records):
    """Returns the store of the small sweep."""
    return write(records)


@pytest.fixture
def two_tasks(fake, records, write):
    """Returns records of two tasks, the second with two seeds."""
    return write([*records, *map(fake.run, fake.coordinates("tatoeba_joined", seeds=(0, 1)))], "two")


@pytest.fixture
def figure(script, monkeypatch):
    """Returns `figure(store, *flags)`: the figure that plots.py writes, still open; it is closed at the end."""
    kept = []

    def figure(store, *flags):
        with monkeypatch.context() as patched:
            patched.setattr(plt, "close", kept.append)
            assert script("plots").main([str(store), *flags]) == 0
        return kept[-1]

    yield figure
    for open_figure in kept:
        plt.close(open_figure)
