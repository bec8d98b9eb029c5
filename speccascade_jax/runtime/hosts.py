"""Several processes that decode together: connecting, agreeing on values, printing, and ending together.

Every process runs the same program on the same examples, and holds a part of the arrays on its own devices. Values that
could differ between processes, such as the time and the content of files, are taken from the first process. Only the
first process prints. In a single process, the functions of this module do nothing.

Without further measures, a process that waits for a killed process would wait until JAX's heartbeat fails and then
abort with a page of traces. For this reason, every process keeps a connection to the first process and sends a byte
when it is done, or the error that ends it. A connection that closes without a word means that the process at its other
end has died. If the first process dies, all others notice. All processes end together: the first process says that it
is done after all others have, so the others wait while it writes files, for as long as that takes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any, TextIO

import jax
import numpy as np
from jax.experimental import multihost_utils

from speccascade_jax.runtime import interrupts, progress, rendezvous
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.files import expanded, make_folder

HEARTBEAT = 150
"""Seconds without a heartbeat after which JAX aborts all processes. This module acts earlier: at once if a connection
breaks, and after `SILENCE` seconds if nothing arrives through it."""
SILENCE = 90.0
"""Number of seconds after which a process that sends no bytes, because it is suspended or cut off, counts as dead."""
BEAT = 5.0
"""Number of seconds between two bytes by which a process shows that it is alive."""
STATUS = 75
"""Exit status of a process that ends because another process has died ("try again" in `sysexits.h`)."""
COMING = 300.0
"""Number of seconds in which all processes must have started."""
PATIENCE = 60
"""Number of seconds that a process waits for a connection to another process."""
LEAD = 0.5
"""Number of seconds by which the other processes end before the first one if all end with an error."""
NOTICED = 2.0
"""Number of seconds within which a process notices that another process has died."""
_SYNC_POINTS = itertools.count()
"""Counter of the points at which all processes may end together; every process counts the same points."""
_DONE = b"."
_ALIVE = b"\0"
_SILENT = b"?"
_FAILED = b"!"
"""First byte of an error message; the message ends where the connection closes."""
_ENDING = threading.Lock()
"""Held by the thread that says why this process ends; it is never released, so that only one thread does."""
_CONNECTIONS: dict[int, socket.socket] = {}
"""Open sockets, by the index of the process at the other end."""
_LISTENERS: list[threading.Thread] = []
"""Threads that read the sockets; each ends when the process at the other end is done."""
_AGAIN = f"on all hosts, {interrupts.SAME}"
_NO_CLUSTER = "coordinator_address should be defined"
"""Part of JAX's error message if it detects no cluster; with any other message, it has detected one and then failed."""
_PORT = 8476
_SHOWN = 3
"""Number of different settings that an error shows."""
_UNSET = ("not set", "not set")
_ALL = "--coordinator_address, --process_count and --process_index"


