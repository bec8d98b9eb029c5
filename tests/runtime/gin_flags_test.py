"""Tests of the settings that processes compare; `gin_errors_test.py` tests the errors of gin's files."""

import os
import subprocess
import sys

import gin
import pytest
from absl import flags

from speccascade_jax.runtime import gin_flags, hosts
from speccascade_jax.runtime.paths import repository_root


@pytest.fixture
def read(monkeypatch):
    """Returns a function that reads gin bindings on a command line and returns the texts that it compares, by name."""
    compared = []
    monkeypatch.setattr(hosts, "many", lambda: True)
    monkeypatch.setattr(hosts, "check_same", lambda *texts: compared.append(texts))

    def read(*arguments):
        parsed = flags.FlagValues()
        monkeypatch.setattr(flags, "FLAGS", parsed)
        for define, name, default, text in gin_flags._FLAGS:
            define(name, default, text, flag_values=parsed)
        flags.DEFINE_integer("shard_id", None, "", flag_values=parsed)
        parsed(gin_flags.rewrite_arguments(["sweep", "--gin_file=configs/quickstart.gin", *arguments]))
        gin.clear_config()
        gin_flags.read("an example")
        return compared.pop()

    yield read
    gin.clear_config()


def test_processes_compare_what_gin_has_read_and_their_flags_but_not_where_files_lie(read):
    flagged = ("--shard_id=1", "--coordinator_address=a:1", "--process_index=0", "--gin.ModelPair.name='/a/pair'")
    exact, here = read(*flagged, "--gin.sweep.output='gs://b/s.jsonl'")
    assert exact["ModelPair.name"] == "'/a/pair'"
    assert here["ModelPair.name"] == "'…/pair'" and here["sweep.output"] == "'gs://b/s.jsonl'"
    assert here["Evaluation.quality_batch"] == "32" and here["--shard_id"] == "1"
    assert not {"--coordinator_address", "--process_index", "--gin_file", "--gin_bindings"} & set(here)
    _, elsewhere = read("--shard_id=1", "--process_index=1", "--gin.ModelPair.name='/b/pair'", "--gin.sweep.seeds=(1,)")
    different = {name for name in {**here, **elsewhere} if here.get(name) != elsewhere.get(name)}
    assert different == {"sweep.output", "sweep.seeds"}


@pytest.mark.parametrize(("here", "there", "same"), [
    ("/a/mine.tsv", "/b/c/mine.tsv", True), ("~/mine.tsv", "../mine.tsv", True), ("/a/gemma-4b", "/a/gemma-12b", False),
    (("x", "/a/y z"), ("x", "/b/y z"), False), ("a/mine.tsv", "b/mine.tsv", True), ("a/mine.tsv", "c/mine.tsv", False),
    ({"k": ["/a/m"]}, {"k": ["/b/m"]}, True), ("google/gemma-3-4b-it", "google/gemma-3-12b-it", False),
    ("google/gemma", "other/gemma", False), ("hf:google/x@main", "hf:google/x@abc", False),
    ("hf:a/x", "hf:b/x", False), ("gs://a/x", "gs://b/x", False), ("EN/DE: {source}", "DE/EN: {source}", False),
    ("/EN/{source}", "/DE/{source}", False), ("and/or", "either/or", False), ("~5 EN/DE", "~5 FR/DE", False),
    (("</s>",), ("</end>",), False), ({"system": "it's a/b"}, {"system": "it's c/b"}, False),
])  # fmt: skip
def test_only_local_paths_with_the_same_last_part_are_alike(here, there, same, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.tsv").touch()
    assert (gin_flags._portable(here) == gin_flags._portable(there)) == same


PROGRAM = """
import gin
from speccascade_jax.runtime import gin_flags

@gin.configurable
def show(notes=False, count=0):
    print(f"notes={notes}")

gin_flags.main(show, "python show.py", switches={"notes": "print all notes"})
"""


@pytest.mark.parametrize(("arguments", "notes"), [
    (["--notes"], True), (["--gin.show.notes=True"], True), (["--nonotes", "--gin.show.notes=True"], False),
])  # fmt: skip
def test_a_switch_sets_an_argument_that_gin_binds_too(tmp_path, arguments, notes):
    (tmp_path / "show.gin").write_text("show.count = 1\n")
    environment = os.environ | {"PYTHONPATH": str(repository_root()), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, "--gin_file=show.gin", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"notes={notes}\n", done.stderr
