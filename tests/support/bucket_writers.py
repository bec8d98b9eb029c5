"""Commands in forked processes that write into the test server's bucket, and are killed at random moments."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import runpy
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# imported here once, so that the processes forked from this one do not import it again
from speccascade_jax.evaluation import experiment  # noqa: F401
from speccascade_jax.results.store.bucket_store import BucketStore
from tests.support.bucket_server import TOKEN, URL, Server

LONGEST = 400
"""Seconds after which a process counts as hanging."""


def _run(module: str, arguments: list[str], environment: dict[str, str], log: Path, lease: float) -> None:
    """Runs a command as `python -m` does; called in a forked process."""
    os.environ.update(environment | {TOKEN: str(os.getpid())})
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    BucketStore.lease_seconds = lease
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


MOMENTS = ("after", "before", "at any time")
"""When a writer is killed: after the server has stored one of its records, before it does, or at any time."""


class Writers:
    """Processes of a command that write records; starts and kills them, and counts what they do.

    Attributes:
        created: how often each record was created.
        counts: numbers of starts, of kills by moment, of writers that were done before their kill, and of refused
            writes, whose record another process had created before.
    """

    def __init__(self, server: Server, module: str, log: Path, lease: float = 1.0):
        self._module, self._log, self._lease = module, log, lease
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._armed: dict[tuple[str, int], int] = {}
        self.created, self.counts = Counter[str](), Counter[str]()
        self._server, self._upload = server, server.upload

    @contextlib.contextmanager
    def watching(self) -> Iterator[Writers]:
        """Counts the records that arrive at the server, and kills the writers of some of them."""
        self._server.upload = self._watched
        try:
            yield self
        finally:
            self._server.upload = self._upload

    def _watched(self, name: str, query: dict[str, str], body: bytes):
        """Answers an upload in place of the server, and kills its writer before or after if it is time."""
        if "/records/" not in name:
            return self._upload(name, query, body)
        writer = int(self._server.caller.token)
        self._kill_armed("before", writer)
        answer = self._upload(name, query, body)
        self.created.update([name] * (answer[0] == 200))
        self.counts["refused"] += answer[0] == 412
        self._kill_armed("after", writer)
        return answer

    def _kill_armed(self, moment: str, writer: int) -> None:
        countdown = self._armed.get((moment, writer), 0)
        self._armed[moment, writer] = countdown - 1
        if countdown == 1:
            os.kill(writer, signal.SIGKILL)

    def start(self, *arguments: str) -> multiprocessing.Process:
        """Starts a process of the command."""
        names = (URL, "SPECCASCADE_COMPILATION_CACHE")
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

        Kills "at any time" happen within `seconds`, the others at one of the first records.
        """
        while kills:
            process, moment = self.start(*arguments), draws.choice(MOMENTS)
            self._armed[moment, process.pid] = draws.randint(1, 3)
            process.join(draws.uniform(0, seconds) if moment == MOMENTS[-1] else LONGEST)
            process.kill()
            process.join()
            if process.exitcode == 0:
                self.counts["done before the kill"] += 1
                return 0
            if process.exitcode != -signal.SIGKILL:
                return process.exitcode
            self.counts[moment] += 1
            kills -= 1
        return self.finish(*arguments)
