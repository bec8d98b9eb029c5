"""Traces: wall-clock time of each instruction of a compiled program, and its place in a round.

XLA on a CPU runs a generation's instructions one after another, each on any free pool thread, and a large product on
several threads at once. So time is wall-clock time on one axis, not thread time. A moment belongs to the instruction
that runs then (half each if two run at once), never to the loop around it. If none runs, the moment is waiting time of
the instruction that starts next. On an accelerator the device's own plane is read; nobody has tested this path on one
yet.

The engine names the parts of a round with `jax.named_scope`, flax names its modules, and XLA writes both into an
instruction's `op_name`: `jit(_generate)/while/body/draft/while/body/T5Module.extend/decoder/layers_0/mlp/mul`. The
compiler drops the name of some instructions, most products among them. They are placed by the weights that they read
and by the named instructions next to them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jax.profiler import ProfileData

_END = "end: "  # XLA:CPU marks with it that other threads have finished an instruction too


@dataclass(frozen=True)
class Event:
    """One execution of an instruction, in ns on the trace's clock.

    Attributes:
        begin, end: of the work on the thread that started it.
        done: time at which other threads are known to have finished their parts. XLA may run the next instruction
            before it reports this; an instruction that begins earlier shows that they had finished.
        run: number of the program's run.
    """

    name: str
    begin: float
    end: float
    done: float
    run: int


@dataclass(kw_only=True)
class Spent:
    """The cost of an instruction over all executions: ns while it ran, ns of waiting before it, and their number."""

    running: float = 0.0
    waiting: float = 0.0
    count: int = 0

    @property
    def total(self) -> float:
        """Running and waiting time, ns."""
        return self.running + self.waiting


def read_runs(folder: Path | str, module: str, count: int) -> list[list[Event]]:
    """Returns the executions of one program's instructions in a trace, by run and by time.

    Args:
        folder: the folder that `jax.profiler.trace` wrote to; the newest of several traces is read.
        module: the program's name, such as `jit_generate`.
        count: number of the program's runs in the trace.

    Raises:
        FileNotFoundError: no trace in the folder. ValueError: the trace does not have `count` runs of that program.
    """
    files = sorted(Path(folder).rglob("*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"no trace (*.xplane.pb) in {folder}; did the profiler start?")
    # An accelerator has its own plane, and the host's plane only shows the launches; a CPU has the host's plane only.
    planes = {plane.name: plane for plane in ProfileData.from_file(str(files[-1])).planes}
    devices = [name for name in sorted(planes) if name.startswith("/device:")] or ["/host:CPU"]
    runs: dict[int, list[Event]] = defaultdict(list)
    for event in _events(planes[devices[0]], module) if devices[0] in planes else ():
        runs[event.run].append(event)
    if len(runs) != count:
        raise ValueError(
            f"the trace in {folder} has {len(runs)} runs of {module}, not {count}: the profiler lost some (trace fewer "
            f"or shorter generations) or does not number them on this device; its planes: {', '.join(planes)}"
        )
    ordered = (sorted(run, key=lambda event: event.begin) for run in runs.values())
    return sorted(ordered, key=lambda run: run[0].begin)


def _events(plane, module: str) -> Iterable[Event]:  # type: ignore[no-untyped-def]
    executions, ends = [], {}
    for line in plane.lines:
        for event in line.events:
            if event.name.startswith(_END):
                ends[dict(event.stats).get("_c")] = event.start_ns
                continue
            stats = dict(event.stats)
            if "hlo_op" in stats and stats.get("hlo_module", module) == module:
                executions.append((str(stats["hlo_op"]), event.start_ns, max(event.duration_ns, 1), stats))
    for name, begin, duration, stats in executions:
        end = begin + duration
        yield Event(name, begin, end, max(end, ends.get(stats.get("_p"), end)), int(stats.get("run_id", 0)))


def own_times(runs: Iterable[Sequence[Event]], is_control: Callable[[str], bool]) -> dict[str, Spent]:
    """Returns each instruction's share of the time from a run's first begin to its last end; the shares add up to it.

    Args:
        runs: executions of each run, ordered by time.
        is_control: returns whether other instructions run inside the instruction of this name, which is then not in the
            result.
    """
    spent: dict[str, Spent] = defaultdict(Spent)
    for run in runs:
        _share(run, is_control, spent)
    return dict(spent)


def _share(run: Sequence[Event], is_control: Callable[[str], bool], spent: dict[str, Spent]) -> None:
    """Adds the time between two consecutive begin or end times of a run to the instructions that ran in between."""
    leaves = _leaves(run, is_control)
    points = sorted(point for n, (_, begin, end) in enumerate(leaves) for point in ((begin, 1, n), (end, 0, n)))
    active: set[int] = set()
    now = run[0].begin
    for moment, begins, n in points:
        for running in active:
            spent[leaves[running][0]].running += (moment - now) / len(active)
        if not active:
            spent[leaves[n][0]].waiting += moment - now
        if begins:
            active.add(n)
            spent[leaves[n][0]].count += 1
        else:
            active.remove(n)
        now = moment


def _leaves(run: Sequence[Event], is_control: Callable[[str], bool]) -> list[tuple[str, float, float]]:
    """Returns name, begin and end of the executions inside which no other instruction runs.

    A loop, branch or call that XLA compiled into one kernel contains no other: it counts like any instruction.
    """
    following = [event.begin for event in run[1:]] + [run[-1].end]
    return [
        (event.name, event.begin, max(event.end, min(event.done, begin)))
        for event, begin in zip(run, following, strict=True)
        if not (is_control(event.name) and begin < event.done)
    ]


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
    """The place of an instruction: `phase`, a path of scopes, and the model's `module` inside it, or ""."""

    phase: tuple[str, ...]
    module: str = ""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of the compiled text.

    Attributes:
        operands, called: names of instructions and of computations.
        op_name: "" if the compiler gives none; for a parameter, the argument's name, `params['target']['…']`.
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
        """The `op_name` if it is a path from the program's start, else ""."""
        return self.op_name if self.op_name.startswith("jit(") else ""


