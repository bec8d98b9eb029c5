"""A single process needs no agreement; `tests/experiments/hosts_test.py` tests several."""

from __future__ import annotations

import socket
import threading

import pytest

from speccascade_jax.runtime import hosts


def test_a_process_without_settings_runs_alone(monkeypatch):
    for name in ("TPU_WORKER_HOSTNAMES", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    hosts.begin()
    assert hosts.first() and not hosts.many()
    assert hosts.agreed({"keys": [1]}) == {"keys": [1]}
    assert hosts.largest(-1) == -1
    with hosts.together():
        pass
    with pytest.raises(SystemExit, match="error"), hosts.together():
        raise SystemExit("error")


@pytest.mark.parametrize(("arguments", "message"), [
    (("a:1", 2, None), "--process_index is missing: give --coordinator_address, --process_count and --process_index"),
    ((None, 2, 0), "--coordinator_address is missing"),
    (("a", 2, 1), "coordinator_address='a': give host:port of the first process"),
    (("a:1", 2, 2), "process_index=2 is outside process_count=2: give a number from 0 to 1"),
])  # fmt: skip
def test_incomplete_or_invalid_process_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        hosts.begin(*arguments)


def test_a_command_of_one_process_refuses_others(monkeypatch):
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    hosts.check_alone("train", {"process_count": None, "multiprocess": False})
    with pytest.raises(ValueError, match="train runs in one process: leave --process_count=2 out"):
        hosts.check_alone("train", {"process_count": 2, "process_index": 0})
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ValueError, match="the environment names other processes; start one alone"):
        hosts.check_alone("train", {})


@pytest.mark.parametrize(("word", "ends"), [(b".", []), (b"", [hosts.STATUS])])
def test_a_connection_closed_without_a_goodbye_ends_the_process(word, ends, monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(hosts.os, "_exit", ended.append)
    own_end, remote_end = socket.socketpair()
    listening = threading.Thread(target=hosts._listen, args=(1, 4, own_end))
    listening.start()
    remote_end.sendall(word)
    remote_end.close()
    listening.join(10)
    assert ended == ends
    said = "error: process 1 of 4 has ended; on all hosts, run the same" if ends else ""
    assert capsys.readouterr().err.startswith(said)
