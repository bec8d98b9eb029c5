"""What a run leaves on disk: its resumable state and its metrics, both safe against a kill at any moment."""

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
from speccascade_jax.results.report.printing import clock_time
from speccascade_jax.storage import archives, checksums, locks
from speccascade_jax.storage.files import expanded, naming, write_atomically

STATE_FILE = "state.msgpack"
T = TypeVar("T")
METRICS_FILE = "metrics.jsonl"
FOLDER = "tensorboard"
"""Where a run's event files lie."""


@flax.struct.dataclass
class TrainState:
    """What a step changes: parameters (of heads by name), optimiser state, int32 step count."""

    params: Params
    opt_state: Any
    step: Array

    @classmethod
    def fresh(cls, params: Params, optimizer: optax.GradientTransformation) -> Self:
        """Returns step 0 of training that starts from `params`."""
        return cls(params, optimizer.init(params), jnp.int32(0))

    def updated(self, optimizer: optax.GradientTransformation, grads: Params) -> Self:
        """Returns the state after one step of `optimizer` along `grads`."""
        updates, opt_state = optimizer.update(grads, self.opt_state, self.params)
        return type(self)(optax.apply_updates(self.params, updates), opt_state, self.step + 1)


Stepped = tuple[TrainState, dict[str, Array]]
"""What a training step returns: the state after it, and the losses by name."""


class Run:
    """A trainer at work in its folder: the state, the log, and a loop over steps that may be killed at any moment.

    Subclasses say what is trained on what: which batches `remaining` yields, what `take` does with one, and what
    `saved_position` keeps beside the state.

    Args:
        trainer: with a `run_dir`; fresh: the state to begin with where that folder holds none.

    Attributes:
        state: the current one; resumed_from: the position that was saved beside the one that the run goes on from.
    """

    state: TrainState
    resumed_from: dict[str, Any]

    def __init__(self, trainer: Any, fresh: TrainState):
        self.trainer, self.directory = trainer, expanded(trainer.run_dir)
        saved = load_state(self.directory, fresh)
        self.state, self.resumed_from = saved or (fresh, {})
        if saved is not None:
            self.state = jax.tree.map(jnp.asarray, self.state)
            logging.info("resuming %s at step %d", self.directory, int(self.state.step))
        logged = self.resumed_from.get("logged")
        self.log = MetricsLog(self.directory / METRICS_FILE, int(self.state.step), logged)

    def remaining(self) -> Iterator[Any]:
        """Yields a batch for every step that is still to come."""
        raise NotImplementedError

    def take(self, step: int, batch: Any) -> None:
        """Takes the step that makes it `step` steps, and logs what there is to say after it."""

    def saved_position(self) -> dict[str, Any]:
        """Returns what is saved beside the state, in plain numbers."""
        return {"logged": self.log.logged}

    def train(self, save_every: float) -> None:
        """Takes all steps that are still to come; saves the state every so many seconds, and at the end."""
        saved_at = time.monotonic()
        for step, batch in enumerate(self.remaining(), int(self.state.step) + 1):
            self.take(step, batch)
            if time.monotonic() - saved_at > save_every:
                self.save()  # when all is logged: a run that goes on from here logs nothing of this step
                saved_at = time.monotonic()
        self.save()

    def save(self) -> None:
        """Writes the resumable state."""
        save_state(self.directory, self.state, self.saved_position())


def time_left(began: float, done: int, total: int) -> str:
    """Returns how long the rest takes, as a clock shows it, at the pace of the `done` parts since `began`."""
    return clock_time((time.monotonic() - began) / done * (total - done))


def save_state(run_dir: Path, state: Any, position: dict[str, Any]) -> None:
    """Write the training state and where the run is in its data (plain numbers) to `run_dir`."""
    payload = {"state": flax.serialization.to_state_dict(state), "position": position}
    content = flax.serialization.msgpack_serialize(payload)
    write_atomically(run_dir / STATE_FILE, content, checksums.seal(content))


