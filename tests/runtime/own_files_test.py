"""Tests of a user's own files given by path: names as module.NAME, a single load, errors that name the file."""

from __future__ import annotations

import sys

import pytest

from speccascade_jax.core import names
from speccascade_jax.runtime import own_files


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Removes modules that a test loads."""
    monkeypatch.setattr(own_files, "_LOADED", {})
    before, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.path[:] = path


def test_names_in_a_file_are_looked_up_by_its_module_name(tmp_path):
    path = tmp_path / "own_numbers.py"
    path.write_text("from own_neighbour import TWO\nTHREE = TWO + 1\n")
    (tmp_path / "own_neighbour.py").write_text("TWO = 2\n")
    own_files.load(str(path))
    assert names.look_up("number", "own_numbers.THREE", {}, int) == 3
    assert own_files.loaded() == {"own_numbers": str(path)}
    path.write_text("THREE = 4\n")
    own_files.load_again(own_files.loaded())  # a file that is already loaded is not executed again
    assert names.look_up("number", "own_numbers.THREE", {}, int) == 3


def test_a_file_that_a_name_alone_leads_to_is_recorded_and_found_again(tmp_path, monkeypatch):
    path = tmp_path / "own_letters.py"
    path.write_text("A = 'a'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert names.look_up("letter", "own_letters.A", {}, str) == "a"
    assert names.look_up("letter", "os.path.sep", {}, str) and own_files.loaded() == {"own_letters": str(path)}
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("A = 'a'\n")  # `load` would call it __init__
    assert names.look_up("letter", "own_package.A", {}, str) and own_files.loaded() == {"own_letters": str(path)}
    recorded = own_files.loaded()
    del sys.modules["own_letters"]
    own_files.load_again({"own_letters": str(tmp_path / "elsewhere" / "own_letters.py")})  # by its name, later
    assert "own_letters" not in sys.modules
    monkeypatch.setattr(sys, "path", [name for name in sys.path if name != str(tmp_path)])
    own_files.load_again(recorded)
    assert sys.modules["own_letters"].A == "a"


def test_importable_modules_are_accepted_too():
    assert own_files.load("json").loads("1") == 1
    assert own_files.loaded() == {}


@pytest.mark.parametrize(("name", "kind", "said"), [
    ("./nowhere.py", FileNotFoundError, "--import=./nowhere.py: there is no such file"),
    ("no_such_module_at_all", ValueError, "no such file, and no module of that name"),
    ("./not-a-name.py", ValueError, "is not a valid module name"),
    ("./json.py", ValueError, "a module 'json' is loaded already: rename the file"),
])  # fmt: skip
def test_invalid_imports_are_refused(tmp_path, monkeypatch, name, kind, said):
    monkeypatch.chdir(tmp_path)
    for empty in ("not-a-name.py", "json.py"):
        (tmp_path / empty).touch()
    with pytest.raises(kind, match=said):
        own_files.load(name)


def test_an_error_in_the_file_propagates_and_leaves_no_module(tmp_path):
    path = tmp_path / "own_broken.py"
    path.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError) as raised:
        own_files.load(str(path))
    assert str(path) in raised.value.__notes__[0]
    assert "own_broken" not in sys.modules and own_files.loaded() == {}
