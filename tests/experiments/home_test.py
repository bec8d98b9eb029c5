"""Tests that `~` stands for the home folder in every path that a user names."""

import errno
import os
import shutil

import pytest

import speccascade_jax as sc
from experiments import convert, describe, plots, tables
from speccascade_jax import checkpoints
from speccascade_jax.data import sentence_pairs
from speccascade_jax.data.vocabularies import load
from speccascade_jax.pairs import head_files
from speccascade_jax.results.store import result_store
from speccascade_jax.runtime import gin_flags
from speccascade_jax.training.heads import shards
from tests.support import fake_records, tiny_pair
from tests.support.acceptance_heads import head_for


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def home(written, tmp_path, monkeypatch):
    """Returns a home folder with a pair in it; the current folder is another one, and stays empty."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    shutil.copytree(written, tmp_path / "home" / "pair")
    yield tmp_path / "home"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_home_is_expanded_for_pairs_models_vocabularies_and_heads(home):
    pair = sc.load_pair("~/pair")
    assert sc.Pair.load("~/pair/target", "~/pair/draft", "~/pair").vocabulary == pair.vocabulary
    assert load.Vocabulary("~/pair/vocabulary.model") == load.load_vocabulary("~/pair")
    checkpoints.save("~/copy", pair.target.model, checkpoints.load("~/pair/target")[1])
    assert checkpoints.describe("~/copy") == checkpoints.describe("~/pair/target").replace("pair/target", "copy")
    head_files.save("~/head.msgpack", head_for(pair))
    assert head_files.load("~/head.msgpack").card.pair == "pair"


def test_home_is_expanded_for_files_of_pairs_and_of_data(home):
    (home / "p.tsv").write_text("a\tb\n")
    assert sentence_pairs.read_pairs("~/p.tsv") == [("a", "b")]
    with pytest.raises(FileNotFoundError, match=f"{home}/data holds no acceptance data"):
        shards.read("~/data")


@pytest.fixture
def stored(home):
    """Returns the records of a store in the home folder."""
    with result_store.ResultStore("~/r.jsonl") as store:
        for record in map(fake_records.run, fake_records.coordinates()):
            store.append(record)
    return store.records


def test_home_is_expanded_for_stores_tables_and_plots(home, stored):
    assert result_store.read_records("~/r.jsonl") == stored
    assert tables.main(["~/r.jsonl", "--format", "markdown", "--output", "~/t.md"]) == 0 and (home / "t.md").is_file()
    assert plots.main(["~/r.jsonl", "--output", "~/figures"]) == 0 and list((home / "figures").iterdir())


def test_home_is_expanded_for_commands_and_gin_files(home, capsys):
    assert convert.main(["~/pair/target", "~/ours"]) == 0 and (home / "ours" / "config.json").is_file()
    assert convert.main(["~/pair", "--checksums"]) == 0 and (home / "pair" / "checksums.json").is_file()
    assert describe.main(["~/pair/target"]) == 0
    (home / "a.gin").write_text("")
    assert gin_flags._find("~/a.gin", (".",)) == gin_flags._find("a.gin", (".", "~")) == str(home / "a.gin")


def test_a_full_disk_leaves_the_old_figure_and_names_it(home, stored, capsys, monkeypatch):
    plots.main(["~/r.jsonl", "--output", "~/figures"])
    before = {path: path.read_bytes() for path in (home / "figures").iterdir()}

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert plots.main(["~/r.jsonl", "--output", "~/figures"]) == 1
    assert "No space left on device; the previous content is unchanged: free some space" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (home / "figures").iterdir()} == before
