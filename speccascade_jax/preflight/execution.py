"""Instructions that one run of a compiled program executes: how often, in which loop, and at which stage of a round.

Constants in a program determine how often some of its loops run (`trips`). Other loops and branches depend on the data:
how many tokens are drafted, whether the draft has to read a missing token first (it *catches up*), and which branch
sampling takes. `Assumptions` contains these numbers, and `Execution.assumed` lists those that were used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from speccascade_jax.preflight import trips
from speccascade_jax.preflight.hlo import Computation, Instruction, Module

FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "while")
    + ("conditional", "call", "add-dependency", "partition-id", "replica-id", "domain")
)
"""Opcodes that cost nothing themselves; the computations that some of them call are counted separately."""
_FREE_CALLS = ("ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound")

STAGES = ("prefill", "draft", "catch-up", "score", "sampling", "verify", "commit", "unnamed")
"""Parts of a round, named by the engine's scopes. Instructions that XLA adds outside every scope are "unnamed"."""
_BY_SCOPE = (
    (r"/catch_up(/|$)", "catch-up"),
    (r"/draft(/|$)", "draft"),
    (r"/score(/|$)", "score"),
    (r"/sampling(/|$)", "sampling"),
    (r"/verify(/|$)", "verify"),
    (r"/commit(/|$)", "commit"),
    # The target is called at one of several block widths, in a loop whose scope names only the width. It is scoring.
    (r"/width_\d+(/|$)", "score"),
)


@dataclass(frozen=True)
class Assumptions:
    """Assumed numbers of iterations and assumed branches, which a program's text does not contain.

    Attributes:
        loops: pattern of a loop's scope -> its iterations; the first pattern that matches counts. Loops that match no
            pattern run once.
        branches: pattern of a conditional's scope and its number of branches ("sampling/case/cond:3") -> the branch
            that is taken. If no pattern matches, the branch with most instructions counts.
        needed: patterns of `loops` that a user wrote, each of which must match a loop.
    """

    loops: Mapping[str, float] = field(default_factory=dict)
    branches: Mapping[str, int] = field(default_factory=dict)
    needed: tuple[str, ...] = ()

    def check(self, module: Module) -> None:
        """Raises a ValueError that lists the program's loops, if a pattern in `needed` matches none of them."""
        scopes = sorted({part.scope for computation in module for part in computation.instructions if _is_loop(part)})
        for pattern in self.needed:
            if not any(re.search(pattern, scope) for scope in scopes):
                raise ValueError(
                    f"loops={{{pattern!r}: …}} fits no loop of the program: give a pattern that matches one of {scopes}"
                )

    def iterations(self, loop: Instruction, counted: int | None = None) -> tuple[float, str]:
        """Returns a loop's iterations, and the assumption as text; the text is empty if nothing had to be assumed.

        Args:
            loop: the loop.
            counted: its iterations if constants in the program determine them (`trips`), otherwise `None`.
        """
        known = counted if loop.trip_count is None else loop.trip_count
        if known is not None:
            return known, ""
        for pattern, count in self.loops.items():
            if re.search(pattern, loop.scope):
                return count, f"{count:g} × loop {_short(loop.scope)}"
        return 1, f"1 × loop {_short(loop.scope)}"

    def branch(self, conditional: Instruction) -> int | None:
        """Returns the branch that a conditional takes; `None` if no pattern matches."""
        scope = f"{conditional.scope}:{len(conditional.branches)}"
        return next((index for pattern, index in self.branches.items() if re.search(pattern, scope)), None)


@dataclass(frozen=True)
class Step:
    """One instruction, and how a run executes it.

    Attributes:
        instruction: the instruction.
        computation: the name of its computation.
        times: how often it runs.
        stage: one of `STAGES`.
        in_loop: whether it is in the body of a loop.
        named: whether the instruction itself has a scope; if not, its stage is that of the first reader of its value,
            or of the loop around it.
    """

    instruction: Instruction
    computation: str
    times: float
    stage: str
    in_loop: bool
    named: bool


@dataclass(frozen=True)
class Execution:
    """Result of `execute`: the instructions that one run of a program executes.

    Attributes:
        module: the program.
        steps: its instructions without those in `FREE`.
        assumed: the assumptions that were used, as texts.
        decisions: its loops and conditionals; `times` counts how often their condition or predicate is evaluated.
    """

    module: Module
    steps: tuple[Step, ...]
    assumed: tuple[str, ...]
    decisions: tuple[Step, ...] = ()


