"""Predicted latencies: the counts of records, multiplied by the costs of compiled programs on other hardware.

How often a method calls its models does not depend on the hardware. `preflight.costs` compiles a sweep's programs for
hardware that this machine does not have, and writes the seconds that each part of a program takes
(`results.store.program_costs`). This module returns copies of records whose latencies are predicted, so that tables and
plots of measured records show them too.

The seconds of an example are those of two programs that run one after the other: the models read the prompt (prefill),
then rounds. Calls of the target, passes of the draft, and calls that bring the draft's cache up to date are counted
separately. Needs no JAX.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from speccascade_jax.core.names import DRAFT, TARGET
from speccascade_jax.results.store.program_costs import PARTS, Hardware, key, programs, refusal
from speccascade_jax.results.store.record import Record, Row

LABEL = "predicted from the compiled program, not measured"
"""Text that tables and plots of predictions show instead of a processor's name."""

STARTS = (0.0, 0.5, 1.0)
"""Assumed times to start an op (an instruction of a compiled program), as shares of the largest possible time.

The true time is unknown, so a predicted latency is a band: the three shares give its low end, its value and its high
end. The method and the target have the same time, so the ratio of their latencies lies between the ratios at the two
ends.
"""

SCORING = ("score", "sampling", "verify")
"""Stages that run only in rounds with a call of the target. All other stages run in every round."""


class Seconds(NamedTuple):
    """Seconds of single examples by part, each `[examples, len(PARTS)]`: for prefill, and for all rounds."""

    prefill: np.ndarray
    rounds: np.ndarray

    def total(self, start: float) -> np.ndarray:
        """Returns seconds `[examples]` if starting an op takes `start` times its largest time.

        Within a program, memory traffic and compute overlap, so only the longer of the two counts.
        """
        memory, compute, collectives, ops = np.moveaxis(np.stack(self), -1, 0)
        total: np.ndarray = (np.maximum(memory, compute) + collectives + start * ops).sum(0)
        return total


class Counts(NamedTuple):
    """Numbers of runs of each part of a program for each example: arrays `[examples]`.

    Attributes:
        rounds: rounds of drafting and verification.
        calls: calls of the target.
        passes: passes of the draft that draft a token.
        catching_up: calls of the draft that only bring its cache up to date.
    """

    rounds: np.ndarray
    calls: np.ndarray
    passes: np.ndarray
    catching_up: np.ndarray


def counts(record: Record, complete: bool) -> Counts:
    """Returns how often a record's examples ran the parts of their program, in the record's order.

    The `draft_steps` of a record contain two kinds of steps: passes that draft a token, and calls that catch up, which
    means that they only add missing tokens to the draft's cache. A pass drafts one token, so all steps beyond the
    number of drafted tokens are calls that catch up, at most one per round. A pass after which a stop policy ended the
    block without a token counts as catching up, which costs about as much. A tree is drafted by one pass per level.

    Args:
        record: the record.
        complete: whether the draft's cache never has to catch up.
    """
    single, point = record["per_example"], record["point"]
    calls, steps, drafted = (np.asarray(single[n], float) for n in ("target_calls", "draft_steps", "drafted"))
    zero = np.zeros_like(steps)
    if point["method"] == DRAFT:  # the draft alone writes the output, with one pass in each round
        return Counts(steps, steps, zero, zero)
    # an example's last block may be committed without a target call; records contain only the sum of such rounds
    rounds = calls + record["counts"]["unverified"] / len(calls)
    if tree := point.get("tree"):
        drafted = rounds * len(tree)
    catching_up = zero if complete else np.clip(steps - drafted, 0, rounds)
    return Counts(rounds, calls, np.maximum(steps - catching_up, 0), catching_up)


def seconds(record: Record, prefill: Row, rounds: Row) -> Seconds:
    """Returns the predicted seconds of a record's examples, from the costs of its two programs (`program_costs`)."""
    number, zero = counts(record, rounds["complete"]), np.zeros(len(PARTS))
    stages, more = ({name: _vector(band) for name, band in rounds[part].items()} for part in ("stages", "more"))
    scoring = sum((stages.pop(name, zero) for name in SCORING), zero)
    run = np.outer(number.rounds, sum(stages.values(), zero)) + np.outer(number.calls, scoring)
    run += np.outer(number.passes, more["draft"]) + np.outer(number.catching_up, more["catch-up"])
    once = sum(map(_vector, prefill["stages"].values()), zero)
    return Seconds(np.broadcast_to(once, run.shape), run)


def _vector(band: Mapping[str, float]) -> np.ndarray:
    return np.asarray([band[name] for name in PARTS])


def predict(records: Sequence[Record], hardware: Hardware, costs: Mapping[str, Row]) -> list[Record]:
    """Returns copies of records with predicted latencies in place of measured ones.

    A copy's entry "predicted" describes the hardware and the parts of the time. If no latency can be predicted, the
    copy has no latency, and this entry contains the reason.

    Args:
        records: records of points; latencies are relative to the target alone, whose record must be among them.
        hardware: the hardware to predict for.
        costs: entries of a file of costs, for all programs (`program_costs.missing`).
    """
    targets = [record for record in records if record["point"]["method"] == TARGET]
    return [_predicted(record, _target(record, targets), hardware, costs) for record in records]


_SAME = (
    "pair",
    "task",
    "split",
    "max_new_tokens",
    "first_example",
    "quality_examples",
    "temperature",
    "top_p",
    "top_k",
)


