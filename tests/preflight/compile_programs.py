"""Compiles programs with the compiler's dump, in a separate process: `compile_programs FOLDER TOPOLOGY NAME ...`.

For every name, the folder gets the compiled text (`hlo.txt`), the dump (`dump/`), and for a model's program the numbers
that its text does not contain (`assumptions.json`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from speccascade_jax import preflight
from speccascade_jax.models import families
from speccascade_jax.preflight import bundles, compiling, topologies
from tests.preflight.by_hand import MODELS, PROGRAMS

OURS = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
"""Variables of the tests' own process that would change what is compiled."""


def start(folder: Path, topology: str, names: Sequence[str]) -> None:
    """Compiles programs in a new process, whose compiler writes its dump into the folder."""
    dump = folder / "all"
    dump.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    environment |= {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": " ".join(bundles.DUMP_FLAGS).format(folder=dump)}
    command = [sys.executable, "-m", "tests.preflight.compile_programs", str(folder), topology, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def compile_by_hand(topology: str, name: str) -> tuple[jax.stages.Compiled, compiling.Assumptions | None]:
    program = PROGRAMS[name]
    layout = jax.sharding.SingleDeviceSharding(topologies.devices(topology)[0])
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=layout) for shape, dtype in program.shapes]
    return jax.jit(program.function, donate_argnums=program.donated).lower(*arguments).compile(), None


def compile_model(topology: str, name: str) -> tuple[jax.stages.Compiled, compiling.Assumptions]:
    model = dict(MODELS[name])
    families.PRESETS["gemma2_2b_4_layers"] = dataclasses.replace(families.PRESETS["gemma2_2b"], num_layers=4)
    traced = compiling.Traced.of(
        preflight.job_of(model.pop("target"), model.pop("draft", None), topology=topology, **model)
    )
    return compiling.compile_job(traced), compiling.assumptions(traced)


def main(folder: Path, topology: str, names: Sequence[str]) -> None:
    for name in names:
        compiled, assumed = (compile_model if name in MODELS else compile_by_hand)(topology, name)
        dump = folder / name / "dump"
        dump.mkdir(parents=True)
        for file in (folder / "all").iterdir():
            file.rename(dump / file.name)
        (folder / name / "hlo.txt").write_text(compiled.as_text() or "")
        numbers = {"loops": dict(assumed.loops), "branches": dict(assumed.branches)} if assumed else {}
        (folder / name / "assumptions.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
