"""What a stack's calls would take if every call of a model cost the same: standardised walltime improvement (SWI).

The measure of paper 4's Tables 4 and 10, from cascade speculative drafting (Chen et al., 2023): the cost model leaves
out prefill, and that a call over a block costs more than one over a token. What is counted is counted in real runs, so
against a prediction it shows what independent acceptance gets wrong, and against the clock what constant costs do
(paper 4, Table 5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from speccascade_jax.methods.build_drafter import the_one
from speccascade_jax.methods.settings import Level, Settings

MODEL = "target"
"""What a pair calls the model that all others draft for."""


def calls(record: Mapping[str, Any], settings: Settings) -> dict[str, int]:
    """How often each model was called, by name, over all examples of a record.

    Args:
        record: of `settings`, with the counts of its levels (`evaluation.measuring`).

    Raises:
        ValueError: a record without counts of the tails that the method has.
    """
    counts, levels = record["counts"], iter(record.get("levels", ()))
    found: Counter[str] = Counter({MODEL: counts["target_calls"]})
    above: Settings | Level = settings
    while True:
        below = the_one(above.drafters, "a method whose calls are counted")
        steps = counts["draft_steps"]  # catching up included
        if above.tail is not None:
            if "tail_steps" not in counts:
                raise ValueError(f"the record does not say how often the tail {above.tail!r} was called: measure again")
            found[above.tail] += counts["tail_steps"]
            steps -= counts["tail_steps"]
        found[below if isinstance(below, str) else below.model] += steps
        if isinstance(below, str):
            return dict(found)
        above, counts = below, next(levels)


def seconds_per_token(record: Mapping[str, Any], settings: Settings, costs: Mapping[str, float]) -> float:
    """Real acceptance, artificial cost: what the calls of a record would have taken, in the unit of the costs.

    Args:
        costs: of a call, by model.
    """
    total = sum(costs[name] * count for name, count in calls(record, settings).items())
    return float(total / record["counts"]["committed"])


def improvement(record: Mapping[str, Any], settings: Settings, costs: Mapping[str, float]) -> float:
    """SWI: how many times as fast as the target alone, which calls itself once for each token."""
    return costs[MODEL] / seconds_per_token(record, settings, costs)
