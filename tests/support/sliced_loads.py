"""Loads of checkpoints onto eight simulated devices, in new processes: JAX fixes the number of devices when it starts.

`python -m tests.support.sliced_loads OUTPUT compare PATH…` compares with loads onto one device, in one process.
`python -m tests.support.sliced_loads OUTPUT measure PORT INDEX EMPTY PATH…` is one of two processes of four devices
each, which measures bytes and memory. Both write JSON to OUTPUT.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MESHES = ((1, 8), (2, 4))


def compared(output: Path, paths: list[str]) -> dict[str, Any]:
    """Returns, by checkpoint, the parameters that differ between loads onto a mesh and onto one device."""
    _end(_start(output, 8, {}, "compare", *paths))
    return dict(json.loads(output.read_text()))


def measured(folder: Path, empty: str, paths: list[str]) -> list[dict[str, Any]]:
    """Returns what each of two processes measures while it loads checkpoints, the first of which is small."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    outputs = [folder / f"measured_{index}.json" for index in range(2)]
    started = [
        _start(output, 4, {"GOOGLE_AUTH_TOKEN_FOR_TESTING": f"process-{i}"}, "measure", port, str(i), empty, *paths)
        for i, output in enumerate(outputs)
    ]
    for process in started:
        _end(process)
    return [json.loads(output.read_text()) for output in outputs]


def _start(output: Path, devices: int, more: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | more
    command = [sys.executable, "-m", "tests.support.sliced_loads", str(output), *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def _end(process: subprocess.Popen[str]) -> None:
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-4000:]


def _compare(paths: list[str]) -> dict[str, Any]:
    import jax
    import numpy as np
    from flax.traverse_util import flatten_dict

    from speccascade_jax.checkpoints import load
    from speccascade_jax.models import layers, stacks
    from speccascade_jax.runtime import mesh as meshes

    def differing(path: str, shape: tuple[int, int], scan: bool, whole: bool) -> list[str]:
        separate = jax.tree.map(np.asarray, stacks.unstack_params(load(path)[1]))
        fused = layers.fuse(separate, 1 if whole else shape[1])
        expected = flatten_dict(stacks.stack_params(fused) if scan else fused, sep="/")
        read = load(path, prepared=True, mesh=meshes.make(shape), scan_layers=scan, whole=whole)[1]
        flat = flatten_dict(read, sep="/")
        return sorted(expected.keys() ^ flat.keys()) or [
            name
            for name, leaf in flat.items()
            if not np.array_equal(leaf, expected[name])
            or any(not np.array_equal(part.data, expected[name][part.index]) for part in leaf.addressable_shards)
        ]

    cases = [(mesh, scan, whole) for mesh, scan in ((MESHES[0], False), (MESHES[1], True)) for whole in (False, True)]
    return {path: [name for case in cases[:3] for name in differing(path, *case)] for path in paths}


def _measure(port: str, index: str, empty: str, paths: list[str]) -> dict[str, Any]:
    import jax

    from speccascade_jax.checkpoints import load
    from speccascade_jax.runtime import hosts
    from speccascade_jax.runtime import mesh as meshes
    from tests.support.memory import bytes_read, resident

    hosts.begin(f"localhost:{port}", 2, int(index))
    results = {}
    for path in (empty, *paths):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current memory
        before, start = bytes_read(), resident()
        _, params = load(path, prepared=True, mesh=meshes.make((1, 8)))
        read, peak = bytes_read() - before, resident("VmHWM") - start
        leaves = jax.tree.leaves(params)
        share = sum(part.data.nbytes for leaf in leaves for part in leaf.addressable_shards)
        once = sum(
            {str(part.index): part.data.nbytes for part in leaf.addressable_shards}[key]
            for leaf in leaves
            for key in {str(part.index) for part in leaf.addressable_shards}
        )
        total = sum(leaf.nbytes for leaf in leaves)
        results[path] = {"read": read, "peak": peak, "share": share, "once": once, "total": total}
        del params, leaves
    return results


if __name__ == "__main__":
    out, mode, *rest = sys.argv[1:]
    results = _compare(rest) if mode == "compare" else _measure(*rest[:3], rest[3:])
    Path(out).write_text(json.dumps(results))
