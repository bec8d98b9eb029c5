"""Learning rate as a function of the step and of the elapsed time."""

import math
from dataclasses import dataclass

from speccascade_jax.core.checks import whole

DECAYS = ("constant", "linear", "cosine", "rsqrt")


@dataclass(frozen=True)
class Schedule:
    """Learning rate with a linear warm-up to `peak`, and a decay to `final * peak` at the planned end.

    The plan limits the number of steps, of minutes, or both; the run ends at whichever limit comes first. A limit in
    minutes lets the run end on time on a machine of any speed. The elapsed time is part of the saved state, so a
    resumed run keeps its plan. T5 is fine-tuned at `peak = 1e-3`, `warmup_steps = 0` and `decay = "constant"` (Raffel
    et al., 2020, section 3.1.2).

    Attributes:
        peak: the highest learning rate.
        warmup_steps: number of steps until `peak`; 0 starts there.
        max_steps, max_minutes: limits of the plan; 0 sets no limit.
        decay: "constant", "linear", "cosine", or "rsqrt" (peak * sqrt(warmup / step), which does not depend on the
            plan).
        final: fraction of `peak` at the end (for linear and cosine).
        first_step: number of steps for which the checkpoint was trained before. Warm-up and "rsqrt" count these steps
            too, so that pre-training continues with its learning rate (T5: `peak = 1e-2`, `warmup_steps = 10_000`,
            "rsqrt").
    """

    peak: float = 1e-3
    warmup_steps: int = 300
    max_steps: int = 0
    max_minutes: float = 0.0
    decay: str = "linear"
    final: float = 0.02
    first_step: int = 0

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise ValueError(f"decay {self.decay!r} is not one of {', '.join(DECAYS)}")
        limits = {"peak": self.peak, "max_minutes": self.max_minutes, "final": self.final}
        for name, value in limits.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}: give a finite number of at least 0")
        for name in ("warmup_steps", "max_steps", "first_step"):
            whole(name, getattr(self, name), 0)
        if self.max_steps <= 0 and self.max_minutes <= 0:
            raise ValueError("the schedule has no end: set max_steps or max_minutes")

    def progress(self, step: int, minutes: float) -> float:
        """Returns the completed fraction of the plan, in [0, 1]."""
        by_steps = step / self.max_steps if self.max_steps > 0 else 0.0
        by_time = minutes / self.max_minutes if self.max_minutes > 0 else 0.0
        return min(1.0, max(by_steps, by_time))

    def rate(self, step: int, minutes: float) -> float:
        """Returns the learning rate of step `step` (from 0), `minutes` into the run."""
        counted = self.first_step + step + 1
        warmup = min(1.0, counted / max(1, self.warmup_steps))
        if self.decay == "constant":
            return self.peak * warmup
        if self.decay == "rsqrt":
            return self.peak * warmup * math.sqrt(max(1, self.warmup_steps) / max(counted, self.warmup_steps))
        done = self.progress(step, minutes)
        remaining = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * warmup * (self.final + (1.0 - self.final) * remaining)
