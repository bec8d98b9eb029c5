"""Golden figures of compiled programs, which `make accelerators` checks: a test fails if a figure changes by 5%.

python -m tests.support.golden_programs      write tests/preflight/golden.json anew (needs libtpu, some 4 minutes)
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from speccascade_jax import preflight
from tests.support import compiling

FILE = Path(__file__).parent.parent / "preflight" / "golden.json"
TOLERANCE = 0.05
SAMPLED = {"method": "spec_decode", "block_size": 5, "temperature": 1.0, "topology": "v5e"}
LARGE = {
    "T5 1.1 small alone": ("t5_1_1_small", None, {"topology": "v5e", "part": "target", "temperature": 1.0}),
    "T5 1.1 small -> base, a round": ("t5_1_1_base", "t5_1_1_small", SAMPLED),
}
"""Programs of published sizes, whose costs include the compiler's final schedules."""
TINY = {
    "tiny T5, a round": ("t5", SAMPLED),
    "tiny Gemma 2, a round": ("gemma", SAMPLED),
    "tiny T5, a round of 8 rows": ("t5", SAMPLED | {"batch": 8}),
    "tiny T5, a tree": ("t5", {"tree": (2, 2), "temperature": 1.0}),
    "tiny T5, block verification": ("t5", SAMPLED | {"verify": "block"}),
    "tiny T5 on (2, 4), a round": ("t5", SAMPLED | {"topology": "v5e:2x4", "mesh": (2, 4), "batch": 2}),
    "tiny T5, a training step": ("t5", {"part": "train", "batch": 4}),
}
"""Programs of tiny models, without schedules: every instruction counts as one operation."""


def figures(report):
    """Returns the figures of a report that are compared."""
    total = report.total
    values = {"hbm_bytes": total.hbm_bytes, "ops": total.ops, "collectives": total.collectives}
    return values | {"cycles": total.cycles, "temporaries": report.memory.temporaries, "code": report.memory.code}


@functools.cache
def large(name):
    target, draft, arguments = LARGE[name]
    return figures(preflight.report(target, draft, **arguments))


def tiny(name):
    family, arguments = TINY[name]
    return figures(compiling.compiled(family, **arguments)[1])


def differences(values, golden):
    """Returns the names of figures that differ by more than the tolerance."""
    return [name for name, value in golden.items() if abs(values[name] - value) > TOLERANCE * max(abs(value), 1)]


if __name__ == "__main__":
    every = {name: large(name) for name in LARGE} | {name: tiny(name) for name in TINY}
    FILE.write_text(json.dumps(every, indent=1) + "\n")
