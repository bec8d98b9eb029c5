"""Reports of compiled programs: memory, HBM traffic, compute, ops, collectives, and the time of a round as a band.

A program is compiled in a child process, with the compiler's dump of final schedules switched on (`bundles`). The child
reads what it needs and deletes the dump.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from speccascade_jax.preflight import traffic
from speccascade_jax.preflight.chips import Chip, chip_of
from speccascade_jax.preflight.execution import STAGES, Execution, Step


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a stage of a program, or of all of it, on one device. Numbers are sums over one run.

    Attributes:
        hbm_bytes: bytes between HBM and the core.
        cycles: bundles that the core issues (`bundles`).
        ops: instructions with a schedule of their own, which have to be started; collectives among them. On a GPU:
            kernels and copies.
        transfers: copies that run beside the ops (`copy-start`, `slice-start`).
        scalar_ops: small instructions that are part of the program's own schedule.
        collectives: messages between devices; sent_bytes: their bytes.
        unnamed_bytes, unnamed_cycles: the share of instructions without a scope, which XLA made.
    """

    hbm_bytes: float = 0.0
    cycles: float = 0.0
    ops: float = 0.0
    transfers: float = 0.0
    scalar_ops: float = 0.0
    collectives: float = 0.0
    sent_bytes: float = 0.0
    unnamed_bytes: float = 0.0
    unnamed_cycles: float = 0.0

    def plus(self, other: Costs, times: float = 1.0) -> Costs:
        """Returns the sum of these costs and `times` others."""
        values = {name: getattr(self, name) + times * getattr(other, name) for name in _NAMES}
        return Costs(**values)


def summed(parts: Iterable[Costs]) -> Costs:
    """Returns the sum of some costs."""
    total = Costs()
    for costs in parts:
        total = total.plus(costs)
    return total


_NAMES = [part.name for part in dataclasses.fields(Costs)]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a program needs on each device, as its compiler states them.

    Attributes:
        arguments, outputs: parameters, states and prompts, and results; aliases: outputs in the place of arguments.
        temporaries: everything between; code: the program itself.
    """

    arguments: int
    outputs: int
    aliases: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """Bytes that have to fit: everything at once, aliases counted once."""
        return self.arguments + self.outputs - self.aliases + self.temporaries + self.code


@dataclass(frozen=True, kw_only=True)
class Launches:
    """The work of a GPU's host in one run of a program (`gpu`).

    Attributes:
        captured: kernels in command buffers (CUDA graphs), which start without the host.
        graphs: command buffers that the host starts.
        host_waits: times that the host waits for a value of the GPU, to decide on a loop's next turn or on a branch.
        loops, conditionals: those that a run meets.
    """

    captured: float = 0.0
    graphs: float = 0.0
    host_waits: float = 0.0
    loops: int = 0
    conditionals: int = 0


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one training step, if every row of its batch is full.

    Attributes:
        tokens: target tokens of all rows.
        flops: operations of the model by `training.finetune.watching.training_flops`.
        devices: number of devices that share it.
    """

    tokens: int
    flops: float
    devices: int


@dataclass(frozen=True, kw_only=True)
class Messages:
    """The collectives of one kind in one run of a program, on one device.

    Attributes:
        count: their number.
        sent_bytes: sum of the bytes of their largest arrays.
        largest: bytes of the largest array of any of them.
    """

    count: float = 0.0
    sent_bytes: float = 0.0
    largest: int = 0


@dataclass(frozen=True, kw_only=True)
class Band:
    """Seconds of one run of a program: the least, and with every op's start at its highest cost.

    Attributes:
        memory, compute: seconds that traffic and compute take alone; they overlap. A GPU's compute is not known: 0.
        collectives: seconds of waiting for other devices.
        starts: seconds of starting ops, at most.
    """

    memory: float
    compute: float
    collectives: float
    starts: float

    @property
    def low(self) -> float:
        """The larger of traffic and compute, plus collectives."""
        return max(self.memory, self.compute) + self.collectives

    @property
    def high(self) -> float:
        """The low end plus the start of every op."""
        return self.low + self.starts

    @property
    def bound(self) -> str:
        """The largest part: "memory", "compute", "collectives" or "ops"."""
        parts = {"memory": self.memory, "compute": self.compute, "collectives": self.collectives, "ops": self.starts}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, kw_only=True)
