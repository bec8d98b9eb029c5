"""Files of a training run: its resumable state and its metrics, both safe if the process is killed at any moment."""

import contextlib
import errno
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import optax
from absl import logging

from speccascade_jax.core.types import Array, Params
from speccascade_jax.runtime import hosts
from speccascade_jax.runtime.progress import clock_time, counted
from speccascade_jax.storage import archives, checksums, leases, locks
from speccascade_jax.storage.buckets import BucketPath
from speccascade_jax.storage.files import expanded, naming, write_atomically

STATE_FILE = "state.msgpack"
T = TypeVar("T")
METRICS_FILE = "metrics.jsonl"
EVERY = 5.0
"""Seconds between writes of a run's metrics to a bucket, because its server throttles frequent writes of one object."""
FOLDER = "tensorboard"
"""Name of the folder in a run's folder for TensorBoard's event files."""


@flax.struct.dataclass
class TrainState:
    """State that a training step changes: parameters, optimiser state, and int32 step count.

    For acceptance and exit heads, the parameters are a dictionary from the name of a head to its parameters.
    """

    params: Params
    opt_state: Any
    step: Array

    @classmethod
    def fresh(cls, params: Params, optimizer: optax.GradientTransformation) -> Self:
        """Returns the state at step 0 of training that starts from `params`."""
        return cls(params, optimizer.init(params), jnp.int32(0))

    def updated(self, optimizer: optax.GradientTransformation, grads: Params) -> Self:
        """Returns the state after one step of `optimizer` along `grads`."""
        updates, opt_state = optimizer.update(grads, self.opt_state, self.params)
        return type(self)(optax.apply_updates(self.params, updates), opt_state, self.step + 1)


Stepped = tuple[TrainState, dict[str, Array]]
"""Result of a training step: the new state, and the losses by name."""


class Run:
    """Run of a trainer in its folder: the state, the log, and a loop over steps that may be killed at any moment.

    Args:
        trainer: settings with a `run_dir`; fresh: initial state, used if that folder holds no state.

    Attributes:
        total: number of all steps; 0: unknown.
        state: the current state; resumed_from: the position that was saved with the state, if the run was resumed.
    """

    total = 0
    state: TrainState
    resumed_from: dict[str, Any]

    def __init__(self, trainer: Any, fresh: TrainState):
        self.trainer, self.directory = trainer, expanded(trainer.run_dir)
        place = self.directory / STATE_FILE
        self._object = leases.SoleObject(place) if isinstance(place, BucketPath) else None
        saved = load_state(self.directory, fresh)
        self.state, self.resumed_from = saved or (fresh, {})
        if saved is not None:
            self.state = jax.tree.map(jnp.asarray, self.state)
            logging.info("resuming %s at step %d", self.directory, int(self.state.step))
        logged = self.resumed_from.get("logged")
        self.log = MetricsLog(self.directory / METRICS_FILE, int(self.state.step), logged)
        if self._object is not None:
            self._object.begin()

    def remaining(self) -> Iterator[Any]:
        """Yields a batch for every remaining step."""
        raise NotImplementedError

    def take(self, step: int, batch: Any) -> None:
        """Takes step number `step` (from 1), and logs its results."""

    def saved_position(self) -> dict[str, Any]:
        """Returns the position to save with the state, in plain numbers."""
        return {"logged": self.log.logged}

    def train(self, save_every: float) -> None:
        """Takes all remaining steps; saves the state every `save_every` seconds, and at the end."""
        saved_at = time.monotonic()
        steps = counted(self.remaining(), "training", "steps", max(0, self.total - int(self.state.step)))
        for step, batch in enumerate(steps, int(self.state.step) + 1):
            self.take(step, batch)
            if time.monotonic() - saved_at > save_every:
                # save only after the step is logged, so that a resumed run does not log it again
                self.save()
                saved_at = time.monotonic()
        self.save()

    def save(self) -> None:
        """Writes the resumable state."""
        self.log.flush()
        save_state(self.directory, self.state, self.saved_position(), self._object)