def load_state(run_dir: Path, like: Any) -> tuple[Any, dict[str, Any]] | None:
    """The saved state, in the structure of `like`, and the position; `None` if `run_dir` holds none.

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
    except Exception as error:  # msgpack has an error of its own for every kind of damage
        raise ValueError(f"{path} is damaged, or no state of a run ({error!r}): {again}") from error
    try:
        state = flax.serialization.from_state_dict(like, saved)
        jax.tree_util.tree_map_with_path(_check_shape, like, state)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} does not fit this configuration ({error}); resume with the configuration that wrote it, "
            "or name another run_dir"
        ) from error
    return state, position


def _check_shape(path: Any, wanted: Any, found: Any) -> None:
    if getattr(wanted, "shape", ()) != getattr(found, "shape", ()):
        raise ValueError(f"{jax.tree_util.keystr(path)}: shape {getattr(found, 'shape', None)}, not {wanted.shape}")


def read_shard(
    path: Path, kind: Callable[..., T], damaged: str, remedy: str, key: str | None = None, foreign: str = ""
) -> T:
    """Returns a file's arrays as a `kind`, which raises for arrays that do not fit together.

    Args:
        damaged, foreign: what the error says of a file that cannot be read, and of one with another key than `key`.

    Raises:
        ValueError: names the file.
    """
    try:
        written, arrays = archives.read(path)
        found = kind(**arrays)
    except Exception as error:  # zlib and zipfile raise whatever the flipped bit makes them meet
        raise ValueError(f"{path} is {damaged} ({error!r}): {remedy}") from error
    if key not in (None, written):
        raise ValueError(f"{path} {foreign}")
    return found


def alone(run_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Keeps other trainers out of a run's folder while the block runs (`LockedError`: one is in it)."""
    return locks.held(run_dir / "lock", run_dir, "wait for it, end it, or name another run_dir")


class MetricsLog:
    """A JSON-lines file with one object per record, each with its `step`; its numbers go to `scalars` too.

    A record is one durable `write` to a file opened for appending, so a kill tears at most the last line; opening the
    log again drops a torn line and what was logged after the state was saved that the run resumes from.

    Args:
        resume_step: that state's; logged: how many records there were then (`logged`), if it says so.
    """

    def __init__(self, path: Path, resume_step: int, logged: int | None = None):
        self.path = path
        kept = [record for record in _records(path) if record["step"] <= resume_step][:logged]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
        self.logged = len(kept)
        self._scalars = Scalars(path.parent, resume_step)

    def append(self, record: dict[str, Any]) -> None:
        """Add one record at the end, durably; an `OSError` (a full disk) leaves the log as it was."""
        line = (json.dumps(record) + "\n").encode()
        with naming(self.path), open(self.path, "ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise
        self.logged += 1
        self._scalars.add(record)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


class Scalars:
    """A run's scalars for TensorBoard and Weights & Biases, where these are installed; `metrics.jsonl` is what counts.

    Event files lie in the run's folder under `tensorboard` (`pip install '.[logging]'`). To W&B goes what is logged
    while a run of its own is active in the process: nothing is sent anywhere unasked. A command begins one by
    `--import=my_run.py`, a file that calls `wandb.init`.

    Args:
        run_dir: the run's folder.
        resume_step: TensorBoard forgets what it was shown beyond this step: it is logged again.
    """

    def __init__(self, run_dir: Path, resume_step: int):
        self._writer: Any = None
        self._folder, self._purged = str(run_dir / FOLDER), resume_step + 1 if resume_step else None

    def add(self, record: Mapping[str, Any]) -> None:
        """Show a record's finite numbers; those of dictionaries inside are named `outer/inner`."""
        numbers = _numbers(record)
        step = numbers.pop("step")
        # an event file is there from its writer's making on: a run that has ended and is started again writes none
        if self._writer is None and importlib.util.find_spec("tensorboardX"):
            import tensorboardX

            self._writer = tensorboardX.SummaryWriter(self._folder, purge_step=self._purged, flush_secs=1)
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, int(step))
        # whoever began a run in this process has imported it
        active: Any = sys.modules.get("wandb")
        if getattr(active, "run", None) is not None:  # a folder called wandb may pass for the module
            active.log(numbers, step=int(step))


def _numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[prefix + name] = float(value)
    return found
