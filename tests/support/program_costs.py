"""Made-up costs of compiled programs, in which every part takes a different number of microseconds."""

from __future__ import annotations

import copy
from typing import Any

from speccascade_jax.results.store import program_costs, result_store
from speccascade_jax.results.store.program_costs import PARTS, Hardware

STORE = "docs/results/quickstart.jsonl"
V5E, H100 = Hardware(topology="v5e", prompt_length=32), Hardware(topology="h100", prompt_length=32)
VERSIONS = {"jax": "0.10.2", "libtpu": "0.0.42.1"}


def records() -> list[dict[str, Any]]:
    """Returns the records of the quickstart's sweep, as copies."""
    copies: Any = copy.deepcopy(result_store.read_records(STORE))
    return copies


def band(memory: float, compute: float = 0.0, collectives: float = 0.0, ops: float = 0.0) -> dict[str, float]:
    """Returns the seconds that each resource takes for a part of a program, given in microseconds."""
    return {name: 1e-6 * x for name, x in zip(PARTS, (memory, compute, collectives, ops), strict=True)}


def entry(program: dict[str, Any], factor: float = 1.0) -> dict[str, Any]:
    """Returns the costs of a program, such as 100 µs of memory traffic for a call of the target."""
    alone = program["settings"].get("method")
    stages = {"score": band(100 * factor, 20, 0, 40), "commit": band(3, 1, 0, 5), "unnamed": band(2, 0, 0, 1)}
    stages |= {"sampling": band(7, 2, 0, 6), "verify": band(5, 3, 0, 4), "draft": band(1.5), "catch-up": band(0.5)}
    more = {"draft": band(11, 4, 2, 30), "catch-up": band(13, 6, 1, 17)}
    if alone == "autoregressive":
        stages, more = {"score": band(90 * factor, 15, 0, 35), "commit": band(4)}, {n: band(0) for n in more}
    if alone == "autoregressive_draft":
        stages, more = {"score": band(10, 3, 0, 25), "commit": band(1)}, {n: band(0) for n in more}
    if program["part"] == "prefill":
        stages, more = {"prefill": band(40, 300, 0, 60)}, {}
    # a rule that reads q needs the draft's distribution at the bonus position, so the draft's cache is then complete
    complete = alone not in ("spec_decode", "autoregressive", "autoregressive_draft")
    costs = {"stages": stages, "more": more, "complete": complete, "launch": 1e-6, "versions": VERSIONS}
    return {"program": program, **costs}


def of(some_records: Any, *hardware: Hardware, factor: float = 1.0) -> dict[str, dict[str, Any]]:
    """Returns the costs of all programs of some records, by key."""
    missing = program_costs.missing(some_records, hardware, {})
    return {program_costs.key(program): entry(program, factor) for program in missing}
