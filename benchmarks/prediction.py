"""A prediction of the speed-up over the target alone, from acceptance and step times (METHODS section 9)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The seconds of the parts of a generation, all measured in the same run.

    Attributes:
        draft: one step of the draft; score: one call of the target over γ + 1 tokens; step: one over a single token.
        prefill, prefill_alone: before the first round with both models, and with the target alone; per example.
    """

    draft: float
    score: float
    step: float
    prefill: float = 0.0
    prefill_alone: float = 0.0


def expected_tokens(acceptance: float, block: int) -> float:
    """Returns tokens per round if each draft is accepted independently: `(1 − a^(γ+1)) / (1 − a)`, `γ + 1` at `a = 1`.

    Raises:
        ValueError: an acceptance outside [0, 1].
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance} is outside [0, 1]")
    return sum(acceptance**n for n in range(block + 1))


def speed_up(costs: Costs, rounds: float, draft_steps: float, tokens: float, tokens_alone: float) -> float:
    """Returns the target's time per token alone over the time per token with rounds.

    Args:
        costs: see there.
        rounds, draft_steps, tokens: of one speculative generation; tokens_alone: of one of the target.
    """
    alone = (costs.prefill_alone + tokens_alone * costs.step) / tokens_alone
    together = (costs.prefill + rounds * costs.score + draft_steps * costs.draft) / tokens
    return alone / together
