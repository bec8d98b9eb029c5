"""Platform that programs are traced for, and whether Pallas kernels replace parts of them.

JAX chooses between implementations when it lowers a program, after both have been traced. This module chooses before,
so that a program for a CPU is not traced through kernels that it does not contain.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

SWITCH = "SPECCASCADE_KERNELS"
"""Environment variable that lets XLA compile all parts of a program if its value is `0`."""
_PLATFORM: ContextVar[str | None] = ContextVar("platform", default=None)
_INTERPRETER: ContextVar[Any] = ContextVar("interpreter", default=None)


def platform() -> str:
    """Returns the platform that programs are traced for, such as "cpu" or "tpu"."""
    return _PLATFORM.get() or jax.default_backend()


@contextmanager
def traced_for(name: str) -> Iterator[None]:
    """Sets the platform of programs that are traced inside the block, if this process does not run them itself."""
    token = _PLATFORM.set(name)
    try:
        yield
    finally:
        _PLATFORM.reset(token)


@contextmanager
def interpreted(parameters: Any) -> Iterator[None]:
    """Runs the kernels for TPUs on this machine, slowly, as tests do.

    JAX keeps traced functions, so call `jax.clear_caches` before and after the block.

    Args:
        parameters: `pltpu.InterpretParams`.
    """
    token = _INTERPRETER.set(parameters)
    try:
        yield
    finally:
        _INTERPRETER.reset(token)


def interpreter() -> Any:
    """Returns the parameters of `interpreted`; `False` if kernels are compiled."""
    return _INTERPRETER.get() or False


def uses_kernels() -> bool:
    """Returns whether kernels for TPUs replace parts of the programs that are traced here."""
    return bool(interpreter()) or (platform() == "tpu" and os.environ.get(SWITCH, "1") != "0")
