"""Software and hardware of a computation, as every record describes them."""

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import speccascade_jax
from speccascade_jax.runtime import products

_PACKAGE = Path(speccascade_jax.__file__).parent
_VERSIONED = ("speccascade_jax", "jax", "jaxlib", "flax", "sacrebleu")


def versions() -> dict[str, str]:
    """Returns the versions of Python, of this package and of the packages that its results depend on."""
    out = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


def toolchain() -> dict[str, Any]:
    """Returns the software versions, besides the code itself, that digests of code depend on.

    Two digests are compared only if their toolchains are equal. The entry `digest` is the version of the digests in
    `code_digests`.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    known = versions()
    return {"digest": 2, "python": python, "jax": known["jax"], "platform": jax.default_backend()}


# cached, because the files may change after the code was loaded
@functools.cache
def package() -> dict[str, Any]:
    """Returns which code of this package is running: its `version`, git's `revision`, and whether it is `dirty`.

    `dirty` says that the package's files differ from the revision. An entry is `None` if it is unknown, because the
    package is not installed, its files are in no repository, or git is missing.
    """
    version, revision, changes = versions()["speccascade_jax"], None, None
    # git may find an unrelated repository around the Python environment; only a repository that tracks the package
    # counts
    if _git("ls-files", "--error-unmatch", "__init__.py") is not None:
        revision, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", ".")
    dirty = None if revision is None or changes is None else bool(changes)
    return {"version": None if version == "not installed" else version, "revision": revision, "dirty": dirty}


def _git(*command: str) -> str | None:
    """Runs git in the package's folder and returns its output; `None` if git fails."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    words = ["git", "--no-optional-locks", *command]
    try:
        done = subprocess.run(words, cwd=_PACKAGE, env=env, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


def device() -> dict[str, Any]:
    """Returns the hardware of the computation, the number of devices and the operating system."""
    devices = jax.devices()
    return hardware() | {"count": len(devices), "system": platform.platform()}


def peak_memory() -> dict[str, Any]:
    """Returns the peak memory of the device of this process that has the highest peak.

    Returns:
        The entry `peak_memory` of a record: the peak in `bytes`, and the device's memory as `limit`. The result is
        empty if the devices report no peak, as CPUs. A device never resets its peak, so the peak may stem from an
        earlier point of the same process.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [(known["peak_bytes_in_use"], known.get("bytes_limit")) for known in stats if "peak_bytes_in_use" in known]
    if not peaks:
        return {}
    used, limit = max(peaks, key=lambda peak: peak[0])
    return {"peak_memory": {"bytes": used, "limit": limit}}


def hardware(mesh: Mesh | None = None) -> dict[str, Any]:
    """Returns the hardware facts that must agree for two latencies to be comparable.

    The key of every timed record contains these facts. They include the shape of a mesh. For accelerators they exclude
    the host's processor, so that a sweep can resume on a machine with another processor.
    """
    first = jax.devices()[0]
    facts: dict[str, Any] = {"platform": first.platform, "kind": first.device_kind}
    if first.platform == "cpu":
        facts |= {"cpus": os.cpu_count(), "processor": _processor()}
        facts |= {"products": "own" if mesh is None and products.available() else "xla"}
    return facts if mesh is None else facts | {"mesh": [*mesh.shape.values()]}


def _processor() -> str:
    """Returns the processor's model name, because JAX calls every processor "cpu"."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
