"""Panels, comparisons and intervals computed from records."""
