"""Tests of agreement between processes, without starting several; `tests/experiments/hosts_test.py` starts them."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

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
    (("a:0", 2, 1), "coordinator_address='a:0': give host:port of the first process, with a port from 1 to 65535"),
    (("a:70000", 2, 1), "coordinator_address='a:70000': give host:port"),
    (("a:1", 2, 2), "process_index=2 is outside process_count=2: give a number from 0 to 1"),
    (("a:1", 2, -1), "process_index=-1 is outside process_count=2"),
    (("a:1", 0, 0), "process_count=0: give the number of processes, at least 1"),
])  # fmt: skip
def test_incomplete_or_invalid_process_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        hosts.begin(*arguments)


@pytest.mark.parametrize(("raised", "variables", "asked", "goes_on"), [
    (ValueError("coordinator_address should be defined."), {}, False, True),
    (ValueError("coordinator_address should be defined."), {}, True, False),
    (ValueError("coordinator_address should be defined."), {"TPU_WORKER_HOSTNAMES": "a,b"}, False, False),
    (RuntimeError("Failed to recognize coordinator address t1v-n-1"), {}, False, False),
    (ConnectionError("metadata.google.internal: no route to host"), {}, False, False),
])  # fmt: skip
def test_a_host_of_a_cluster_never_goes_on_alone(raised, variables, asked, goes_on, monkeypatch):
    for name in ("TPU_WORKER_HOSTNAMES", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def initialize(*_, **__):
        raise raised

    monkeypatch.setattr(hosts, "_may_be_a_pod", lambda: True)
    monkeypatch.setattr(hosts.jax.distributed, "initialize", initialize)
    if goes_on:
        hosts.begin(asked=asked)
        return
    remedy = r"the other processes were not found .*: give --coordinator_address, .* 1 and 0 for a single machine"
    with pytest.raises(ValueError, match=remedy) as refused:
        hosts.begin(asked=asked)
    assert str(raised) in str(refused.value)


def test_a_command_of_one_process_refuses_others(monkeypatch):
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    hosts.check_alone("train", {"process_count": None, "multiprocess": False})
    with pytest.raises(ValueError, match="train runs in one process: leave --process_count=2 out"):
        hosts.check_alone("train", {"process_count": 2, "process_index": 0})
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ValueError, match="the environment names other processes; start one alone"):
        hosts.check_alone("train", {})


AGAIN = "error: process 1 of 4 has ended; on all hosts, run the same command again"
NO_MESH = "error: process 1 of 4 has ended: mesh=(1, 1) needs 1 devices\n"


@pytest.mark.parametrize(("words", "status", "said"), [
    ([b"\0", b"."], None, ""), ([b"\0\0"], hosts.STATUS, AGAIN), ([b"!mesh=(1, 1)", b" needs 1 devices"], 1, NO_MESH),
])  # fmt: skip
def test_a_process_ends_if_another_dies_or_fails_but_not_if_another_finishes(words, status, said, monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(hosts.os, "_exit", ended.append)
    monkeypatch.setattr(hosts, "_ENDING", threading.Lock())
    own_end, remote_end = socket.socketpair()
    listening = threading.Thread(target=hosts._listen, args=(1, 4, own_end))
    listening.start()
    for word in words:
        remote_end.sendall(word)
        time.sleep(0.05)
    remote_end.close()
    listening.join(10)
    assert ended == [status][: status is not None]
    printed = capsys.readouterr().err
    assert printed.startswith(said) and (said or not printed)


def test_a_silent_process_counts_as_dead(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(hosts.os, "_exit", ended.append)
    monkeypatch.setattr(hosts, "_ENDING", threading.Lock())
    monkeypatch.setattr(hosts, "SILENCE", 0.5)
    own_end, remote_end = socket.socketpair()
    own_end.settimeout(hosts.SILENCE)
    listening = threading.Thread(target=hosts._listen, args=(1, 4, own_end))
    listening.start()
    for _ in range(8):
        remote_end.sendall(b"\0")
        time.sleep(0.1)
    assert listening.is_alive()
    listening.join(10)
    assert ended == [hosts.STATUS]
    said = "error: process 1 of 4 has ended or is suspended: nothing has come from it for 0 s; on all hosts, run the"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(("error", "words"), [
    (SystemExit("error: mesh=(1, 1) needs 1 devices"), b"!mesh=(1, 1) needs 1 devices"),
    (OSError("disk full"), b"!OSError: disk full"),
    (SystemExit(2), b""), (KeyboardInterrupt(), b""),
])  # fmt: skip
def test_the_text_of_an_error_reaches_the_other_processes(error, words, monkeypatch):
    own_end, remote_end = socket.socketpair()
    monkeypatch.setattr(hosts, "_CONNECTIONS", {1: own_end})
    hosts._say_failed(error)
    own_end.close()
    assert remote_end.recv(100) == words


@pytest.mark.parametrize("index", [0, 1])
def test_processes_end_together_and_the_first_one_says_so_last(index, monkeypatch):
    """Checks that a process waits for the other's last word, such as while the first writes a trained model."""
    own_end, remote_end = socket.socketpair()
    remote_end.settimeout(10)
    listener = threading.Thread(target=hosts._listen, args=(1 - index, 2, own_end))
    monkeypatch.setattr(hosts, "_CONNECTIONS", {1 - index: own_end})
    monkeypatch.setattr(hosts, "_LISTENERS", [listener])
    monkeypatch.setattr(hosts, "first", lambda: index == 0)

    def work():
        with hosts.together():
            pass

    ending = threading.Thread(target=work)
    for thread in (listener, ending):
        thread.start()
    if index == 1:
        assert remote_end.recv(1) == b"."
    ending.join(0.1)
    assert ending.is_alive()
    remote_end.sendall(b".")
    ending.join(10)
    assert not ending.is_alive() and remote_end.recv(1 - index) == b"."[: 1 - index]


