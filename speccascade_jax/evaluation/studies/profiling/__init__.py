"""Profiles of the time of a generation."""
