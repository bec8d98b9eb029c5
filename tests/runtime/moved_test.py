"""Tests that old module names still import the moved modules, from Python and from pickles, with a warning."""

import importlib
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest

import speccascade_jax
from speccascade_jax.core import validate_types
from speccascade_jax.runtime import moved

PACKAGE = Path(speccascade_jax.__file__).parent


def test_every_new_module_exists_and_no_old_one_does():
    for old, new in moved.MOVED.items():
        paths = [PACKAGE.joinpath(*name.split(".")) for name in (old, new)]
        exists = [path.is_dir() and any(path.glob("*.py")) or path.with_suffix(".py").is_file() for path in paths]
        assert exists == [False, True], (old, new)


@pytest.fixture
def forgotten():
    """Removes old names, so that they are imported again."""
    for name in [name for name in sys.modules if moved.new_place(name) != name]:
        del sys.modules[name]


@pytest.mark.parametrize(("old", "new"), [
    ("core.typed", "core.validate_types"),
    ("results.tables", "results.report.tables"),
    ("results.tables.grid", "results.report.tables.grid"),
    # first the package of this module moved, then the module itself
    ("evaluation.calibration.outcome", "evaluation.studies.calibration.calibrating"),
])  # fmt: skip
def test_an_old_name_imports_the_same_module_and_warns(forgotten, old, new):
    place = importlib.import_module(f"speccascade_jax.{new}")
    spec = place.__spec__
    said = f"speccascade_jax.{old} is now speccascade_jax.{new}; the old name works until 0.4"
    with pytest.warns(DeprecationWarning) as caught:
        assert importlib.import_module(f"speccascade_jax.{old}") is place
    assert str(caught[-1].message) == said
    assert place.__spec__ is spec and place.__name__ == f"speccascade_jax.{new}"


def test_pickles_that_name_an_old_module_load(forgotten):
    assert pickle.loads(b"cspeccascade_jax.core.typed\nLater\n.") is validate_types.Later


def test_unknown_module_names_still_raise():
    with pytest.raises(ModuleNotFoundError, match="speccascade_jax.core.nothing"):
        importlib.import_module("speccascade_jax.core.nothing")


def test_a_reused_module_name_still_has_its_moved_attributes(monkeypatch):
    was = ModuleType("was_the_store")
    was.__getattr__ = moved.attributes_of("speccascade_jax.core.validate_types")
    monkeypatch.setitem(sys.modules, "was_the_store", was)
    with pytest.warns(DeprecationWarning, match="^Later is in speccascade_jax.core.validate_types now; its old place"):
        from was_the_store import Later
    assert Later is validate_types.Later
    for name in ("Earlier", "math", "__path__"):
        assert not hasattr(was, name)
