"""Counts of the bytes that instructions move between HBM and the core, and that devices send to each other.

For a transfer that fetches data ahead (`copy-start`, `slice-start`), the bytes that arrive count. Every other
instruction reads its operands that lie in HBM, and writes its results that lie there. A slice or gather reads only a
part of its operand, and an update in place writes only a part, fused or not. Parts consist of whole tiles; an update
that fills only a part of a tile reads this tile first.
"""

from __future__ import annotations

import re

from speccascade_jax.preflight.hlo import Array, Computation, Instruction, Module

HBM = 0
_SEMAPHORES = 2
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_VIEWS = ("bitcast", "get-tuple-element", "reshape-bitcast")
_PARTS = ("slice", "dynamic-slice", "gather")
_STATED = re.compile(r'"bytes_accessed":"?(\d+)')
"""Bytes that a kernel says it moves (`pl.CostEstimate`)."""
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcode of an update in place -> the operand that holds the new values."""


def collective(instruction: Instruction) -> str | None:
    """Returns the kind of a collective, for a whole collective or for its start; `None` for any other instruction."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def message(module: Module, instruction: Instruction) -> tuple[str, int] | None:
    """Returns the kind and the bytes of a collective, alone or in a fusion; `None` for any other instruction.

    On a TPU, a collective that runs at the same time as matrix products is a chain of fusions, and the first fusion
    starts it. Gradients are summed and scattered in a fusion of an all-reduce with slices.
    """
    kind = collective(instruction)
    if kind is not None:
        return kind, sent(instruction)
    called = instruction.called("calls") if instruction.opcode == "fusion" else None
    if called is None:
        return None
    inside = module.computations[called].instructions
    scatters = called.startswith("all-reduce-scatter")
    if not scatters and not any(part.target == "AsyncCollectiveStart" for part in inside):
        return None
    fused = next((part for part in inside if collective(part)), None)
    if fused is None:
        return None
    size = sum(array.bytes for array in fused.results)  # a single message carries several arrays
    return "reduce-scatter" if scatters else str(collective(fused)), size


def sent(instruction: Instruction) -> int:
    """Returns the bytes of a collective's largest array, which a device receives or sums."""
    return max((array.bytes for array in instruction.results), default=0)


def hbm_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Returns the bytes that one execution of an instruction reads from HBM and writes to HBM."""
    moved = _read(module, computation, instruction) + _written(module, computation, instruction)
    stated = _STATED.search(instruction.attributes) if instruction.target == "tpu_custom_call" else None
    if stated is None:
        return moved
    # A kernel states how many bytes it moves, because it may read or write its arrays only in part, or several times.
    # It also counts arrays in VMEM, which `moved` does not contain.
    operands = [computation.by_name[name] for name in instruction.operands if name in computation.by_name]
    everything = sum(array.bytes for part in (*operands, instruction) for array in part.results)
    return min(moved, int(stated[1])) if int(stated[1]) <= everything else moved + int(stated[1]) - everything


def _read(module: Module, computation: Computation, instruction: Instruction) -> int:
    operands = [computation.by_name[name] for name in instruction.operands if name in computation.by_name]
    if instruction.opcode == "copy-start":
        return instruction.results[0].bytes if _lies_in_hbm(operands[0]) else 0
    if instruction.opcode in ("slice-start", "dynamic-slice-start"):
        return sum(array.bytes for array in _arriving(computation, instruction)) if _lies_in_hbm(operands[0]) else 0
    total = 0
    for number, operand in enumerate(operands):
        if _lies_in_hbm(operand):
            total += _part_read(module, computation, instruction, number, operand)
    return total


def _part_read(
    module: Module, computation: Computation, instruction: Instruction, number: int, operand: Instruction
) -> int:
    """Returns the bytes that an instruction reads of one operand."""
    whole = sum(array.bytes for array in operand.results if array.space == HBM)
    if instruction.opcode in _PARTS and number == 0:
        return min(whole, _sliced_bytes(instruction, operand))
    if instruction.opcode in _UPDATES and number == 0:
        return min(whole, _completed_bytes(module, computation, instruction))
    called = instruction.called("calls") if instruction.opcode == "fusion" else None
    if called is None:
        return whole
    inside = module.computations[called]
    return min(whole, _fused_read(module, inside, inside.parameters[number], whole))


def _fused_read(module: Module, inside: Computation, value: Instruction, whole: int) -> int:
    """Returns the bytes that a fused computation reads of one parameter, or of a view of it."""
    if value.root and value.opcode != "parameter":
        return whole  # the fusion returns this view of the whole array, so it reads every byte of the array
    total = 0
    for user in inside.users.get(value.name, []):
        place = user.operands.index(value.name)
        if user.opcode in _VIEWS or _is_view(module, user):
            total += _fused_read(module, inside, user, whole)
        elif user.opcode == "tuple" and user.root:
            total += 0  # passed on without being read
        elif user.opcode in (*_PARTS, *_UPDATES, "fusion"):
            total += _part_read(module, inside, user, place, value)
        else:
            return whole
    return total


def _arriving(computation: Computation, start: Instruction) -> list[Array]:
    """Returns what a transfer's start delivers; its result contains operands, arriving arrays and semaphores."""
    operands = [computation.by_name[name] for name in start.operands if name in computation.by_name]
    listed = sum(len(operand.results) for operand in operands)
    return [array for array in start.results[listed:] if array.space != _SEMAPHORES]


