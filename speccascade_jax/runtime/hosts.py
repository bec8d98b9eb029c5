"""Several processes that decode as one: joining, agreeing on values, output, and the end of one of them.

Every process runs the same program on the same examples, and holds its devices' part of the arrays. Values that would
differ between processes come from the first one: the content of a store, the time, who prints. In a single process
everything here does nothing.

Without further measures, a process that waits for a killed one would wait until JAX's heartbeat fails and then abort
with a page of traces. So every process keeps a connection to the first one and sends a byte when it is done; a
connection that ends without that byte means that the process is gone. The end of the first process reaches all others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from speccascade_jax.runtime import interrupts

HEARTBEAT = 30
"""Seconds without a heartbeat after which JAX gives up a process; a broken connection is noticed at once."""
STATUS = 75
"""Exit status of a process that ends because another one is gone ("try again" in `sysexits.h`)."""
PATIENCE = 60
"""Seconds for the processes to reach each other."""
NOTICED = 2.0
"""Seconds within which a process notices that another one is gone."""
_SYNC_POINTS = itertools.count()
"""Numbers of the points at which all processes may end together; every process counts the same points."""
_DONE = b"."
_CONNECTIONS: dict[int, socket.socket] = {}
"""Connections by process."""
_ALL = "--coordinator_address, --process_count and --process_index"


def begin(
    coordinator: str | None = None, count: int | None = None, index: int | None = None, *, asked: bool = False
) -> None:
    """Joins the other processes; must be called before any code asks for a device.

    Give `coordinator`, `count` and `index` together, or none of them: on TPU pods and under SLURM the environment has
    them, and on one machine there is nothing to join.

    Args:
        coordinator: "host:port" of the first process.
        count: the number of processes.
        index: the index of this process.
        asked: whether the user says that there are other processes; finding none is then an error.

    Raises:
        ValueError: some of the three without the rest, no such process or address, or no other processes though asked.
    """
    _check(coordinator, count, index)
    if coordinator is None and not (asked or _in_a_cluster() or _may_be_a_pod()):
        return
    options: dict[str, Any] = {"local_device_ids": _own_devices(), "heartbeat_timeout_seconds": HEARTBEAT}
    try:
        jax.distributed.initialize(coordinator, count, index, **options)
    except (ValueError, RuntimeError) as error:
        if coordinator is None and not (asked or _in_a_cluster()):
            return  # not a pod
        raise ValueError(f"the other processes were not found ({error}): give {_ALL}") from error
    if not first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
        warnings.simplefilter("ignore")
    host = None if coordinator is None else coordinator.rpartition(":")[0]
    _watch(jax.process_index(), jax.process_count(), host)


def _check(coordinator: str | None, count: int | None, index: int | None) -> None:
    words = {"coordinator_address": coordinator, "process_count": count, "process_index": index}
    missing = [name for name, value in words.items() if value is None]
    if 0 < len(missing) < len(words):
        raise ValueError(f"--{missing[0]} is missing: give {_ALL}, or none of them")
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise ValueError(f"coordinator_address={coordinator!r}: give host:port of the first process")
    if count is not None and index is not None and not 0 <= index < count:
        raise ValueError(f"process_index={index} is outside process_count={count}: give a number from 0 to {count - 1}")


def _in_a_cluster() -> bool:
    """Returns whether the environment says that this is one of several processes."""
    return "," in os.environ.get("TPU_WORKER_HOSTNAMES", "") or int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1


def _may_be_a_pod() -> bool:
    """Returns whether this is a machine for TPUs, where JAX asks the machine itself for other processes."""
    return find_spec("libtpu") is not None and os.environ.get("JAX_PLATFORMS", "") in ("", "tpu")


def _own_devices() -> list[int] | None:
    """Returns the numbers of all GPUs of a node on which SLURM runs one task; JAX itself would use only the first GPU.

    Returns `None` otherwise: JAX then chooses.
    """
    if os.environ.get("SLURM_NTASKS_PER_NODE") != "1" or "SLURM_GPUS_ON_NODE" not in os.environ:
        return None
    return list(range(int(os.environ["SLURM_GPUS_ON_NODE"])))


def many() -> bool:
    """Returns whether this process joined others; does not initialize JAX's devices in a process that joined none."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def first() -> bool:
    """Returns whether this is the process that writes and prints."""
    return not many() or jax.process_index() == 0


