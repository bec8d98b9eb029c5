"""Which part of a round each instruction of a compiled generation belongs to, read from XLA's text.

The engine names the parts of a round with `jax.named_scope`, flax names its modules, and XLA writes both into an
instruction's `op_name`: `jit(_generate)/while/body/draft/while/body/T5Module.extend/decoder/layers_0/mlp/mul`. The
compiler drops the name of some instructions, among them most products: they are placed by the weights that they read
and by the named instructions next to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

SCOPES = ("draft", "catch_up", "score", "sampling", "verify", "rule", "commit")
PREFILL, OTHER, MODEL, COPIES = "prefill", "other", "model", "copies"
CACHE, REST = "cache writes", "residuals, masks"

_ROUND = re.compile(r"^(?:jit\([^/]*\)/)+while/(?:body|cond)/(.*)$")  # the outermost loop is the one over rounds
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")
_REFERENCE = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CONTROL = ("while", "conditional", "call")
_VIEWS = ("bitcast", "copy", "transpose", "convert", "reshape")
_PLUMBING = re.compile(r"^(?:while|body|cond|branch_\d+_fun|closed_call|.*[(<].*)$")
_MODEL = re.compile(r"^(?:[A-Z]\w*|model|encoder|decoder|layers_\d+)$")
_WRITES = ("scatter", "dynamic_update_slice")


@dataclass(frozen=True)
class Place:
    """Where an instruction belongs: `phase`, a path of scopes, and the model's `module` inside it, or ""."""

    phase: tuple[str, ...]
    module: str = ""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of the compiled text.

    Attributes:
        operands, called: names of instructions and of computations.
        op_name: "" where the compiler gives none; a parameter's is what the caller calls it, `params['target']['…']`.
        index: of a get-tuple-element, or a parameter's number.
    """

    name: str
    opcode: str
    shape: str
    computation: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    op_name: str
    index: int

    @property
    def path(self) -> str:
        """`op_name` if it is a path from the program's start, else ""."""
        return self.op_name if self.op_name.startswith("jit(") else ""