def _is_view(module: Module, instruction: Instruction) -> bool:
    """Returns whether a fusion inside a fusion only changes the layout of its operand."""
    called = instruction.called("calls") if instruction.opcode == "fusion" else None
    if called is None:
        return False
    return {part.opcode for part in module.computations[called].instructions} <= {"parameter", *_VIEWS}


def _written(module: Module, computation: Computation, instruction: Instruction) -> int:
    results = instruction.results
    if instruction.opcode == "copy-start":
        return results[0].bytes if results[0].space == HBM else 0
    if instruction.opcode in _UPDATES:
        return _update_bytes(computation, instruction) if results[0].space == HBM else 0
    if instruction.opcode == "fusion" and (called := instruction.called("calls")):
        return _fused_written(module.computations[called], instruction)
    if collective(instruction) and instruction.opcode.endswith("-start"):
        return max((array.bytes for array in results if array.space == HBM), default=0)
    if instruction.opcode.endswith("-start"):
        results = _arriving(computation, instruction)
    return sum(array.bytes for array in results if array.space == HBM)


def _fused_written(inside: Computation, fusion: Instruction) -> int:
    root = inside.root
    parts = [inside.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(parts) != len(fusion.results):
        return sum(array.bytes for array in fusion.results if array.space == HBM)
    written = (_value_written(inside, part, array.bytes) for part, array in zip(parts, fusion.results, strict=True))
    return sum(count for count, array in zip(written, fusion.results, strict=True) if array.space == HBM)


def _value_written(inside: Computation, part: Instruction, whole: int) -> int:
    """Returns the bytes that a fused computation writes of a result: those of its updates in place, or all bytes.

    Args:
        inside: the fused computation.
        part: the result.
        whole: the number of bytes of the result.
    """
    total = 0
    while part.opcode in (*_VIEWS, *_UPDATES):
        total += _update_bytes(inside, part) if part.opcode in _UPDATES else 0
        part = inside.by_name[part.operands[0]]
    # Only updates of a parameter are in place. A value that the fusion computes is written in full.
    return min(whole, total) if total and part.opcode == "parameter" else whole


def _sliced_bytes(instruction: Instruction, operand: Instruction) -> int:
    """Returns the bytes of the tiles that a slice reads; a gather reads its rows one by one."""
    source, result = operand.results[0], instruction.results[0]
    if instruction.opcode == "gather" or len(source.shape) != len(result.shape):
        return result.bytes
    return source.part(result.shape).bytes


def _update_bytes(computation: Computation, update: Instruction) -> int:
    """Returns the bytes that an update in place writes."""
    values = computation.by_name.get(update.operands[_UPDATES[update.opcode]])
    if values is None:
        return _result_bytes(update)
    if update.opcode == "scatter":
        return _result_bytes(values)
    return update.results[0].part(values.results[0].shape).bytes


def _completed_bytes(module: Module, computation: Computation, update: Instruction) -> int:
    """Returns the bytes that an update in place reads, because it fills only a part of a tile or adds to old values."""
    values = computation.by_name.get(update.operands[_UPDATES[update.opcode]])
    if values is None:
        return 0
    written = _update_bytes(computation, update)
    if update.opcode == "scatter":
        combine = update.called("to_apply")
        replaces = combine is not None and module.computations[combine].root.opcode == "parameter"
        return 0 if replaces else written
    return 0 if written == values.results[0].logical_bytes else written


def _lies_in_hbm(value: Instruction) -> bool:
    return any(array.space == HBM for array in value.results)


def _result_bytes(instruction: Instruction) -> int:
    return sum(array.bytes for array in instruction.results)
