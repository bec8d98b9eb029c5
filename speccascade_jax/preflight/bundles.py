"""Cycles of instructions, from the final schedules that a TPU's compiler writes.

A TPU core issues one bundle per cycle. The bundles that it issues while it runs an instruction's final schedule are its
cycles, while no memory keeps it waiting. `DUMP_FLAGS` makes the compiler write the schedules, and nothing else, as one
file for each distinct instruction. A list of duplicates says which instructions share a file. Small scalar instructions
have no file: they are part of the program's own schedule ("TLP").

XLA's `estimated_cycles` is not read. It is a heuristic of the scheduler, which can be twenty times too high.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from speccascade_jax.preflight import schedules

DUMP_FLAGS = (
    "--xla_jf_dump_to={folder}",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=^(final_bundles|deduplication-map)$",
)
"""Flags for LIBTPU_INIT_ARGS, which the library reads when it is loaded."""
_FILE = re.compile(r"(\d+)-(.+)-\d+-final_bundles\.txt")


def cycles(text: str) -> int:
    """Returns the cycles of a final schedule."""
    return schedules.issued(text)


def read(folder: Path) -> dict[str, int]:
    """Returns the cycles of every instruction that has a schedule of its own, by name.

    Args:
        folder: the folder that `DUMP_FLAGS` named, of one compilation.
    """
    by_key: dict[str, int] = {}
    for file in sorted(folder.iterdir()):
        if match := _FILE.fullmatch(file.name):
            by_key[match.group(2)] = cycles(file.read_text())
    table = {}
    for names, key in duplicates(folder).items():
        if key in by_key:
            table[names] = by_key[key]
    return by_key | table


def duplicates(folder: Path) -> Mapping[str, str]:
    """Returns the name of each instruction -> the name of the one whose schedule it shares."""
    table: dict[str, str] = {}
    for file in folder.glob("*-deduplication-map.txt"):
        key = ""
        for line in file.read_text().splitlines():
            if line.startswith("key:"):
                key = line.removeprefix("key:")
                table[key] = key
            elif line.startswith("  "):
                table[line.strip()] = key
    return table
