"""What drafters chosen for each query are held against: times per token, and each query's best arm, known afterwards.

Needs no JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from speccascade_jax.results.analysis.panels import Spot, Value
from speccascade_jax.results.store.result_store import Record

ORACLE = "each query's best arm"


def selects(spot: Spot) -> bool:
    """Whether a drafter was chosen for each query."""
    return "selection" in spot.records[0]


def fixed_arm(spot: Spot) -> int | None:
    """The place of the arm that a selection always takes; `None` where it is no such."""
    told = spot.records[0].get("selection", {"choose": None, "arms": ()})
    return told["arms"].index(told["choose"]) if told["choose"] in told["arms"] else None


def per_token(spot: Spot) -> Spot:
    """The spot with every query's time divided by the tokens that it wrote: sampled outputs differ in length."""

    def divided(timed: dict[str, Any]) -> dict[str, Any]:
        each = np.asarray(timed["per_example_ms"]) / np.maximum(timed["per_example_tokens"], 1)
        return {**timed, "per_example_ms": each.tolist()}

    records = tuple(
        {**record, **{name: divided(record[name]) for name in ("latency", "target_latency")}}
        if record.get("latency")
        else record
        for record in spot.records
    )
    return _with_ratio(replace(spot, records=records))


def ratio(spot: Spot) -> float | None:
    """Time per token over the target's, of a spot of `per_token`; mean over seeds."""
    times = [
        [np.sum(record[name]["per_example_ms"]) for name in ("latency", "target_latency")]
        for record in spot.records
        if record.get("latency")
    ]
    return float(np.mean([own / beside for own, beside in times])) if times else None


def _with_ratio(spot: Spot) -> Spot:
    found = ratio(spot)
    return spot if found is None else replace(spot, latency=Value(found, found, found))


def oracle(spots: Sequence[Spot]) -> Spot | None:
    """What each query's best arm would have taken, from spots of `per_token`; `None` without enough trials.

    The arm is the fastest one in the other trials, as a ratio to the target beside it: the fastest of one trial is
    partly luck, which would be counted as speed.

    Args:
        spots: of one set of drafters, by one method; those that always take one arm are what the best is taken from.
    """
    always = [spot for spot in spots if fixed_arm(spot) is not None]
    by_seed = [{record["point"]["seed"]: record for record in spot.records if _tried(record)} for spot in always]
    if len(always) < 2 or not (seeds := set.intersection(*map(set, by_seed))):
        return None
    places = np.asarray([fixed_arm(spot) for spot in always])
    records = tuple(_best_of([found[seed] for found in by_seed], places) for seed in sorted(seeds))
    like = replace(always[0], method=ORACLE, label=ORACLE, ms_per_example=None, measures={}, seeds=len(seeds))
    return _with_ratio(replace(like, records=records, inconclusive=False))


def _tried(record: Record) -> bool:
    return bool(record.get("latency")) and len(record["latency"]["per_example_ms"]) > 1


def _best_of(timed: list[Record], places: np.ndarray) -> Record:
    """A record of each query's best arm, from records of one arm always each; `places`: of these arms."""
    own, beside = (
        np.asarray([each[name]["per_example_ms"] for each in timed]) for name in ("latency", "target_latency")
    )
    ratios = own / beside  # [arms, trials, examples]
    best = (ratios.sum(1, keepdims=True) - ratios).argmin(0)[None]

    def picked(values: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.take_along_axis(values, best, axis=0)[0]
        return found

    tokens = np.maximum(picked(np.asarray([each["latency"]["per_example_tokens"] for each in timed])), 1)
    like, total = timed[0], (picked(own) * tokens).sum(1) / tokens.sum(1)  # as every record's: all time over all tokens
    latency = {"per_example_ms": picked(own).tolist(), "per_example_tokens": tokens.tolist()}
    return {
        **like,
        "key": ORACLE,
        "latency": {**like["latency"], **latency, "ms_per_token": {"value": float(np.median(total))}},
        "target_latency": {**like["target_latency"], "per_example_ms": picked(beside).tolist()},
        "selection": {**like["selection"], "choose": ORACLE},
        "per_example": {"arm": places[best].ravel().tolist()},
    }
