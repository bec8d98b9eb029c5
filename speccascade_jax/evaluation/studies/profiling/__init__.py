"""Profiling: the time that each part of a decoding round takes."""
