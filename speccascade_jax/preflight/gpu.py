"""Command buffers, loops and branches of a program that XLA compiled for a GPU.

Every fusion, copy, library call and collective of a GPU's scheduled program is a kernel that the host starts. XLA
groups neighbouring kernels into command buffers (CUDA graphs), each of which the host starts at once. The host decides
on loops and branches: it reads their condition from the GPU and waits for it, except for loops whose number of
iterations XLA knows. `DUMP_FLAGS` makes the compiler write the order of the host's work with the command buffers that
XLA forms under the flags of the compiling process.

A machine without a driver cannot tell the rest: whether the driver of the GPU's machine takes every command of a
command buffer (XLA forms them anew where it loads the program), how often a buffer has to be rewritten because arrays
moved, which kernel autotuning would choose for a product, and how long any kernel takes. Arrays all lie in HBM; what
the L2 cache keeps between two kernels counts as traffic. So do not compare a GPU's bytes with a TPU's, whose compiler
places arrays in VMEM.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from speccascade_jax.preflight.execution import Execution
from speccascade_jax.preflight.report import Launches

DUMP_FLAGS = ("--xla_dump_to={folder}",)
"""Flags for XLA_FLAGS, which the compiler reads when it is loaded."""
_AFTER, _BEFORE = ".thunk_sequence_after_thunk_passes.txt", ".thunk_sequence.txt"
"""Endings of the files with the order of the host's work; without command buffers XLA writes only the second."""
_LINE = re.compile(r"^( *)(\d+): (k\w+)")
_NAMED = re.compile(r'profile_annotation: "([^"]+)"\s+thunk_id: (\d+)')
_SPACE = re.compile(r"(\{[\d,]*:[^}]*?)S\([15]\)")


def without_spaces(text: str) -> str:
    """Returns a program's text without the memories of its arrays: on a GPU, `S(1)` is the part of HBM for collectives.

    Arrays in the host's memory (`S(5)`) lose their mark too; the programs of this package have none.
    """
    return _SPACE.sub(r"\1", text)


def read(folder: Path) -> list[frozenset[str]]:
    """Returns the instructions of every command buffer of the program that was compiled last.

    Args:
        folder: the folder that `DUMP_FLAGS` named.

    Raises:
        FileNotFoundError: the compiler wrote no order of the host's work; its dump has another format.
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
    """Returns the instructions of every command buffer.

    Args:
        sequence: the order of the host's work, nested by indentation.
        metadata: the instruction of every number in it.
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
    """Returns the work of the host in one run.

    Args:
        execution: what the run executes.
        buffers: the instructions of every command buffer; none if they were not read.
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
