"""Communication with a library in its own process (a worker): requests and answers are lines of JSON.

A worker answers the requests `versions`, `load` and `run`. The library's own output goes to the worker's log, so that
the pipe carries only answers. An error is an answer too, so a setting that fails does not end the run. This module
imports only the standard library, because workers run in other environments.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

Options = dict[str, Any]
Ids = list[list[int]]


class Peer(Protocol):
    """The operations that every worker implements by means of its library."""

    def versions(self) -> dict[str, str]:
        """Returns the version of each package by name."""

    def load(self, pair: dict[str, Any]) -> None:
        """Sets the pair, as `pairs.Prepared.told` describes it, and drops the previous pair."""

    def write(self, options: Options, prompts: Ids, pair: dict[str, Any]) -> Ids:
        """Returns greedy outputs of one batch; this call is timed."""


def serve(peer: Peer, extra: dict[str, Callable[..., Any]] | None = None) -> None:
    """Answers requests until the pipe closes; `extra` maps names of further requests to the functions that answer."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to stdout, which would mix with the answers
    pair: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["op"] == "versions":
                answer: Any = peer.versions()
            elif request["op"] == "load":
                pair, answer = request["pair"], None
                peer.load(pair)
            elif request["op"] == "run":
                answer = timed(peer, request["options"], request["batches"], pair)
            else:
                answer = (extra or {})[request["op"]](**request["given"])
        except Exception as error:  # any exception of a library becomes the answer, so that the worker keeps running
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}) + "\n")
        else:
            answers.write(json.dumps({"answer": answer}) + "\n")
        sys.stdout.flush()  # before the answer, so that the log is complete even if the worker dies after it
        answers.flush()


def timed(
    peer: Peer, options: Options, batches: Sequence[Ids], pair: dict[str, Any], clock: Any = time.perf_counter
) -> dict[str, Any]:
    """Times each batch from prompt ids to output ids; returns `seconds` `[batches]` and the `tokens` of all rows."""
    seconds, rows = [], []
    for batch in batches:
        begin = clock()
        out = peer.write(options, batch, pair)
        seconds.append(clock() - begin)
        rows += out
    return {"seconds": seconds, "tokens": [cut(row, pair["stop"]) for row in rows]}


def cut(row: Sequence[int], stop: Sequence[int]) -> list[int]:
    """Returns a row up to and including its first stop id, because some libraries write more tokens after it."""
    out = [int(token) for token in row]
    ends = [position for position, token in enumerate(out) if token in stop]
    return out[: ends[0] + 1] if ends else out


class WorkerError(RuntimeError):
    """An error that a worker gave as its answer, or the end of a worker's process."""


class Worker:
    """A client that starts a worker's process and sends requests to it.

    Args:
        command: the command that starts the process; log: the file for the library's own output.

    Raises:
        WorkerError: the process could not be started; the message gives the reason.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str] | None = None):
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w", encoding="utf-8") as opened:
            try:
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=opened,
                    text=True,
                    env={**os.environ, **(environment or {})},
                )
            except OSError as error:
                raise WorkerError(str(error)) from error

    def ask(self, op: str, **request: Any) -> Any:
        """Returns the answer to a request.

        Raises:
            WorkerError: the worker answered with an error, or its process ended; the message then has the log's last
                line.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"op": op, **request}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            process.wait()
            last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["no output"]
            raise WorkerError(f"the process ended with status {process.returncode}: {last[0][:300]}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["answer"]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the process may have died with an unread request
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
