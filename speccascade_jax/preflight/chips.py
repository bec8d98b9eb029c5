"""Accelerators as data: memory, bandwidth, peak speed and clock of each, with their sources.

TPU figures are those of Google Cloud's pages on each version (cloud.google.com/tpu/docs), clocks those of "How to Scale
Your Model" (jax-ml.github.io/scaling-book, 2025). GPU figures are those of NVIDIA's data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass

from speccascade_jax.core.names import hint

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One device of an accelerator, as JAX counts devices.

    Attributes:
        name: the first part of a topology's name.
        memory: bytes of its HBM.
        bandwidth: bytes per second between HBM and the core.
        flops: peak bfloat16 operations per second.
        clock: bundles per second of a TPU core; 0 for a GPU.
        launch: the largest cost of starting one op (TPU) or one kernel (GPU), in seconds; the smallest is 0.
        link: bytes per second of a collective; latency: seconds of a small one.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    clock: float = 0.0
    launch: float = 1e-6
    link: float = 86e9
    latency: float = 5e-6

    @property
    def is_gpu(self) -> bool:
        """Whether the chip is a GPU."""
        return not self.clock


def _tpu(name: str, gib: int, gigabytes_per_second: float, teraflops: float, gigahertz: float) -> Chip:
    return Chip(
        name=name, memory=gib * GIB, bandwidth=gigabytes_per_second * 1e9, flops=teraflops * 1e12,
        clock=gigahertz * 1e9,
    )  # fmt: skip


CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v4", 32, 1228, 275, 1.05),
        _tpu("v5e", 16, 819, 197, 1.5),
        _tpu("v5p", 95, 2765, 459, 1.75),
        _tpu("v6e", 32, 1638, 918, 1.75),
        # two devices on a chip, each with half of its memory and speed; the clock follows from the peak speed
        _tpu("tpu7x", 96, 3690, 1153, 2.2),
    )
}
"""The accelerators that programs can be compiled for, by name."""


def chip_of(topology: str) -> Chip:
    """Returns the chip of a topology such as "v5e:2x4".

    Raises:
        ValueError: no such chip; names the known ones.
    """
    name = topology.split(":")[0]
    if name not in CHIPS:
        raise ValueError(f"topology={topology!r}: {hint(name, CHIPS)}the chips are {', '.join(CHIPS)}")
    return CHIPS[name]