class Report:
    """A compiler's account of one program. All of it is compiled for a chip, nothing is measured.

    Attributes:
        job: the arguments of `preflight.report`.
        chip: name of the chip.
        memory: bytes on each device.
        stages: costs by stage (`execution.STAGES`).
        more: the costs that one more pass of the draft model ("draft") and one more call that brings its cache up to
            date ("catch-up") add to a round; empty for other parts.
        complete: whether a round leaves the draft's cache complete, so that it never has to catch up.
        cache_copies: runs of an instruction that copies a whole cache within a loop.
        kernels: names of hand-written kernels (Pallas).
        f64: instructions on 64-bit floats; callbacks: calls of the host.
        compile_memory: peak bytes of the process that compiled.
        compile_seconds: time of the compiler, without the dump if `dumped` is false.
        dumped: whether cycles were read from final schedules, and command buffers of a GPU from its dump.
        launches: the work of a GPU's host; `None` for a TPU.
        messages: collectives by kind, such as "all-gather".
        work: the work of a training step; `None` for other parts.
        assumed: numbers that the program does not hold, in words.
        versions: of jax and of the compiler.
    """

    job: Mapping[str, Any]
    chip: str
    memory: Memory
    stages: Mapping[str, Costs]
    more: Mapping[str, Costs] = field(default_factory=dict)
    complete: bool = False
    cache_copies: float = 0
    kernels: Sequence[str] = ()
    f64: int = 0
    callbacks: int = 0
    compile_seconds: float = 0.0
    compile_memory: int = 0
    dumped: bool = True
    launches: Launches | None = None
    messages: Mapping[str, Messages] = field(default_factory=dict)
    work: Work | None = None
    assumed: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> Costs:
        """The sum over stages."""
        return summed(self.stages.values())

    @property
    def band(self) -> Band:
        """Seconds of one run."""
        return band(self.total, chip_of(self.chip))

    @property
    def fits(self) -> bool:
        """Whether the program's memory fits the chip."""
        return self.missing <= 0

    @property
    def missing(self) -> int:
        """Bytes by which the program exceeds the chip's memory, negative where there is room."""
        return self.memory.peak - chip_of(self.chip).memory

    @property
    def utilisation(self) -> tuple[float, float] | None:
        """The share of the devices' peak that a training step's operations are, least and most (MFU)."""
        if self.work is None:
            return None
        chip = chip_of(self.chip)
        at_peak = self.work.flops / (self.work.devices * chip.flops)
        return at_peak / self.band.high, at_peak / self.band.low

    def as_json(self) -> dict[str, Any]:
        """Returns the report as values of JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Report:
        """Returns the report that `as_json` described."""
        parts = dict(values) | {"memory": Memory(**values["memory"])}
        for kind in ("stages", "more"):
            parts[kind] = {name: Costs(**costs) for name, costs in values.get(kind, {}).items()}
        parts["messages"] = {name: Messages(**costs) for name, costs in values.get("messages", {}).items()}
        parts["work"] = Work(**values["work"]) if values.get("work") else None
        parts["launches"] = Launches(**values["launches"]) if values.get("launches") else None
        return cls(**parts)


def band(costs: Costs, chip: Chip) -> Band:
    """Returns the time of costs on a chip: the larger of traffic and compute, plus collectives, plus starts."""
    return Band(
        memory=costs.hbm_bytes / chip.bandwidth,
        compute=costs.cycles / chip.clock if chip.clock else 0.0,
        collectives=costs.collectives * chip.latency + costs.sent_bytes / chip.link,
        starts=costs.ops * chip.launch,
    )


def account(execution: Execution, cycles: Mapping[str, int] | None) -> dict[str, Costs]:
    """Returns the costs of a run by stage.

    Args:
        execution: what the run executes.
        cycles: cycles of every instruction that has a schedule of its own; `None` if none was read, and every
            instruction then counts as an op.
    """
    stages: dict[str, Costs] = {}
    for step in execution.steps:
        stages[step.stage] = stages.get(step.stage, Costs()).plus(_cost(execution, step, cycles), step.times)
    return {name: stages[name] for name in STAGES if name in stages}


def _cost(execution: Execution, step: Step, cycles: Mapping[str, int] | None) -> Costs:
    instruction = step.instruction
    computation = execution.module.computations[step.computation]
    moved = traffic.hbm_bytes(execution.module, computation, instruction)
    message = traffic.message(execution.module, instruction)
    transfer = message is None and instruction.opcode.endswith("-start")
    bundles = (cycles or {}).get(instruction.name, 0)
    alone = not transfer and (cycles is None or instruction.name in cycles or message is not None)
    return Costs(
        hbm_bytes=moved,
        cycles=bundles,
        ops=float(alone),
        transfers=float(transfer),
        scalar_ops=float(not alone and not transfer),
        collectives=float(message is not None),
        sent_bytes=message[1] if message else 0,
        unnamed_bytes=0 if step.named else moved,
        unnamed_cycles=0 if step.named else bundles,
    )


def messages(execution: Execution) -> dict[str, Messages]:
    """Returns the collectives that a run executes, by kind."""
    kinds: dict[str, Messages] = {}
    for step in execution.steps:
        message = traffic.message(execution.module, step.instruction)
        if message is not None:
            kind, size = message
            before = kinds.get(kind, Messages())
            kinds[kind] = Messages(
                count=before.count + step.times,
                sent_bytes=before.sent_bytes + step.times * size,
                largest=max(before.largest, size),
            )
    return kinds


def cache_copies(execution: Execution, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> float:
    """Returns how often a run writes a whole cache inside a loop, where an update in place would write a few entries.

    Args:
        execution: what the run executes.
        shapes: dtype and shape of the caches' arrays on one device.
    """
    wanted = {(dtype, tuple(sorted(shape))) for dtype, shape in shapes}
    return sum(step.times for step in execution.steps if step.in_loop and _rewrites(execution, step, wanted))


def _rewrites(execution: Execution, step: Step, wanted: set[tuple[str, tuple[int, ...]]]) -> bool:
    instruction = step.instruction
    if not wanted & {(array.dtype, tuple(sorted(array.shape))) for array in instruction.results}:
        return False
    if instruction.opcode != "fusion":
        return instruction.opcode in ("copy", "transpose", "select", "reverse", "concatenate")
    inside = execution.module.computations[str(instruction.called("calls"))]
    # a fusion that updates in place reads the array that it returns, and nothing else of its size
    return not {part.opcode for part in inside.instructions} & {"dynamic-update-slice", "scatter"}
