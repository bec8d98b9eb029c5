"""Iterations of loops whose counter begins at a constant, changes by a constant, and is compared with a constant.

The text of a program compiled for a TPU no longer contains the `known_trip_count` that XLA derived. The constants are
in the loop's computations, or reach the loop as operands, possibly through the tuples of outer loops.
"""

from __future__ import annotations

import math

from speccascade_jax.preflight.hlo import Computation, Instruction, Module

_SAME = ("copy", "bitcast", "copy-start", "copy-done", "reshape")
"""Opcodes of instructions whose value equals that of their operand."""
_MOST_HOPS = 64


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns the iterations of a loop, or `None` if constants do not determine them.

    Args:
        module: the program.
        computation: the computation that contains the loop.
        loop: an instruction of kind "while".
    """
    condition = module.computations[str(loop.called("condition"))]
    test = condition.root
    if test.opcode != "compare" or len(test.operands) != 2:
        return None
    index = _element_of(condition, test.operands[0])
    limit = _value(module, condition, test.operands[1])
    if index is None or limit is None:
        return None
    start = _entering(module, computation, loop, index)
    step = _step(module, module.computations[str(loop.called("body"))], index)
    return None if start is None or step is None else _count(test, limit - start, step)


def _count(test: Instruction, distance: int, step: int) -> int | None:
    """Returns after how many steps of size `step` a counter has covered the `distance` to its limit."""
    direction = test.attribute("direction")
    if direction in ("GT", "GE"):
        distance, step = -distance, -step
    if step <= 0 or direction == "EQ":
        return None
    if direction in ("LE", "GE"):
        distance += 1
    return max(0, math.ceil(distance / step))


def _element_of(computation: Computation, name: str) -> int | None:
    """Returns the index of the element of a computation's parameter that equals a value, or `None`."""
    value = _same(computation, name)
    if value is None or value.opcode != "get-tuple-element":
        return None
    source = computation.by_name.get(value.operands[0])
    return int(value.attribute("index")) if source is not None and source.opcode == "parameter" else None


def _same(computation: Computation, name: str) -> Instruction | None:
    """Returns the instruction that computes a value: skips copies and views, which only pass it on."""
    value = computation.by_name.get(name)
    while value is not None and value.opcode in _SAME:
        value = computation.by_name.get(value.operands[0])
    return value


def _value(module: Module, computation: Computation, name: str, hops: int = 0) -> int | None:
    """Returns the integer that a value always equals, or `None`."""
    value = _same(computation, name)
    if value is None or hops > _MOST_HOPS:
        return None
    if value.opcode == "constant":
        return value.literal
    index = _element_of(computation, name)
    caller = module.callers.get(computation.name)
    if index is None or caller is None or caller[1].opcode != "while":
        return None
    around, loop = caller
    body = module.computations[str(loop.called("body"))]
    return _entering(module, around, loop, index, hops + 1) if _unchanged(body, index) else None


def _unchanged(body: Computation, index: int) -> bool:
    """Returns whether a loop's body passes the given element of its carry tuple through unchanged."""
    return body.root.opcode == "tuple" and _element_of(body, body.root.operands[index]) == index


def _entering(module: Module, computation: Computation, loop: Instruction, index: int, hops: int = 0) -> int | None:
    """Returns the integer that an element of a loop's tuple has before the first iteration, or `None`."""
    start = _same(computation, loop.operands[0])
    if start is None or start.opcode != "tuple":
        return None
    return _value(module, computation, start.operands[index], hops)


def _step(module: Module, body: Computation, index: int) -> int | None:
    """Returns the constant by which a loop's body changes its counter, or `None`."""
    if body.root.opcode != "tuple":
        return None
    advance = _same(body, body.root.operands[index])
    if advance is None or advance.opcode not in ("add", "subtract"):
        return None
    counter, change = advance.operands
    if _element_of(body, counter) != index and advance.opcode == "add":
        counter, change = change, counter
    step = _value(module, body, change)
    if _element_of(body, counter) != index or step is None:
        return None
    return step if advance.opcode == "add" else -step
