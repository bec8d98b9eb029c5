"""A sandbox in which a generated Python program can do no harm; without protection nothing runs."""

from speccascade_jax.metrics.sandbox.running import Outcome, SandboxUnavailable, available, describe, run

__all__ = ["Outcome", "SandboxUnavailable", "available", "describe", "run"]
