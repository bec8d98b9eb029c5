"""Running a generated Python program where it can harm nobody; where that cannot be had, it does not run."""

from speccascade_jax.metrics.sandbox.running import Outcome, SandboxUnavailable, available, describe, run

__all__ = ["Outcome", "SandboxUnavailable", "available", "describe", "run"]
