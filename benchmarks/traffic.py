"""Counts of the bytes that a call must read; bytes over memory bandwidth give the floor of the call's time.

The bytes are counted in the traced program (the jaxpr), so this works for every model. Arrays that the call never reads
(the encoder while decoding, cross-attention kernels whose products are cached) do not count. Of a lookup table, such as
an embedding, only the rows that are looked up count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

_LOOKS_UP = {"gather", "dynamic_slice", "slice"}
_CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint"}


def bytes_read(function: Callable[..., Any], *args: Any) -> int:
    """Returns the bytes of `args` (pytrees of arrays) that `function` has to read, each array at most once.

    A cache that attention reads counts in full, because all slots are read, including masked ones.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return sum(_read(jaxpr, variable) for variable in jaxpr.invars)


def _read(jaxpr: Any, variable: Any) -> int:
    """Returns the bytes of one argument that a program's equations read."""
    uses = [(eqn, n) for eqn in jaxpr.eqns for n, operand in enumerate(eqn.invars) if operand is variable]
    return min(_bytes(variable), sum(_read_by(eqn, n) for eqn, n in uses))


def _read_by(eqn: Any, operand: int) -> int:
    """Returns the bytes that an equation reads of its operand number `operand`."""
    if eqn.primitive.name in _CALLS:
        inner = next(value for value in eqn.params.values() if hasattr(value, "eqns"))
        inner = getattr(inner, "jaxpr", inner)
        return _read(inner, inner.invars[operand])
    if operand == 0 and eqn.primitive.name in _LOOKS_UP:
        return sum(_bytes(out) for out in eqn.outvars)
    return _bytes(eqn.invars[operand])


def _bytes(variable: Any) -> int:
    return math.prod(variable.aval.shape) * variable.aval.dtype.itemsize