def begin(
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    asked: bool = False,
    logs: str | None = None,
) -> None:
    """Connects this process to the other processes; must be called before any code uses a JAX device.

    Give `coordinator`, `count` and `index` together, or none of them. On TPU pods and under SLURM, the environment
    contains them. On a single machine there is nothing to connect. A process that seems to belong to a cluster never
    goes on alone, because each host would then do the whole work.

    Args:
        coordinator: "host:port" of the first process.
        count: the number of processes.
        index: the index of this process.
        asked: whether the user requests several processes; it is then an error to find no others.
        logs: local folder in which each process but the first writes what it prints, to `host-<index>.log`; `None`:
            only the first process prints. Every process prints its errors.

    Raises:
        ValueError: only some of the three arguments are given, the address or index is invalid, or no other process is
            found although the user requests several, or JAX has detected a cluster.
    """
    _check(coordinator, count, index)
    if index:
        progress.end()  # from here on, only the first process shows progress, on behalf of all
    folder = None if logs is None else _log_folder(logs)
    if coordinator is None and not (asked or _in_a_cluster() or _may_be_a_pod()):
        return
    if coordinator is not None and count is not None and index is not None:
        _meet(coordinator, count, index)
    options: dict[str, Any] = {"local_device_ids": _own_devices(), "heartbeat_timeout_seconds": HEARTBEAT}
    options["initialization_timeout"] = int(2 * COMING)  # `_in_time` ends earlier: JAX would abort with pages of traces
    try:
        with _in_time():
            jax.distributed.initialize(coordinator, count, index, **options)
    except (ValueError, RuntimeError, OSError) as error:
        if _NO_CLUSTER in str(error) and not (asked or _in_a_cluster()):
            return
        alone = f" (localhost:{_PORT}, 1 and 0 for a single machine)" * (coordinator is None)
        raise ValueError(f"the other processes were not found ({error}): give {_ALL}{alone}") from error
    _check_devices()
    if not first():
        progress.end()
        sys.stdout = _log(folder)
        if folder is None:
            warnings.simplefilter("ignore")
    host = None if coordinator is None else coordinator.rpartition(":")[0]
    _watch(jax.process_index(), jax.process_count(), host)


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """Ends this process with `STATUS` if the block takes longer than `COMING` seconds.

    `STATUS` means "try again": a machine that starts late can join the next attempt.
    """
    timer = threading.Timer(COMING, _late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _late() -> None:
    print(f"error: the other processes did not come within {COMING:.0f} s; {_AGAIN}", file=sys.stderr, flush=True)
    os._exit(STATUS)  # nothing else interrupts JAX while it waits


def _check_devices() -> None:
    """Raises ValueError if processes have different numbers of devices, which JAX's messages between hosts exclude."""
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        fewest, most = (pick(counts, key=lambda index: (counts[index], index)) for pick in (min, max))
        raise ValueError(
            f"process {fewest} has {counts[fewest]} devices, and process {most} has {counts[most]}: give every process "
            "equally many (CUDA_VISIBLE_DEVICES)"
        )


def _log_folder(logs: str) -> Path:
    """Makes the folder of logs and returns it; an error after this process is connected would leave others waiting."""
    folder = expanded(logs)
    if isinstance(folder, BucketPath):
        raise ValueError(f"--host_logs={logs}: give a local folder, and copy it to the bucket")
    make_folder(folder)
    return folder


def _log(folder: Path | None) -> TextIO:
    """Opens the file that receives what this process prints, for appending; the first process needs no such file."""
    if folder is None:
        return open(os.devnull, "w", encoding="utf-8")
    return open(folder / f"host-{jax.process_index()}.log", "a", buffering=1, encoding="utf-8")


def _check(coordinator: str | None, count: int | None, index: int | None) -> None:
    words = {"coordinator_address": coordinator, "process_count": count, "process_index": index}
    missing = [name for name, value in words.items() if value is None]
    if 0 < len(missing) < len(words):
        raise ValueError(f"--{missing[0]} is missing: give {_ALL}, or none of them")
    if coordinator is not None and not _is_address(coordinator):
        raise ValueError(
            f"coordinator_address={coordinator!r}: give host:port of the first process, with a port from 1 to 65535"
        )
    if count is not None and count < 1:
        raise ValueError(f"process_count={count}: give the number of processes, at least 1")
    if count is not None and index is not None and not 0 <= index < count:
        raise ValueError(f"process_index={index} is outside process_count={count}: give a number from 0 to {count - 1}")


def _is_address(coordinator: str) -> bool:
    address = re.fullmatch(r".+:(\d{1,5})", coordinator)
    return address is not None and 0 < int(address[1]) < 1 << 16


def _meet(coordinator: str, count: int, index: int) -> None:
    """Waits for all processes, because JAX would wait for them silently; ends this process if another does not come."""
    try:
        rendezvous.meet(coordinator, count, index, COMING)
    except rendezvous.AbsentError as error:
        print(f"error: {error}; {_AGAIN}", file=sys.stderr, flush=True)
        sys.exit(STATUS)


def _in_a_cluster() -> bool:
    """Returns whether environment variables of TPU pods or SLURM say that this is one of several processes."""
    return "," in os.environ.get("TPU_WORKER_HOSTNAMES", "") or int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1


def _may_be_a_pod() -> bool:
    """Returns whether this seems to be a TPU machine, on which JAX itself finds the other processes."""
    return find_spec("libtpu") is not None and os.environ.get("JAX_PLATFORMS", "") in ("", "tpu")


def _own_devices() -> list[int] | None:
    """Returns the indices of all GPUs of a node on which SLURM runs one task; by default, JAX would use only the first.

    In all other cases the function returns `None`, so that JAX chooses the devices.
    """
    if os.environ.get("SLURM_NTASKS_PER_NODE") != "1" or "SLURM_GPUS_ON_NODE" not in os.environ:
        return None
    return list(range(int(os.environ["SLURM_GPUS_ON_NODE"])))


def many() -> bool:
    """Returns whether this process is connected to other processes.

    In a process without connections, the function does not initialize JAX's devices.
    """
    return jax.distributed.is_initialized() and jax.process_count() > 1


def first() -> bool:
    """Returns whether this is the first process, which is the only one that prints and writes files."""
    return not many() or jax.process_index() == 0


def agreed(value: Any) -> Any:
    """Returns the first process's value, sent as JSON, in every process; all processes must call this function."""
    if not many():
        return value
    encoded = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(encoded))))
    # padded to a power of two, because JAX compiles one program for each buffer length
    buffer = np.zeros(1 << max(6, (size - 1).bit_length()), np.uint8)
    if first():
        buffer[:size] = encoded
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(buffer))[:size].tobytes())


