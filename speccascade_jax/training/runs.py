"""What a run leaves on disk: its resumable state and its metrics, both safe against a kill at any moment."""

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import optax

from speccascade_jax.core.types import Array, Params
from speccascade_jax.results.report.printing import clock_time
from speccascade_jax.storage import archives, checksums, locks
from speccascade_jax.storage.files import naming, write_atomically
from speccascade_jax.training.scalars import Scalars

STATE_FILE = "state.msgpack"
T = TypeVar("T")
METRICS_FILE = "metrics.jsonl"


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
