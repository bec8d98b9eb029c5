"""Tests of the data directory: the variable that sets it, and the error for a missing file."""

import re

import pytest

from speccascade_jax.data import directory
from speccascade_jax.data.tasks.seqio_task import SeqioTask
from speccascade_jax.data.tasks.table import TASKS
from speccascade_jax.pairs.pair import DATA_PAIRS, load_pair
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
    assert "https://github.com/multi30k/dataset" in str(error.value)
    assert "SPECCASCADE_DATA" in str(error.value)
    assert "tiny_translation" in str(error.value)


def test_every_data_set_and_pair_that_is_not_shipped_has_an_origin(monkeypatch, tmp_path):
    """A user of the package has no data directory: the error has to say where each file is."""
    monkeypatch.setenv(directory.VARIABLE, str(tmp_path))
    for task in (task for name, task in TASKS.items() if not name.startswith(("tiny_", "stories"))):
        if not isinstance(task, SeqioTask):
            with pytest.raises(FileNotFoundError, match=r"its data come from https://.* or use the shipped task"):
                task.load()
    for name in DATA_PAIRS:
        with pytest.raises(FileNotFoundError) as error:
            load_pair(name)
        assert re.search(r"curl -L --create-dirs -o '\S+\.bin' 'https://\S+'", str(error.value))
        assert "or use a shipped pair (tatoeba_en_de, " in str(error.value)
        # tiny_translation is a task, so an error about a pair must not suggest it
        assert "tiny_translation" not in str(error.value)
