"""Interpretation of kernels for TPUs on this machine, with a check for races."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from speccascade_jax.runtime import platforms

INTERPRETER = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
"""Fills memory that nothing has written with NaN, and records accesses to the same place in no order."""
EAGER = dataclasses.replace(INTERPRETER, dma_execution_mode="eager")
"""Copies arrays when a copy starts, not when it is awaited, so that a buffer that changes too late has no effect."""


@contextmanager
def interpreted(name: str = "tpu", parameters: pltpu.InterpretParams = INTERPRETER) -> Iterator[None]:
    """Interprets the kernels of programs that are traced inside the block, and fails if two accesses raced.

    Races are recorded for "tpu" only. JAX operations interpret the kernels for "gpu".
    """
    jax.clear_caches()
    pltpu.reset_tpu_interpret_mode_state()
    with platforms.interpreted(parameters if name == "tpu" else True, name):
        yield
    races = interpret_pallas_call.races
    assert races is None or not races.races_found, "two accesses to the same memory have no order"
    jax.clear_caches()
