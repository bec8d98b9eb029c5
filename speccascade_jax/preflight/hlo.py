"""Parser of XLA's scheduled programs: computations, instructions, and sizes of arrays in memory.

It reads the text of `jax.stages.Compiled.as_text()`, after scheduling and layout assignment. An array's layout names
its memory: `S(1)` is a TPU's vector memory (VMEM), `S(2)` to `S(6)` are small memories of the core, and no mark means
HBM.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

_HEADER = re.compile(r"^(ENTRY )?%?([^ ]+) \(.*\{$")
_NAMED = re.compile(r"^  (ROOT )?%?([^ ]+) = ")
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"([a-z]+[0-9a-z]*)\[([0-9,]*)\](?:\{([0-9,]*)((?::[^}]*)?)\})?")
_OPERAND = re.compile(r"%([^ ,(){}]+)")
_TILE = re.compile(r"T((?:\([0-9,*]+\))+)")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class Array:
    """One array of a program.

    Attributes:
        dtype: XLA's name of the element type, such as "bf16".
        shape: its size along each axis.
        order: the axes from the fastest varying one to the slowest.
        tile: sizes of the outermost tile along the fastest axes, slowest of these first; empty if there are no tiles.
        space: number of the memory that holds it; 0 is HBM, 1 is VMEM.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = 0

    @property
    def bits(self) -> int:
        """Number of bits of an element."""
        digits = re.search(r"\d+", self.dtype)
        return _BITS[self.dtype] if self.dtype in _BITS else int(digits.group()) if digits else 0

    @property
    def logical_bytes(self) -> int:
        """Number of bytes of the elements, without padding."""
        return -(-math.prod(self.shape) * self.bits // 8)

    @property
    def bytes(self) -> int:
        """Number of bytes in memory, where the axes that tiles cover are padded to whole tiles."""
        sizes = [self.shape[axis] for axis in reversed(self.order)] if self.order else list(self.shape)
        for place, size in enumerate(reversed(self.tile), 1):
            if place <= len(sizes):
                sizes[-place] = -(-sizes[-place] // size) * size
        return -(-math.prod(sizes) * self.bits // 8)

    def part(self, shape: tuple[int, ...]) -> Array:
        """Returns a part of the array with the given shape, padded to whole tiles as in memory."""
        return replace(self, shape=shape)


def arrays(text: str) -> list[Array]:
    """Returns the arrays of a type: a single array, or the leaves of a tuple in order."""
    return [_array(match) for match in _ARRAY.finditer(text)]


def _array(match: re.Match[str]) -> Array:
    dtype, shape, order, rest = match.groups()
    tile, space = _TILE.search(rest or ""), re.search(r"S\((\d+)\)", rest or "")
    first = tile.group(1).split(")")[0].strip("(") if tile else ""
    return Array(
        dtype,
        _numbers(shape),
        _numbers(order or ""),
        _numbers(first) if "*" not in first else (),
        int(space.group(1)) if space else 0,
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


@dataclass(frozen=True)
class Instruction:
    """One instruction of a program.

    Attributes:
        name: its name, unique in the module.
        opcode: the kind of instruction, such as "fusion".
        type: the text of its result's type.
        operands: names of its operands; for a parameter its number, and for a scalar constant its text.
        attributes: the text that follows its operands.
        root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    attributes: str = field(repr=False)
    root: bool = False

    @cached_property
    def results(self) -> list[Array]:
        """The arrays of its result."""
        return arrays(self.type)

    @property
    def scope(self) -> str:
        """The path of named scopes and functions in which it was traced; empty if XLA added the instruction."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    @property
    def literal(self) -> int | None:
        """The value of an integer constant; `None` for any other instruction."""
        text = self.operands[0] if self.opcode == "constant" and self.operands else ""
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    def attribute(self, name: str) -> str:
        """Returns the text of an attribute up to the next comma; empty if it has no such attribute."""
        match = re.search(rf"(?:^|[ ,]){name}=([^ ,]+)", self.attributes)
        return match.group(1) if match else ""

    def called(self, attribute: str) -> str | None:
        """Returns the computation that an attribute names (`body`, `condition`, `calls`, `to_apply`)."""
        match = re.search(rf"\b{attribute}=%?([^ ,{{}}]+)", self.attributes)
        return match.group(1) if match else None

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional, in the order of its predicate's values (false first)."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if listed:
            return tuple(part.strip().lstrip("%") for part in listed.group(1).split(","))
        chosen = (self.called("false_computation"), self.called("true_computation"))
        return tuple(name for name in chosen if name is not None)

    @property
    def trip_count(self) -> int | None:
        """The number of iterations of a loop; `None` if XLA does not know it."""
        match = re.search(r'known_trip_count"?[:=]\{"?n"?:"?(\d+)', self.attributes)
        return int(match.group(1)) if match else None

    @property
    def target(self) -> str:
        """The name of the function that a custom call calls."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match.group(1) if match else ""


@dataclass(frozen=True)
class Computation:
    """A named list of instructions, in the order of the schedule."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters, by number."""
        parameters = [part for part in self.instructions if part.opcode == "parameter"]
        return sorted(parameters, key=lambda part: int(part.operands[0]) if part.operands else 0)

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next(part for part in reversed(self.instructions) if part.root)

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction's value."""
        table: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                table.setdefault(operand, []).append(instruction)
        return table


@dataclass(frozen=True)
class Module:
    """A scheduled program.

    Attributes:
        computations: all computations by name.
        entry: the name of the computation that runs first.
    """

    computations: dict[str, Computation]
    entry: str

    @cached_property
    def callers(self) -> dict[str, tuple[Computation, Instruction]]:
        """The computation and the instruction that call each body and condition of a loop; each has a single caller."""
        return {
            name: (computation, instruction)
            for computation in self.computations.values()
            for instruction in computation.instructions
            if instruction.opcode == "while"
            for name in (instruction.called("body"), instruction.called("condition"))
            if name is not None
        }

    def __iter__(self) -> Iterator[Computation]:
        """Iterates over the computations."""
        return iter(self.computations.values())


def parse(text: str) -> Module:
    """Reads a scheduled program.

    Raises:
        ValueError: the text contains no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, name, inside = "", "", list[Instruction]()
    for line in text.splitlines():
        if name and line.startswith("}"):
            computations[name] = Computation(name, tuple(inside))
            name, inside = "", []
        elif name:
            instruction = _instruction(line)
            inside += [] if instruction is None else [instruction]
        elif header := _HEADER.match(line):
            name = header.group(2)
            entry = name if header.group(1) else entry
    if not entry:
        raise ValueError("the text contains no ENTRY computation: give the text of a compiled program")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction | None:
    named = _NAMED.match(line)
    if named is None:
        return None
    rest = " " + line[named.end() :]
    begin = _after_type(rest)
    opcode = _OPCODE.match(rest, begin)
    if opcode is None:
        return None
    end = _closing(rest, opcode.end() - 1)
    inside = rest[opcode.end() : end]
    operands = tuple(_OPERAND.findall(inside))
    if opcode.group(1) == "parameter" or (opcode.group(1) == "constant" and "[]" in rest[1:begin]):
        operands = (inside.strip(),)
    return Instruction(
        named.group(2), opcode.group(1), rest[1:begin], operands, rest[end + 1 :], named.group(1) is not None
    )


def _after_type(text: str) -> int:
    """Returns the index of the space after a result's type, which may be a tuple."""
    if text[1] == "(":
        return _closing(text, 1) + 1
    return text.index(" ", 1)


def _closing(text: str, opening: int) -> int:
    """Returns the index of the bracket that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    raise ValueError(f"unbalanced brackets in {text[:80]!r}: give the text of a compiled program")
