"""From counters to the measures that every experiment reports (METHODS section 9)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from speccascade_jax.core.names import PER_EXAMPLE
from speccascade_jax.engine.counters import Counters

COUNTS = (
    "rounds", "target_calls", "drafted", "examined", "kept", "rejected", "committed", "discarded", "draft_steps",
    "unverified", "unverified_tokens",
)  # fmt: skip


def summarise(stats: Counters, lengths: Any = None, *, rows: Any = None, draft_alone: bool = False) -> dict[str, Any]:
    """The measures over a batch.

    Args:
        stats: counters per row, from a `Generation`.
        lengths: checked against `committed` when given.
        rows: bool or index array choosing rows (padding rows of a last batch, one α of several).
        draft_alone: the draft wrote alone, in the target's place in the engine: its passes are draft steps.

    Returns:
        counts, ratios (`None` where the denominator is 0), `by_position` lists, and `inconclusive`: nothing was
        drafted, so the run says nothing about acceptance.
    """
    chosen = None if rows is None else np.asarray(rows)
    totals = {name: _total(getattr(stats, name), chosen) for name in Counters.__dataclass_fields__}
    if lengths is not None and _total(lengths, chosen) != totals["committed"]:
        raise ValueError("the counters belong to another generation: committed tokens and lengths disagree")
    if draft_alone:
        totals |= {"draft_steps": totals["target_calls"], "target_calls": 0}
    return _measures(totals) | ({"draft_share": 1.0} if draft_alone else {})


def level_counters(inner: Any) -> list[Counters]:
    """Counters of the engines that draft for an engine, from the one right below it down (`Generation.inner`)."""
    found = []
    while isinstance(inner, Mapping) and isinstance(inner.get("counters"), Counters):
        found.append(inner["counters"])
        inner = inner.get("inner")
    return found


def tail_steps(inner: Any) -> list[Any]:
    """Draft steps that a tail took, `[B]`, for each engine from the target's down; `None` where it has no tail."""
    found = []
    while True:
        found.append(inner.get("tail_steps") if isinstance(inner, Mapping) else None)
        if not (isinstance(inner, Mapping) and isinstance(inner.get("counters"), Counters)):
            return found
        inner = inner.get("inner")


def _total(counts: Any, chosen: np.ndarray | None) -> Any:
    """The sum over all rows or the chosen ones: a number, or a list of one for each position."""
    found = np.asarray(counts) if chosen is None else np.asarray(counts)[chosen]
    total = found[0] if len(found) == 1 else np.add.reduce(found)  # one row is its own sum: most of what this takes
    return total.tolist()


def per_example(stats: Counters, *, draft_alone: bool = False) -> dict[str, list[int]]:
    """`PER_EXAMPLE` name -> counts, one per row; `draft_alone` as in `summarise`."""
    counts = {name: np.asarray(getattr(stats, name)).tolist() for name in PER_EXAMPLE}
    if draft_alone:
        counts |= {"draft_steps": counts["target_calls"], "target_calls": [0] * len(counts["committed"])}
    return counts


def _measures(totals: dict[str, Any]) -> dict[str, Any]:
    """The measures of METHODS section 9, and section 6's verification and discard rates, from summed counters."""
    counts = {name: totals[name] for name in COUNTS}
    return {
        **counts,
        "acceptance_rate": _ratio(counts["kept"], counts["examined"]),
        "rejection_rate": _ratio(counts["rejected"], counts["examined"]),
        "draft_utilisation": _ratio(counts["kept"], counts["drafted"]),
        "rejections_per_token": _ratio(counts["rejected"], counts["committed"]),
        "deferral_rate": _ratio(totals["deferred"], totals["decided"]),
        "block_efficiency": _ratio(counts["committed"], counts["target_calls"]),
        "average_accepted_length": _ratio(counts["kept"], counts["target_calls"]),
        "verification_rate": _ratio(counts["target_calls"], counts["committed"]),
        "discard_rate": _ratio(counts["discarded"], counts["committed"]),
        "draft_share": _ratio(counts["kept"] + counts["unverified_tokens"], counts["committed"]),
        "by_position": {
            "examined": totals["examined_at"],
            "kept": totals["kept_at"],
            "deferred": totals["deferred_at"],
            "kept_although_deferred": totals["kept_although_deferred_at"],
        },
        "inconclusive": counts["drafted"] == 0,
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