def time_left(began: float, done: int, total: int) -> str:
    """Returns the estimated remaining time as clock text, from the time that the first `done` of `total` parts took."""
    return clock_time((time.monotonic() - began) / done * (total - done))


def save_state(run_dir: Path, state: Any, position: dict[str, Any], place: leases.SoleObject | None = None) -> None:
    """Writes the training state and the run's position in its data (plain numbers) to `run_dir`.

    Raises:
        LockedError: the state is the object `place` in a bucket, and another process has written it.
    """
    payload = {"state": flax.serialization.to_state_dict(state), "position": position}
    content = flax.serialization.msgpack_serialize(payload)
    if place is None:
        write_atomically(run_dir / STATE_FILE, content, checksums.seal(content))
    else:
        place.write(content + checksums.seal(content))


def load_state(run_dir: Path, like: Any) -> tuple[Any, dict[str, Any]] | None:
    """Returns the saved state, in the structure of `like`, and the position; `None` if `run_dir` holds no state.

    Raises:
        ValueError: the saved state is damaged, or belongs to another model or optimiser.
    """
    path = run_dir / STATE_FILE
    if not path.is_file():
        return None
    again = "copy it from elsewhere, or remove it and train again"
    content = checksums.unsealed(path, path.read_bytes(), again)
    try:
        payload = flax.serialization.msgpack_restore(content)
        saved, position = payload["state"], dict(payload["position"])
    except Exception as error:  # msgpack raises a different error for every kind of damage
        raise ValueError(f"{path} is damaged, or is not the state of a run ({error!r}): {again}") from error
    try:
        state = flax.serialization.from_state_dict(like, saved)
        jax.tree_util.tree_map_with_path(_check_shape, like, state)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} does not fit this configuration ({error}); resume with the configuration that wrote it, "
            "or name another run_dir"
        ) from error
    return state, position


def _check_shape(path: Any, wanted: Any, actual: Any) -> None:
    if getattr(wanted, "shape", ()) != getattr(actual, "shape", ()):
        raise ValueError(f"{jax.tree_util.keystr(path)}: shape {getattr(actual, 'shape', None)}, not {wanted.shape}")


def read_shard(
    path: Path, kind: Callable[..., T], damaged: str, remedy: str, key: str | None = None, foreign: str = ""
) -> T:
    """Reads the arrays of a file and passes them to `kind`, which raises if the arrays do not fit together.

    Args:
        path: the file.
        kind: makes the result from the file's arrays.
        damaged: description in the error message for an unreadable file.
        remedy: end of the error message for an unreadable file.
        key: the key that the file must have; `None`: any.
        foreign: description in the error message for a file whose key is not `key`.

    Raises:
        ValueError: the file is unreadable, or its key is not `key`; the message names the file.
    """
    try:
        written, arrays = archives.read(path)
        shard = kind(**arrays)
    except Exception as error:  # zlib and zipfile raise many error types on damaged bytes
        raise ValueError(f"{path} is {damaged} ({error!r}): {remedy}") from error
    if key not in (None, written):
        raise ValueError(f"{path} {foreign}")
    return shard


@contextlib.contextmanager
def alone(run_dir: Path) -> Iterator[None]:
    """Locks a run's folder against other trainers while the block runs; of several processes, the first locks it.

    Raises:
        LockedError: another trainer uses the folder; all processes raise it.
        ValueError: the processes do not share the folder.
    """
    with contextlib.ExitStack() as stack:
        refusal: Exception | None = None
        if hosts.first():
            try:
                remedy = "wait for it, end it, or name another run_dir"
                stack.enter_context(locks.held(run_dir / "lock", run_dir, remedy))
            except (locks.LockedError, OSError, ValueError) as error:
                refusal = error
        message = hosts.agreed(refusal and str(refusal))
        if message is not None:
            raise refusal or locks.LockedError(message)
        hosts.check_shared(run_dir)
        yield


