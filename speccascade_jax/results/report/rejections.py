"""Where drafted tokens are rejected: by position in the block, from counters; by the laws' distance, from traces."""

from __future__ import annotations

from collections.abc import Iterable

from speccascade_jax.results.analysis.panels import Spot
from speccascade_jax.results.store.trace import Trace

BINS = 10


def by_position(spot: Spot) -> list[tuple[int, float]]:
    """Position (from 1) -> the rejected share of the tokens examined there, over all seeds."""
    told = [record.get("by_position", {}) for record in spot.records]
    longest = max((len(each.get("examined", ())) for each in told), default=0)
    found = []
    for at in range(longest):
        examined, kept = (
            sum((each[name] + [0] * longest)[at] for each in told if each) for name in ("examined", "kept")
        )
        if examined:
            found.append((at + 1, 1 - kept / examined))
    return found


def by_divergence(traces: Iterable[Trace]) -> list[tuple[float, float]]:
    """The middle of each tenth of total variation -> the rejected share of the tokens examined there."""
    examined, rejected = [0] * BINS, [0] * BINS
    for trace in traces:
        for step in (step for each in trace.rounds for step in each.steps):
            if step.fate in ("kept", "rejected") and step.divergence is not None:
                place = min(int(step.divergence * BINS), BINS - 1)
                examined[place] += 1
                rejected[place] += step.fate == "rejected"
    return [((n + 0.5) / BINS, rejected[n] / examined[n]) for n in range(BINS) if examined[n]]
