"""What a computation ran on and with: part of every record."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

_VERSIONED = ("speccascade_jax", "jax", "jaxlib", "flax", "sacrebleu")


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of what its results rest on."""
    out = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


def device() -> dict[str, Any]:
    """What the computation ran on."""
    devices = jax.devices()
    return hardware() | {"count": len(devices), "system": platform.platform()}


def hardware() -> dict[str, Any]:
    """What makes two latencies comparable: part of every key."""
    first = jax.devices()[0]
    return {"platform": first.platform, "kind": first.device_kind, "cpus": os.cpu_count(), "processor": _processor()}


def _processor() -> str:
    """The processor's model name; JAX calls every one of them "cpu"."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
