"""The learning rate: warm-up by steps, decay by planned steps or by planned minutes."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then decay to `final * peak` at the planned end.

    The plan is a number of steps, of minutes, or both (what comes first ends the run). With minutes the end
    is on time however slow the machine is; the elapsed time is part of the checkpoint, so a resumed run keeps its plan.

    Attributes:
        peak: the highest learning rate.
        warmup_steps: steps until `peak`.
        max_steps, max_minutes: the plan; 0 where it sets no limit.
        decay: "linear", "cosine", or "rsqrt" (peak * sqrt(warmup / step), which heeds no plan).
        final: the fraction of `peak` left at the end (linear and cosine).
    """

    peak: float = 1e-3
    warmup_steps: int = 300
    max_steps: int = 0
    max_minutes: float = 0.0
    decay: str = "linear"
    final: float = 0.02

    def __post_init__(self) -> None:
        if self.decay not in ("linear", "cosine", "rsqrt"):
            raise ValueError(f"decay {self.decay!r} is not one of linear, cosine, rsqrt")
        if self.max_steps <= 0 and self.max_minutes <= 0:
            raise ValueError("the schedule has no end: give max_steps or max_minutes")

    def progress(self, step: int, minutes: float) -> float:
        """The fraction of the plan that is done, in [0, 1]."""
        by_steps = step / self.max_steps if self.max_steps > 0 else 0.0
        by_time = minutes / self.max_minutes if self.max_minutes > 0 else 0.0
        return min(1.0, max(by_steps, by_time))

    def rate(self, step: int, minutes: float) -> float:
        """The learning rate of step `step` (from 0), `minutes` into the run."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if self.decay == "rsqrt":
            return self.peak * warmup * math.sqrt(max(1, self.warmup_steps) / max(step + 1, self.warmup_steps, 1))
        done = self.progress(step, minutes)
        left = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * warmup * (self.final + (1.0 - self.final) * left)
