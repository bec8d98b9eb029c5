"""Work of the host for a program that XLA compiled for a GPU: command buffers, loops and branches.

Every fusion, copy, library call and collective of a GPU's scheduled program is a kernel that the host starts. XLA
groups neighbouring kernels into command buffers (CUDA graphs), and the host starts each buffer with one call. The host
also controls loops and branches: it waits until it has read the condition from the GPU, except in loops whose number of
iterations XLA knows. `DUMP_FLAGS` makes the compiler write the sequence of the host's work, with the command buffers
that XLA forms under the flags of the compiling process.

The following is unknown on a machine without a GPU driver: whether the driver of the GPU's machine supports every
command of a command buffer (XLA forms the buffers again when it loads the program), how often a buffer has to be
rewritten because arrays moved, which kernel autotuning would choose for a product, and how long any kernel takes.
All arrays lie in HBM, and data that the L2 cache keeps between two kernels still count as traffic. So do not compare a
GPU's bytes with a TPU's, whose compiler places arrays in its vector memory (VMEM).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from speccascade_jax.preflight.execution import Execution
from speccascade_jax.preflight.report import Launches

DUMP_FLAGS = ("--xla_dump_to={folder}",)
"""Flags for the environment variable XLA_FLAGS, which the compiler reads when it is loaded."""
_AFTER, _BEFORE = ".thunk_sequence_after_thunk_passes.txt", ".thunk_sequence.txt"
"""Ends of the names of the files with the host's work, after and before command buffers are formed; without command
buffers XLA writes only the second file."""
_LINE = re.compile(r"^( *)(\d+): (k\w+)")
_NAMED = re.compile(r'profile_annotation: "([^"]+)"\s+thunk_id: (\d+)')
_SPACE = re.compile(r"(\{[\d,]*:[^}]*?)S\([15]\)")


def without_spaces(text: str) -> str:
    """Returns a GPU program's text without the marks of memories: `S(1)` is the part of HBM for collectives.

    This also removes the mark of arrays in the host's memory (`S(5)`); this package's programs have no such arrays.
    """
    return _SPACE.sub(r"\1", text)


def read(folder: Path) -> list[frozenset[str]]:
    """Returns the instructions of every command buffer of the last compiled program, one set per buffer.

    Args:
        folder: the folder named in `DUMP_FLAGS`.

    Raises:
        FileNotFoundError: the dump has no file with the host's work, so its format is another one.
    """
    before = sorted(folder.glob(f"*{_BEFORE}"))
    if not before:
        raise FileNotFoundError(
            f"the compiler wrote no file *{_BEFORE} to {folder}: its dump has another format; pass dump=False"
        )
    start = before[-1].name.removesuffix(_BEFORE)
    after, metadata = folder / (start + _AFTER), folder / f"{start}.thunk_metadata.txt"
    return command_buffers(after.read_text(), metadata.read_text()) if after.exists() else []


def command_buffers(sequence: str, metadata: str) -> list[frozenset[str]]:
    """Returns the instructions of every command buffer, one set per buffer.

    Args:
        sequence: the text of the host's work in order, nested by indentation.
        metadata: text that gives the instruction for every number in `sequence`.
    """
    names = {int(number): name for name, number in _NAMED.findall(metadata)}
    buffers, members, depth = list[frozenset[str]](), set[str](), -1
    for match in filter(None, map(_LINE.match, sequence.splitlines())):
        indentation, number, kind = len(match.group(1)), int(match.group(2)), match.group(3)
        if depth >= 0 and indentation <= depth:
            buffers.append(frozenset(members))
            members, depth = set(), -1
        if kind == "kCommandBuffer":
            depth = indentation
        elif depth >= 0 and number in names:
            members.add(names[number])
    return [*buffers, frozenset(members)] if depth >= 0 else buffers


def launches(execution: Execution, buffers: Sequence[frozenset[str]]) -> Launches:
    """Returns the counts of the host's work in one run.

    Args:
        execution: the instructions of the run.
        buffers: the instructions of every command buffer; empty if they were not read.
    """
    times = {step.instruction.name: step.times for step in execution.steps}
    captured = frozenset[str]().union(*buffers)
    decisions = execution.decisions
    loops = [step for step in decisions if step.instruction.opcode == "while"]
    return Launches(
        captured=sum(count for name, count in times.items() if name in captured),
        graphs=sum(max((times.get(name, 0.0) for name in buffer), default=0.0) for buffer in buffers),
        host_waits=sum(step.times for step in decisions if step.instruction.name not in captured),
        loops=len(loops),
        conditionals=len(decisions) - len(loops),
    )
