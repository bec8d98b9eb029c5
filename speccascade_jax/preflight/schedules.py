"""Simulation of a TPU core's scalar unit, which counts the bundles that the core issues in a final schedule.

The scalar unit counts the iterations of a schedule's loops, compares numbers, and branches. Most of this depends only
on constants, so it is simulated here: 32-bit integers and predicates are computed, and every other value is unknown. A
bundle in a loop counts once for each iteration that does not skip it. Most loops are pipelined: they load, compute and
store at the same time for three different iterations, so the first iteration skips the store. A branch with an unknown
condition is not taken: the bundles that it would skip count, and the body of a loop of unknown length counts once.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

DELAY = 4
"""Number of bundles that are issued after a branch before it takes effect."""
MOST_STEPS = 10_000_000
"""Largest number of bundles with scalar instructions that are simulated. After them, no branch goes backwards, so the
simulation ends."""

_LINE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +(?:[A-Z]{2})? *: ?[> ]*\{")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_TARGET = re.compile(r"\$region(\d+)")
_INSTRUCTION = re.compile(r"%(\w+) = ([a-z][\w.]*)(?: \((!?)%(\w+)(, %\w+)?\),?)? ?(.*)", re.DOTALL)
_SPILL = re.compile(r"\[smem:\[#(allocation\d+_spill)\]\](?: \((!?)%(\w+)\),?)? ?(?:%(\w+))?")
_LABEL = re.compile(r"^\[\w+:\$\w+\] ")
_NAME = re.compile(r"%(\w+)")
_REGISTER = re.compile(r"(?:.*_)?([sp]\d+)$")
_MASK = 0xFFFFFFFF

Value = int | None
"""An integer, a predicate as 0 or 1, or `None` for anything that is not known."""


def _shifted_left(value: int, places: int) -> int:
    return value << places if 0 <= places < 32 else 0


def _shifted_right(value: int, places: int) -> int:
    return (value & _MASK) >> places if 0 <= places < 32 else 0


_INTEGER: dict[str, Callable[[int, int], int]] = {
    "sadd": operator.add, "ssub": operator.sub, "smul": operator.mul,
    "sand": operator.and_, "sor": operator.or_, "sxor": operator.xor, "smin": min, "smax": max,
    "sshll": _shifted_left, "sshrl": _shifted_right, "sshra": lambda value, places: value >> min(max(places, 0), 31),
}  # fmt: skip
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip


@dataclass(frozen=True)
class _Scalar:
    """One instruction of the scalar unit.

    Attributes:
        result: the register that it writes, empty for a branch.
        kind: the instruction's name up to the first dot; types: the rest of this name.
        predicate: the register that decides whether it runs (empty: it always runs); negated: whether it runs if this
            register is 0.
        kept: the register whose value the result takes if the instruction does not run (empty: the result keeps its
            value).
        operands: constants (as text) and names of registers.
        target: the index of the bundle to which a branch goes.
        name: the name of its result; uses: the names of all values that it reads.
    """

    result: str
    kind: str
    types: tuple[str, ...]
    predicate: str = ""
    negated: bool = False
    kept: str = ""
    operands: tuple[str, ...] = ()
    target: int = 0
    name: str = ""
    uses: tuple[str, ...] = ()


def issued(text: str) -> int:
    """Returns the number of bundles that a core issues while it runs a final schedule."""
    return _Run(_program(bundles_of(text))).count()


def bundles_of(text: str) -> list[str]:
    """Returns the text of every bundle; a comment may extend over several lines."""
    bundles: list[str] = []
    for line in text.splitlines():
        if begin := _LINE.match(line):
            bundles.append(line[begin.end() :])
        elif bundles:
            bundles[-1] += "\n" + line
    return bundles


def _program(bundles: Sequence[str]) -> list[list[_Scalar]]:
    """Returns, for every bundle, its branches and the scalar instructions on which branches depend."""
    regions: dict[str, int] = {}
    for number, bundle in enumerate(bundles):
        for region in _REGION.findall(bundle):
            regions.setdefault(region, number)
    program = [_scalars(bundle, regions, len(bundles)) for bundle in bundles]
    deciding = _deciding([part for bundle in program for part in bundle])
    return [[part for part in bundle if part.kind == "sbr" or part.name in deciding] for bundle in program]


def _deciding(instructions: Sequence[_Scalar]) -> set[str]:
    """Returns the names of all values on which branches depend."""
    uses: dict[str, set[str]] = {}
    for part in instructions:
        uses.setdefault(part.name, set()).update(part.uses)
    names, queue = set[str](), list(uses.get("", ()))
    while queue:
        name = queue.pop()
        if name not in names:
            names.add(name)
            queue.extend(uses.get(name, ()))
    return names


def _scalars(bundle: str, regions: dict[str, int], end: int) -> list[_Scalar]:
    inside = _COMMENT.sub("", bundle).rsplit("}", 1)[0]
    scalars = (_scalar(part.strip(), regions, end) for part in inside.split(";;"))
    return [scalar for scalar in scalars if scalar is not None]


def _scalar(text: str, regions: dict[str, int], end: int) -> _Scalar | None:
    """Parses an instruction; returns `None` if it neither sets a register of the scalar unit nor branches."""
    match = _INSTRUCTION.match(text)
    if match is None:
        return None
    name, opcode, negation, predicate, kept, rest = match.groups()
    kind, *types = opcode.split(".")
    uses = tuple(_NAME.findall(text)[1:])
    condition = (_register(predicate or ""), negation == "!", _register((kept or "").strip(", %")))
    if spill := _SPILL.search(rest):
        return _spilled(kind, name, spill)
    if kind == "sbr":
        goal = _TARGET.search(rest)
        # A branch to a region that starts nowhere goes to the end of the schedule.
        return _Scalar("", kind, (), *condition, target=regions.get(goal.group(1), end) if goal else end, uses=uses)
    if not _REGISTER.match(name):
        return None
    operands = tuple(_LABEL.sub("", operand.strip()) for operand in rest.split(","))
    return _Scalar(_register(name), kind, tuple(types), *condition, operands, name=name, uses=uses)


def _spilled(kind: str, name: str, spill: re.Match[str]) -> _Scalar:
    """Returns the instruction that stores a register in memory or loads it; the place counts as a register."""
    place, negation, predicate, stored = spill.groups()
    result, operand = (place, stored or "") if kind == "sst" else (name, place)
    return _Scalar(
        _register(result), "smov", (), _register(predicate or ""), negation == "!", operands=(f"%{operand}",),
        name=result, uses=(operand, *([predicate] if predicate else [])),
    )  # fmt: skip


def _register(name: str) -> str:
    match = _REGISTER.match(name)
    return match.group(1) if match else name


@dataclass
class _Run:
    """Simulated run of a schedule's scalar instructions.

    Attributes:
        program: the scalar instructions of every bundle.
        registers: values by register.
    """

    program: Sequence[Sequence[_Scalar]]
    registers: dict[str, Value] = field(default_factory=dict)

    def count(self) -> int:
        """Returns the number of bundles until the run leaves the schedule."""
        place = issued = steps = 0
        landing: tuple[int, int] | None = None  # (bundles until a branch takes effect, its target)
        busy = self._next_busy()
        while place < len(self.program):
            quiet = min(busy[place] - place, landing[0] if landing else len(self.program))
            place, issued = place + quiet, issued + quiet
            landing = (landing[0] - quiet, landing[1]) if landing else None
            if landing and landing[0] == 0:
                place, landing = landing[1], None
                continue
            if place == len(self.program):
                break
            goal = self._step(self.program[place])
            landing = (landing[0] - 1, landing[1]) if landing else None
            if goal is not None and (goal > place or steps < MOST_STEPS):
                landing = (DELAY, goal)
            place, issued, steps = place + 1, issued + 1, steps + 1
        return issued

    def _next_busy(self) -> list[int]:
        """Returns, for every bundle, the index of the next bundle (or of itself) that has scalar instructions."""
        table, last = [0] * len(self.program), len(self.program)
        for number in reversed(range(len(self.program))):
            last = number if self.program[number] else last
            table[number] = last
        return table

    def _step(self, bundle: Sequence[_Scalar]) -> int | None:
        """Runs a bundle, in which all instructions read before any writes; returns the target of a taken branch."""
        goal, written = None, {}
        for part in bundle:
            runs = self._runs(part)
            if part.kind == "sbr":
                goal = part.target if runs else goal
            elif part.kind != "sphi" and (runs != 0 or part.kept):
                # A branch with an unknown condition is not taken, so the instructions that it would skip run. Some of
                # them, such as the start of a loop's counter, stand before the branch, under the opposite condition.
                begins = runs is None and part.negated and not part.kept
                # A phi instruction (`sphi`) only joins two names of one register, so it is skipped.
                value = self._value(part) if runs or begins else self.registers.get(part.kept)
                written[part.result] = None if runs is None and not begins else value
        self.registers.update(written)
        return goal

    def _runs(self, part: _Scalar) -> Value:
        if not part.predicate:
            return 1
        value = self.registers.get(part.predicate)
        return None if value is None else int(bool(value) != part.negated)

    def _value(self, part: _Scalar) -> Value:
        values = [self._operand(operand) for operand in part.operands]
        if part.kind in ("smov", "pmov", "pneg", "int_to_ptr"):
            value = values[0]
            return value if value is None or part.kind != "pneg" else int(not value)
        if part.kind in ("pand", "pnand", "por", "pnor"):
            return _joined(part.kind, values)
        if None in values or len(values) < 2 or not {"s32", "u32"} & set(part.types):
            return None
        left, right = (int(value or 0) for value in values[:2])
        if "u32" in part.types:
            left, right = left & _MASK, right & _MASK
        if part.kind == "scmp":
            return int(_COMPARE[part.types[0]](left, right))
        compute = _INTEGER.get(part.kind)
        return None if compute is None else _signed(compute(left, right))

    def _operand(self, text: str) -> Value:
        negated = text.startswith("!")
        if text.lstrip("!").startswith("%"):
            value = self.registers.get(_register(text.lstrip("!%")))
            return int(not value) if negated and value is not None else value
        return _signed(int(text)) if re.fullmatch(r"-?\d+", text) else None


def _joined(kind: str, values: Sequence[Value]) -> Value:
    """Returns the value of two predicates joined by `and` or `or`; one known predicate may be enough to decide it."""
    decisive = 0 if kind in ("pand", "pnand") else 1
    if any(value is not None and bool(value) == bool(decisive) for value in values):
        joined = decisive
    elif None in values:
        return None
    else:
        joined = 1 - decisive
    return 1 - joined if kind in ("pnand", "pnor") else joined


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 32) if value >> 31 else value
