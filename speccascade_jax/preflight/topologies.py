"""Devices that this machine does not have: the chips of a named topology, for which XLA compiles without hardware."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from speccascade_jax.preflight.chips import CHIPS, Chip, chip_of
from speccascade_jax.runtime import mesh as meshes

SMALLEST = {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "tpu7x": "2x2x1"}
SMALLEST |= {name: "1" for name in CHIPS if name not in SMALLEST}
"""Smallest topology of each kind of chip; its first device is used if a single chip is requested."""
TWO_CORES = ("v4",)
"""Chips whose two cores form one device on a pod; by default the compiler makes each core a device."""
_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment variables with which libtpu neither asks a cloud for hardware nor checks for other processes."""
NO_LIBRARY = (
    "compiling for a TPU needs its compiler, which is not installed: pip install 'speccascade_jax[libtpu]' (0.7 GB)"
)
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""JAX's packages that contain the compiler for GPUs."""
NO_PLUGIN = (
    "compiling for a GPU needs its compiler, which is not installed: pip install 'speccascade_jax[cuda12]' "
    "(JAX's plugin and CUDA's libraries, 5 GB; no driver)"
)


@functools.cache  # cached, because a program may only combine arrays that belong to the same device objects
def devices(topology: str) -> list[Any]:
    """Returns the devices of a topology; programs can be compiled for them, but not run.

    Args:
        topology: "CHIP:SIZES", such as "v5e:2x4", or a chip alone for its smallest topology. For a GPU, SIZES is the
            number of GPUs on one host ("h100:8"), or three numbers: groups of hosts, hosts per group, GPUs per host
            ("h100:1x2x8").

    Raises:
        ValueError: the chip or the sizes are unknown.
        ImportError: the chip's compiler is not installed; the message contains the command that installs it.
    """
    kind = chip_of(topology)
    _check_installed(kind)
    os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
    if not os.environ.get("JAX_PLATFORMS"):
        # Otherwise, JAX would look for a TPU in this machine, because libtpu is installed.
        jax.config.update("jax_platforms", "cpu")
    sizes = topology.split(":")[1] if ":" in topology else SMALLEST[kind.name]
    try:
        if kind.is_gpu:
            options = {"target_config": kind.target_config, "topology": _gpu_sizes(sizes)}
            described = topologies.get_topology_desc(kind.name, "cuda", **options)
        else:
            options = {"chip_config_name": "megacore"} if kind.name in TWO_CORES else {}
            described = topologies.get_topology_desc(f"{kind.name}:{sizes}", "tpu", **options)
    except Exception as error:
        raise ValueError(f"topology={topology!r} is not known to the compiler: {str(error).splitlines()[0]}") from error
    return list(described.devices)


def _check_installed(kind: Chip) -> None:
    """Raises `ImportError` if a chip's compiler is not installed."""
    if not kind.is_gpu and importlib.util.find_spec("libtpu") is None:
        raise ImportError(NO_LIBRARY)
    if kind.is_gpu and not any(map(importlib.util.find_spec, PLUGINS)):
        raise ImportError(NO_PLUGIN)


def _gpu_sizes(sizes: str) -> str:
    """Returns sizes in the GPU compiler's form: groups of hosts, hosts per group, GPUs per host."""
    parts = sizes.split("x")
    if len(parts) not in (1, 3) or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError("give the number of GPUs on one host, such as 8, or three numbers, such as 1x2x8")
    return sizes if len(parts) == 3 else f"1x1x{sizes}"


def mesh_of(topology: str, shape: Sequence[int]) -> Mesh | None:
    """Returns a mesh (data, model) over a topology's first devices; `None` for a single device.

    Raises:
        ValueError: as in `devices`; or the topology has too few devices.
    """
    data, model = meshes.checked(shape)
    chips, count = devices(topology), data * model
    if count > len(chips):
        raise ValueError(
            f"mesh={(data, model)} needs {count} devices, but {topology!r} has {len(chips)}: choose a larger topology "
            "or a smaller mesh"
        )
    if count == 1:
        return None
    grid = np.array(chips[:count]).reshape(data, model)
    return Mesh(grid, meshes.AXES, axis_types=(AxisType.Auto,) * len(meshes.AXES))


def sharding_of(topology: str, mesh: Mesh | None, spec: PartitionSpec = PartitionSpec()) -> Sharding:  # noqa: B008
    """Returns the layout of an array on a mesh, or on the topology's first device without a mesh."""
    return SingleDeviceSharding(devices(topology)[0]) if mesh is None else NamedSharding(mesh, spec)