def _target(record: Record, targets: Sequence[Record]) -> Record | None:
    """Returns the target alone with a record's examples and sampling, if possible with the same seed."""

    def identity(other: Record) -> list[Any]:
        point: Mapping[str, Any] = other["point"]
        prints = [other["fingerprints"].get(name) for name in ("weights", "examples")]
        return [*prints, *(point.get(name) for name in _SAME), sorted(other["per_example"]["ids"])]

    same = [target for target in targets if identity(target) == identity(record)]
    return min(same, key=lambda target: target["point"]["seed"] != record["point"]["seed"], default=None)


def _predicted(record: Record, target: Record | None, hardware: Hardware, costs: Mapping[str, Row]) -> Record:
    facts = _facts(record, hardware)
    reasons = [_reason(needed, hardware, costs) for needed in (record, target) if needed]
    reasons += ["there is no record of the target alone on the same examples"] * (target is None)
    if target is None or any(reasons):
        return _copy(record, facts | {"refused": next(filter(None, reasons))}, {})
    entries = _entries(record, hardware, costs)
    facts |= {name: entries["round"][name] for name in ("versions", "launch")}
    ours, theirs = (_by_id(needed, hardware, costs) for needed in (record, target))
    parts = (ours.prefill + ours.rounds).mean(0)
    facts["parts"] = dict(zip(PARTS, parts.tolist(), strict=True))
    low, middle, high = (_latencies(record, ours.total(start), theirs.total(start)) for start in STARTS)
    ratios = [latencies["relative_latency"]["value"] for latencies in (low, middle, high)]
    middle["relative_latency"] |= {"low": min(ratios), "high": max(ratios)}
    ends = [_copy(record, facts, latencies) for latencies in (low, high)]
    return _copy(record, facts | {"ends": ends}, middle)


def _facts(record: Record, hardware: Hardware) -> Row:
    """Returns the facts about a prediction that tables show."""
    program = programs(record, hardware)["round"]
    facts = {name: program[name] for name in ("topology", "mesh", "dtype", "prompt_length")}
    return facts | {"counted_in": record["point"]["dtype"], "models": list(hardware.models)}


def _entries(record: Record, hardware: Hardware, costs: Mapping[str, Row]) -> dict[str, Row]:
    return {name: costs[key(program)] for name, program in programs(record, hardware).items()}


def _reason(record: Record, hardware: Hardware, costs: Mapping[str, Row]) -> str:
    """Returns why a record's seconds cannot be predicted; empty if they can."""
    if reason := refusal(record):
        return reason
    return next((entry["refused"] for entry in _entries(record, hardware, costs).values() if "refused" in entry), "")


def _by_id(record: Record, hardware: Hardware, costs: Mapping[str, Row]) -> Seconds:
    """Returns the seconds of a record's examples in the order of their ids, so that two records can be paired."""
    entries, order = _entries(record, hardware, costs), np.argsort(record["per_example"]["ids"])
    return Seconds(*(part[order] for part in seconds(record, entries["prefill"], entries["round"])))


def _latencies(record: Record, ours: np.ndarray, theirs: np.ndarray) -> Row:
    """Returns a record's three entries about latency, from seconds `[examples]` of the method and of the target."""
    tokens = record["quality"]["tokens_per_example"]

    def entry(seconds: np.ndarray) -> Row:
        ms = 1e3 * float(seconds.mean())
        entries = {"ms_per_example": _exactly(ms), "ms_per_token": _exactly(ms / max(tokens, 1))}
        # The entry has no counts of calls. With them, points with equal counts would be taken for equal work, from
        # which noise is estimated, but their programs may differ.
        return entries | {"per_example_ms": [(1e3 * seconds).tolist()], "examples": len(seconds), "trials": 1}

    relative = _exactly(float(ours.sum() / theirs.sum()))
    return {"latency": entry(ours), "target_latency": entry(theirs), "relative_latency": relative}


def _exactly(value: float) -> Row:
    return {"value": value, "low": value, "high": value, "trials": [value]}


def _copy(record: Record, facts: Row, latencies: Row) -> Record:
    """Returns a record with other latencies, and with the predicted hardware as its device."""
    measured = ("latency", "target_latency", "relative_latency", "failed_timings", "planned_latency")
    kept = {name: value for name, value in record.items() if name not in measured}
    point = {**record["point"], "latency_examples": len(record["per_example"]["ids"]), "latency_trials": 1}
    device = {**record["device"], "kind": facts["topology"], "processor": LABEL}
    return cast(Record, kept | {"point": point, "device": device, "predicted": facts} | latencies)


def ends(*sides: Iterable[Record]) -> Iterator[list[list[Record]]]:
    """Yields the sides of a comparison with latencies at the low end of their bands, then at the high end.

    Yields nothing if a latency was measured instead of predicted.
    """
    records = [list(side) for side in sides]
    if all("ends" in record.get("predicted", {}) for side in records for record in side):
        yield from ([[record["predicted"]["ends"][end] for record in side] for side in records] for end in (0, 1))


def plain(record: Record) -> Record:
    """Returns a record without its two copies for the ends of the band, which a table of all values would repeat."""
    if "predicted" not in record:
        return record
    facts = {name: value for name, value in record["predicted"].items() if name != "ends"}
    return cast(Record, {**record, "predicted": facts})
