"""A single process needs no agreement; `tests/experiments/hosts_test.py` tests several."""

from __future__ import annotations

import socket
import threading

import pytest

from speccascade_jax.runtime import hosts


def test_a_process_that_is_told_nothing_is_alone(monkeypatch):
    for name in ("TPU_WORKER_HOSTNAMES", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    hosts.begin()
    assert hosts.first() and not hosts.many()
    assert hosts.agreed({"keys": [1]}) == {"keys": [1]}
    with hosts.together():
        pass
    with pytest.raises(SystemExit, match="error"), hosts.together():
        raise SystemExit("error")


@pytest.mark.parametrize(("arguments", "message"), [
    (("a:1", 2, None), "--process_index is missing: give --coordinator_address, --process_count and --process_index"),
    ((None, 2, 0), "--coordinator_address is missing"),
    (("a", 2, 1), "coordinator_address='a': give host:port of the first process"),
    (("a:1", 2, 2), "process_index=2 of process_count=2: give one of 0 to 1"),
])  # fmt: skip
def test_half_a_word_about_others_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        hosts.begin(*arguments)


@pytest.mark.parametrize(("word", "ends"), [(b".", []), (b"", [hosts.STATUS])])
def test_a_connection_that_ends_without_a_word_is_a_process_that_is_gone(word, ends, monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(hosts.os, "_exit", ended.append)
    own_end, remote_end = socket.socketpair()
    listening = threading.Thread(target=hosts._listen, args=(1, 4, own_end))
    listening.start()
    remote_end.sendall(word)
    remote_end.close()
    listening.join(10)
    assert ended == ends
    said = "error: process 1 of 4 is gone; on all hosts give the same" if ends else ""
    assert capsys.readouterr().err.startswith(said)
