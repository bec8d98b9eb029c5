"""Measuring: points, sweeps, sessions, latencies."""
