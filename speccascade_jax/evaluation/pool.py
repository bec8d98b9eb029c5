"""Ray workers that measure the points (configurations) of a sweep in parallel, each worker on one device.

One driver process hands out the points, and only the driver writes to the result store. The driver loads no weights, so
a worker computes the keys of the records. If a worker dies, the unfinished points of its group return to the queue, and
a new worker measures them. If the driver dies, running the same command again continues from the store. Ray Core is an
optional dependency (`pip install '.[pool]'`); this module uses only Ray's actors.
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
"""Number of worker deaths at the same point after which the sweep ends with an error."""
_MEMORY = ("memory", "object_store_memory")
ACCELERATORS = ("GPU", "TPU")
"""Ray's resource names for the accelerators that every JAX process opens by default."""


def check(points: Sequence[Point], count: int, device: str | None) -> None:
    """Checks the worker settings of a sweep, before Ray starts.

    Raises:
        ValueError: each worker would need several devices; `device` is "CPU", which workers share; or the points are
            timed, but several workers have no device of their own.
    """
    if math.prod(points[0].pair.mesh) > 1:
        raise ValueError(
            f"mesh={points[0].pair.mesh} needs several devices, but each of the workers has one: leave workers out"
        )
    if device == "CPU":
        raise ValueError(
            "worker_device='CPU' is shared by the workers of a machine: name a resource that each machine has once "
            "(ray start --resources=…), or leave it out and time nothing (Evaluation.latency_examples=0)"
        )
    if count > 1 and not device and points[0].evaluation.latency_examples:
        raise ValueError(
            f"workers={count} share the cores of a machine and would disturb each other's timings: give worker_device, "
            "or time nothing (Evaluation.latency_examples=0)"
        )


class Worker:
    """Ray actor that measures points in its own `Session`.

    The session (loaded models and examples) opens on the actor's device at the first request.
    """

    def __init__(self, points: Sequence[Point], accelerated: bool, files: Sequence[str] = ()):
        self._points = points
        own_files.load_again(files)
        if accelerated:
            # the driver may have restricted JAX to the CPU, to leave the accelerators to its workers
            jax.config.update("jax_platforms", None)

    @cached_property
    def _session(self) -> Session:
        return open_session(self._points)

    def identities(self, points: Sequence[Point]) -> list[Identity]:
        """Returns the identity (keys and code provenance) that each point's record would have on this worker."""
        return [self._session.identity(point) for point in points]

    def pid(self) -> int:
        """Returns the id of the worker's process."""
        return os.getpid()

    def measure(self, points: Sequence[Point], keys: Sequence[str]) -> Iterator[Record]:
        """Yields one record per point, as soon as the point is measured.

        Raises:
            ValueError: this worker computes other keys for the points, for instance because its device differs.
        """
        if [self._session.key(point) for point in points] != list(keys):
            raise ValueError(
                f"the worker on {platform.node()} has another device, processor or package than the first worker, "
                "which computes the records' keys: start Ray on machines of one kind"
            )
        yield from evaluate(self._session, points)


class Pool:
    """Worker processes of one sweep.

    Args:
        points: all points of the sweep, which `check` has accepted.
        count: number of workers.
        address: address of a Ray cluster; `None` starts a local cluster, which ends with the sweep.
        device: Ray resource of which each worker reserves one unit: "GPU", "TPU" (one chip) or any resource that Ray's
            nodes were started with; `None`: the workers reserve no device.

    Raises:
        ImportError: Ray is not installed.
        ValueError: the cluster has fewer CPUs or devices than workers; or it has accelerators that all workers would
            open, because `device` is `None`.
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
        resources = self.ray.cluster_resources()
        for kind in ("CPU", device) if device else ("CPU",):
            if (have := int(resources.get(kind, 0))) < count:
                named = sorted(name for name in resources if ":" not in name and name not in _MEMORY)
                raise ValueError(
                    f"workers={count} need one {kind} each, but Ray has {have}: lower workers, or set worker_device to "
                    f"another of {', '.join(named)}"
                )
        if not device and count > 1 and (many := [name for name in ACCELERATORS if resources.get(name)]):
            raise ValueError(f"workers={count} would all open the same {many[0]}s: give worker_device={many[0]!r}")

    def identities(self) -> dict[Point, Identity]:
        """Returns the identity (keys and code provenance) of every point's record, as the first worker computes it."""
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
        """Measures the points that the store lacks; each worker measures one group of points at a time.

        `keys` maps each point to the key of its record. The other arguments are those of `result_store.fill`.

        Raises:
            RuntimeError: `ATTEMPTS` workers died while they measured the same point.
        """
        outdated = set(stale)
        waiting, running = list(groups)[::-1], dict[Any, tuple[int, Sequence[Point]]]()
        idle, deaths = list(range(len(self.workers))), dict[Point, int]()
        while waiting or running:
            while waiting and idle:
                done = store.done_keys() - outdated | {keys[point] for _, group in running.values() for point in group}
                if missing := [point for point in waiting.pop() if keys[point] not in done]:
                    worker = idle.pop()
                    request = self.workers[worker].measure.remote(missing, [keys[point] for point in missing])
                    running[request] = worker, missing
            if not running:
                return
            answered = self.ray.wait(list(running), num_returns=1)[0][0]
            try:
                record = self._got(partial(self._next, answered))
                store.append(superseding(record, store.records) if record["key"] in outdated else record)
                outdated.discard(record["key"])
                on_record(record)
            except StopIteration:
                idle.append(running.pop(answered)[0])
            except self.ray.exceptions.RayError as error:  # Ray lost the worker, its machine or the record
                worker, group = running.pop(answered)
                waiting.append(group)
                done = store.done_keys() - outdated
                self._count_death(deaths, [point for point in group if keys[point] not in done], error)
                self.workers[worker] = self._actor()
                # the new worker may have to wait until the dead worker's device is free, so it is used last
                idle.insert(0, worker)

    def _next(self, answers: Iterator[Any]) -> Record:
        return self.ray.get(next(answers))

    def _got(self, answer: Callable[[], Any]) -> Any:
        """Returns a worker's answer; if the worker raised an error, raises that error in this process."""
        try:
            return answer()
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error

    @staticmethod
    def _count_death(deaths: dict[Point, int], unfinished: Sequence[Point], error: Exception) -> None:
        """Counts a worker's death against the first point that the worker had not finished."""
        for point in unfinished[:1]:
            deaths[point] = deaths.get(point, 0) + 1
            if deaths[point] >= ATTEMPTS:
                last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                raise RuntimeError(f"the worker of {point.label()} died {ATTEMPTS} times: {last}") from error

    def close(self) -> None:
        """Shuts Ray down, which ends the workers."""
        self.ray.shutdown()
