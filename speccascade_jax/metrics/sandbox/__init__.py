"""A sandbox for generated Python programs; on a system without the needed protection, no program runs."""

from speccascade_jax.metrics.sandbox.running import Outcome, SandboxUnavailable, available, describe, run

__all__ = ["Outcome", "SandboxUnavailable", "available", "describe", "run"]
