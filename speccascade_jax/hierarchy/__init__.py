"""Which models to stack, and how many tokens each is to hold: paper 4's optimiser, exact (METHODS.md section 7)."""

from speccascade_jax.hierarchy.latency import Hierarchy, latency
from speccascade_jax.hierarchy.measure import Measured, measure
from speccascade_jax.hierarchy.solve import solve

__all__ = ["Hierarchy", "Measured", "latency", "measure", "solve"]
