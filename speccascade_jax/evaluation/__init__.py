"""Measurement: points, sweeps, sessions and latencies."""
