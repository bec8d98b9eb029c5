"""Records in the form that a sweep writes, with counts for each example and made-up times.

The times are computed from the counts and from fixed times of a forward pass of each model.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from tests.support import fake_records

EXAMPLES, TIMED, TRIALS = 64, 16, 2
DRAFT_SECONDS, TARGET_SECONDS, CONSTANT, ALONE_SECONDS, ALONE_CONSTANT = 0.002, 0.011, 0.004, 0.010, 0.003

TOKENS = np.random.default_rng(0).integers(20, 120, EXAMPLES)
HARD = np.random.default_rng(1).normal(1.0, 0.25, EXAMPLES).clip(0.4, 1.6)


def record(
    name: str,
    verification: float,
    discard: float,
    *,
    block: int | None = None,
    stop: float | None = None,
    law: str = "spec_decode",
    noise: float = 0.02,
    seed: int = 0,
    slower: float = 1.0,
    **point: Any,
) -> dict[str, Any]:
    """Returns a record with about these rates; some examples discard more tokens, the same ones in every record."""
    end = name.startswith("autoregressive")
    coordinates = {
        **fake_records.coordinates()[0], "method": name, "alpha": None,
        "seed": seed, "block_size": None if end else block or 20, "bonus": None if end else "rule",
        "stop_threshold": stop, "swept_block": block is not None, "law": law, **point,
    }  # fmt: skip
    complete = copy.deepcopy(fake_records.run(coordinates))
    draws = np.random.default_rng([seed, int(1e4 * verification), int(1e4 * discard)])
    wobble = draws.normal(1.0, noise, (2, EXAMPLES))
    calls = np.round(TOKENS * verification * (1 if end else HARD * wobble[0])).astype(int)
    discarded = np.round(TOKENS * discard * HARD * wobble[1]).astype(int)
    drafted = TOKENS * (name != "autoregressive") + discarded - calls * (not end)
    complete["per_example"] = {
        "ids": list(range(EXAMPLES)), "committed": TOKENS.tolist(), "target_calls": calls.tolist(),
        "discarded": discarded.tolist(), "draft_steps": drafted.tolist(), "drafted": drafted.tolist(),
    }  # fmt: skip
    complete["latency"] |= _timed(name, TOKENS, drafted, calls, slower)
    complete["target_latency"] |= _timed("autoregressive", TOKENS, 0 * TOKENS, TOKENS, 1.0)
    return complete


def _timed(method: str, tokens: np.ndarray, steps: np.ndarray, calls: np.ndarray, slower: float) -> dict[str, Any]:
    seconds = CONSTANT + DRAFT_SECONDS * steps + TARGET_SECONDS * calls
    if method == "autoregressive":
        seconds = ALONE_CONSTANT + ALONE_SECONDS * calls
    rows = {"tokens": tokens, "draft_steps": steps, "target_calls": calls, "ms": 1e3 * slower * seconds}
    return {f"per_example_{name}": [row[:TIMED].tolist()] * TRIALS for name, row in rows.items()}


FIXED = {2: (0.45, 0.30), 4: (0.33, 0.70), 6: (0.29, 1.15), 8: (0.27, 1.65)}
ADAPTIVE = {0.1: (0.50, 0.10), 0.3: (0.38, 0.25), 0.5: (0.31, 0.45), 0.7: (0.27, 0.80), 0.9: (0.245, 1.40)}


def sweep(adaptive: dict[float, tuple[float, float]] = ADAPTIVE, **more: Any) -> list[dict[str, Any]]:
    """Returns records of target alone, draft alone, fixed block sizes, and thresholds of "specdecpp".

    `more` are arguments of `record` for the thresholds.
    """
    ends = [record("autoregressive", 1.0, 0.0), record("autoregressive_draft", 0.0, 0.0)]
    fixed = [record("spec_decode", *rates, block=block) for block, rates in FIXED.items()]
    return [*ends, *fixed, *(record("specdecpp", *rates, stop=h, **more) for h, rates in adaptive.items())]


def headed(given: dict[str, Any], head: str) -> dict[str, Any]:
    """Returns a copy of a record whose method used the acceptance head with this fingerprint."""
    return {**given, "key": given["key"] + head, "fingerprints": given["fingerprints"] | {"head": head}}


def of_task(task: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns copies of the records as if they belonged to the task `task`."""
    return [{**r, "point": r["point"] | {"task": task}, "key": r["key"] + task} for r in records]


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns copies of the records without latencies."""
    kept = ("latency", "target_latency", "relative_latency")
    return [{name: part for name, part in record.items() if name not in kept} for record in records]
