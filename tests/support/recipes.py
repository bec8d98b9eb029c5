"""Loader of gin files that stops before weights are loaded, for tests of `gin/` and `configs/`."""

import gin
import pytest

from speccascade_jax.evaluation import experiment
from speccascade_jax.evaluation.studies.calibration import calibrating
from speccascade_jax.evaluation.studies.profiling import profiling
from speccascade_jax.evaluation.studies.survey import surveying
from speccascade_jax.hierarchy import optimizing
from speccascade_jax.metrics import sandbox
from speccascade_jax.runtime import gin_flags
from speccascade_jax.runtime.paths import repository_root
from speccascade_jax.selection import make_data as selection_data
from speccascade_jax.selection import report as comparison
from speccascade_jax.selection import serving
from speccascade_jax.training.heads import make_data

ROOT = repository_root()
CONFIGS = sorted(f"configs/{path.name}" for path in (ROOT / "configs").glob("*.gin"))
HOLES = {
    "gin/models/directory.gin": ["PAIR='some/pair'"],
    "gin/models/two_checkpoints.gin": ["PAIR='two'", "TARGET='some/target'", "DRAFT='some/draft'"],
    "gin/tasks/file.gin": ["FileTask.path='file.csv'"],
    "gin/tasks/seqio.gin": [
        "SeqioTask.name='seqio'",
        "SeqioTask.module='some.module'",
        "SeqioTask.max_input_length=512",
        "SeqioTask.max_output_length=64",
    ],
    **{f"gin/tasks/{name}.gin": ["Evaluation.execute_code=True"] for name in ("humaneval", "mbpp")},
}


class Resolved(BaseException):
    """An exception that is raised instead of loading weights."""


@pytest.fixture
def stop_before_loading(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # stores are opened before weights are loaded

    def stop(points):
        raise Resolved(points[0])

    def stop_others(pair, evaluation):
        raise Resolved((pair, evaluation))

    monkeypatch.setattr(experiment, "open_session", stop)

    def stop_source(pair):
        raise Resolved(pair)

    for module in (surveying, profiling, calibrating, make_data, optimizing):
        monkeypatch.setattr(module, "Session", stop_others)
    monkeypatch.setattr(comparison, "open_session", stop)
    for module in (selection_data, serving):
        monkeypatch.setattr(module, "load_source", stop_source)
    monkeypatch.setattr(sandbox, "available", lambda: None)  # files also resolve on systems without a sandbox
    gin.clear_config()
    yield
    gin.clear_config()


def resolve(function, files, bindings=()):
    holes = [binding for name in files for binding in HOLES.get(name, ())]
    gin_flags.parse_gin([str(ROOT / name) for name in files], [*holes, *bindings])
    with pytest.raises(Resolved) as stopped:
        gin.get_configurable(function)()
    return stopped.value.args[0]
