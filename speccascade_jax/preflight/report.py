"""Reports of compiled programs: memory, HBM traffic, compute, ops, collectives, and the band of a round's times.

A child process compiles the program and lets the compiler write its final schedules (`bundles`). The child process
reads these files and deletes them. A *band* is a range of possible times.
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
    """Costs of one stage of a program, or of the whole program, on one device. Numbers are sums over one run.

    Attributes:
        hbm_bytes: bytes that are moved between HBM and the core.
        cycles: bundles that the core issues (`bundles`).
        ops: instructions that have their own schedule and have to be started, including collectives. On a GPU: kernels
            and copies.
        transfers: copies that run at the same time as ops (`copy-start`, `slice-start`).
        scalar_ops: small instructions that are part of the program's own schedule.
        collectives: number of messages between devices; sent_bytes: their total size in bytes.
        unnamed_bytes, unnamed_cycles: the part of the bytes and cycles that belongs to instructions without a scope,
            which XLA added.
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
        """Returns these costs plus `times` times the `other` costs."""
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
    """Memory that a program needs on each device, in bytes, as its compiler reports it.

    Attributes:
        arguments: parameters, states and prompts; outputs: results; aliases: outputs that are written in place of
            arguments.
        temporaries: intermediate arrays; code: the program itself.
    """

    arguments: int
    outputs: int
    aliases: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """Bytes that have to fit: the sum of all parts, with aliases counted once."""
        return self.arguments + self.outputs - self.aliases + self.temporaries + self.code


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Work of the host in one run of a program on a GPU (`gpu`).

    Attributes:
        captured: kernels in command buffers (CUDA graphs), which the host does not start one by one.
        graphs: number of command buffers that the host starts.
        host_waits: how often the host waits for a value from the GPU, to decide whether a loop continues or which
            branch runs.
        loops, conditionals: numbers of loops and conditionals that the run executes.
    """

    captured: float = 0.0
    graphs: float = 0.0
    host_waits: float = 0.0
    loops: int = 0
    conditionals: int = 0


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one training step, if every row of its batch is full.

    Attributes:
        tokens: target tokens of all rows.
        flops: floating-point operations of the model, by `training.finetune.watching.training_flops`.
        devices: number of devices that share the work.
    """

    tokens: int
    flops: float
    devices: int


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Collectives of one kind in one run of a program, on one device.

    Attributes:
        count: their number.
        sent_bytes: sum over the collectives of the bytes of each one's largest array.
        largest: bytes of the largest array of any of them.
    """

    count: float = 0.0
    sent_bytes: float = 0.0
    largest: int = 0


@dataclass(frozen=True, kw_only=True)
class Band:
    """Range of times that one run of a program may take, in seconds.

    At the low end, starting an op takes no time; at the high end, every start takes as long as `Chip.launch`.

    Attributes:
        memory, compute: seconds of HBM traffic and of compute, which overlap; compute is 0 for a GPU, where it is
            unknown.
        collectives: seconds spent on messages between devices.
        starts: seconds spent on starting ops at the high end.
    """

    memory: float
    compute: float
    collectives: float
    starts: float

    @property
    def low(self) -> float:
        """Low end, in seconds: the larger of traffic and compute, plus collectives."""
        return max(self.memory, self.compute) + self.collectives

    @property
    def high(self) -> float:
        """High end, in seconds: the low end plus the largest cost of starting every op."""
        return self.low + self.starts

    @property
    def bound(self) -> str:
        """The largest part of the time: "memory", "compute", "collectives" or "ops" (their starts)."""
        parts = {"memory": self.memory, "compute": self.compute, "collectives": self.collectives, "ops": self.starts}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report on one program, computed from the program as compiled for a chip; nothing is measured.

    Attributes:
        job: the arguments of `preflight.report`.
        chip: name of the chip.
        memory: bytes on each device.
        stages: costs by stage (`execution.STAGES`).
        more: the costs that are added to a round by one more pass of the draft model ("draft") and by one more call
            that brings its cache up to date ("catch-up"); empty for other parts of decoding.
        complete: whether the draft's cache is complete after every round, so that the draft never has to catch up.
        cache_copies: how often a run copies a whole cache within a loop.
        kernels: names of hand-written kernels (Pallas).
        f64: number of instructions on 64-bit floats; callbacks: number of calls to Python on the host.
        compile_memory: peak bytes of the process that compiled.
        compile_seconds: time of the compiler; it includes writing the dump if `dumped` is true.
        dumped: whether the compiler's dump was read, for cycles (TPU) or command buffers (GPU).
        launches: the work of a GPU's host; `None` for a TPU.
        messages: collectives by kind, such as "all-gather".
        work: the work of a training step; `None` for other parts.
        assumed: the assumptions about numbers that the program's text does not contain, as texts.
        versions: versions of jax and of the compiler.
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
        """Sum of the costs over all stages."""
        return summed(self.stages.values())

    @property
    def band(self) -> Band:
        """Range of times that one run may take, in seconds."""
        return band(self.total, chip_of(self.chip))

    @property
    def fits(self) -> bool:
        """Whether the program's memory fits the chip."""
        return self.missing <= 0

    @property
    def missing(self) -> int:
        """Bytes by which the program exceeds the chip's memory; negative if memory is left."""
        return self.memory.peak - chip_of(self.chip).memory

    @property
    def utilisation(self) -> tuple[float, float] | None:
        """Lowest and highest share of the devices' peak speed that a training step reaches (MFU)."""
        if self.work is None:
            return None
        chip = chip_of(self.chip)
        at_peak = self.work.flops / (self.work.devices * chip.flops)
        return at_peak / self.band.high, at_peak / self.band.low

    def as_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
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
    """Returns the range of times that a run with these costs may take on a chip."""
    return Band(
        memory=costs.hbm_bytes / chip.bandwidth,
        compute=costs.cycles / chip.clock if chip.clock else 0.0,
        collectives=costs.collectives * chip.latency + costs.sent_bytes / chip.link,
        starts=costs.ops * chip.launch,
    )


def account(execution: Execution, cycles: Mapping[str, int] | None) -> dict[str, Costs]:
    """Returns the costs of a run, by stage.

    Args:
        execution: what the run executes.
        cycles: cycles of every instruction that has its own schedule; `None` if schedules were not read. Every
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
    """Returns how often a run writes a whole cache inside a loop, instead of updating a few entries in place.

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
    # A fusion with an update returns the array that it reads, updated in place, and copies nothing.
    return not {part.opcode for part in inside.instructions} & {"dynamic-update-slice", "scatter"}
