"""Tests of what processes agree on before they measure; `tests/experiments/` tests whole sweeps."""

import pytest

from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation.session import Identity
from speccascade_jax.runtime import hosts


def identity(key, code, jax="1"):
    return Identity(key, key, {"code": code, "toolchain": {"jax": jax}})


@pytest.mark.parametrize(("first", "message"), [
    (identity("a", "1"), None),
    (identity("b", "1"), "other weights or examples than process 0, or runs on another kind of machine: copy the same"),
    (identity("a", "2"), "other code than process 0: copy the same files to all hosts"),
    (identity("a", "2", jax="2"), None),
])  # fmt: skip
def test_a_process_with_other_files_than_the_first_is_refused(first, message, monkeypatch, tmp_path):
    answers = [{first.key: first.provenance}, ["done"]]
    monkeypatch.setattr(hosts, "agreed", lambda value: answers.pop(0))
    store = experiment.Follower(tmp_path / "store.jsonl")
    if message is None:
        experiment._agree(store, [identity("a", "1")])
        assert store.done_keys() == {"done"}
        return
    with pytest.raises(ValueError, match=message):
        experiment._agree(store, [identity("a", "1")])
