"""Metrics of generated text. They need no JAX."""
