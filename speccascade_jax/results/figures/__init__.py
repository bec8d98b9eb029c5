"""Figures; they load matplotlib."""
