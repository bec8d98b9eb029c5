"""What a run leaves on disk: its resumable state and its metrics, both safe against a kill at any moment."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.serialization
import flax.struct
import jax

from speccascade_jax.core.files import write_atomically
from speccascade_jax.core.types import Array, Params

STATE_FILE = "state.msgpack"
METRICS_FILE = "metrics.jsonl"


@flax.struct.dataclass
class TrainState:
    """What a step changes: parameters (of heads by name), optimiser state, int32 step count."""

    params: Params
    opt_state: Any
    step: Array


def save_state(run_dir: Path, state: Any, position: dict[str, Any]) -> None:
    """Write the training state and where the run is in its data (plain numbers) to `run_dir`."""
    payload = {"state": flax.serialization.to_state_dict(state), "position": position}
    write_atomically(run_dir / STATE_FILE, flax.serialization.msgpack_serialize(payload))


def load_state(run_dir: Path, like: Any) -> tuple[Any, dict[str, Any]] | None:
    """The saved state, in the structure of `like`, and the position; `None` if `run_dir` holds none.

    Raises:
        ValueError: the saved state belongs to another model or optimiser.
    """
    path = run_dir / STATE_FILE
    if not path.is_file():
        return None
    payload = flax.serialization.msgpack_restore(path.read_bytes())
    try:
        state = flax.serialization.from_state_dict(like, payload["state"])
        jax.tree_util.tree_map_with_path(_check_shape, like, state)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{path} does not fit this configuration ({error}); resume with the configuration that wrote it, "
            "or name another run_dir"
        ) from error
    return state, payload["position"]


def _check_shape(path: Any, wanted: Any, found: Any) -> None:
    if getattr(wanted, "shape", ()) != getattr(found, "shape", ()):
        raise ValueError(f"{jax.tree_util.keystr(path)}: shape {found.shape}, not {wanted.shape}")


class MetricsLog:
    """A JSON-lines file with one object per record, each with its `step`.

    A record is one `write` to a file opened for appending, so a kill loses or tears at most the last line;
    opening the log again drops a torn line and the records after the step that the run resumes from.
    """

    def __init__(self, path: Path, resume_step: int):
        self.path = path
        kept = [record for record in _records(path) if record.get("step", 0) <= resume_step]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))

    def append(self, record: dict[str, Any]) -> None:
        """Add one record at the end."""
        with open(self.path, "ab", buffering=0) as file:
            file.write((json.dumps(record) + "\n").encode())


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
