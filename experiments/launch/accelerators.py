"""Types of TPUs as Google Cloud names them: the software of their machines, and their topology for `preflight`.

Sources: docs.cloud.google.com/tpu/docs/runtimes (software), …/tpu/docs/v6e and its neighbours (chips of a host), and
the tables of types and default topologies of xpk (github.com/AI-Hypercomputer/xpk,
src/xpk/core/system_characteristics.py, version 1.16).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A generation of TPUs.

    Attributes:
        chip: its name in `preflight`; cores: how much one chip counts in the number of a type's name, such as the 16 of
            "v5litepod-16": 1, or 2 if the number counts cores.
        software: the runtime version of its machines; empty if the Cloud TPU API does not offer them.
        cube: whether its chips form a torus of three dimensions; otherwise of two.
        host: largest number of chips per host in slices of the Cloud TPU API.
    """

    chip: str
    cores: int
    software: str
    cube: bool
    host: int


FAMILIES = {
    "v4": Family("v4", 2, "tpu-ubuntu2204-base", True, 4),
    "v5litepod": Family("v5e", 1, "v2-alpha-tpuv5-lite", False, 8),
    "v5p": Family("v5p", 2, "v2-alpha-tpuv5", True, 4),
    "v6e": Family("v6e", 1, "v2-alpha-tpuv6e", False, 8),
    "tpu7x": Family("tpu7x", 2, "", True, 4),
}
"""Families by the first part of a type's name."""
GKE_HOST = 4
"""Largest number of chips per host in slices that xpk creates; their machine types end in -1t or -4t."""
TOGETHER = ("experiments.sweep", "experiments.run", "experiments.finetune")
"""This repository's commands that several processes can run together; `finetune` in its mode `train` only."""
_SMALL_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4"}
"""Topologies below one cube of 4x4x4 chips, by the number of chips."""
_LARGEST_SQUARE = 256


def family_of(accelerator_type: str) -> tuple[Family, int]:
    """Returns the family of a type such as "v5litepod-16", and its number of chips.

    Raises:
        ValueError: no such type; names the known ones.
    """
    name, _, number = accelerator_type.partition("-")
    known = ", ".join(f"{family}-N" for family in FAMILIES)
    if name not in FAMILIES or not re.fullmatch(r"[1-9]\d*", number):
        raise ValueError(f"accelerator type {accelerator_type!r} is not known: give one of {known}")
    chips, rest = divmod(int(number), FAMILIES[name].cores)
    if rest or not chips:
        raise ValueError(f"accelerator type {accelerator_type!r}: N counts cores, {FAMILIES[name].cores} on each chip")
    return FAMILIES[name], chips


def joined(command: Sequence[str], accelerator_type: str, *, gke: bool = False) -> list[str]:
    """Returns a command with `--multiprocess` if a slice of this type has several hosts, which must find each other.

    Args:
        command: the words of the command.
        accelerator_type: the type of TPU.
        gke: whether xpk makes the slice, on GKE.

    Raises:
        ValueError: the type is unknown, or the command runs in one process only.
    """
    family, chips = family_of(accelerator_type)
    return multiprocess(command) if chips > (GKE_HOST if gke else family.host) else list(command)


def check_together(command: Sequence[str]) -> None:
    """Raises ValueError for a command of this repository that runs in one process."""
    module = next((word for word in command if word.startswith("experiments.")), TOGETHER[0])
    mode = re.search(r"--mode[= ](?!train\b)\S+", " ".join(command))
    if module not in TOGETHER or mode:
        name = f"{module} {mode[0]}" if mode else module
        raise ValueError(f"{name} runs in one process: choose a type with one host, or a single process")


def multiprocess(command: Sequence[str]) -> list[str]:
    """Returns a command with `--multiprocess`: a host that finds no others then ends, instead of working alone.

    Raises:
        ValueError: the command runs in one process only.
    """
    check_together(command)
    return [*command, *(["--multiprocess"] if "--multiprocess" not in command else [])]


def software_of(accelerator_type: str) -> str:
    """Returns the runtime version of a type's machines.

    Raises:
        ValueError: the type is unknown, or the Cloud TPU API does not offer it.
    """
    family, _ = family_of(accelerator_type)
    if not family.software:
        raise ValueError(f"accelerator type {accelerator_type!r} is offered on GKE only: use the launcher gke")
    return family.software


def topology_of(accelerator_type: str) -> str:
    """Returns a type's default topology for `preflight`, such as "v5e:4x4" of "v5litepod-16".

    Raises:
        ValueError: the type is unknown, or no default topology has this number of chips.
    """
    family, chips = family_of(accelerator_type)
    if chips == 1:
        return family.chip
    sizes = _cube(chips) if family.cube else _square(chips)
    if not sizes:
        raise ValueError(f"accelerator type {accelerator_type!r}: no slice has {chips} chips")
    return f"{family.chip}:{sizes}"


def _square(chips: int) -> str:
    """Returns the two sizes of a slice of 4 to 256 chips, the smaller one first, or an empty text."""
    if chips & (chips - 1) or not 4 <= chips <= _LARGEST_SQUARE:
        return ""
    smaller = 1 << ((chips.bit_length() - 1) // 2)
    return f"{smaller}x{chips // smaller}"


def _cube(chips: int) -> str:
    """Returns the three sizes of a slice, as equal as possible, in ascending order, or an empty text."""
    if chips < 64 or chips % 64:
        return _SMALL_CUBES.get(chips, "")
    cubes = chips // 64
    pairs = ((a, b) for a in range(1, cubes + 1) for b in range(a, math.isqrt(cubes // a) + 1) if cubes % (a * b) == 0)
    a, b = min(pairs, key=lambda pair: sum(pair) + cubes // math.prod(pair))
    return "x".join(str(4 * size) for size in (a, b, cubes // (a * b)))
