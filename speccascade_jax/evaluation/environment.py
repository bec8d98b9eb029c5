"""What a computation ran on and with: part of every record."""

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
    """Versions of Python, of this package and of what its results rest on."""
    out = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


def toolchain() -> dict[str, Any]:
    """Returns what digests of code depend on beside the code: they are compared under one toolchain only.

    `digest` counts the ways in which `code_digests` has taken them.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    known = versions()
    return {"digest": 2, "python": python, "jax": known["jax"], "platform": jax.default_backend()}


@functools.cache  # of the code that was loaded, not of what a file has become since
def package() -> dict[str, Any]:
    """Which code of this package runs: `version`, git's `revision`, and whether the package's files differ from it.

    `None` where there is none: the package is not installed, its files are in no repository, or git is not there.
    """
    version, revision, changes = versions()["speccascade_jax"], None, None
    # a repository around the environment that the package was installed into is not the package's
    if _git("ls-files", "--error-unmatch", "__init__.py") is not None:
        revision, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", ".")
    dirty = None if revision is None or changes is None else bool(changes)
    return {"version": None if version == "not installed" else version, "revision": revision, "dirty": dirty}


def _git(*command: str) -> str | None:
    """What git says in the package's folder; `None` where it fails."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    words = ["git", "--no-optional-locks", *command]
    try:
        done = subprocess.run(words, cwd=_PACKAGE, env=own, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


def device() -> dict[str, Any]:
    """What the computation ran on."""
    devices = jax.devices()
    return hardware() | {"count": len(devices), "system": platform.platform()}


def hardware(mesh: Mesh | None = None) -> dict[str, Any]:
    """What makes two latencies comparable: part of every key.

    Of a mesh its shape; of accelerators not the host's processor, so that a machine in another one's place goes on.
    """
    first = jax.devices()[0]
    found: dict[str, Any] = {"platform": first.platform, "kind": first.device_kind}
    if first.platform == "cpu":
        found |= {"cpus": os.cpu_count(), "processor": _processor()}
        found |= {"products": "own" if mesh is None and products.available() else "xla"}
    return found if mesh is None else found | {"mesh": [*mesh.shape.values()]}


def _processor() -> str:
    """The processor's model name; JAX calls every one of them "cpu"."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
