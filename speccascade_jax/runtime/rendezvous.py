"""Meeting of several processes at the first process's address, before JAX connects them.

JAX's own start waits without a word, aborts with pages of traces if two processes have the same index, and accepts
processes that expect another number of processes. So the processes meet first, at the same port: every other process
connects to the first one and sends a line of JSON about itself. The first process sends a greeting, by which others
recognise it, and one answer to all: `_GO` once all have come, or the error with which all end.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import jax

RESOLVING = 60.0
"""Number of seconds within which a host's name must resolve: the names of new machines may be registered late."""
FOREIGN = 30.0
"""Number of seconds to wait for a port that another program uses, such as an earlier run that is still ending."""
LINGERING = 10.0
"""Number of seconds for which the first process, before it ends with an error, tells late processes this error."""
NOTICES = (10.0, 60.0)
"""Seconds before the first line that says what a process waits for, and between further lines."""
_GREETING = b"speccascade_jax 1\n"
_GO = b"go\n"
_ANSWERING = 5.0
"""Number of seconds in which the other end of a new connection must send its line."""
_PAUSE = 0.5


class AbsentError(Exception):
    """An error for processes that have not come in time."""


@dataclass(frozen=True)
class Process:
    """Description of a process, which it sends to the first process."""

    index: int
    count: int
    host: str
    jax: str


def meet(coordinator: str, count: int, index: int, seconds: float) -> None:
    """Waits until all processes have come to the first process's address, and compares what they expect.

    Args:
        coordinator: "host:port" of the first process.
        count: the number of processes.
        index: the index of this process.
        seconds: time in which all processes must come.

    Raises:
        ValueError: the address cannot be used, two processes have the same index, or they differ in the number of
            processes or the version of JAX; every process that has come raises it.
        AbsentError: a process has not come in time.
    """
    name, _, port = coordinator.rpartition(":")
    address = (name.removeprefix("[").removesuffix("]"), int(port))
    this = Process(index, count, socket.gethostname(), jax.__version__)
    waiting = _Waiting(coordinator, seconds)
    if index == 0:
        _gather(this, address, waiting)
    else:
        _join(this, address, waiting)


