"""Measurement of decoding methods: configurations ("points"), sweeps, sessions and latencies."""