@dataclass(frozen=True)
class HloText:
    """A compiled program: its instructions by name."""

    instructions: Mapping[str, Instruction]

    @classmethod
    def parse(cls, text: str) -> HloText:
        """Read `compiled.as_text()`."""
        found, computation = {}, ""
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                computation = header[1]
            elif match := _INSTRUCTION.match(line):
                found[match[1]] = _instruction(match, computation)
        return cls(found)

    @cached_property
    def callers(self) -> Mapping[str, Instruction]:
        """Computation -> the instruction that runs it."""
        return {name: one for one in self.instructions.values() for name in one.called}

    @cached_property
    def _users(self) -> Mapping[str, list[Instruction]]:
        out: dict[str, list[Instruction]] = {}
        for one in self.instructions.values():
            for name in one.operands:
                out.setdefault(name, []).append(one)
        return out

    @cached_property
    def _bodies(self) -> Mapping[str, list[Instruction]]:
        out: dict[str, list[Instruction]] = {}
        for one in self.instructions.values():
            out.setdefault(one.computation, []).append(one)
        return out

    def is_control(self, name: str) -> bool:
        """Whether other instructions run inside this one: a loop, a branch or a call."""
        return name in self.instructions and self.instructions[name].opcode in _CONTROL

    def place(self, name: str) -> Place:
        """Where an instruction belongs; phase `(OTHER,)` where nothing tells."""
        one = self.instructions.get(name)
        if one is None:
            return Place((OTHER,))
        found = self._by_name(one)
        if found.phase[-1] not in ("draft", "catch_up", "score", PREFILL):
            return found
        module = self._weights(one) or found.module
        return Place((*found.phase, MODEL) if module and found.phase[-1] == "draft" else found.phase, module)

    def _by_name(self, one: Instruction) -> Place:
        around = place_of(self._enclosing(one))
        if not one.path and one.opcode.startswith("copy"):
            return Place((*around.phase, COPIES))
        named = place_of(one.path or next(self._near(one), ""))
        if around.phase == (PREFILL,):  # whatever its name: the compiler takes out of a loop what does not change
            return Place(around.phase, named.module)
        return around if OTHER in named.phase else named

    def _enclosing(self, one: Instruction) -> str:
        """The path of the innermost loop or branch around an instruction that has one, or ""."""
        caller = self.callers.get(one.computation)
        while caller is not None and not caller.path:
            caller = self.callers.get(caller.computation)
        if caller is None:
            return "jit()/"
        return caller.path + ("/body/" if caller.opcode == "while" else "/")

    def _near(self, one: Instruction, reach: int = 4) -> Iterator[str]:
        """The paths nearest to an instruction: inside it, of those that read it, of its operands."""
        for name in one.called:
            yield from (x.path for x in reversed(self._bodies.get(name, [])) if x.path)
        for ahead in (True, False):
            front = [one]
            for _ in range(reach):
                front = [y for x in front for y in (self._users.get(x.name, []) if ahead else self._operands(x))]
                yield from (x.path for x in front if x.path)

    def _operands(self, one: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in one.operands if name in self.instructions]

    def _weights(self, one: Instruction) -> str:
        """The module whose parameters an instruction reads, or ""."""
        for name in one.operands:
            origin = self._origin(name)
            if origin.startswith("params[") and (module := _module(re.findall(r"\['(\w+)'\]", origin)[1:-1])):
                return module
        return ""

    def _origin(self, name: str) -> str:
        """The program's argument behind an operand, through views and the states of loops; "" if it is computed."""
        while (one := self.instructions.get(name)) is not None:
            if one.opcode in _VIEWS:
                name = one.operands[0]
            elif one.opcode == "get-tuple-element":
                name = self._element(one)
            else:
                entry = one.opcode == "parameter" and one.computation not in self.callers
                return one.op_name if entry else ""
        return ""

    def _element(self, one: Instruction) -> str:
        """What the state of a loop or branch holds at an index when it starts; "" if unknown."""
        state = self.instructions.get(one.operands[0])
        if state is not None and state.opcode == "parameter" and state.computation in self.callers:
            caller = self.callers[state.computation]
            branch = caller.opcode == "conditional"
            at = 1 + caller.called.index(state.computation) if branch else state.index
            state = self.instructions.get(caller.operands[at])
        return state.operands[one.index] if state is not None and state.opcode == "tuple" else ""


def place_of(path: str) -> Place:
    """Where an `op_name` points to; of the joined names of merged instructions, the first."""
    path = path.partition(";")[0]
    path = path[path.rindex(path.partition("/")[0]) :]  # inlining puts the caller's path before the callee's
    inside = _ROUND.match(path)
    if inside is None:
        return Place((PREFILL,), _module(path.split("/")[1:-1], path)) if path else Place((OTHER,))
    *tokens, primitive = inside[1].split("/")
    at = [n for n, token in enumerate(tokens) if token in SCOPES]
    if not at:
        return Place((OTHER,))
    return Place(tuple(tokens[n] for n in at), _module(tokens[at[-1] + 1 :], primitive))


def _module(tokens: Sequence[str], primitive: str = "") -> str:
    """The part of the model that flax's names point to: the first below the layer, norms together."""
    names = [token.partition(".")[0] for token in tokens if not _PLUMBING.match(token)]
    for name in names:
        if not _MODEL.match(name):
            return "norms" if name.endswith("norm") else name
    return "" if not names else CACHE if primitive in _WRITES else REST


def _instruction(match: re.Match[str], computation: str) -> Instruction:
    name, shape, opcode, operands, rest = match.groups()
    op_name = _OP_NAME.search(rest)
    number = re.search(r"index=(\d+)", rest) if opcode != "parameter" else re.match(r"(\d+)", operands)
    return Instruction(
        name=name,
        opcode=opcode,
        shape=shape,
        computation=computation,
        operands=tuple(_REFERENCE.findall(operands)),
        called=tuple(x for group in _CALLED.findall(rest) for x in _REFERENCE.findall(group)),
        op_name=op_name[1].replace("\\'", "'") if op_name else "",
        index=int(number[1]) if number else 0,
    )
