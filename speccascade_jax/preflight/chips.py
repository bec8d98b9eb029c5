"""Table of accelerators: memory, bandwidth, peak speed, clock and links of each, with their sources.

TPUs: memory and bandwidth are from Google Cloud's pages (docs.cloud.google.com/tpu/docs, one for each version), as are
the peak speeds in `runtime.peaks`. The clock of v5e is from "How to Scale Your Model" (jax-ml.github.io/scaling-book).
The clocks of v4 and v5p follow from the peak speed of eight matrix units of 128 by 128. No page states the clocks of
v6e and tpu7x. They follow from the peak speed of two matrix units of 256 by 256 per core, if a bundle starts two
products in each unit. Collectives: marin-community/marin issue 6736 (small ones take 4.5 to 5.9 µs, large ones reach 86
GB/s).

GPUs: memory, bandwidth and all other values that the compiler needs are from XLA's own descriptions of the devices
(github.com/openxla/xla, xla/backends/gpu/target_config/specs), which were read from the devices; an H200's memory is
the one that nvidia-smi shows (143,771 MiB). The other values are in `NVLINK`, `NCCL` and `LAUNCH`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from speccascade_jax.core.names import hint
from speccascade_jax.runtime.peaks import PEAK_FLOPS

GIB = 2**30
MIB = 2**20
START = 1e-6
"""Largest time to start an op on a TPU, in seconds; in public traces small ops take 0.3 to 1 µs."""
LAUNCH = 3e-6
"""Largest time to start a kernel on a GPU, in seconds.

`cuLaunchKernel` takes the host of a GB200 3.0 to 3.3 µs (meta-pytorch/tritonbench pull request 1017). Kernels in a
command buffer (a CUDA graph) start in a fraction of this time.
"""
NVLINK = {"a100": 300e9, "h100": 450e9, "h200": 450e9, "b200": 900e9}
"""Bytes per second of NVLink in one direction ("How to Scale Your Model", chapter on GPUs)."""
NCCL = 370 / 450
"""The share of NVLink that collectives reach: 370 GB/s on an H100 (a maintainer of NCCL, NVIDIA/nccl issue 1442)."""
NCCL_LATENCY = 10e-6
"""Seconds of a small collective: 6 µs on two H100 (NVIDIA/nccl issue 1259), 9.9 µs on A100 (nccl-tests issue 331)."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One device of an accelerator, as JAX counts devices.

    Attributes:
        name: the first part of a topology's name.
        memory: bytes of its HBM that programs may fill.
        bandwidth: bytes per second between HBM and the core.
        flops: peak bfloat16 operations per second, without sparsity.
        clock: bundles per second of a TPU core; 0 for a GPU.
        launch: the largest time to start one op (TPU) or one kernel (GPU), in seconds; the smallest is 0.
        link: bytes per second of a collective; latency: seconds that a small collective takes.
        target_config: a GPU's description for XLA's compiler, a `GpuTargetConfig` as text; empty for a TPU.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    clock: float = 0.0
    launch: float = START
    link: float = 86e9
    latency: float = 5e-6
    target_config: str = ""

    @property
    def is_gpu(self) -> bool:
        """Whether the chip is a GPU."""
        return bool(self.target_config)


