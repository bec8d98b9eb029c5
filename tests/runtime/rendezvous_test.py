"""Tests of the meeting of processes, which are threads here."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from speccascade_jax.runtime import rendezvous


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    for name, value in {"RESOLVING": 0.2, "FOREIGN": 0.2, "LINGERING": 1.0, "_ANSWERING": 0.5, "_PAUSE": 0.02}.items():
        monkeypatch.setattr(rendezvous, name, value)


@pytest.fixture
def port():
    with rendezvous.listen(0) as free:
        return free.getsockname()[1]


def meet(port, *processes, seconds=10.0):
    """Lets processes `(count, index)` meet; returns for each the error that ends it, or `None`."""

    def run(process):
        try:
            rendezvous.meet(f"localhost:{port}", *process, seconds)
        except (ValueError, rendezvous.AbsentError) as error:
            return error

    with ThreadPoolExecutor() as threads:
        return list(threads.map(run, processes))


def test_processes_go_on_when_all_have_come(port):
    assert meet(port, (3, 2), (3, 0), (3, 1)) == [None] * 3
    assert meet(port, (1, 0)) == [None]


@pytest.mark.parametrize(("processes", "message"), [
    (((3, 0), (3, 1), (3, 1)), "process_index=1 was given to two processes (on {host}): give each process a number of "
                               "its own, from 0 to 2"),
    (((2, 0), (2, 0)), "process_index=0 was given to two processes (on {host})"),
    (((2, 0), (3, 1)), "process 1 on {host} has process_count=3, and process 0 on {host} has process_count=2: give"),
])  # fmt: skip
def test_all_processes_end_with_one_error_if_their_flags_do_not_fit(processes, message, port):
    for error in meet(port, *processes):
        assert isinstance(error, ValueError) and str(error).startswith(message.format(host=socket.gethostname()))


def test_another_version_of_jax_is_refused(port):
    with ThreadPoolExecutor() as threads:
        first = threads.submit(meet, port, (2, 0))
        with come(port, {"index": 1, "count": 2, "host": "b", "jax": "0.0.1"}) as connection:
            answer = connection.makefile().read()
        (error,) = first.result()
    assert "process 1 on b has JAX 0.0.1, and process 0" in str(error) and "install the same version" in str(error)
    assert str(error) in answer


def test_a_process_that_has_ended_while_it_waited_may_come_again(port):
    words = {"index": 1, "count": 3, "host": "b", "jax": jax.__version__}
    with ThreadPoolExecutor() as threads:
        first = threads.submit(meet, port, (3, 0))
        come(port, words).close()
        with come(port, words):
            assert meet(port, (3, 2)) == first.result() == [None]


def test_the_first_process_ignores_other_programs(port):
    with ThreadPoolExecutor() as threads:
        first = threads.submit(meet, port, (2, 0))
        for words in ("GET / HTTP/1.1", []):
            with come(port, words):
                pass
        assert meet(port, (2, 1)) == first.result() == [None]


def come(port, words):
    """Connects to the first process, which may still be starting, and sends it words as JSON."""
    while True:
        try:
            connection = socket.create_connection(("localhost", port), timeout=10)
        except OSError:
            continue
        connection.sendall(json.dumps(words).encode() + b"\n")
        return connection


@pytest.mark.parametrize("answer", [b"", b"220 mail\r\n"])
def test_a_port_of_another_program_is_named(answer):
    with rendezvous.listen(0) as other:
        port = other.getsockname()[1]

        def serve():
            with pytest.raises(OSError):
                while True:
                    other.accept()[0].sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        first, second = meet(port, (2, 0), (2, 1))
        other.shutdown(socket.SHUT_RDWR)
    assert f"port {port} cannot be used here (Address already in use): name a free port on all hosts" in str(first)
    assert "another program has this port" in str(second) and "give process_index=1 to one process only" in str(second)


@pytest.mark.parametrize("index", [0, 1])
def test_an_unknown_host_is_named(index, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match="the host 'nowhere' is not known here .*: give the name or the IP address of"):
        rendezvous.meet("nowhere:8476", 2, index, 10.0)


def test_a_process_says_what_it_waits_for_and_ends_in_time(port, monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "NOTICES", (0.1, 60.0))
    first, second = meet(port, (3, 0), (3, 2), seconds=1.0)
    assert str(first) == str(second) == f"process 1 of 3 at localhost:{port} did not come within 1 s"
    assert isinstance(first, rendezvous.AbsentError) and isinstance(second, rendezvous.AbsentError)
    assert f"waiting for process 1 of 3 at localhost:{port}, for at most 1 s\n" in capsys.readouterr().err
    (alone,) = meet(port, (3, 2), seconds=0.3)
    assert str(alone) == f"process 0 of 3 at localhost:{port} did not come within 0 s"
