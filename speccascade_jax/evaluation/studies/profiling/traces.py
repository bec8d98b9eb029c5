"""What ran when and where it belongs: each instruction's own wall-clock time in a trace, and its part of a round.

XLA on a CPU runs a generation's instructions one after another, on whichever pool thread is free, and a large product
on several threads at once. So time is wall-clock time on one axis, not time of a thread: a moment belongs to the
instruction that runs then (halved between two that run at once), never to the loop around it, and a moment in which
none runs is the waiting time of the one that starts next. On an accelerator the device's own plane is read; that path
has not been tried on one.

The engine names the parts of a round with `jax.named_scope`, flax names its modules, and XLA writes both into an
instruction's `op_name`: `jit(_generate)/while/body/draft/while/body/T5Module.extend/decoder/layers_0/mlp/mul`. The
compiler drops the name of some instructions, among them most products: they are placed by the weights that they read
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

_END = "end: "  # XLA:CPU's mark that other threads have finished an instruction too


@dataclass(frozen=True)
class Event:
    """One execution of an instruction, in ns on the trace's clock.

    Attributes:
        begin, end: of the thread's work that started it.
        done: when other threads are known to have finished their parts of it. XLA may run what comes after before it
            says so: an instruction that begins in between shows that they had.
        run: which run of the program.
    """

    name: str
    begin: float
    end: float
    done: float
    run: int


@dataclass(kw_only=True)
class Spent:
    """What an instruction cost in all its executions: ns while it ran, ns waited before it, how often."""

    running: float = 0.0
    waiting: float = 0.0
    count: int = 0

    @property
    def total(self) -> float:
        """Running and waiting, ns."""
        return self.running + self.waiting


def read_runs(folder: Path | str, module: str, count: int) -> list[list[Event]]:
    """Returns the executions of one program's instructions in a trace, by run and by time.

    Args:
        folder: what `jax.profiler.trace` wrote to; of several traces the newest is read.
        module: the program's name, such as `jit_generate`; count: how often it ran.

    Raises:
        FileNotFoundError: no trace in the folder. ValueError: the trace does not have `count` runs of that program.
    """
    files = sorted(Path(folder).rglob("*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"no trace (*.xplane.pb) in {folder}; did the profiler start?")
    # An accelerator has a plane of its own, on which the host's is only the launching; a CPU has the host's alone.
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
    found, ends = [], {}
    for line in plane.lines:
        for event in line.events:
            if event.name.startswith(_END):
                ends[dict(event.stats).get("_c")] = event.start_ns
                continue
            stats = dict(event.stats)
            if "hlo_op" in stats and stats.get("hlo_module", module) == module:
                found.append((str(stats["hlo_op"]), event.start_ns, max(event.duration_ns, 1), stats))
    for name, begin, duration, stats in found:
        end = begin + duration
        yield Event(name, begin, end, max(end, ends.get(stats.get("_p"), end)), int(stats.get("run_id", 0)))


def own_times(runs: Iterable[Sequence[Event]], is_control: Callable[[str], bool]) -> dict[str, Spent]:
    """Returns each instruction's share of the time from a run's first beginning to its last end; they add up to it.

    Args:
        runs: each by time; is_control: whether other instructions run inside this one, which is then not in the answer.
    """
    spent: dict[str, Spent] = defaultdict(Spent)
    for run in runs:
        _share(run, is_control, spent)
    return dict(spent)


def _share(run: Sequence[Event], is_control: Callable[[str], bool], spent: dict[str, Spent]) -> None:
    """Walks along the run's beginnings and ends, charging the time since the last one to what was running."""
    leaves = _leaves(run, is_control)
    points = sorted(point for n, (_, begin, end) in enumerate(leaves) for point in ((begin, 1, n), (end, 0, n)))
    active: set[int] = set()
    now = run[0].begin
    for at, begins, n in points:
        for other in active:
            spent[leaves[other][0]].running += (at - now) / len(active)
        if not active:
            spent[leaves[n][0]].waiting += at - now
        if begins:
            active.add(n)
            spent[leaves[n][0]].count += 1
        else:
            active.remove(n)
        now = at


def _leaves(run: Sequence[Event], is_control: Callable[[str], bool]) -> list[tuple[str, float, float]]:
    """Returns name, begin and end of the executions inside which no other runs.

    A loop, branch or call that XLA made one kernel of has none inside: it is an instruction like any other.
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
        """Reads `compiled.as_text()`."""
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
        """Tells whether other instructions run inside this one: a loop, a branch or a call."""
        return name in self.instructions and self.instructions[name].opcode in _CONTROL

    def place(self, name: str) -> Place:
        """Returns where an instruction belongs; phase `(OTHER,)` where nothing tells."""
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
    """Returns where an `op_name` points to; of the joined names of merged instructions, the first."""
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
    called = tuple(x for group in _CALLED.findall(rest) for x in _REFERENCE.findall(group))
    return Instruction(
        name=name, opcode=opcode, shape=shape, computation=computation, called=called,
        operands=tuple(_REFERENCE.findall(operands)), index=int(number[1]) if number else 0,
        op_name=op_name[1].replace("\\'", "'") if op_name else "",
    )  # fmt: skip
