"""Estimates of every rule's rejection and deferral rates from one pass over given outputs."""
