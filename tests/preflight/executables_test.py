"""Tests of files of compiled programs, with programs of the CPU."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.preflight import executables
from speccascade_jax.storage.errors import CheckpointError


@pytest.fixture
def program():
    shape, never_before = jax.ShapeDtypeStruct((3, 4), jnp.float32), time.time_ns()
    # a program that comes from JAX's compilation cache has lost what a CPU needs to write it again
    return (
        jax.jit(lambda x, scale: {"sum": x.sum(0) * scale, "n": x.shape[0] + never_before % 2**30})
        .lower(shape, 2.0)
        .compile()
    )


def test_a_loaded_program_gives_the_results_of_the_saved_one(tmp_path, program):
    executables.save(tmp_path / "sum.program", program)
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    loaded = executables.load(tmp_path / "sum.program")
    np.testing.assert_array_equal(loaded(x, 2.0)["sum"], 2 * x.sum(0))


def test_a_program_of_another_compiler_is_refused(tmp_path, program, monkeypatch):
    executables.save(tmp_path / "sum.program", program)
    monkeypatch.setattr(executables, "versions", lambda: {"jax": "9.9"})
    with pytest.raises(ValueError, match=r"was compiled by jax .*, but this machine has jax 9\.9: compile it again"):
        executables.load(tmp_path / "sum.program")


def test_a_file_that_holds_something_else_is_neither_replaced_nor_loaded(tmp_path, program):
    (tmp_path / "thesis.txt").write_text("my thesis")
    with pytest.raises(ValueError, match="was not made by this command"):
        executables.save(tmp_path / "thesis.txt", program)
    with pytest.raises(CheckpointError, match="write it again"):
        executables.load(tmp_path / "thesis.txt")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        executables.load(tmp_path / "nothing")