def largest(value: int) -> int:
    """Returns the largest of all processes' values (int32) in every process; all processes must call this function."""
    return int(np.max(multihost_utils.process_allgather(np.int32(value)))) if many() else value


def check_shared(folder: Path) -> None:
    """Raises ValueError if a process does not see the first one's files in a folder; all processes must call this.

    Args:
        folder: an existing folder, to which all processes will write parts of the same files.
    """
    if not many() or isinstance(folder, BucketPath):
        return
    file = folder / f".shared-{agreed(secrets.token_hex(8))}"
    if first():
        file.touch()
    agreed(None)  # the others look only now
    blind = largest(-1 if file.exists() else jax.process_index())
    if first():
        file.unlink()
    if blind >= 0:
        raise ValueError(
            f"process {blind} does not see process 0's files in {folder}: name a folder that all hosts share, or one "
            "in gs://"
        )


def check_same(
    settings: Mapping[str, str],
    portable: Mapping[str, str] | None = None,
    remedy: str = "start all processes with the same settings",
) -> None:
    """Raises ValueError if this process has other settings than the first one; all processes must call this function.

    Processes with different settings would run different programs, and wait for each other forever.

    Args:
        settings: the settings' values as texts, by name.
        portable: the same values as texts, but with folders removed from local paths, because hosts may hold a file in
            different folders; a setting is accepted if either of its texts is the same in both processes.
        remedy: end of the error message.
    """
    here = {name: [text, (portable or settings)[name]] for name, text in settings.items()}
    expected = agreed(here)
    pairs = {name: (here.get(name, _UNSET), expected.get(name, _UNSET)) for name in {**expected, **here}}
    differing = {name: texts for name, pair in pairs.items() if (texts := _differing(*pair))}
    wrong = [f"{name} is {_difference(*texts)}" for name, texts in differing.items()]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" * (len(wrong) > _SHOWN)
        raise ValueError(f"{'; '.join(wrong[:_SHOWN])}{more}: {remedy}")


def _differing(here: Sequence[str], first: Sequence[str]) -> tuple[str, str] | None:
    """Compares the texts of a setting in two processes: `None` if a pair is equal, otherwise the first pair."""
    pairs = list(zip(here, first, strict=True))
    return None if any(text == expected for text, expected in pairs) else pairs[0]


def _difference(here: str, first: str) -> str:
    """Returns two texts of a setting for an error message, each from shortly before the place where they differ."""
    start = max(0, len(os.path.commonprefix([here, first])) - 30)
    texts = ["…" * bool(start) + shorten(text[start:], 90, placeholder=" …") for text in (here, first)]
    return f"{texts[0]} in process {jax.process_index()} and {texts[1]} in process 0"


def stop_here() -> None:
    """Ends all processes at the same point after SIGTERM has reached any of them.

    Every process must call this function equally often, because its calls are the points at which processes can end.
    With several processes, JAX handles SIGTERM itself, because a process that ended alone would leave the others
    waiting in a collective operation. JAX tells all processes the next point that no process has passed. A single
    process ends directly on SIGTERM.

    Raises:
        interrupts.Terminated: all processes end at this call.
    """
    if many() and multihost_utils.reached_preemption_sync_point(next(_SYNC_POINTS)):
        raise interrupts.Terminated


def check_alone(command: str, words: Mapping[str, Any]) -> None:
    """Raises ValueError if flags or the environment name other processes, for a command that runs in one process.

    Args:
        command: the command, for the error message.
        words: values, by flag name, of the flags that name other processes.

    Raises:
        ValueError: a flag is set, or the environment says that there are other processes.
    """
    flags = [f"--{name}={value}" for name, value in words.items() if value]
    if flags or _in_a_cluster():
        cause = f"leave {', '.join(flags)} out" if flags else "the environment names other processes; start one alone"
        raise ValueError(f"{command} runs in one process: {cause}")


@contextlib.contextmanager
def together(how: str = interrupts.SAME) -> Iterator[None]:
    """Ends all processes if the block raises an error; otherwise waits until the block has ended in all processes.

    If the error is only a consequence of another process's end, the message about that process appears instead. The
    other processes end with this process's error, since running the same command again would not help. In a single
    process, errors pass through.

    Args:
        how: the printed advice on how to continue after a signal.
    """
    try:
        yield
        _wait_until_all_are_done()
    except BaseException as error:
        if not many():
            raise
        if isinstance(error, interrupts.Terminated):
            _say_done()  # all processes end here, so no process may report this one as dead
        time.sleep(NOTICED)
        _ENDING.acquire()
        _say_failed(error)
        # a normal exit would wait for the other processes, which may be waiting for this one
        status = _status(error, how)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _wait_until_all_are_done() -> None:
    """Tells the other processes that this one is done, the first process last, and waits until all are done."""
    # JAX's own shutdown aborts all processes after 5 minutes, also with a longer shutdown_timeout_seconds (JAX 0.10.2)
    if not first():
        _say_done()
    for listener in _LISTENERS:
        listener.join()
    if first():
        _say_done()


