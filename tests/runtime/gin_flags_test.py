"""Tests of the settings that processes compare; `gin_errors_test.py` tests the errors of gin's files."""

import gin
import pytest
from absl import flags

from speccascade_jax.runtime import gin_flags, hosts


@pytest.fixture
def read(monkeypatch):
    """Returns a function that reads gin bindings on a command line and returns the settings that it compares."""
    compared = []
    monkeypatch.setattr(hosts, "many", lambda: True)
    monkeypatch.setattr(hosts, "check_same", compared.append)

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
    here = read(*flagged, "--gin.sweep.output='gs://b/s.jsonl'")
    assert here["ModelPair.name"] == "'a local path'" and here["sweep.output"] == "'gs://b/s.jsonl'"
    assert here["Evaluation.quality_batch"] == "32" and here["--shard_id"] == "1"
    assert not {"--coordinator_address", "--process_index", "--gin_file", "--gin_bindings"} & set(here)
    there = read("--shard_id=1", "--process_index=1", "--gin.ModelPair.name='/b/pair'", "--gin.sweep.seeds=(1,)")
    different = {name for name in {**here, **there} if here.get(name) != there.get(name)}
    assert different == {"sweep.output", "sweep.seeds"}
