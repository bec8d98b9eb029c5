"""Peak speeds of accelerators by name, and the name of a device that JAX found.

TPUs: Google Cloud's pages (docs.cloud.google.com/tpu/docs, one for each version). GPUs: NVIDIA's data sheets, without
sparsity.
"""

from typing import Any

PEAK_FLOPS = {
    "v4": 275e12, "v5e": 197e12, "v5p": 459e12, "v6e": 918e12,
    "tpu7x": 1153e12,  # half of a chip's peak, because JAX counts two devices per chip
    "a100": 312e12, "h100": 989.4e12, "h200": 989.4e12, "b200": 2250e12,
}  # fmt: skip
"""Peak bfloat16 operations per second of one device, as JAX counts devices, by the chip's name."""

_NAMES = {
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e",
    "TPU v6e": "v6e", "TPU7x": "tpu7x", "NVIDIA A100-SXM4-40GB": "a100", "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-PCIE-40GB": "a100", "NVIDIA A100 80GB PCIe": "a100", "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200", "NVIDIA B200": "b200",
}  # fmt: skip
"""Chip by `device_kind`. libtpu and JAX name some TPUs differently. H100 on PCIe has another peak: not listed."""


def peak_flops(device: Any) -> float | None:
    """Returns the peak bfloat16 operations per second of a JAX device; `None` where it is unknown, as for a CPU."""
    return PEAK_FLOPS.get(_NAMES.get(device.device_kind, ""))
