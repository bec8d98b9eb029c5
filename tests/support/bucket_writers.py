"""Commands in forked processes that write into the test server's bucket, and are killed at random moments."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import runpy
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# loaded once, in the process that the others are forked from
from speccascade_jax.evaluation import experiment  # noqa: F401
from speccascade_jax.results.store.bucket_store import BucketStore
from tests.support.bucket_server import Server

LONGEST = 400
"""Seconds after which a process counts as hanging."""


def _run(module: str, arguments: list[str], environment: dict[str, str], log: Path, lease: float) -> None:
    """Runs a command as `python -m` does, in a process that was forked for it."""
    os.environ.update(environment)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    BucketStore.lease_seconds = lease
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Writers:
    """Starts and kills writers, and counts what they do.

    Attributes:
        created: how often each record was created.
        counts: numbers of starts, of kills, of kills during an upload, and of records that another process had created.
    """

    def __init__(self, server: Server, module: str, log: Path, lease: float = 1.0):
        self._module, self._log, self._lease = module, log, lease
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._armed: dict[int, int] = {}
        self._lock = threading.Lock()
        self.created, self.counts = Counter[str](), Counter[str]()
        self._server, self._upload = server, server.upload

    @contextlib.contextmanager
    def watching(self) -> Iterator[Writers]:
        """Counts the records that arrive at the server, and kills writers that wait for one."""
        self._server.upload, self._server.fault = self._counted, self._kill_armed
        try:
            yield self
        finally:
            self._server.upload = self._upload

    def _counted(self, name: str, query: dict[str, str], body: bytes):
        answer = self._upload(name, query, body)
        if "/records/" in name:
            self.created.update([name] * (answer[0] == 200))
            self.counts["refused"] += answer[0] == 412
        return answer

    def _kill_armed(self, method: str, name: str) -> None:
        if method != "POST" or "/records/" not in name:
            return
        with self._lock:
            for process in list(self._armed):
                self._armed[process] -= 1
                if self._armed[process] == 0:
                    self.counts["during an upload"] += 1
                    os.kill(process, signal.SIGKILL)

    def start(self, *arguments: str) -> multiprocessing.Process:
        """Starts a process of the command."""
        names = ("TENSORSTORE_GCS_HTTP_URL", "GOOGLE_AUTH_TOKEN_FOR_TESTING", "SPECCASCADE_COMPILATION_CACHE")
        environment = {name: os.environ[name] for name in names if name in os.environ}
        arguments = (self._module, list(arguments), environment, self._log, self._lease)
        process = self._context.Process(target=_run, args=arguments)
        process.start()
        self.counts["starts"] += 1
        return process

    def finish(self, *arguments: str) -> int:
        """Runs the command to its end, and returns its exit status."""
        process = self.start(*arguments)
        process.join(LONGEST)
        process.kill()
        process.join()
        return process.exitcode

    def write(self, kills: int, draws: random.Random, seconds: float, *arguments: str) -> int:
        """Kills the command several times, then runs it to its end, and returns the exit status.

        Half of the kills come within the given seconds, the others while one of the next records is uploaded.
        """
        while kills:
            process = self.start(*arguments)
            at_upload = draws.random() < 0.5
            end = time.monotonic() + (LONGEST if at_upload else draws.uniform(0, seconds))
            if at_upload:
                with self._lock:
                    self._armed[process.pid] = draws.randint(1, 6)
            process.join(end - time.monotonic())
            with self._lock:
                self._armed.pop(process.pid, None)
            process.kill()
            process.join()
            if process.exitcode != -signal.SIGKILL:
                self.counts["done before the kill"] += 1
                if process.exitcode:
                    return process.exitcode
                break
            self.counts["kills"] += 1
            kills -= 1
        return self.finish(*arguments)
