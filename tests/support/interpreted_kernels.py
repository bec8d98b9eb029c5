"""Interpretation of kernels for TPUs on this machine, with a check for races."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from speccascade_jax.runtime import platforms

INTERPRETER = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
"""Fills unwritten memory with NaN, and records races: unordered accesses to the same memory."""
EAGER = dataclasses.replace(INTERPRETER, dma_execution_mode="eager")
"""Copies arrays when a copy is started, not when it is awaited, so that changes of the source after the start show."""


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
