"""A run's scalars for TensorBoard and Weights & Biases, where these are installed; `metrics.jsonl` is what counts.

Event files lie in the run's folder under `tensorboard` (`pip install '.[logging]'`). To W&B goes what is logged while a
run of its own is active in the process: nothing is sent anywhere unasked. A command begins one by `--import=my_run.py`,
a file that calls `wandb.init`.
"""

import importlib.util
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"


class Scalars:
    """Takes the numbers of records that have a `step`.

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