@dataclass(frozen=True)
class HloText:
    """A compiled program: its instructions by name."""

    instructions: Mapping[str, Instruction]

    @classmethod
    def parse(cls, text: str) -> HloText:
        """Parses the text of `compiled.as_text()`."""
        instructions, computation = {}, ""
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                computation = header[1]
            elif match := _INSTRUCTION.match(line):
                instructions[match[1]] = _instruction(match, computation)
        return cls(instructions)

    @cached_property
    def callers(self) -> Mapping[str, Instruction]:
        """The instruction that runs each computation, by the computation's name."""
        return {name: instruction for instruction in self.instructions.values() for name in instruction.called}

    @cached_property
    def _users(self) -> Mapping[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in instruction.operands:
                users.setdefault(name, []).append(instruction)
        return users

    @cached_property
    def _bodies(self) -> Mapping[str, list[Instruction]]:
        bodies: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            bodies.setdefault(instruction.computation, []).append(instruction)
        return bodies

    def is_control(self, name: str) -> bool:
        """Returns whether other instructions run inside this one: a loop, a branch or a call."""
        return name in self.instructions and self.instructions[name].opcode in _CONTROL

    def place(self, name: str) -> Place:
        """Returns the place of an instruction; phase `(OTHER,)` if it is unknown."""
        instruction = self.instructions.get(name)
        if instruction is None:
            return Place((OTHER,))
        place = self._by_name(instruction)
        if place.phase[-1] not in ("draft", "catch_up", "score", PREFILL):
            return place
        module = self._weights(instruction) or place.module
        return Place((*place.phase, MODEL) if module and place.phase[-1] == "draft" else place.phase, module)

    def _by_name(self, instruction: Instruction) -> Place:
        around = place_of(self._enclosing(instruction))
        if not instruction.path and instruction.opcode.startswith("copy"):
            return Place((*around.phase, COPIES))
        named = place_of(instruction.path or next(self._near(instruction), ""))
        if around.phase == (PREFILL,):  # whatever its name: the compiler moves invariant code out of loops
            return Place(around.phase, named.module)
        return around if OTHER in named.phase else named

    def _enclosing(self, instruction: Instruction) -> str:
        """Returns the path of the innermost named loop or branch around an instruction; "jit()/" outside of all."""
        caller = self.callers.get(instruction.computation)
        while caller is not None and not caller.path:
            caller = self.callers.get(caller.computation)
        if caller is None:
            return "jit()/"
        return caller.path + ("/body/" if caller.opcode == "while" else "/")

    def _near(self, instruction: Instruction, reach: int = 4) -> Iterator[str]:
        """Yields the paths nearest to an instruction: inside it, of its users, of its operands."""
        for name in instruction.called:
            yield from (x.path for x in reversed(self._bodies.get(name, [])) if x.path)
        for ahead in (True, False):
            front = [instruction]
            for _ in range(reach):
                front = [y for x in front for y in (self._users.get(x.name, []) if ahead else self._operands(x))]
                yield from (x.path for x in front if x.path)

    def _operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    def _weights(self, instruction: Instruction) -> str:
        """Returns the module whose parameters an instruction reads, or ""."""
        for name in instruction.operands:
            origin = self._origin(name)
            if origin.startswith("params[") and (module := _module(re.findall(r"\['(\w+)'\]", origin)[1:-1])):
                return module
        return ""

    def _origin(self, name: str) -> str:
        """Returns the program's argument behind an operand, through views and loop states; "" if it is computed."""
        while (instruction := self.instructions.get(name)) is not None:
            if instruction.opcode in _VIEWS:
                name = instruction.operands[0]
            elif instruction.opcode == "get-tuple-element":
                name = self._element(instruction)
            else:
                entry = instruction.opcode == "parameter" and instruction.computation not in self.callers
                return instruction.op_name if entry else ""
        return ""

    def _element(self, instruction: Instruction) -> str:
        """Returns the operand that a get-tuple-element reads from a tuple or a loop's first state; "" if unknown."""
        state = self.instructions.get(instruction.operands[0])
        if state is not None and state.opcode == "parameter" and state.computation in self.callers:
            caller = self.callers[state.computation]
            branch = caller.opcode == "conditional"
            operand = 1 + caller.called.index(state.computation) if branch else state.index
            state = self.instructions.get(caller.operands[operand])
        return state.operands[instruction.index] if state is not None and state.opcode == "tuple" else ""


def place_of(path: str) -> Place:
    """Returns the place that an `op_name` names; merged instructions have joined names, of which the first counts."""
    path = path.partition(";")[0]
    path = path[path.rindex(path.partition("/")[0]) :]  # inlining puts the caller's path before the callee's
    inside = _ROUND.match(path)
    if inside is None:
        return Place((PREFILL,), _module(path.split("/")[1:-1], path)) if path else Place((OTHER,))
    *tokens, primitive = inside[1].split("/")
    scope_indices = [n for n, token in enumerate(tokens) if token in SCOPES]
    if not scope_indices:
        return Place((OTHER,))
    return Place(tuple(tokens[n] for n in scope_indices), _module(tokens[scope_indices[-1] + 1 :], primitive))


def _module(tokens: Sequence[str], primitive: str = "") -> str:
    """Returns the part of the model that flax's names point to: the first below the layer; all norms are one part."""
    names = [token.partition(".")[0] for token in tokens if not _PLUMBING.match(token)]
    for name in names:
        if not _MODEL.match(name):
            return "norms" if name.endswith("norm") else name
    return "" if not names else CACHE if primitive in _WRITES else REST


def _instruction(match: re.Match[str], computation: str) -> Instruction:
    name, shape, opcode, operands, rest = match.groups()
    op_name = _OP_NAME.search(rest)
    number = re.search(r"index=(\d+)", rest) if opcode != "parameter" else re.match(r"(\d+)", operands)
    called = tuple(x for group in _CALLED.findall(rest) for x in _REFERENCE.findall(group))
    return Instruction(
        name=name, opcode=opcode, shape=shape, computation=computation, called=called,
        operands=tuple(_REFERENCE.findall(operands)), index=int(number[1]) if number else 0,
        op_name=op_name[1].replace("\\'", "'") if op_name else "",
    )  # fmt: skip
