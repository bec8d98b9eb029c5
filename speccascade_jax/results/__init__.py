"""Measurement records, and the panels, intervals, tables and figures computed from them. Needs no JAX."""
