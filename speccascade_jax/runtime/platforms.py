"""Platform that programs are traced for, and whether Pallas kernels replace parts of them.

JAX chooses between implementations when it lowers a program, after both have been traced. This module chooses before
tracing, so that a program for a CPU is not traced through kernels that it does not contain.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

SWITCH = "SPECCASCADE_KERNELS"
"""Environment variable; with the value `0`, no Pallas kernels are used and XLA compiles all parts of a program."""
GPUS = ("cuda", "gpu")
"""Platforms whose kernels Triton compiles."""
VMEM = {"TPU v5 lite": 120, "TPU v5e": 120, "TPU v6 lite": 120, "TPU v6e": 120}
"""MiB of VMEM that one kernel may use, by the kind of device: most of 128 MiB."""
_PLATFORM: ContextVar[tuple[str, str] | None] = ContextVar("platform", default=None)
_INTERPRETER: ContextVar[tuple[str, Any] | None] = ContextVar("interpreter", default=None)


def platform() -> str:
    """Returns the platform that programs are traced for, such as "cpu" or "tpu"."""
    traced = _PLATFORM.get()
    return jax.default_backend() if traced is None else traced[0]


def vmem_bytes() -> int:
    """Returns how many bytes of VMEM one kernel may use; for kinds of devices that `VMEM` lacks, XLA's 16 MiB."""
    traced = _PLATFORM.get()
    kind = jax.devices()[0].device_kind if traced is None else traced[1]
    return 2**20 * (128 if interpreter() else VMEM.get(kind, 16))


@contextmanager
def traced_for(name: str, kind: str = "") -> Iterator[None]:
    """Sets the platform, and the kind of device, of programs that this process traces but does not run."""
    token = _PLATFORM.set((name, kind))
    try:
        yield
    finally:
        _PLATFORM.reset(token)


@contextmanager
def interpreted(parameters: Any, name: str = "tpu") -> Iterator[None]:
    """Runs the kernels for TPUs or GPUs on this machine, slowly, as tests do.

    JAX caches traced functions, so call `jax.clear_caches` before and after the block.

    Args:
        parameters: `pltpu.InterpretParams`, or `True` for Pallas' interpreter of any platform's kernels.
        name: the platform whose kernels run, "tpu" or "gpu".
    """
    token = _INTERPRETER.set((name, parameters))
    try:
        yield
    finally:
        _INTERPRETER.reset(token)


def interpreter() -> Any:
    """Returns the parameters of `interpreted`; `False` if kernels are compiled."""
    chosen = _INTERPRETER.get()
    return False if chosen is None else chosen[1]


def uses_kernels() -> bool:
    """Returns whether kernels for TPUs replace parts of the programs that are traced here."""
    return _interprets("tpu") or (platform() == "tpu" and _enabled())


def uses_gpu_kernels() -> bool:
    """Returns whether kernels for GPUs replace parts of the programs that are traced here."""
    return _interprets("gpu") or (platform() in GPUS and _enabled())


def _interprets(name: str) -> bool:
    chosen = _INTERPRETER.get()
    return chosen is not None and chosen[0] == name


def _enabled() -> bool:
    return os.environ.get(SWITCH, "1") != "0"