def _tpu(name: str, gib: float, gigabytes_per_second: float, gigahertz: float) -> Chip:
    return Chip(
        name=name, memory=int(gib * GIB), bandwidth=gigabytes_per_second * 1e9, flops=PEAK_FLOPS[name],
        clock=gigahertz * 1e9,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Gpu:
    """Values in which GPUs differ, named as in XLA's description if it has such a field.

    Attributes:
        features: whether kernels may use instructions that only this compute capability has (`sm_90a`).
    """

    name: str
    device: str
    memory: int
    bandwidth: int
    core_count: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    l2_cache_size: int
    clock_rate_ghz: float
    capability: int
    features: bool

    @property
    def chip(self) -> Chip:
        return Chip(
            name=self.name, memory=self.memory, bandwidth=self.bandwidth, flops=PEAK_FLOPS[self.name], launch=LAUNCH,
            link=NVLINK[self.name] * NCCL, latency=NCCL_LATENCY, target_config=self.target_config,
        )  # fmt: skip

    @property
    def target_config(self) -> str:
        shared = ("core_count", "fpus_per_core", "shared_memory_per_core", "shared_memory_per_block_optin")
        numbers = {name: getattr(self, name) for name in (*shared, "l2_cache_size", "clock_rate_ghz")} | _LIMITS
        numbers |= {"memory_bandwidth": self.bandwidth, "device_memory_size": self.memory}
        described = " ".join(f"{name}: {value}" for name, value in numbers.items())
        extension = "ACCELERATED_FEATURES" if self.features else "NONE"
        capability = f"cuda_compute_capability {{ major: {self.capability} feature_extension: {extension} }}"
        return (
            f'gpu_device_info {{ {described} {_DRIVER} {capability} }} platform_name: "CUDA" {_LIBRARIES} '
            f'device_description_str: "{self.device}"'
        )


_DRIVER = 'driver_version: "12.9.0"'
"""The driver's CUDA version, which XLA asks for before it puts loops and branches into command buffers."""
_LIMITS = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
}
"""The limits that these GPUs share."""
_LIBRARIES = "dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 9 }"
"""Lowest versions of cuDNN and CUDA that `jax[cuda12]` installs."""

_A100 = _Gpu(
    name="a100", device="NVIDIA A100-SXM4-80GB", memory=85_100_068_864, bandwidth=2_039_040_000_000,
    core_count=108, fpus_per_core=64, shared_memory_per_core=167936, shared_memory_per_block_optin=166912,
    l2_cache_size=41943040, clock_rate_ghz=1.41, capability=8, features=False,
)  # fmt: skip
_H100 = _Gpu(
    name="h100", device="NVIDIA H100 80GB HBM3", memory=84_942_979_072, bandwidth=3_352_320_000_000,
    core_count=132, fpus_per_core=128, shared_memory_per_core=233472, shared_memory_per_block_optin=232448,
    l2_cache_size=52428800, clock_rate_ghz=1.98, capability=9, features=True,
)  # fmt: skip
_H200 = replace(_H100, name="h200", device="NVIDIA H200", memory=143_771 * MIB, bandwidth=4_800_000_000_000)
_B200 = replace(
    _H100, name="b200", device="NVIDIA B200", memory=191_514_411_008, bandwidth=7_672_320_000_000,
    core_count=148, l2_cache_size=132644864, clock_rate_ghz=1.965, capability=10,
)  # fmt: skip


CHIPS = {
    chip.name: chip
    for chip in (
        # Memory sizes are the limits that errors of libtpu 0.0.42.1 name, slightly below the memory of the chips.
        _tpu("v4", 30.75, 1200, 1.05),
        _tpu("v5e", 15.75, 819, 1.5),
        _tpu("v5p", 95.74, 2765, 1.75),
        _tpu("v6e", 31.25, 1638, 1.75),
        # A tpu7x chip counts as two devices, each with half of the chip's memory and speed.
        _tpu("tpu7x", 94.75, 3690, 2.2),
        *(gpu.chip for gpu in (_A100, _H100, _H200, _B200)),
    )
}
"""The accelerators that programs can be compiled for, by name."""


def chip_of(topology: str) -> Chip:
    """Returns the chip of a topology such as "v5e:2x4".

    Raises:
        ValueError: the chip is unknown; the message names the known chips.
    """
    if not isinstance(topology, str):
        raise ValueError(f"topology={topology!r} is not a string: write CHIP or CHIP:SIZES, such as 'v5e:2x4'")
    name = topology.split(":")[0]
    if name not in CHIPS:
        raise ValueError(f"topology={topology!r}: {hint(name, CHIPS)}the chips are {', '.join(CHIPS)}")
    return CHIPS[name]