class MetricsLog:
    """JSON-lines file with one record per line, each with its `step`; numbers in the records also go to `Scalars`.

    A record is one durable `write` to a file opened for appending, so a kill damages at most the last line. Opening the
    log again drops a damaged last line, and all records that were logged after the resumed state was saved. Of several
    processes, only the first writes, and only its `logged` counts the file's records.

    In a bucket, where nothing can be appended, the whole object is written again, at most every `EVERY` seconds and by
    `flush`. The write fails if another process has written the object meanwhile. So if a process is suspended and
    another one continues its run, the first ends with an error when it wakes up.

    Args:
        resume_step: step of the resumed state; logged: number of records at that time, if known.

    Raises:
        ValueError: the file holds lines, but none of them is a record.
    """

    def __init__(self, path: Path, resume_step: int, logged: int | None = None):
        self.path, self.logged = path, logged or 0
        if not hosts.first():
            return
        if isinstance(path, BucketPath):
            self._object = leases.SoleObject(path)
        records = [*_records(path)]
        if not records and path.is_file() and b"\n" in path.read_bytes():
            raise ValueError(f"{path} is no trainer's log, so it is not replaced: name another run_dir, or move it")
        kept = [record for record in records if record["step"] <= resume_step][:logged]
        self._content = "".join(json.dumps(record) + "\n" for record in kept).encode()
        self._written_at = 0.0
        if isinstance(path, BucketPath):
            self.flush()
        else:
            write_atomically(path, self._content)
        self.logged = len(kept)
        self._scalars = Scalars(path.parent, resume_step)

    def append(self, record: dict[str, Any]) -> None:
        """Appends one record, on a disk durably; an `OSError` (a full disk) leaves the log unchanged."""
        if not hosts.first():
            return
        line = (json.dumps(record) + "\n").encode()
        if isinstance(self.path, BucketPath):
            self._content += line
            if time.monotonic() - self._written_at >= EVERY:
                self.flush()
        else:
            self._append(line)
        self.logged += 1
        self._scalars.add(record)

    def flush(self) -> None:
        """Writes the log to its bucket, with all records; does nothing on a disk, where each record is written at once.

        Raises:
            LockedError: another process has written the log.
        """
        if not hosts.first() or not isinstance(self.path, BucketPath):
            return
        self._object.write(self._content)
        self._written_at = time.monotonic()

    def _append(self, line: bytes) -> None:
        with naming(self.path), open(self.path, "ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


class Scalars:
    """Writer of metrics for TensorBoard and Weights & Biases, if they are installed; `metrics.jsonl` is authoritative.

    Event files are written to the run's folder under `tensorboard` (`pip install '.[logging]'`). W&B gets the numbers
    only while a W&B run is active in the process, so nothing is sent without the user's request. A command starts a W&B
    run with `--import=my_run.py`, a file that calls `wandb.init`. A run in a bucket has no event files.

    Args:
        run_dir: the run's folder.
        resume_step: step of the resumed state; TensorBoard discards earlier points beyond this step, because they are
            logged again.
    """

    def __init__(self, run_dir: Path, resume_step: int):
        self._writer: Any = None
        self._folder, self._purged = str(run_dir / FOLDER), resume_step + 1 if resume_step else None
        self._has_events = not isinstance(run_dir, BucketPath) and bool(importlib.util.find_spec("tensorboardX"))

    def add(self, record: Mapping[str, Any]) -> None:
        """Sends a record's finite numbers; entries of nested dictionaries are named `outer/inner`."""
        numbers = _numbers(record)
        step = numbers.pop("step")
        # create the writer at the first record only: a writer creates its file at once, and a finished run that is
        # started again must not leave an empty file
        if self._writer is None and self._has_events:
            import tensorboardX

            self._writer = tensorboardX.SummaryWriter(self._folder, purge_step=self._purged, flush_secs=1)
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, int(step))
        # looked up without an import: a process with an active W&B run has imported wandb already
        active: Any = sys.modules.get("wandb")
        # a folder named wandb can be imported too, but has no `run`
        if getattr(active, "run", None) is not None:
            active.log(numbers, step=int(step))


def _numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            numbers |= _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            numbers[prefix + name] = float(value)
    return numbers
