"""Search for the fastest hierarchy of draft models (Globerson et al., 2025; docs/methods.md, section 7)."""

from speccascade_jax.hierarchy.latency import Hierarchy, latency
from speccascade_jax.hierarchy.measure import Measured, measure
from speccascade_jax.hierarchy.solve import solve

__all__ = ["Hierarchy", "Measured", "latency", "measure", "solve"]
