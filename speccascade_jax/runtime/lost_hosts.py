"""Noticing at once that another process is gone, and ending in one line.

A process that waits for one that was killed would wait until JAX's heartbeat fails and then be aborted with a page of
traces. So every process holds a connection to the first one and says so when it is done; a connection that ends without
that word is a process that is gone. The first one's end reaches all others.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from speccascade_jax.runtime import interrupts

STATUS = 75
"""What a process ends with whose fellow is gone ("try again", as `sysexits.h` has it)."""
PATIENCE = 60
"""Seconds for the processes to reach each other."""
_DONE = b"."
_CONNECTIONS: dict[int, socket.socket] = {}
"""Process -> the connection to it."""


def watch(index: int, count: int, agreed: Callable[[Any], Any], where: str | None = None) -> None:
    """Connect the processes, and end this one when another is gone; all must call it.

    Args:
        index, count: which process this is, and of how many; agreed: gives all processes the first one's value.
        where: the first one's host, as the others know it; by default what it calls itself.

    Raises:
        OSError: they do not reach each other within `PATIENCE` seconds.
    """
    if count < 2:
        return
    try:
        _connect(index, count, agreed, where)
    except OSError as error:
        raise OSError(
            f"the {count} processes do not reach each other at {where or 'the first one'}: {error}"
        ) from error
    for other, connection in _CONNECTIONS.items():
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        threading.Thread(target=_listen, args=(other, count, connection), daemon=True).start()


def _connect(index: int, count: int, agreed: Callable[[Any], Any], where: str | None) -> None:
    if index > 0:
        host, port = agreed(None)
        _CONNECTIONS[0] = socket.create_connection((where or host, port), timeout=PATIENCE)
        _CONNECTIONS[0].sendall(index.to_bytes(4))
        return
    with socket.create_server(("", 0)) as server:
        server.settimeout(PATIENCE)
        agreed([socket.gethostname(), server.getsockname()[1]])
        while len(_CONNECTIONS) < count - 1:
            connection, _ = server.accept()
            connection.settimeout(PATIENCE)
            other = int.from_bytes(connection.recv(4, socket.MSG_WAITALL))
            if 0 < other < count:  # nobody else
                _CONNECTIONS[other] = connection


def _listen(other: int, count: int, connection: socket.socket) -> None:
    try:
        said = connection.recv(1)
    except OSError:
        said = b""
    if said == _DONE:
        return
    print(f"error: process {other} of {count} is gone; on all hosts {interrupts.SAME}", file=sys.stderr, flush=True)
    os._exit(STATUS)  # what waits for it in a collective can't be interrupted otherwise


def leave() -> None:
    """Tell the others that this process is done."""
    for connection in _CONNECTIONS.values():
        try:
            connection.sendall(_DONE)
        except OSError:  # it is gone already, which its own thread says
            continue
