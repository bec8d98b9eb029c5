"""A prediction of the speed-up over the target alone, from acceptance and step times (METHODS section 9)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The seconds of each part of a generation, all measured in the same run.

    Attributes:
        draft: a call of the draft on one token; score: a call of the target on γ + 1 tokens; step: a call of the target
            on one token.
        prefill: work per example before the first round, with both models; prefill_alone: the same with only the
            target.
    """

    draft: float
    score: float
    step: float
    prefill: float = 0.0
    prefill_alone: float = 0.0


def expected_tokens(acceptance: float, block: int) -> float:
    """Returns tokens per round if each draft is accepted independently: `(1 − a^(γ+1)) / (1 − a)`, `γ + 1` at `a = 1`.

    Raises:
        ValueError: `acceptance` is outside [0, 1].
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance} is outside [0, 1]")
    return sum(acceptance**n for n in range(block + 1))


def speed_up(costs: Costs, rounds: float, draft_steps: float, tokens: float, tokens_alone: float) -> float:
    """Returns the predicted speed-up: time per token of the target alone over time per token of speculation.

    Args:
        costs: the measured seconds of each part.
        rounds, draft_steps, tokens: numbers of one speculative generation.
        tokens_alone: number of tokens of one generation by the target alone.
    """
    alone = (costs.prefill_alone + tokens_alone * costs.step) / tokens_alone
    together = (costs.prefill + rounds * costs.score + draft_steps * costs.draft) / tokens
    return alone / together
