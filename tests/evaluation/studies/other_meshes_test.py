"""Surveys and data that are killed on one device and continue on a mesh of two: the results of unbroken runs."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from tests.support import new_process, tiny_pair

PROGRAM = """
import json, pathlib, sys
import numpy as np
from speccascade_jax.evaluation.points import Evaluation, ModelPair, Settings
from speccascade_jax.evaluation.studies.survey import surveying
from speccascade_jax.selection import data, make_data as selection
from speccascade_jax.storage import archives
from speccascade_jax.runtime import compilation_cache
from speccascade_jax.training.heads import make_data as acceptance, shards
from tests.support.killing import killed_at

compilation_cache.switch_on()
folder, data.SHARD = pathlib.Path(sys.argv[1]), 2
few = {"quality_examples": 4, "quality_batch": 2, "max_new_tokens": 6}
one, two = (ModelPair(name=str(folder / "pair"), mesh=mesh) for mesh in ((1, 1), (2, 1)))
sampled = {"evaluation": Evaluation(task="tiny_translation", **few), "settings": Settings(temperature=1.0)}
COMMANDS = {
    "survey": (
        lambda pair, output: surveying.survey(
            pair=pair, rules=("chow",), check=(0.5,), alphas=5, output=f"{output}.json", **sampled
        ),
        (surveying, "write_atomically", 1),
    ),
    "acceptance": (
        lambda pair, output: acceptance.make(pair=pair, shard_size=2, output=str(output), **sampled),
        (shards, "write_shard", 2),
    ),
    "selection": (
        lambda pair, output: selection.make(
            pair=pair, domains=[sampled["evaluation"]], drafters=("draft", "autoregressive"), output=str(output)
        ),
        (archives, "write", 3),
    ),
}
for name in sys.argv[2:]:
    command, moment = COMMANDS[name]
    command(one, folder / f"{name}-whole")
    with killed_at(*moment):
        command(one, folder / f"{name}-resumed")
    command(two, folder / f"{name}-resumed")
print(json.dumps(None))
"""


def contents(path):
    """Returns the numbers of a result: a JSON file, or the arrays of a folder by file and name."""
    if path.with_name(f"{path.name}.json").exists():
        return json.loads(path.with_name(f"{path.name}.json").read_text())
    files = sorted(file.relative_to(path) for file in path.rglob("*.npz"))
    return {str(file): dict(np.load(path / file)) for file in files}


@pytest.mark.laws
def test_killed_studies_continue_on_another_mesh(tmp_path):
    names = ("survey", "acceptance", "selection")
    (tmp_path / "pair").mkdir()
    tiny_pair.write(tmp_path / "pair")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    new_process.answer(PROGRAM, tmp_path, *names, XLA_FLAGS=flags)
    for name in names:
        whole, resumed = (contents(tmp_path / f"{name}-{end}") for end in ("whole", "resumed"))
        assert whole
        _check_equal(whole, resumed, name)


def _check_equal(whole, resumed, place):
    """Compares texts and whole numbers exactly, and real numbers up to rounding, which differs between meshes."""
    if isinstance(whole, dict):
        assert whole.keys() == resumed.keys(), place
        for name, value in whole.items():
            _check_equal(value, resumed[name], f"{place} {name}")
    elif isinstance(whole, list):
        assert len(whole) == len(resumed), place
        for number, (one, other) in enumerate(zip(whole, resumed, strict=True)):
            _check_equal(one, other, f"{place} {number}")
    elif np.asarray(whole).dtype.kind == "f":
        np.testing.assert_allclose(whole, resumed, rtol=1e-4, atol=1e-5, err_msg=place)
    else:
        np.testing.assert_array_equal(whole, resumed, err_msg=place)