def agreed(value: Any) -> Any:
    """Returns the first process's value (JSON) in all processes; all must call it."""
    if not many():
        return value
    encoded = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(encoded))))
    # padded to a power of two: JAX compiles one program for each length
    buffer = np.zeros(1 << max(6, (size - 1).bit_length()), np.uint8)
    if first():
        buffer[:size] = encoded
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(buffer))[:size].tobytes())


def stop_here() -> None:
    """Ends all processes at the same point after SIGTERM reached any of them; every process must call it equally often.

    With several processes JAX handles SIGTERM itself, because a process that ended alone would leave the others in a
    collective. It tells all processes the next point that none has passed. In a single process SIGTERM needs no point.

    Raises:
        interrupts.Terminated: this is that point.
    """
    if many() and multihost_utils.reached_preemption_sync_point(next(_SYNC_POINTS)):
        raise interrupts.Terminated


def check_alone(command: str, words: Mapping[str, Any]) -> None:
    """Raises ValueError if flags or the environment name other processes, for a command that runs in one process.

    Args:
        command: the command, for the error.
        words: flag -> value, of the flags that name other processes.

    Raises:
        ValueError: a flag is set, or the environment says that there are other processes.
    """
    flags = [f"--{name}={value}" for name, value in words.items() if value]
    if flags or _in_a_cluster():
        cause = f"leave {', '.join(flags)} out" if flags else "the environment names other processes; start one alone"
        raise ValueError(f"{command} runs in one process: {cause}")


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Ends all processes on an error inside the block; without an error, notifies the others when this one is done.

    If the error only says that another process is gone, the message about that process appears instead. In a single
    process errors pass through.
    """
    try:
        yield
    except BaseException as error:
        if not many():
            raise
        if isinstance(error, interrupts.Terminated):
            _say_done()  # all processes end here: none of them is missed
        time.sleep(NOTICED)
        # an orderly end would wait for the others, which may wait for this one
        status = _status(error)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
    _say_done()


def _say_done() -> None:
    """Tells the other processes that this one ends without an error."""
    for connection in _CONNECTIONS.values():
        with contextlib.suppress(OSError):  # that process has ended already; its `_listen` thread reports it
            connection.sendall(_DONE)


def _status(error: BaseException) -> int:
    """Prints why this process ends, and returns its exit status."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    if isinstance(error, KeyboardInterrupt | interrupts.Terminated):
        return interrupts.status(error, interrupts.SAME)
    traceback.print_exception(error)  # without --debug, `one_line_errors` has replaced this error by SystemExit
    return 1


def _watch(index: int, count: int, first_host: str | None) -> None:
    """Connects the processes, and ends this one when another is gone; all must call it.

    Args:
        index: the index of this process.
        count: the number of processes.
        first_host: the first one's host, as the others know it; `None`: the name that it calls itself.

    Raises:
        OSError: they do not reach each other within `PATIENCE` seconds.
    """
    if count < 2:
        return
    try:
        _connect(index, count, first_host)
    except OSError as error:
        address = first_host or "the first process"
        raise OSError(f"the {count} processes cannot reach each other at {address}: {error}") from error
    for process, connection in _CONNECTIONS.items():
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        threading.Thread(target=_listen, args=(process, count, connection), daemon=True).start()


def _connect(index: int, count: int, first_host: str | None) -> None:
    if index > 0:
        host, port = agreed(None)
        _CONNECTIONS[0] = socket.create_connection((first_host or host, port), timeout=PATIENCE)
        _CONNECTIONS[0].sendall(index.to_bytes(4))
        return
    with socket.create_server(("", 0)) as server:
        server.settimeout(PATIENCE)
        agreed([socket.gethostname(), server.getsockname()[1]])
        while len(_CONNECTIONS) < count - 1:
            connection, _ = server.accept()
            connection.settimeout(PATIENCE)
            process = int.from_bytes(connection.recv(4, socket.MSG_WAITALL))
            if 0 < process < count:  # only processes of this run
                _CONNECTIONS[process] = connection


def _listen(other: int, count: int, connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        if connection.recv(1) == _DONE:
            return
    print(f"error: process {other} of {count} has ended; on all hosts, {interrupts.SAME}", file=sys.stderr, flush=True)
    os._exit(STATUS)  # a collective that waits for the process can't be interrupted otherwise