def _say_done() -> None:
    """Tells the other processes that this one ends without an error."""
    _say(_DONE)


def _say_failed(error: BaseException) -> None:
    """Tells the other processes the error that ends this one; signals and bare exit statuses have no words to tell."""
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        _say_last(_FAILED + error.code.removeprefix("error: ").encode())
    elif isinstance(error, Exception):
        _say_last(_FAILED + f"{type(error).__name__}: {error}".encode())


def _say_last(words: bytes) -> None:
    """Tells the other processes why all end, and lets them end before the first process does.

    JAX's coordinator is a part of the first process, and the others would print pages of gRPC's errors without it.
    """
    _say(words)
    for connection in _CONNECTIONS.values():
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
    if many() and first():
        time.sleep(LEAD)


def _say(words: bytes) -> None:
    for connection in _CONNECTIONS.values():
        with contextlib.suppress(OSError):  # that process has ended already, and its `_listen` thread reports this
            connection.sendall(words)


def _status(error: BaseException, how: str) -> int:
    """Prints why this process ends, and returns its exit status."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    if isinstance(error, KeyboardInterrupt | interrupts.Terminated):
        return interrupts.status(error, how)
    traceback.print_exception(error)  # without --debug, `one_line_errors` has replaced this error by SystemExit
    return 1


def _watch(index: int, count: int, first_host: str | None) -> None:
    """Connects all processes, and ends this process as soon as another one dies; every process must call this function.

    Args:
        index: the index of this process.
        count: the number of processes.
        first_host: the name of the first process's host, as the others reach it; `None` uses the host's own name.

    Raises:
        OSError: the processes do not reach each other within `PATIENCE` seconds.
    """
    if count < 2:
        return
    try:
        _connect(index, count, first_host)
    except OSError as error:
        address = first_host or "the first process"
        raise OSError(f"the {count} processes cannot reach each other at {address}: {error}") from error
    for process, connection in _CONNECTIONS.items():
        connection.settimeout(SILENCE)
        _LISTENERS.append(threading.Thread(target=_listen, args=(process, count, connection), daemon=True))
        _LISTENERS[-1].start()
    threading.Thread(target=_beat, daemon=True).start()


def _beat() -> None:
    """Sends a byte every `BEAT` seconds, by which the other processes see that this one is alive."""
    while True:
        time.sleep(BEAT)
        _say(_ALIVE)


def _connect(index: int, count: int, first_host: str | None) -> None:
    if index > 0:
        host, port = agreed(None)
        _CONNECTIONS[0] = socket.create_connection((first_host or host, port), timeout=PATIENCE)
        _CONNECTIONS[0].sendall(index.to_bytes(4))
        return
    with rendezvous.listen(0) as server:
        server.settimeout(PATIENCE)
        agreed([socket.gethostname(), server.getsockname()[1]])
        while len(_CONNECTIONS) < count - 1:
            connection, _ = server.accept()
            connection.settimeout(PATIENCE)
            process = int.from_bytes(connection.recv(4, socket.MSG_WAITALL))
            if 0 < process < count:  # other programs may connect to the port, too: only processes of this run count
                _CONNECTIONS[process] = connection


def _listen(other: int, count: int, connection: socket.socket) -> None:
    words = _last_words(connection)
    if words == _DONE:
        return
    _ENDING.acquire()
    if words == _SILENT:
        reason, status = f" or is suspended: nothing has come from it for {SILENCE:.0f} s; {_AGAIN}", STATUS
    elif words.startswith(_FAILED):
        _say_last(words)  # only the first process is connected to all
        reason, status = f": {words[len(_FAILED) :].decode(errors='replace')}", 1
    else:
        reason, status = f"; {_AGAIN}", STATUS
    print(f"error: process {other} of {count} has ended{reason}", file=sys.stderr, flush=True)
    os._exit(status)  # nothing else interrupts a collective operation that waits for the dead process


def _last_words(connection: socket.socket) -> bytes:
    """Returns `_DONE` as soon as it arrives, `_SILENT` after a silence, or all that came before the end."""
    words = b""
    with contextlib.suppress(OSError):
        try:
            while words != _DONE and (received := connection.recv(4096)):
                words += received.replace(_ALIVE, b"")
        except TimeoutError:
            return words or _SILENT
    return words