class _Waiting:
    """Time that a process has waited, with lines that say what it waits for."""

    def __init__(self, coordinator: str, seconds: float):
        self.coordinator, self.seconds = coordinator, seconds
        self._began, self._next = time.monotonic(), NOTICES[0]

    @property
    def passed(self) -> float:
        return time.monotonic() - self._began

    def check(self, missing: str) -> None:
        """Prints what is missing when a line is due (`NOTICES`); raises AbsentError when the waiting time is over."""
        if self.passed > self.seconds:
            raise AbsentError(f"{missing} did not come within {self.seconds:.0f} s")
        if self.passed > self._next:
            self._next += NOTICES[1]
            print(f"waiting for {missing}, for at most {self.seconds:.0f} s", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Guest:
    """A process that has come to the first process, and the connection to it."""

    process: Process
    connection: socket.socket

    def has_ended(self) -> bool:
        """Returns whether the process has closed the connection; it sends nothing after its first line."""
        self.connection.setblocking(False)
        try:
            return self.connection.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def _gather(this: Process, address: tuple[str, int], waiting: _Waiting) -> None:
    """Waits, as the first process, until all others have come, and sends them the answer."""
    _resolve(address, waiting)
    guests: list[_Guest] = []
    with _open(this, address, waiting) as server:
        server.settimeout(_PAUSE)
        try:
            while absent := sorted({*range(1, this.count)} - {guest.process.index for guest in guests}):
                waiting.check(f"process {', '.join(map(str, absent))} of {this.count} at {waiting.coordinator}")
                guest = _next_guest(server)
                guests = [other for other in guests if not other.has_ended()]  # a restarted one connects again
                if guest:
                    guests.append(guest)
                    _compare([this, *(other.process for other in guests[:-1])], guest.process)
            _answer(guests, _GO)
        except (ValueError, AbsentError) as error:
            _refuse(server, this.count, guests, f"{type(error).__name__} {error}\n".encode())
            raise
        finally:
            for guest in guests:
                guest.connection.close()


def _next_guest(server: socket.socket) -> _Guest | None:
    """Returns the next process that connects; `None` if there is none now, or if another program tries the port."""
    try:
        connection, _ = server.accept()
    except TimeoutError:
        return None
    connection.settimeout(_ANSWERING)
    try:
        connection.sendall(_GREETING)
        return _Guest(Process(**json.loads(_line(connection))), connection)
    except (OSError, ValueError, TypeError):
        connection.close()
        return None


def _compare(known: Sequence[Process], guest: Process) -> None:
    """Raises ValueError if a process has the index of a known one, or expects other things than the first one."""
    for process in known:
        if process.index == guest.index:
            raise ValueError(_twice(process, guest))
    first, labels = known[0], {"count": "process_count=", "jax": "JAX "}
    for name, remedy in (("count", "give all processes the same"), ("jax", "install the same version on all hosts")):
        values = getattr(guest, name), getattr(first, name)
        if values[0] != values[1]:
            theirs, ours = (f"{labels[name]}{value}" for value in values)
            place = f"process {guest.index} on {guest.host}"
            raise ValueError(f"{place} has {theirs}, and process 0 on {first.host} has {ours}: {remedy}")


def _twice(first: Process, second: Process) -> str:
    places = f"on {first.host}" if first.host == second.host else f"on {first.host} and {second.host}"
    remedy = f"give each process a number of its own, from 0 to {first.count - 1}"
    return f"process_index={first.index} was given to two processes ({places}): {remedy}"


def _answer(guests: Sequence[_Guest], words: bytes) -> None:
    for guest in guests:
        try:
            guest.connection.settimeout(_ANSWERING)
            guest.connection.sendall(words)
        except OSError:
            continue  # it has ended, which is noticed when JAX connects the processes


def _refuse(server: socket.socket, count: int, guests: list[_Guest], words: bytes) -> None:
    """Tells an error to all processes that have come, and for a while to those that come later."""
    _answer(guests, words)
    until = time.monotonic() + LINGERING
    while len(guests) < count - 1 and time.monotonic() < until:
        if guest := _next_guest(server):
            guests.append(guest)
            _answer([guest], words)


def _open(this: Process, address: tuple[str, int], waiting: _Waiting) -> socket.socket:
    """Returns a socket that listens at the port.

    Raises:
        ValueError: another program has the port, or another process of this run that is the first one, too.
    """
    try:
        return listen(address[1])
    except OSError as error:
        try:
            _ask(this, ("localhost", address[1]), 2 * LINGERING)
        except OSError:
            remedy = "name a free port on all hosts"
            wrong = f"port {address[1]} cannot be used here ({os.strerror(error.errno or 0)})"
            raise ValueError(f"coordinator_address={waiting.coordinator!r}: {wrong}: {remedy}") from error
        raise ValueError(_twice(this, this)) from error


def listen(port: int) -> socket.socket:
    """Returns a socket that listens at a port, for IPv4 and, if this host has it, IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _resolve(address: tuple[str, int], waiting: _Waiting) -> None:
    """Waits until the name of the first process's host is known."""
    while True:
        try:
            socket.getaddrinfo(*address)
            return
        except OSError as error:
            _check_name(address[0], waiting, error)
        time.sleep(_PAUSE)


def _check_name(name: str, waiting: _Waiting, error: OSError) -> None:
    if waiting.passed > min(RESOLVING, waiting.seconds):
        remedy = "give the name or the IP address of the first process's host"
        wrong = f"the host {name!r} is not known here ({error})"
        raise ValueError(f"coordinator_address={waiting.coordinator!r}: {wrong}: {remedy}") from error
    waiting.check(f"the name {name!r}, which is not known here")


def _join(this: Process, address: tuple[str, int], waiting: _Waiting) -> None:
    """Waits, as any process but the first, for the first process and its answer."""
    foreign_since = None
    while True:
        try:
            _ask(this, address, waiting.seconds - waiting.passed, waiting)
            return
        except socket.gaierror as error:
            _check_name(address[0], waiting, error)
        except _ForeignError as error:
            foreign_since = foreign_since or waiting.passed
            if waiting.passed - foreign_since > min(FOREIGN, waiting.seconds):
                remedy = f"name a free port on all hosts, and give process_index={this.index} to one process only"
                raise ValueError(f"coordinator_address={waiting.coordinator!r}: {error}: {remedy}") from error
        except OSError:
            waiting.check(f"process 0 of {this.count} at {waiting.coordinator}")
        time.sleep(_PAUSE)


class _ForeignError(OSError):
    """An error for a port that belongs to another program."""


def _ask(this: Process, address: tuple[str, int], seconds: float, waiting: _Waiting | None = None) -> None:
    """Tells the first process about this one, and returns once all have come.

    Raises:
        ValueError, AbsentError: the first process's answer.
        OSError: there is no answer: nobody listens there, the first process has ended, or it is another program.
    """
    with socket.create_connection(address, timeout=_ANSWERING) as connection:
        connection.sendall(json.dumps(asdict(this)).encode() + b"\n")
        try:
            greeting = _line(connection)
        except OSError as error:
            raise _ForeignError("another program has this port, and does not answer") from error
        if greeting != _GREETING:
            raise _ForeignError("another program has this port, or a run that has begun already")
        until = time.monotonic() + seconds + LINGERING
        kind, _, message = _last_line(connection, until, waiting).decode().partition(" ")
    if kind == "ValueError":
        raise ValueError(message.strip())
    if kind == "AbsentError":
        raise AbsentError(message.strip())
    if kind.encode() != _GO:
        raise ConnectionError("the first process has ended")


def _last_line(connection: socket.socket, until: float, waiting: _Waiting | None) -> bytes:
    """Returns the first process's answer; meanwhile says that this process waits."""
    connection.settimeout(_PAUSE)
    while time.monotonic() < until:
        try:
            return _line(connection)
        except TimeoutError:
            if waiting and waiting.passed < waiting.seconds:
                waiting.check("the processes that process 0 lists")
    return b""


def _line(connection: socket.socket) -> bytes:
    """Returns the next line, or a part of it if the connection closes or the line is longer than processes send."""
    words = b""
    while not words.endswith(b"\n") and len(words) < 4096 and (received := connection.recv(1)):
        words += received
    return words
