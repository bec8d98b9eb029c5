"""Tests of the code version in a record: the package's version, git's revision, and whether files differ from it."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from speccascade_jax.evaluation import environment

_HERE = Path(environment.__file__).parent


@pytest.fixture
def fresh(monkeypatch):
    """Returns a function that computes `package()` as if the package were in a folder."""

    def fresh(folder: Path) -> dict:
        monkeypatch.setattr(environment, "_PACKAGE", folder)
        environment.package.cache_clear()
        return environment.package()

    yield fresh
    environment.package.cache_clear()


def _git(folder: Path, *command: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *named, *command], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path) -> Path:
    """Returns the folder of a package that is committed in a repository."""
    package = tmp_path / "repository" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package.parent / ".gitignore").write_text("*.pyc\nvenv\n")
    _git(package.parent, "init", "-q")
    _git(package.parent, "add", ".")
    _git(package.parent, "commit", "-qm", "first")
    return package


def test_a_checkout_is_named_by_its_revision(fresh, repository):
    revision = _git(repository, "rev-parse", "HEAD")
    version = environment.versions()["speccascade_jax"]
    assert fresh(repository) == {"version": version, "revision": revision, "dirty": False}
    (repository.parent / "notes.md").write_text("beside the package\n")
    (repository / "x.pyc").write_text("ignored")
    assert fresh(repository)["dirty"] is False
    (repository / "new.py").write_text("x = 1\n")
    assert fresh(repository)["dirty"] is True
    _git(repository, "add", ".")
    _git(repository, "commit", "-qm", "second")
    second = fresh(repository)
    assert second["dirty"] is False and second["revision"] != revision
    (repository / "__init__.py").write_text("x = 2\n")
    assert fresh(repository)["dirty"] is True


def test_the_revision_of_a_surrounding_project_is_ignored(fresh, repository):
    installed = repository.parent / "venv" / "package"
    shutil.copytree(repository, installed)
    assert fresh(installed)["revision"] is None and fresh(installed)["dirty"] is None


def test_without_git_or_a_repository_there_is_no_revision_and_variables_are_ignored(
    fresh, repository, tmp_path, monkeypatch
):
    bare, revision = tmp_path / "bare", _git(repository, "rev-parse", "HEAD")
    bare.mkdir()
    assert fresh(bare)["revision"] is None
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert fresh(repository)["revision"] == revision
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fresh(repository)["revision"] is None


def test_a_package_that_is_not_installed_has_no_version(fresh, repository, monkeypatch):
    monkeypatch.setattr(environment, "versions", lambda: {"speccascade_jax": "not installed"})
    assert fresh(repository)["version"] is None


def test_the_fullest_device_gives_the_peak_of_memory(monkeypatch):
    """CPUs tell nothing, and the devices of one process may tell different things."""
    assert environment.peak_memory() == {}
    stats = [None, {"peak_bytes_in_use": 3, "bytes_limit": 9}, {"peak_bytes_in_use": 5}, {"bytes_in_use": 7}]
    devices = [SimpleNamespace(memory_stats=lambda known=known: known) for known in stats]
    monkeypatch.setattr(environment.jax, "local_devices", lambda: devices)
    assert environment.peak_memory() == {"peak_memory": {"bytes": 5, "limit": None}}