TOGETHER = """
import time
from speccascade_jax.runtime import hosts
with hosts.together():
    hosts.begin("localhost:{port}", 3, {index})
    time.sleep({seconds})
hosts.sys.__stdout__.write(f"end {{time.monotonic()}}")
"""


@pytest.mark.laws
def test_no_process_ends_before_the_first_one_has_written():
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    texts = [TOGETHER.format(port=port, index=index, seconds=seconds) for index, seconds in enumerate((2, 0, 1))]
    running = [subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) for text in texts]
    times = [float(process.communicate(timeout=60)[0].rpartition("end ")[2]) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert max(times) - min(times) < 1.0


ALONE = """
from speccascade_jax.runtime import hosts
hosts.COMING = 1.0
hosts.begin("localhost:{port}", 2, {index})
"""


@pytest.mark.laws
@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_waits_too_long_for_others_ends_with_one_line_and_can_be_started_again(index):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", ALONE.format(port=port, index=index)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == hosts.STATUS, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    advice = "on all hosts, run the same command again: finished parts are kept, and the rest follows"
    absent = f"error: process {1 - index} of 2 at localhost:{port} did not come within 1 s; {advice}"
    assert lines == [absent] and "@ " not in done.stderr


def test_processes_with_other_numbers_of_devices_are_refused(monkeypatch):
    devices = [SimpleNamespace(process_index=index) for index in (0, 1, 1, 2)]
    monkeypatch.setattr(hosts.jax, "devices", lambda: devices)
    with pytest.raises(ValueError, match="process 0 has 1 devices, and process 1 has 2: give every process equally"):
        hosts._check_devices()
    del devices[2]
    hosts._check_devices()


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_a_folder_that_processes_do_not_share_is_refused(index, shared, monkeypatch, tmp_path):
    if index == 1 and shared:
        (tmp_path / ".shared-a").touch()
    monkeypatch.setattr(hosts, "many", lambda: True)
    monkeypatch.setattr(hosts, "first", lambda: index == 0)
    monkeypatch.setattr(hosts.jax, "process_index", lambda: index)
    monkeypatch.setattr(hosts, "agreed", lambda value: "a")
    monkeypatch.setattr(hosts, "largest", lambda value: value if index == 1 or shared else 1)
    message = "process 1 does not see process 0's files in .*: name a folder that all hosts share, or one in gs://"
    with nullcontext() if shared else pytest.raises(ValueError, match=message):
        hosts.check_shared(tmp_path)
    assert len(list(tmp_path.iterdir())) == (index == 1 and shared)


def test_a_process_with_other_settings_names_them(monkeypatch):
    first = {"a": "1", "b": "x" * 100 + "1", "c": "2", "d": "1", "e": "0"}
    monkeypatch.setattr(hosts, "agreed", lambda value: {name: [text, text] for name, text in first.items()})
    hosts.check_same(first)
    with pytest.raises(ValueError, match="start all processes with the same settings") as refused:
        hosts.check_same({"b": "x" * 100 + "2", "c": "2", "d": "2", "f": "3"})
    said = str(refused.value)
    assert said.startswith("a is not set in process 0 and 1 in process 0; ")
    assert f"b is …{'x' * 30}2 in process 0 and …{'x' * 30}1 in process 0; " in said and "; and 2 more: start" in said


def test_values_are_the_same_if_one_of_their_texts_is(monkeypatch):
    monkeypatch.setattr(hosts, "agreed", lambda value: {"out": ["r/o", "…/o"], "file": ["/a/f", "…/f"]})
    # a folder of results may exist in one process only, so the second text of the same setting may differ
    hosts.check_same({"out": "r/o", "file": "/b/f"}, {"out": "r/o", "file": "…/f"})
    with pytest.raises(ValueError, match=r"^file is /b/g in process 0 and /a/f in process 0: copy it$"):
        hosts.check_same({"out": "r/o", "file": "/b/g"}, {"out": "r/o", "file": "…/g"}, "copy it")


def test_the_first_process_ends_after_it_has_said_why(monkeypatch):
    own_end, remote_end = socket.socketpair()
    slept = []
    monkeypatch.setattr(hosts, "_CONNECTIONS", {1: own_end})
    monkeypatch.setattr(hosts, "many", lambda: True)
    monkeypatch.setattr(hosts, "first", lambda: True)
    # the other process reads the end of the words while this one still waits
    monkeypatch.setattr(hosts.time, "sleep", lambda _: slept.append(hosts._last_words(remote_end)))
    hosts._say_failed(ValueError("x"))
    assert slept == [b"!ValueError: x"]


@pytest.mark.parametrize(("logs", "message"), [
    ("gs://bucket/logs", "--host_logs=gs://bucket/logs: give a local folder"), ("{}/file", "file is a file"),
])  # fmt: skip
def test_a_folder_for_logs_is_refused_before_other_processes_wait(tmp_path, logs, message):
    (tmp_path / "file").write_text("")
    with pytest.raises((ValueError, OSError), match=message):
        hosts.begin("localhost:1234", 2, 1, logs=logs.format(tmp_path))
