"""Checkpoints of a training run on one or several hosts, written in the background, and verified when read.

Orbax writes and reads the arrays. Every host writes the parts of its own devices into one folder, which all hosts must
see. Orbax writes under a temporary name, and renames the folder when all hosts have finished.

Orbax does not notice a flipped bit in an array. Each checkpoint therefore holds a file `record`: the digest of every
other file, the names and types of the arrays, and the position of the run in its data. The record is written before the
folder gets its final name, so a folder with a final name but without a record is damaged, too.

Orbax's `CheckpointManager` is not used: it calls JAX's preemption sync points with its own step numbers, after which
`hosts.stop_here`, which counts its calls, could not end a run on several hosts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from logging import INFO
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from speccascade_jax.runtime import hosts, interrupts
from speccascade_jax.storage import checksums
from speccascade_jax.storage.files import make_folder, write_atomically
from speccascade_jax.training import runs

FOLDER = "states"
"""Name of the folder in a run's folder that holds the checkpoints, one folder for each step."""
RECORD = "record"
IN_BUCKET = re.compile(r"(0|[1-9]\d*)-[0-9a-f]{8}")
"""Names of checkpoints' folders in a bucket: step and token of the run."""
_TEMPORARY = ".orbax-checkpoint-tmp"
"""Part of a folder's name while Orbax writes the folder, and while this module deletes it."""
_UNSEALED = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Files that Orbax changes after the record is written; no array depends on them."""
_AGAIN = "copy it from elsewhere, or remove it and train again"


class DamagedError(Exception):
    """Error for a checkpoint that cannot be used; the message says what is damaged. All processes raise it together."""


class States:
    """Checkpoints of one run, of which the last `keep` are kept.

    All processes of the run must call the same methods. A checkpoint is in `folder/states/<step>`. Only the processes
    that save change this folder, so other programs may read the last checkpoint with `latest` at any time. For a folder
    that may be in a bucket, use `bucket_states.open_states`.

    Args:
        folder: the run's folder, on a file system that all hosts share; keep: number of checkpoints to keep.
    """

    _other_form = IN_BUCKET, "in a bucket"
    """Names of checkpoints that this class can't read, and where they are written."""

    def __init__(self, folder: Path, keep: int = 2):
        self.run_dir, self.folder, self.keep = folder, (folder / FOLDER).absolute(), keep
        self._last: int | None = None  # step of the newest checkpoint, or of the one that is being written
        self._record: dict[str, Any] = {}  # record of the checkpoint that is being written
        self._writes = False
        self._damaged: list[int] = []

    def save(self, step: int, state: Any, position: dict[str, Any], wait: bool = False) -> None:
        """Begins to write the state after `step` steps; the next steps may be taken (and donate the state) meanwhile.

        A step that is saved already is not saved again.

        Args:
            step: number of steps taken.
            state: pytree of arrays.
            position: the run's position in its data, in plain JSON values; the first process's is stored.
            wait: whether to return only after the checkpoint is complete.

        Raises:
            OSError: this checkpoint (with `wait`) or the one before could not be written.
            ValueError: another run has written a checkpoint of this step.
            LockedError: the run is in a bucket, and another process continues it.
        """
        if step != self._last:
            self._settle()
            self._prepare(step)
            self._record = {"position": json.loads(json.dumps(position)), "arrays": _described(state)}
            self._last = step
            self._write(step, state)
        if wait:
            self._settle()

    def latest(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """Returns the newest undamaged state and its position, or `None` if the run has saved nothing.

        All processes return the state of the same step. The arrays have the saved values and types (weak types
        included), even on another mesh or with another number of hosts.

        Args:
            like: pytree of `jax.ShapeDtypeStruct` (or arrays) with the wanted shardings. Leaves without a sharding go
                to the default device, or to all devices if there are several processes.

        Raises:
            ValueError: every checkpoint is damaged, the newest undamaged one is of another model or optimiser, or the
                folder holds the state of an older version of the package, or was copied between disk and bucket.
        """
        self._settle()
        self._refuse_old_state()
        self._refuse_other_form()
        damages: dict[int, str] = {}
        for step in reversed(hosts.agreed(self._steps())):
            try:
                record = self._verified(step)
                self._check_fits(step, like, record)
                state = self._restored(step, jax.tree.map(_placed, like))
            except DamagedError as error:
                if not hosts.agreed(self._exists(step)):
                    return self.latest(like)  # the checkpoint is not damaged: the run has deleted it meanwhile
                damages[step] = str(error)
                continue
            self._warn(damages, step)
            self._last, self._damaged = step, list(damages)
            return _typed(state, record["arrays"]), record["position"]
        if damages:
            listed = "; ".join(f"{step}: {damage}" for step, damage in damages.items())
            raise ValueError(f"{self.folder} holds only damaged checkpoints ({listed}): {_AGAIN}")
        return None

    def close(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
            OSError: the checkpoint could not be written.
        """
        self._settle()

    @functools.cached_property
    def _checkpointer(self) -> Any:
        ocp = _orbax()
        # Orbax calls this function in the first process, after all processes have written and before it renames
        options = ocp.options.AsyncOptions(post_finalization_callback=self._write_record)
        return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=options)

    def _write(self, step: int, state: Any) -> None:
        """Begins to write the arrays and then the record; afterwards, steps may donate the arrays."""
        self._checkpointer.save(self.folder / str(step), args=_orbax().args.PyTreeSave(state))

    def _wait(self) -> None:
        """Waits until this process has written its part of the checkpoint."""
        self._checkpointer.wait_until_finished()

    def _write_record(self) -> None:
        """Writes the record of the checkpoint that is being written, with the digests of its files."""
        (folder,) = self.folder.glob(f"{self._last}{_TEMPORARY}*")
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in _UNSEALED]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            digests = threads.map(checksums.file_digest, files)
        names = [path.relative_to(folder).as_posix() for path in files]
        record = self._record | {checksums.BYTES: dict(zip(names, digests, strict=True))}
        content = json.dumps(record).encode()
        write_atomically(folder / RECORD, content, checksums.seal(content))

    def _settle(self) -> None:
        """Waits for the last write, then deletes the checkpoints that are not kept."""
        if not self._writes:
            return
        try:
            self._wait()
        except Exception as error:  # TensorStore and several layers of futures raise errors of many types
            step, self._last = self._last, None
            reason = str(error).partition("\n")[0]
            raise OSError(
                f"{self.folder / str(step)} could not be written ({reason}); the checkpoint before is unchanged: "
                "free some space, or write elsewhere"
            ) from error
        if hosts.first():
            self._delete_old()

    def _delete_old(self) -> None:
        """Deletes all checkpoints but the last ones."""
        for step in [step for step in self._steps() if (self.folder / str(step) / RECORD).is_file()][: -self.keep]:
            # renamed first, so that a kill does not leave a damaged checkpoint; the next run's `_prepare` deletes it
            shutil.rmtree((self.folder / str(step)).rename(self.folder / f"{step}{_TEMPORARY}"))

    def _prepare(self, step: int) -> None:
        """Cleans up before the first write; raises ValueError if there is a checkpoint of this step."""
        if hosts.first() and not self._writes:
            self._clean_up()
        self._writes = True
        if hosts.agreed(self._exists(step)):
            path = self.folder / str(step)
            raise ValueError(f"{path} is the checkpoint of another run: move it away, or name another run_dir")

    def _clean_up(self) -> None:
        """Deletes unfinished checkpoints, and moves damaged ones aside."""
        make_folder(self.folder)
        for entry in self.folder.iterdir():
            if re.fullmatch(rf"\d+{re.escape(_TEMPORARY)}.*", entry.name) and entry.is_dir():
                shutil.rmtree(entry)
        for damaged in self._damaged:
            _move_aside(self.folder / str(damaged))

    def _exists(self, step: int) -> bool:
        return (self.folder / str(step)).exists()

    def _steps(self) -> list[int]:
        """Returns the steps that have a folder, in ascending order."""
        return sorted(int(name) for name in self._names() if re.fullmatch(r"0|[1-9]\d*", name))

    def _names(self) -> list[str]:
        """Returns the names of all entries in the folder, which are checkpoints and possibly others."""
        return [entry.name for entry in self.folder.iterdir()] if self.folder.is_dir() else []

    def _refuse_other_form(self) -> None:
        """Raises ValueError if checkpoints were copied here from a bucket, or to a bucket from a disk."""
        pattern, where = self._other_form
        if name := next((name for name in hosts.agreed(self._names()) if pattern.fullmatch(name)), None):
            raise ValueError(
                f"{self.run_dir}: checkpoint {FOLDER}/{name} was written {where}, and can be resumed only there: copy "
                "the run back, or name another run_dir"
            )

    def _refuse_old_state(self) -> None:
        old = self.run_dir / runs.STATE_FILE
        if old.is_file():
            raise ValueError(
                f"{old} was written by an older version of the trainer, which this one cannot resume: "
                "name another run_dir to train again, or finish this run with that version"
            )

    def _verified(self, step: int) -> dict[str, Any]:
        """Returns the record of a checkpoint, the same in all processes; raises `DamagedError`.

        Each process compares its share of the files with their digests.
        """
        folder = self.folder / str(step)
        record: dict[str, Any] | None = hosts.agreed(_read_record(folder))
        if record is None:
            raise DamagedError(f"{RECORD} has changed or is missing")
        digests = [*record[checksums.BYTES].items()]
        share = range(*((jax.process_index(), len(digests), jax.process_count()) if hosts.many() else (len(digests),)))
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            intact = threads.map(lambda number: _is_intact(folder, *digests[number]), share)
        damaged = [number for number, fine in zip(share, intact, strict=True) if not fine]
        last = hosts.largest(max(damaged, default=-1))
        if last >= 0:
            raise DamagedError(f"{digests[last][0]} has changed or is missing")
        return record

    def _warn(self, damages: dict[int, str], step: int) -> None:
        for damaged, damage in damages.items():
            path = self.folder / str(damaged)
            warnings.warn(f"{path} is damaged ({damage}): training goes on from step {step}", stacklevel=3)

    def _check_fits(self, step: int, like: Any, record: dict[str, Any]) -> None:
        """Raises ValueError if the names, shapes or types of a checkpoint's arrays differ from those of `like`."""
        if difference := _difference(_described(like), record["arrays"]):
            raise ValueError(
                f"{self.folder / str(step)} does not fit this configuration ({difference}); resume with the "
                "configuration that wrote it, or name another run_dir"
            )

    def _restored(self, step: int, placed: Any) -> Any:
        """Returns the arrays of a checkpoint, with the shardings of `placed`; raises `DamagedError`."""
        ocp = _orbax()
        shardings = ocp.checkpoint_utils.construct_restore_args(placed)
        args = ocp.args.PyTreeRestore(item=placed, restore_args=shardings)
        return self._checkpointer.restore(self.folder / str(step), args=args)


@contextlib.contextmanager
def saved_on_stop(save: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Lets SIGTERM and Ctrl-C end a training loop between two batches only, after the state is saved.

    A second signal ends the process at once, without saving. With several processes, JAX handles SIGTERM, and all
    processes save and end after the same step; Ctrl-C then ends them without saving.

    Args:
        save: writes the state and waits until it is written.

    Yields:
        The function that every process calls after every step and every batch of an evaluation: it saves and raises
        `interrupts.Terminated` (SIGTERM) or `KeyboardInterrupt` if the run is to stop, and else does nothing.
    """
    asked: list[BaseException] = []

    def note(number: int, frame: Any) -> None:
        # the system's own handler needs no Python, so it also ends a process that is inside a long XLA program
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        asked.append(interrupts.Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        os.write(2, b"\nstopping after this batch, and the state is then saved; a second signal stops at once\n")

    def stop_if_asked() -> None:
        stop = asked[0] if asked else None
        try:
            hosts.stop_here()
        except interrupts.Terminated as terminated:
            stop = terminated
        if stop is not None:
            save()
            raise stop

    alone = not hosts.many() and threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT) if alone}
    try:
        yield stop_if_asked
        stop_if_asked()  # a signal after the last step must not get lost
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _orbax() -> Any:
    """Returns Orbax, without its dozens of log lines per checkpoint."""
    import orbax.checkpoint as ocp  # Imported here, because the import is slow.

    logger = logging.get_absl_logger()
    if _is_worth_reading not in logger.filters:
        logger.addFilter(_is_worth_reading)
    return ocp


def _is_worth_reading(entry: Any) -> bool:
    return entry.levelno > INFO or "/orbax/" not in entry.pathname


def _move_aside(path: Path) -> None:
    """Renames a damaged checkpoint, so that its step can be saved again."""
    names = (path.with_name(f"{path.name}.damaged{end}") for end in ("", *(f"-{number}" for number in range(2, 1000))))
    path.rename(next(name for name in names if not name.exists()))


def _read_record(folder: Path) -> dict[str, Any] | None:
    """Returns a checkpoint's record, or `None` if it cannot be read."""
    file = folder / RECORD
    try:
        record = json.loads(checksums.unsealed(file, file.read_bytes(), _AGAIN))
        if {"position", "arrays", checksums.BYTES} <= record.keys():
            return dict(record)
    except (OSError, ValueError, AttributeError):
        pass
    return None


def _is_intact(folder: Path, name: str, digest: str) -> bool:
    try:
        return checksums.file_digest(folder / name) == digest
    except OSError:
        return False


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their names, in the tree's order."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _described(tree: Any) -> dict[str, list[Any]]:
    """Returns shape, data type and weak type of every array, by name."""
    leaves = named_leaves(tree).items()
    types = {name: leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf) for name, leaf in leaves}
    return {name: [list(leaf.shape), str(leaf.dtype), leaf.weak_type] for name, leaf in types.items()}


def _difference(wanted: dict[str, list[Any]], saved: dict[str, list[Any]]) -> str:
    """Returns the first difference in names, shapes or data types as text, or ""."""
    for name in sorted(wanted.keys() | saved.keys()):
        if name not in saved or name not in wanted:
            return f"it {'lacks' if name not in saved else 'has the unexpected array'} {name}"
        if saved[name][:2] != wanted[name][:2]:
            (shape, dtype, _), (wanted_shape, wanted_dtype, _) = saved[name], wanted[name]
            return f"{name}: {dtype} of shape {tuple(shape)}, not {wanted_dtype} of shape {tuple(wanted_shape)}"
    return ""


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of an array or of a `ShapeDtypeStruct`, with a sharding."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None and hosts.many():
        everywhere = jax.sharding.Mesh(np.asarray(jax.devices()), ("devices",))
        sharding = jax.sharding.NamedSharding(everywhere, jax.sharding.PartitionSpec())
    elif sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _typed(state: Any, arrays: dict[str, list[Any]]) -> Any:
    """Returns restored arrays with their saved weak types.

    JAX promotes weak and strong types differently, so the next step would otherwise have other result types.
    """

    def typed(name: Any, leaf: jax.Array) -> jax.Array:
        if not arrays[_name(name)][2]:
            return leaf
        zero = False if leaf.dtype == bool else leaf.dtype.type(0).item()
        # Filling with a Python number gives a weakly typed array, which stays weakly typed when its elements are set.
        weak = jax.jit(lambda array: jax.lax.full(array.shape, zero).at[...].set(array), out_shardings=leaf.sharding)
        return weak(leaf)

    return jax.tree_util.tree_map_with_path(typed, state)
