"""Profiler traces: the wall-clock time of each instruction of a compiled program, and its place in a decoding round.

On a CPU, XLA runs a generation's instructions one after another. Each instruction runs on any free thread of a pool,
and a large matrix product runs on several threads at once. So the times here are wall-clock times, not sums over
threads. Each moment is attributed to the instruction that runs then (half to each if two run at once), never to the
loop around it. A moment without a running instruction is waiting time of the instruction that starts next. On an
accelerator, the device's own plane of the trace is read; nobody has tested this on an accelerator yet.

The engine names the parts of a round with `jax.named_scope`, flax names its modules, and XLA writes both names into an
instruction's `op_name`: `jit(_generate)/while/body/draft/while/body/T5Module.extend/decoder/layers_0/mlp/mul`. The
compiler drops the names of some instructions, among them most matrix products. The place of such an instruction is
inferred from the weights that it reads and from the named instructions next to it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jax.profiler import ProfileData

_END = "end: "  # prefix of XLA:CPU's events that report the end of an instruction on other threads


@dataclass(frozen=True)
class Event:
    """One execution of an instruction, with times in ns on the clock of the trace.

    Attributes:
        begin, end: begin and end of the work on the thread that started the instruction.
        done: time at which other threads are known to have finished their parts. XLA may run the next instruction
            before it reports this time; if the next instruction begins earlier, the parts had finished by then.
        run: number of the program's run that the execution belongs to.
    """

    name: str
    begin: float
    end: float
    done: float
    run: int


@dataclass(kw_only=True)
class Spent:
    """Time of one instruction, summed over its executions: ns running, and ns of waiting before it starts.

    `count` is the number of executions.
    """

    running: float = 0.0
    waiting: float = 0.0
    count: int = 0

    @property
    def total(self) -> float:
        """Sum of running and waiting time, in ns."""
        return self.running + self.waiting


def read_runs(folder: Path | str, module: str, count: int) -> list[list[Event]]:
    """Returns the executions of one program's instructions in a trace: a list for each run, ordered by time.

    Args:
        folder: the folder that `jax.profiler.trace` wrote to; if it holds several traces, the newest is read.
        module: the program's name, such as `jit_generate`.
        count: number of the program's runs in the trace.

    Raises:
        FileNotFoundError: the folder holds no trace. ValueError: the trace does not have `count` runs of that program.
    """
    files = sorted(Path(folder).rglob("*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"no trace (*.xplane.pb) in {folder}; did the profiler start?")
    # An accelerator has its own plane in the trace, and the host's plane shows only launches. A CPU has only the host's
    # plane.
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
    """Divides the time of every run among its instructions; the shares add up to the time from first begin to last end.

    Args:
        runs: executions of each run, ordered by time.
        is_control: returns whether the instruction of this name is a loop, a branch or a call. The time of such an
            instruction is attributed to the instructions inside it, if there are any.
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
    """Returns name, begin and end of those executions inside which no other instruction runs.

    A loop, branch or call that XLA compiled into one kernel contains no other instruction, so it counts like any other.
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

_ROUND = re.compile(r"^(?:jit\([^/]*\)/)+while/(?:body|cond)/(.*)$")  # the outermost loop runs over rounds
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")
_REFERENCE = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CONTROL = ("while", "conditional", "call")
_VIEWS = ("bitcast", "copy", "transpose", "convert", "reshape")
# Names that the engine gives to branches of sampling and to block widths for `preflight`. They are no parts of a model.
_BRANCHES = r"is_greedy|is_identity|identity_greedy_or_scaled|truncates|width_\d+"
_PLUMBING = re.compile(rf"^(?:while|body|cond|branch_\d+_fun|closed_call|{_BRANCHES}|.*[(<].*)$")
_MODEL = re.compile(r"^(?:[A-Z]\w*|model|encoder|decoder|layers(?:_\d+)?)$")
_WRITES = ("scatter", "dynamic_update_slice")


@dataclass(frozen=True)
class Place:
    """Place of an instruction in a round: `phase`, a path of scopes, and `module`, the part of the model or ""."""

    phase: tuple[str, ...]
    module: str = ""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of the text of a compiled program.

    Attributes:
        operands, called: names of the instructions that it reads, and of the computations that it runs.
        op_name: the name from the source code, or "" if the compiler gives none; for a parameter, the name of the
            argument, `params['target']['…']`.
        index: index in the tuple for a get-tuple-element, or the number of a parameter.
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
        """The `op_name` if it is a path from the start of the program, else ""."""
        return self.op_name if self.op_name.startswith("jit(") else ""


@dataclass(frozen=True)
class HloText:
    """Text of a compiled program, parsed into instructions by name."""

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
        """Map from the name of a computation to the instruction that runs it."""
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
        """Returns whether other instructions run inside this instruction: it is a loop, a branch or a call."""
        return name in self.instructions and self.instructions[name].opcode in _CONTROL

    def place(self, name: str) -> Place:
        """Returns the place of an instruction in a round; the phase is `(OTHER,)` if the place is unknown."""
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
        # Code outside the loop over rounds counts as prefill, whatever its name says: the compiler moves loop-invariant
        # code of a round out of the loop.
        if around.phase == (PREFILL,):
            return Place(around.phase, named.module)
        return around if OTHER in named.phase else named

    def _enclosing(self, instruction: Instruction) -> str:
        """Returns the path of the innermost named loop or branch around an instruction; "jit()/" if there is none."""
        caller = self.callers.get(instruction.computation)
        while caller is not None and not caller.path:
            caller = self.callers.get(caller.computation)
        if caller is None:
            return "jit()/"
        return caller.path + ("/body/" if caller.opcode == "while" else "/")

    def _near(self, instruction: Instruction, reach: int = 4) -> Iterator[str]:
        """Yields the paths nearest to an instruction: first inside it, then of its users, then of its operands."""
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
        """Returns the program argument behind an operand, through views and loop states; "" if it is computed."""
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
        """Returns the operand that a get-tuple-element reads from a tuple or an initial loop state; "" if unknown."""
        state = self.instructions.get(instruction.operands[0])
        if state is not None and state.opcode == "parameter" and state.computation in self.callers:
            caller = self.callers[state.computation]
            branch = caller.opcode == "conditional"
            operand = 1 + caller.called.index(state.computation) if branch else state.index
            state = self.instructions.get(caller.operands[operand])
        return state.operands[instruction.index] if state is not None and state.opcode == "tuple" else ""


def place_of(path: str) -> Place:
    """Returns the place that an `op_name` describes.

    XLA joins the names of merged instructions; only the first name counts.
    """
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
    """Returns the part of the model in a path of flax names: the first name below the layer; all norms are one part."""
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
