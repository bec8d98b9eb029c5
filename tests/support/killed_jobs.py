"""Jobs that write files, each run in a separate process that kills itself at a chosen operation on its folder.

The process kills itself with SIGKILL before its n-th `fsync`, `replace`, `rename`, `write`, `unlink` or `rmdir` in the
folder; a write is then half done. The remaining files are those that a kill at this moment leaves.
"""

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import converting, reading
from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Settings
from speccascade_jax.evaluation.studies.calibration import calibrating
from speccascade_jax.runtime import compilation_cache
from speccascade_jax.training import runs
from speccascade_jax.training.finetune.run import train
from speccascade_jax.training.heads import make_data
from speccascade_jax.training.heads.train import HeadTrainer
from tests.support import calibration_fakes
from tests.training import conftest as micro

WATCHED = ("fsync", "replace", "rename", "write", "unlink", "rmdir")
SMALL = Evaluation(
    task="tiny_translation", max_new_tokens=6, quality_examples=4, quality_batch=2, latency_examples=0, resamples=10
)


def run(job: str, shared: Path, folder: Path, dies_at: int) -> None:
    """Does a job in `folder`, and dies at operation number `dies_at` (0: never).

    A job that lives to the end writes its number of operations to `<folder>.count`.
    """
    compilation_cache.switch_on()
    seen = _watch(folder, dies_at)
    JOBS[job](shared, folder)
    folder.with_suffix(".count").write_text(str(seen[0]))


def _watch(folder: Path, dies_at: int) -> list[int]:
    seen = [0]

    def inside(first: Any, dir_fd: int | None) -> bool:
        handle = first if isinstance(first, int) else dir_fd
        path = os.readlink(f"/proc/self/fd/{handle}") if handle is not None else os.fsdecode(first)
        return path.startswith(str(folder))

    def watched(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if inside(args[0], more.get("dir_fd")):
                seen[0] += 1
                if seen[0] == dies_at:
                    if name == "write":
                        plain(args[0], args[1][: len(args[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **more)

        return call

    for name in WATCHED:
        setattr(os, name, watched(name, getattr(os, name)))
    return seen


def _sweep(shared: Path, folder: Path) -> None:
    experiment.sweep(
        pair=ModelPair(name=str(shared / "pair")),
        evaluation=SMALL,
        methods=("spec_decode", "chow"),
        alphas={"chow": (0.2,)},
        block_sizes=(2,),
        output=str(folder / "s.jsonl"),
    )


def _calibrate(_: Path, folder: Path) -> None:
    def law(settings):
        if settings.method == "autoregressive_draft":
            return 0.8, 0.1, 1.0
        return 1.0, 0.9 - (settings.alpha or 0) / 2, 0.5

    calibrating.Session = lambda *_: calibration_fakes.FakeSession(law, noise=0.5)
    experiment.evaluate = calibration_fakes.FakeSession.evaluate
    calibrating.calibrate(
        pair=calibration_fakes.SOURCE,
        evaluation=calibration_fakes.TASK,
        settings=Settings(),
        methods=("spec_decode", "opt"),
        alphas={"opt": (0.0, 0.1, 0.2)},
        block_sizes=(3,),
        max_loss=0.05,
        search_examples=120,
        test_examples=60,
        held_out_examples=100,
        output=str(folder / "found.jsonl"),
    )


def _data(shared: Path, folder: Path) -> None:
    evaluation = dataclasses.replace(SMALL, quality_examples=8)
    source = ModelPair(name=str(shared / "pair"))
    sampling = Settings(temperature=1.0)
    make_data.make(pair=source, evaluation=evaluation, settings=sampling, shard_size=2, output=str(folder / "data"))


def _heads(shared: Path, folder: Path) -> None:
    HeadTrainer(
        run_dir=str(folder / "run"),
        pair=ModelPair(name=str(shared / "pair")),
        data=(str(shared / "data"),),
        depths=(0,),
        w_rejs=(1.0,),
        laws=(True,),
        held_out=0.3,
        batch_positions=128,
        epochs=3,
        warmup_steps=1,
        log_every=2,
        save_every_seconds=0.0,
    ).run()


def _t5(shared: Path, folder: Path) -> None:
    often = {"log_every": 5, "evaluate_every": 6, "examples": 1, "save_every_minutes": 0.0}
    train(micro.micro_trainer(shared / "corpus", folder / "run", dropout=0.1, **often))


def _convert(shared: Path, folder: Path) -> None:
    converting.convert(reading.find(shared / "new"), folder / "out", "float32", overwrite=True)


JOBS = {
    "sweep": _sweep, "calibration": _calibrate, "data": _data, "heads": _heads, "t5": _t5, "conversion": _convert,
}  # fmt: skip
UNEQUAL = {
    "checksum", "package", "minutes", "tokens_per_second", "started", "wall_seconds", "versions", "device", "seconds",
    "environment",
}  # fmt: skip
"""Entries that differ between two runs of a job, because they depend on the time or the moment of the kill."""
LEFT = {".damaged", ".html", ".tmp", ".png"}
"""Endings of files that are not compared: torn or unfinished files of a kill, and pictures and pages, which show times.

TensorBoard's event files (`runs.FOLDER`) are not compared either, because a resumed job begins a new one.
"""


ORBAX = ("out/", "run/model/", "run/states/")
"""Folders that Orbax writes, in which equal arrays have different bytes."""


def outcome(folder: Path) -> dict[str, Any]:
    """Returns a job's files without time-dependent entries: records and settings as JSON, states, models."""
    contents: dict[str, Any] = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if file.is_dir() or name.startswith(ORBAX) or file.suffix in LEFT or runs.FOLDER in file.parts:
            continue
        if file.name == "state.msgpack":
            contents[name] = True  # not compared, because the heads and the metrics show its content
        elif file.suffix == ".jsonl":
            contents[name] = [_plain(json.loads(line)) for line in file.read_text().splitlines()]
        else:
            contents[name] = file.read_bytes()
    for name in ("out", "run/model"):
        if (folder / name).is_dir():
            contents[name] = model(folder / name)
    return contents


def _plain(record: Any) -> Any:
    if isinstance(record, dict):
        return {name: _plain(value) for name, value in record.items() if name not in UNEQUAL}
    return record


def model(path: Path) -> list[Any]:
    """Returns a checkpoint's parameters."""
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(checkpoints.load(path)[1])]


def prepare(folder: Path, shared: Path) -> Path:
    """Makes an empty folder for a job; for a conversion, one with the files that it replaces."""
    folder.mkdir()
    if folder.name.startswith("conversion"):
        shutil.copytree(shared / "old", folder / "out")
    return folder
