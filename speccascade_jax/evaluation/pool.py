"""A pool of workers that measure a sweep's points, each on a device of its own; one driver owns the store.

The driver loads no weights: it asks a worker for keys. A worker that dies gives back what its group still lacks, and
one in its place goes on; a driver that dies leaves a store that the same command goes on with. Ray Core is an extra
(`pip install '.[pool]'`); of it only actors are used.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import jax

from speccascade_jax.evaluation.measuring import evaluate
from speccascade_jax.evaluation.points import Point
from speccascade_jax.evaluation.session import Identity, Session, open_session
from speccascade_jax.results.store.result_store import Record, ResultStore, superseding
from speccascade_jax.runtime import own_files

ATTEMPTS = 3
"""How often a point may take its worker with it before the sweep ends."""
_MEMORY = ("memory", "object_store_memory")
ACCELERATORS = ("GPU", "TPU")
"""What Ray calls devices that JAX opens by itself."""


def check(points: Sequence[Point], count: int, device: str | None) -> None:
    """What is known before Ray starts.

    Raises:
        ValueError: points are to be timed and workers have no device each, or each is to have several.
    """
    if math.prod(points[0].pair.mesh) > 1:
        raise ValueError(
            f"mesh={points[0].pair.mesh} is of several devices, of which each of the workers has one: leave workers out"
        )
    if device == "CPU":
        raise ValueError(
            "worker_device='CPU' is what workers share: name what each machine has one of (ray start "
            "--resources=…), or leave it out and time nothing (Evaluation.latency_examples=0)"
        )
    if count > 1 and not device and points[0].evaluation.latency_examples:
        raise ValueError(
            f"workers={count} that share a machine's cores would time each other: give worker_device, or time nothing "
            "(Evaluation.latency_examples=0)"
        )


class Worker:
    """What an actor is: a session, opened where its device is when it is first asked."""

    def __init__(self, points: Sequence[Point], accelerated: bool, files: Sequence[str] = ()):
        self._points = points
        own_files.load_again(files)
        if accelerated:
            jax.config.update("jax_platforms", None)  # whatever keeps the driver off its workers' devices

    @cached_property
    def _session(self) -> Session:
        return open_session(self._points)

    def identities(self, points: Sequence[Point]) -> list[Identity]:
        """Returns the identities that the points' records have when they are measured here."""
        return [self._session.identity(point) for point in points]

    def pid(self) -> int:
        return os.getpid()

    def measure(self, points: Sequence[Point], keys: Sequence[str]) -> Iterator[Record]:
        """Records, each as soon as it is there.

        Raises:
            ValueError: the keys are those of another kind of device.
        """
        if [self._session.key(point) for point in points] != list(keys):
            raise ValueError(
                f"the worker on {platform.node()} has another device, processor or package than the first, whose keys "
                "records get: start Ray on machines of one kind"
            )
        yield from evaluate(self._session, points)


class Pool:
    """Workers of one sweep.

    Args:
        points: all of the sweep's, `check`ed.
        count: of workers.
        address: of a Ray cluster; `None`: one is started here, and ends with the sweep.
        device: of what each worker has one to itself: "GPU", "TPU" (a chip) or any resource that Ray's nodes were
            started with; `None`: of nothing.

    Raises:
        ImportError: Ray is not installed.
        ValueError: the cluster has fewer devices than workers, or accelerators that all workers would open.
    """

    def __init__(self, points: Sequence[Point], count: int, address: str | None = None, device: str | None = None):
        try:
            import ray
        except ImportError as error:
            raise ImportError("a pool of workers needs Ray: pip install '.[pool]'") from error
        self.ray: Any = ray
        self.points = list(points)
        self.ray.init(address=address or "local", log_to_driver=False, include_dashboard=False)
        try:
            self._check_cluster(count, device)
            needs = {"num_gpus": 1} if device == "GPU" else {"resources": {device: 1}} if device else {}
            actor = self.ray.remote(num_cpus=1, **needs)(Worker)
            self._actor = partial(actor.remote, self.points, device in ACCELERATORS, [*own_files.loaded().values()])
            self.workers = [self._actor() for _ in range(count)]
        except BaseException:
            self.close()
            raise

    def _check_cluster(self, count: int, device: str | None) -> None:
        found = self.ray.cluster_resources()
        for each in ("CPU", device) if device else ("CPU",):
            if (have := int(found.get(each, 0))) < count:
                named = sorted(name for name in found if ":" not in name and name not in _MEMORY)
                raise ValueError(
                    f"workers={count} want a {each} each, and Ray finds {have}: lower workers, or let worker_device be "
                    f"another of {', '.join(named)}"
                )
        if not device and count > 1 and (many := [name for name in ACCELERATORS if found.get(name)]):
            raise ValueError(f"workers={count} would all open the same {many[0]}s: give worker_device={many[0]!r}")

    def identities(self) -> dict[Point, Identity]:
        """Returns the identity of every point's record."""
        identities = self._got(lambda: self.ray.get(self.workers[0].identities.remote(self.points)))
        return dict(zip(self.points, identities, strict=True))

    def fill(
        self,
        store: ResultStore,
        groups: Sequence[Sequence[Point]],
        keys: dict[Point, str],
        on_record: Callable[[Record], None] = lambda record: None,
        stale: Collection[str] = (),
    ) -> None:
        """Measure what the store does not hold yet, a group a worker at a time; arguments as `result_store.fill`'s.

        Raises:
            RuntimeError: a point ended its worker `ATTEMPTS` times.
        """
        outdated = set(stale)
        waiting, running = list(groups)[::-1], dict[Any, tuple[int, Sequence[Point]]]()
        idle, deaths = list(range(len(self.workers))), dict[Point, int]()
        while waiting or running:
            while waiting and idle:
                done = store.done_keys() - outdated | {keys[point] for _, group in running.values() for point in group}
                if missing := [point for point in waiting.pop() if keys[point] not in done]:
                    worker = idle.pop()
                    asked = self.workers[worker].measure.remote(missing, [keys[point] for point in missing])
                    running[asked] = worker, missing
            if not running:
                return
            told = self.ray.wait(list(running), num_returns=1)[0][0]
            try:
                record = self._got(partial(self._next, told))
                store.append(superseding(record, store.records) if record["key"] in outdated else record)
                outdated.discard(record["key"])
                on_record(record)
            except StopIteration:
                idle.append(running.pop(told)[0])
            except self.ray.exceptions.RayError as error:  # the worker is gone, its machine, or the record on its way
                worker, group = running.pop(told)
                waiting.append(group)
                done = store.done_keys() - outdated
                self._count_death(deaths, [point for point in group if keys[point] not in done], error)
                self.workers[worker] = self._actor()
                idle.insert(0, worker)  # asked last: it may have to wait for a device

    def _next(self, told: Iterator[Any]) -> Record:
        return self.ray.get(next(told))

    def _got(self, answer: Callable[[], Any]) -> Any:
        """A worker's answer; its errors are raised as if they had happened here."""
        try:
            return answer()
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error

    @staticmethod
    def _count_death(deaths: dict[Point, int], left: Sequence[Point], error: Exception) -> None:
        """Blame what the worker was at."""
        for point in left[:1]:
            deaths[point] = deaths.get(point, 0) + 1
            if deaths[point] >= ATTEMPTS:
                last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                raise RuntimeError(f"{point.label()} ended its worker {ATTEMPTS} times: {last}") from error

    def close(self) -> None:
        """End the workers."""
        self.ray.shutdown()
