"""The data directory: one setting, and an error that names the remedy."""

import pytest

from speccascade_jax.data import directory
from speccascade_jax.runtime import paths


def test_the_environment_variable_sets_the_directory(monkeypatch, tmp_path):
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    (tmp_path / "set").mkdir()
    assert directory.data_directory() == tmp_path
    assert directory.require("set") == tmp_path / "set"


def test_the_default_directory_is_next_to_the_repository(monkeypatch):
    monkeypatch.delenv(directory.VARIABLE, raising=False)
    assert directory.data_directory() == paths.repository_root().parent / "shared" / "data"


def test_the_error_for_a_missing_file_names_the_file_and_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError) as error:
        directory.require("multi30k", "val.tsv")
    assert str(tmp_path / "multi30k" / "val.tsv") in str(error.value)
    assert "SPECCASCADE_DATA" in str(error.value)
    assert "tiny_translation" in str(error.value)
