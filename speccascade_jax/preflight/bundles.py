"""Cycles of instructions, from the final schedules that a TPU's compiler writes.

A TPU core issues one bundle of operations per cycle. So the number of bundles in an instruction's final schedule is the
number of its cycles, if the core waits neither for memory nor for a matrix unit. (By the chip's peak speed, a product
of 128 rows takes up to 8% longer than its bundles.) `DUMP_FLAGS` makes the compiler write only the schedules, one file
for each distinct instruction. A list of duplicates tells which instructions share a file.

The program's own schedule ("TLP") calls these instructions. Between two calls it prepares arguments, starts transfers
and computes small scalar instructions, which have no file. These bundles, about 23 between two calls and 8% of a round
of T5 small and base, count as cycles of the call before them. Bundles before the first call do not count, because they
only copy arguments that the caller did not donate.

XLA's `estimated_cycles` is not used, because this heuristic of the scheduler can be twenty times too high.
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
"""Flags for the environment variable LIBTPU_INIT_ARGS, which libtpu reads when it is loaded."""
_FILE = re.compile(r"(\d+)-(.+)-\d+-final_bundles\.txt")
_CALL = re.compile(r"inlined_call [^/]*/\* %(\S+) = ")
_PROGRAM = "TLP"
"""The name of the program's own schedule."""


def cycles(text: str) -> int:
    """Returns the cycles of a final schedule."""
    return schedules.issued(text)


def control(text: str) -> dict[str, int]:
    """Returns, by instruction, the number of bundles in the program's own schedule from its call to the next call."""
    table: dict[str, int] = {}
    name = ""
    for bundle in schedules.bundles_of(text):
        if called := _CALL.search(bundle):
            name = called.group(1)
        if name:
            table[name] = table.get(name, 0) + 1
    return table


def read(folder: Path) -> dict[str, int]:
    """Returns the cycles of every instruction that has its own schedule, by the instruction's name.

    Args:
        folder: the folder named in `DUMP_FLAGS`, with the dump of one compilation.
    """
    by_key, calls = dict[str, int](), dict[str, int]()
    for file in sorted(folder.iterdir()):
        match = _FILE.fullmatch(file.name)
        if match and match.group(2) == _PROGRAM:
            calls = control(file.read_text())
        elif match:
            by_key[match.group(2)] = cycles(file.read_text())
    shared = {name: by_key[key] for name, key in duplicates(folder).items() if key in by_key}
    return {name: count + calls.get(name, 0) for name, count in (by_key | shared).items()}


def duplicates(folder: Path) -> Mapping[str, str]:
    """Returns, for the name of each instruction, the name of the instruction whose schedule file it shares."""
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
