"""Cycles of instructions, from the final schedules that a TPU's compiler writes.

A TPU core issues one bundle per cycle, so the bundles of an instruction's final schedule, times the iterations of its
loops, are its cycles while no memory keeps it waiting. `DUMP_FLAGS` makes the compiler write the schedules, and nothing
else, as one file for each distinct instruction. A list of duplicates says which instructions share a file. Small
scalar instructions have no file: they are part of the program's own schedule ("TLP").

XLA's `estimated_cycles` is not read. It is a heuristic of the scheduler, which can be twenty times too high.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

DUMP_FLAGS = (
    "--xla_jf_dump_to={folder}",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=^(final_bundles|deduplication-map)$",
)
"""Flags for LIBTPU_INIT_ARGS, which the library reads when it is loaded."""
_FILE = re.compile(r"(\d+)-(.+)-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +(?:([A-Z]{2}) ?)?: ?(>*)")
_EXIT = re.compile(r"scmp\.\w+\.\w+\.totalorder %\S+, (\d+) /\* loop exit test")


def cycles(text: str) -> int:
    """Returns the cycles of a final schedule: its bundles, those in loops times the loops' iterations.

    A loop whose count is not a constant counts once.
    """
    lines = [line for line in text.splitlines() if _BUNDLE.match(line) and "{" in line]
    depths, starts = [], []
    for line in lines:
        match = _BUNDLE.match(line)
        assert match is not None
        depths.append(line[match.start() : line.index("{")].count(">"))
        starts.append(match.group(1) == "LB")
    factors = [1] * len(lines)
    for begin in (number for number, start in enumerate(starts) if start):
        end = next((n for n in range(begin + 1, len(lines)) if _leaves(n, begin, depths, starts)), len(lines))
        tests = [_EXIT.search(lines[n]) for n in range(begin, end) if depths[n] == depths[begin]]
        counts = [int(test.group(1)) for test in tests if test is not None]
        if counts:
            for number in range(begin, end):
                factors[number] *= max(1, counts[-1])
    return sum(factors)


def _leaves(line: int, begin: int, depths: list[int], starts: list[bool]) -> bool:
    """Returns whether a line is behind the loop that starts at line `begin`: further out, or in its neighbour."""
    return depths[line] < depths[begin] or (starts[line] and depths[line] == depths[begin])


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