def execute(module: Module, assumptions: Assumptions, start: str = "unnamed", host_counts: bool = False) -> Execution:
    """Returns the instructions that a run executes, under assumptions.

    Args:
        module: the program.
        assumptions: numbers that the program's text does not hold.
        start: the stage to which instructions outside every scope and loop are assigned.
        host_counts: whether the host counts the iterations of loops whose number is known, as it does for GPUs; their
            conditions are then not computed.
    """
    assumptions.check(module)
    walk = _Walk(module, assumptions, host_counts)
    steps = tuple(walk.computation(module.entry, 1.0, start, False))
    return Execution(module, steps, tuple(dict.fromkeys(walk.assumed)), tuple(walk.decisions))


def _is_loop(instruction: Instruction) -> bool:
    return instruction.opcode == "while"


class _Walk:
    def __init__(self, module: Module, assumptions: Assumptions, host_counts: bool = False):
        self.module, self.assumptions, self.assumed = module, assumptions, list[str]()
        self.host_counts, self.decisions = host_counts, list[Step]()
        # A training step has no stages, and a search for one at each of its many instructions would take long.
        self.staged = any(stage_of(part.scope) for computation in module for part in computation.instructions)

    def computation(self, name: str, times: float, stage: str, in_loop: bool) -> Iterator[Step]:
        computation = self.module.computations[name]
        for instruction in computation.instructions:
            named = stage_of(instruction.scope)
            current = named or (_stage_of_users(computation, instruction) if self.staged else "") or stage
            if _is_loop(instruction):
                yield from self._loop(computation, instruction, times, current)
            elif instruction.opcode == "conditional":
                self.decisions.append(Step(instruction, name, times, current, in_loop, bool(named)))
                yield from self._conditional(instruction, times, current, in_loop)
            elif instruction.opcode == "call":
                yield from self.computation(str(instruction.called("to_apply")), times, current, in_loop)
            elif not is_free(instruction):
                yield Step(instruction, name, times, current, in_loop, bool(named))

    def _loop(self, around: Computation, loop: Instruction, times: float, stage: str) -> Iterator[Step]:
        count, said = self.assumptions.iterations(loop, trips.trip_count(self.module, around, loop))
        self.assumed += [said] if said else []
        # A loop evaluates its condition once more than its body.
        evaluated = 0.0 if self.host_counts and loop.trip_count is not None else times * (count + 1)
        self.decisions.append(Step(loop, around.name, evaluated, stage, True, bool(loop.scope)))
        if evaluated:
            yield from self.computation(str(loop.called("condition")), evaluated, stage, True)
        if count:
            yield from self.computation(str(loop.called("body")), times * count, stage, True)

    def _conditional(self, conditional: Instruction, times: float, stage: str, in_loop: bool) -> Iterator[Step]:
        chosen = self.assumptions.branch(conditional)
        if chosen is None:
            before = list(self.assumed), list(self.decisions)
            bodies = [list(self.computation(name, times, stage, in_loop)) for name in conditional.branches]
            chosen = max(range(len(bodies)), key=lambda number: len(bodies[number]))
            self.assumed, self.decisions = before
        self.assumed.append(f"branch {chosen} of {len(conditional.branches)} at {_short(conditional.scope)}")
        yield from self.computation(conditional.branches[chosen], times, stage, in_loop)


def _stage_of_users(computation: Computation, instruction: Instruction) -> str:
    """Returns the stage of an instruction's first reader, because copies that XLA adds have no scope of their own."""
    seen, queue = {instruction.name}, [instruction.name]
    for name in queue:  # the list grows while the loop reads it
        for user in computation.users.get(name, []):
            if stage := stage_of(user.scope):
                return stage
            if user.name not in seen:
                seen.add(user.name)
                queue.append(user.name)
    return ""


def is_free(instruction: Instruction) -> bool:
    """Returns whether an instruction costs nothing: it only names, reshapes or groups values, or ends a transfer."""
    if instruction.opcode == "custom-call":
        return instruction.target in _FREE_CALLS
    return instruction.opcode in FREE or instruction.opcode.endswith("-done")


def stage_of(scope: str) -> str:
    """Returns the stage of a scope, empty if the scope names none."""
    return next((stage for pattern, stage in _BY_SCOPE if re.search(pattern, scope)), "")


def _short(scope: str) -> str:
    """Returns a scope without the compiled function's name and without the words that all loops' scopes contain."""
    parts = [part for part in scope.split("/")[1:] if part not in ("body", "closed_call", "cond", "while")]
    return "/".join(parts) or "of rounds"
